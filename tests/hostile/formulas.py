"""Formulas made of the words of the language and of words that are not: each is fitted, or refused in one line.

A formula that holds must fit and predict finite numbers for the table it was fitted to; none may run as a program.
"""

import random
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import viper
from hostile.harness import SilentlyWrong, outcome_of

WORDS = [
    "a",
    "b",
    "c",
    "g",
    "h",
    "`odd name`",
    "y",
    ".",
    "0",
    "1",
    "2",
    "3",
    "10",
    "11",
    "1e3",
    "1e999",
    "True",
    "x",
    "-1",
]
SIGNS = [
    "+",
    "-",
    "*",
    "/",
    ":",
    "^",
    "**",
    "~",
    "(",
    ")",
    ",",
    "=",
    " ",
    "|",
    "%",
    "@",
    "[",
    "]",
    "{",
    "}",
    "`",
    "'",
    '"',
    "\\",
]
CALLS = [
    "log",
    "log1p",
    "exp",
    "sqrt",
    "abs",
    "center",
    "scale",
    "I",
    "poly",
    "bs",
    "C",
    "Treatment",
    "np.log",
    "eval",
    "open",
]
TEMPLATES = [
    "poly({0}, {1})",
    "bs({0}, df={1})",
    "C({0}, Treatment('{1}'))",
    "I({0}**{1})",
    "({0} + {1})^2",
    "log({0})",
]
TEMPLATES += [
    "{0}:{1}",
    "{0}*{1}",
    "{0}/{1}",
    "center({0})",
    "({0} + {1}):{0}",
    "-{0}",
    "scale({0}):C({1})",
    "I({0} + {1})",
]
EVIL = [
    "__import__('os').abort()",
    "().__class__",
    "a if b else c",
    "lambda: 0",
    "a;b",
    "a\nb",
    "{a}",
    "a.b",
    "a[0]",
    "exec('x')",
]
DEEP = [
    "y ~ " + "-" * 20_000 + "a",
    "y ~ " + "(" * 5_000 + "a" + ")" * 5_000,
    "y ~ " + "I(" * 500 + "a" + ")" * 500,
    "y ~ " + " + ".join(["a"] * 20_000),
    "y ~ (a + b + c + g + h)^10",
    "y ~ " + "*".join("abcgh" * 6),
    "y ~ I(a**2**9**9)",
    "y ~ I(9**9**9)",
    "y ~ poly(a, 10**9)",
    "y ~ bs(a, df=1000000)",
    "y ~ " + " + ".join(f"I(a + {i})" for i in range(300)),
    "y ~ -(-a)",
    "y ~ I(",
    "y ~ `",
    "y ~ a + " + "b" * 100_000,
    "y ~ " + "a:" * 3_000 + "a",
]


class Material(NamedTuple):
    table: pd.DataFrame


def prepare(folder: Path) -> Material:
    rng = np.random.default_rng(2)
    table = pd.DataFrame(rng.uniform(0.5, 2.0, (40, 3)), columns=list("abc"))
    table["g"], table["h"] = rng.choice(["u", "v", "w"], 40), rng.integers(1, 4, 40)
    table["odd name"] = rng.normal(size=40)
    table["y"] = rng.integers(0, 2, 40)
    viper.VariationalLogisticRegression.from_formula("y ~ bs(a, df=4) + C(g)", table)  # imports everything
    return Material(table)


def make_formula(generator: random.Random) -> str:
    kind = generator.random()
    if kind < 0.01:
        return generator.choice(DEEP)
    if kind < 0.3:  # any tokens
        words = [*WORDS, *SIGNS, *SIGNS, *(f"{name}(" for name in CALLS), *EVIL]
        return "y ~ " + " ".join(generator.choice(words) for _ in range(generator.randrange(1, 12)))
    terms = [make_term(generator, 2) for _ in range(generator.randrange(1, 5))]
    formula = "y ~ " + generator.choice([" + ", " - ", "+"]).join(terms)
    if kind < 0.5:  # one character is changed, lost or doubled
        at = generator.randrange(len(formula))
        formula = formula[:at] + generator.choice(["", formula[at] * 2, *SIGNS]) + formula[at + 1 :]
    return formula


def make_term(generator: random.Random, depth: int) -> str:
    if depth == 0 or generator.random() < 0.4:
        return generator.choice(WORDS[:6] if generator.random() < 0.9 else [*WORDS, *EVIL])
    inner = [make_term(generator, depth - 1), generator.choice([make_term(generator, depth - 1), *WORDS[8:13]])]
    return generator.choice(TEMPLATES).format(*inner)


def run_case(material: Material, seed: int) -> tuple[str, str]:
    generator = random.Random(seed)
    formula = make_formula(generator)
    options: dict[str, Any] = {"standardize": generator.random() < 0.7}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = viper.VariationalLogisticRegression.from_formula(formula, material.table, **options)
        except ValueError as error:
            outcome, detail = outcome_of(error)
            return outcome, f"{formula:.60}: {detail}" if outcome != "line" else ""
        probability = model.predict_proba(material.table)[:, 1]
    if not ((probability >= 0) & (probability <= 1)).all():
        raise SilentlyWrong(f"probabilities that are none for {formula:.80}")
    names, units = model.formula_.names, model.formula_.units
    if len(names) != model.coef_.shape[1] or list(units) != names:
        raise SilentlyWrong(f"names that do not match for {formula:.80}")
    return "right", ""
