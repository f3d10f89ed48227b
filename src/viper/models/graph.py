"""Nodes of an ONNX graph, and the columns of a formula as such nodes.

A formula's graph has one input for each raw column: numbers, booleans, or text. Inside it are the rule for missing
values, the categories, every function of the formula with what it learned, and the standardisation.

Runtimes have no erf in double precision, so graphs compute erfc themselves: with t = 2/(2+x) and x ≥ 0,
erfc(x) = t exp(-x² + P(t)), where P is smooth on [0, 1] and interpolated at Chebyshev points.
"""

import ast
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.special
from numpy.polynomial import Chebyshev, Polynomial

from viper.errors import FormulaError
from viper.formula.encoding import Encoding, evaluate_terms
from viper.softplus.mixture_table import MIXTURES

if TYPE_CHECKING:
    from collections.abc import Callable

MISSING_TEXT = ""  # how a missing value is written in a column of text
UNKNOWN = -1  # code of a level that the model does not know
DEGREE = 18  # degree of P; gives erfc with an error of 1.4e-12
FACTOR = re.compile(r"(?P<source>[^\[]+)(?:\[(?:T\.)?(?P<part>[^\]]+)\])?")  # poly(n1_, 2)[1], c2_[T.L1]


class OnnxGraph:
    """Collects nodes and constants; `add` returns the name of the new node's output."""

    def __init__(self, onnx: Any, prefix: str = "") -> None:
        self.onnx, self.prefix = onnx, prefix  # a nested graph needs names of its own
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []
        self.uses_ml = False  # whether a node belongs to ONNX's domain for machine learning

    def add(self, operation: str, *inputs: Any, name: str | None = None, **attributes: Any) -> str:
        """Add a node whose inputs are names or numbers."""
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        name = name or f"{self.prefix}{operation.lower()}_{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(operation, names, [name], **attributes))
        return name

    def constant(self, value: Any) -> str:
        name = f"{self.prefix}constant_{len(self.constants)}"
        self.constants.append(self.onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def input(self, name: str, kind: int, width: int) -> str:
        """Add an input with that many columns, and return its name."""
        self.inputs.append(self.onnx.helper.make_tensor_value_info(name, kind, [None, width]))
        return name


def erfc(graph: OnnxGraph, x: str) -> str:
    """erfc(x) for x ≥ 0."""
    t = graph.add("Div", 2.0, graph.add("Add", x, 2.0))
    exponent = graph.add("Sub", horner(graph, t), graph.add("Mul", x, x))
    return graph.add("Mul", t, graph.add("Exp", exponent))


def horner(graph: OnnxGraph, t: str) -> str:
    """P(t) by Horner's rule in u = 2t - 1."""
    u = graph.add("Sub", graph.add("Mul", t, 2.0), 1.0)
    *lower, leading = log_erfc_polynomial(DEGREE)
    total = graph.constant(leading)
    for coefficient in reversed(lower):
        total = graph.add("Add", graph.add("Mul", total, u), coefficient)
    return total


def log_erfc_polynomial(degree: int) -> list[np.float64]:
    """Coefficients, in powers of u = 2t - 1, of P(t) = log(erfc(x) e^{x²} / t) with x = 2/t - 2."""

    def target(u: np.ndarray) -> np.ndarray:
        t = (u + 1.0) / 2.0
        return np.log(scipy.special.erfcx(2.0 / t - 2.0) / t)

    return list(Chebyshev.interpolate(target, degree).convert(kind=Polynomial).coef)


def expected_tail(graph: OnnxGraph, size: str, variance: str) -> str:
    """E[s(X)] for X ~ N(-size, variance): Σ_j p_j ½ erfc(x_j) with x_j = size/√(2(variance + σ_j²))."""
    table = MIXTURES[-1]
    spread = graph.add("Add", variance, np.array([table.variances]))
    x = graph.add("Div", size, graph.add("Sqrt", graph.add("Mul", spread, 2.0)))
    return graph.add("MatMul", erfc(graph, x), 0.5 * np.array(table.weights)[:, None])


class FormulaGraph:
    """The columns of X as nodes that read raw columns. Each of these is an input of that name, with one column."""

    def __init__(self, graph: OnnxGraph, encoding: Encoding, real: int) -> None:
        if encoding.missing == "multiple":
            raise FormulaError(
                "a model for ONNX must fill in missing values by one number; got missing='multiple', which draws them. "
                "Fit with missing='mean' or 'indicator'."
            )
        self.graph, self.encoding, self.real = graph, encoding, real
        self.codes: dict[str, str] = {}  # column -> codes of its levels, int64
        self.numbers: dict[str, str] = {}  # column -> its values, double; NaN only where nothing is filled in
        self.calls: dict[str, str] = {}  # a call whose value was added before
        self.missing: dict[str, str] = {}  # column of numbers -> whether a value is missing
        for name in encoding.inputs:
            self.add_input(name)

    def columns(self) -> str:
        """Add X, standardised as in the fit. Rows that cannot be predicted become NaN."""
        import pandas

        parsed, levels = self.encoding.parsed, self.encoding.levels
        found = [self.numbers[name] for name in parsed.plain]
        if parsed.variables:
            # names of levels may hold any character, so formulaic sees L0, L1, … instead
            given: dict[str, Any] = {
                name: pandas.Categorical.from_codes([0], [f"L{k}" for k in range(len(levels[column]))])
                if name[0] == "c"
                else [1.0]
                for name, column in parsed.variables.items()
            }
            names = evaluate_terms(parsed.rest, pandas.DataFrame(given), dict(self.encoding.transforms))
            found += [self.product(name.split(":")) for name in names]
        found += [self.cast(self.missing[name]) for name in self.encoding.indicators]
        X = self.graph.add("Concat", *found, axis=1)
        X = self.graph.add("Sub", X, np.array([self.encoding.centre]))
        return self.graph.add("Div", X, np.array([self.encoding.scale]))

    # --- raw columns ---

    def add_input(self, name: str) -> None:
        """Add the input of a raw column, with its missing values filled in."""
        graph, types, encoding = self.graph, self.graph.onnx.TensorProto, self.encoding
        levels = encoding.levels.get(name)
        if levels is not None and isinstance(levels[0], bool):
            found = graph.add("Cast", graph.input(name, types.BOOL, 1), to=types.INT64)
            self.codes[name] = found if levels == [False, True] else graph.add("Sub", np.int64(1), found)
        elif levels is not None and isinstance(levels[0], str):
            self.codes[name] = self.text_codes(graph.input(name, types.STRING, 1), name)
        else:
            value = graph.add("Cast", graph.input(name, self.real, 1), to=types.DOUBLE)
            absent = graph.add("IsNaN", value)
            self.missing[name] = absent
            if levels is not None:
                self.codes[name] = self.number_codes(value, absent, name)
            if name in encoding.means:
                filled = encoding.means[name] if encoding.fills else np.nan
                self.numbers[name] = graph.add("Where", absent, filled, value)

    def text_codes(self, text: str, name: str) -> str:
        levels, new = self.encoding.levels[name], self.new_code(name)
        known: dict[str, int] = {level: k for k, level in enumerate(levels)}
        known.setdefault(MISSING_TEXT, self.missing_code(name))
        self.graph.uses_ml = True
        return self.graph.add(
            "LabelEncoder",
            text,
            domain="ai.onnx.ml",
            keys_strings=list(known),
            values_int64s=list(known.values()),
            default_int64=new,
        )

    def number_codes(self, value: str, absent: str, name: str) -> str:
        code: Any = np.int64(self.new_code(name))
        for k, level in enumerate(self.encoding.levels[name]):
            code = self.graph.add("Where", self.graph.add("Equal", value, float(level)), np.int64(k), code)
        return self.graph.add("Where", absent, np.int64(self.missing_code(name)), code)

    def missing_code(self, name: str) -> int:
        return self.encoding.levels[name].index(self.encoding.common[name]) if self.encoding.fills else UNKNOWN

    def new_code(self, name: str) -> int:
        """Return the code of a level that was not in the fit, by the model's rule `unseen`."""
        return {"error": UNKNOWN, "missing": self.missing_code(name), "baseline": 0}[self.encoding.unseen]

    # --- terms ---

    def product(self, factors: list[str]) -> str:
        first, *others = (self.factor(factor) for factor in factors)
        for other in others:
            first = self.graph.add("Mul", first, other)
        return first

    def factor(self, text: str) -> str:
        """A number, a function of numbers, one column of a spline or polynomial, or a level of a category."""
        found = FACTOR.fullmatch(text)
        assert found is not None, text
        source, part = found["source"], found["part"]
        category = re.fullmatch(r"(?:C\()?c(\d+)_\)?", source)
        if category and part is not None:
            return self.level(self.encoding.columns[int(category[1])], int(part.removeprefix("L")))
        node = ast.parse(source, mode="eval").body
        return self.number(node) if part is None else self.basis(node, int(part))

    def level(self, column: str, k: int) -> str:
        """1 where the column has its level k, otherwise 0; NaN where its level is unknown."""
        codes = self.codes[column]
        known = self.cast(self.graph.add("Equal", codes, np.int64(k)))
        return self.graph.add("Where", self.graph.add("Less", codes, np.int64(0)), np.nan, known)

    def number(self, node: ast.expr) -> str:
        source = ast.unparse(node)
        if source not in self.calls:
            self.calls[source] = self.evaluated(node)
        return self.calls[source]

    def evaluated(self, node: ast.expr) -> str:
        add = self.graph.add
        match node:
            case ast.Name(id=name):
                return self.numbers[self.encoding.columns[int(name[1:-1])]]
            case ast.Constant(value=int() | float() as value):
                return self.graph.constant(np.array([[float(value)]]))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return add("Neg", self.number(operand))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.number(operand)
            case ast.BinOp(left=left, op=op, right=right):
                words = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Div: "Div", ast.Pow: "Pow"}
                return add(words[type(op)], self.number(left), self.number(right))
            case ast.Call(func=ast.Name(id="I"), args=[inside]):
                return self.number(inside)
            case ast.Call(func=ast.Name(id="log1p"), args=[inside]):
                return add("Log", add("Add", self.number(inside), 1.0))
            case ast.Call(func=ast.Name(id="log" | "exp" | "sqrt" | "abs" as function), args=[inside]):
                return add(function.capitalize(), self.number(inside))
            case ast.Call(func=ast.Name(id="center" | "scale"), args=[inside]):
                state = self.encoding.transforms[ast.unparse(node)]
                centred = add("Sub", self.number(inside), float(state["center"] or 0.0))
                return centred if state["scale"] is None else add("Div", centred, float(state["scale"]))
        raise FormulaError(f"a formula for ONNX must use functions that it has; got {ast.unparse(node)}.")

    def basis(self, node: ast.expr, part: int) -> str:
        """One column of poly() or bs()."""
        assert isinstance(node, ast.Call), ast.unparse(node)
        make: dict[str, Callable[[ast.Call], dict[int, str]]] = {"poly": self.polynomials, "bs": self.splines}
        source = f"{ast.unparse(node)}[{part}]"
        if source not in self.calls:
            found = make[ast.unparse(node.func)](node)
            self.calls |= {f"{ast.unparse(node)}[{k}]": column for k, column in found.items()}
        return self.calls[source]

    def polynomials(self, call: ast.Call) -> dict[int, str]:
        """Powers of x, or orthonormal polynomials by their three-term recurrence."""
        add, x, state = self.graph.add, self.number(call.args[0]), self.encoding.transforms[ast.unparse(call)]
        if "alpha" not in state:
            degree = max(literals(call, ("degree", "raw")).get("degree", 1), 1)
            return {k: add("Pow", x, float(k + 1)) for k in range(degree)}
        alpha, norms = state["alpha"], state["norms2"]
        monic = [self.graph.constant(np.ones((1, 1))), add("Sub", x, float(alpha[0]))]
        for k in range(1, len(alpha)):
            before = add("Mul", monic[k - 1], float(norms[k] / norms[k - 1]))
            monic.append(add("Sub", add("Mul", add("Sub", x, float(alpha[k])), monic[k]), before))
        return {k: add("Div", monic[k], float(np.sqrt(norms[k]))) for k in range(1, len(monic))}

    def splines(self, call: ast.Call) -> dict[int, str]:
        """B-splines by the recurrence of Cox and de Boor; beyond the range of the fit NaN, or the value at its end."""
        add, state = self.graph.add, self.encoding.transforms[ast.unparse(call)]
        knots, low, high = state["knots"], float(state["lower_bound"]), float(state["upper_bound"])
        degree = literals(call, ("df", "degree")).get("degree", 3)
        raw = self.number(call.args[0])
        x = add("Min", add("Max", raw, low), high)
        if self.encoding.beyond == "refuse":
            x = add("Where", add("Equal", x, raw), x, np.nan)
        last = len(knots) - degree - 1  # the interval that ends here contains its end
        basis = []
        for i in range(len(knots) - 1):
            above = add("GreaterOrEqual", x, float(knots[i]))
            below = add("LessOrEqual" if i + 1 == last else "Less", x, float(knots[i + 1]))
            basis.append(self.cast(add("And", above, below)))
        for d in range(1, degree + 1):
            rising = [self.rise(x, knots[i], knots[i + d]) for i in range(len(knots) - d)]
            basis = [
                add("Add", add("Mul", rising[i], basis[i]), add("Mul", add("Sub", 1.0, rising[i + 1]), basis[i + 1]))
                for i in range(len(knots) - d - 1)
            ]
        # a comparison with NaN is false, so that its splines would be zero
        return {i: add("Where", add("IsNaN", x), np.nan, basis[i]) for i in range(1, len(basis))}

    def rise(self, x: str, start: float, end: float) -> str:
        if start == end:
            return self.graph.constant(np.zeros((1, 1)))
        return self.graph.add("Div", self.graph.add("Sub", x, float(start)), float(end - start))

    def cast(self, flags: str) -> str:
        return self.graph.add("Cast", flags, to=self.graph.onnx.TensorProto.DOUBLE)


def literals(call: ast.Call, names: tuple[str, ...]) -> dict[str, int]:
    """Return the options of a call, which follow its first argument."""
    given = dict(zip(names, call.args[1:], strict=False)) | {str(one.arg): one.value for one in call.keywords}
    return {name: int(ast.literal_eval(value)) for name, value in given.items()}
