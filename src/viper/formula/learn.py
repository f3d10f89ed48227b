"""Models from tables: a formula learns from one table, is stored with the model, and encodes every later table."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from viper.data.checks import FIT_SEED, read_labels, seed_of
from viper.data.scaling import column_moments
from viper.errors import FormulaError, LeftOutWarning, RowError, counted, listed, users_line
from viper.formula.columns import (
    SAME_TO,
    as_frame,
    as_numbers,
    check_column_count,
    check_plain_values,
    differs_in_every_row,
    is_date,
    is_text,
    left_out_columns,
    levels_of,
    python_value,
    sorted_values,
    target_without_blanks,
    with_days,
    without_blanks,
)
from viper.formula.encoding import (
    MISSING_LEVEL,
    MISSING_RULES,
    Encoding,
    decode_transforms,
    encode_transforms,
    formula_has_intercept,
    missing_name,
)
from viper.formula.grammar import DATE_FUNCTIONS, ParsedFormula, check_powers, parse_formula, split_sides, tokenize
from viper.formula.imputation import CodedColumns, CompletedTables, Imputation, complete_tables
from viper.formula.training import TrainingData
from viper.inference.progress import StepProgress

if TYPE_CHECKING:
    import pandas

FormulaModel = TypeVar("FormulaModel", bound="FormulaMixin")
WrappedFit = TypeVar("WrappedFit", bound=Callable[..., Any])
MOST_LEVELS = 10_000
INTERCEPT_IN_FORMULA = "the formula must say whether there is an intercept; got fit_intercept. Write 'y ~ 0 + age'."


class Learned(NamedTuple):
    """An encoding with the rows that it learned from: X, the labels, and which rows of the data they are.

    `classes` are the two labels with the positive one second, or None if they are in sorted order. With
    missing="multiple" there are several `tables`, and X is the first.
    """

    encoding: Encoding
    X: "pandas.DataFrame"
    y: np.ndarray
    kept: np.ndarray
    classes: np.ndarray | None = None
    tables: Sequence[CodedColumns] = ()
    imputing: "Imputing | None" = None
    groups: "pandas.DataFrame | None" = None  # the columns of groups, if the formula has group terms

    @property
    def labels(self) -> np.ndarray:
        """Return labels whose sorted order is that of the classes: y itself, or whether it is positive."""
        return self.y if self.classes is None else np.asarray(self.y == self.classes[1], dtype=bool)

    def labels_for(self, model: Any) -> np.ndarray:
        """Return the labels as the model takes them: y itself, if the model knows the order of the levels."""
        return self.y if getattr(model, "categories", None) is not None else self.labels

    def with_rules(self, unseen: str, beyond: str) -> "Learned":
        """Return the same with other rules for new rows."""
        return self._replace(encoding=self.encoding.with_rules(unseen=unseen, beyond=beyond))

    def part(self, rows: np.ndarray) -> "Learned":
        """Return some of the rows under the same encoding. Missing values are drawn again, from these rows alone."""
        groups = None if self.groups is None else self.groups.iloc[rows]
        whole = np.ones(len(rows), bool)
        part = Learned(self.encoding, self.X.iloc[rows], self.y[rows], whole, self.classes, groups=groups)
        if not self.tables:
            return part
        index, encoding = part.X.index, self.encoding
        coded = cast(CompletedTables, self.tables).columns.take(rows)
        tables = complete_inputs(coded, part.labels, self.imputing or Imputing())
        encoding = replace(encoding, imputation=Imputation.learn(tables))
        X = encoding._scaled(encoding._design(encoding.raw_columns(tables[0], index), encoding.transforms))
        return part._replace(encoding=encoding, X=X, tables=tables)

    def raw(self) -> "pandas.DataFrame":
        """Return the raw columns before missing values were drawn, as a model with a formula predicts from them."""
        coded = cast(CompletedTables, self.tables).columns
        return self.encoding.raw_columns(coded, self.X.index)

    def group_arguments(self) -> dict[str, Any]:
        """Return what `fit` needs besides X and labels: the groups, if there are any."""
        return {} if self.groups is None else {"groups": self.groups}

    def designs(self) -> "Iterator[pandas.DataFrame]":
        """Yield X of each completed table."""
        yield self.X
        for k in range(1, len(self.tables)):
            raw = self.encoding.raw_columns(self.tables[k], self.X.index)
            yield self.encoding._scaled(self.encoding._design(raw, self.encoding.transforms))


class Imputing(NamedTuple):
    """How missing="multiple" draws: the number of tables, the number of sweeps over each, and the seed."""

    imputations: int = 20
    sweeps: int = 10
    seed: int = FIT_SEED
    verbose: Any = "auto"

    def check(self) -> "Imputing":
        for name, least in {"imputations": 2, "sweeps": 1}.items():
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
                raise FormulaError(f"{name} must be an integer of at least {least}; got {value!r}.")
        return self


def learn_formula(
    formula: str,
    data: Any,
    missing: str = "error",
    standardize: bool = False,
    positive: Any = None,
    imputing: Imputing | None = None,
) -> Learned:
    """Learn an encoding from data, and apply it to the same data.

    `positive` is the class whose probability is modelled, by default the last in order. `imputing` is how
    missing="multiple" draws.

    Raises
    ------
    FormulaError
        If the formula does not fit the data, or values are missing and `missing` is "error".
    """
    import pandas

    used = used_rows(formula, data, missing)
    parsed, columns, frame = used.parsed, used.columns, used.frame
    numbers = {*parsed.plain, *(column for name, column in parsed.variables.items() if name[0] in "nd")}
    levels = levels_by_column(frame, parsed)
    y = target_labels(frame[parsed.target])
    classes = ordered_classes(frame[parsed.target], y, positive)
    values = {name: as_numbers(frame[name]) for name in columns if name in numbers}
    common = {name: python_value(frame[name].mode()[0]) for name in levels}
    if missing == "indicator":
        frame, levels, common = with_missing_levels(frame, levels, common, numbers)
    imputing, inputs = (imputing or Imputing()).check(), frame[columns[1:]]
    encoding = Encoding(
        formula=parsed.formula,
        target=parsed.target,
        columns=columns,
        missing=missing,
        means={name: known_mean(x) for name, x in values.items()},
        levels=levels,
        common=common,
        transforms={},
        names=[],
        intercept=True,
        centre=[],
        scale=[],
        standardize=standardize,
        counts=used.counts,
        positive=None if classes is None else python_value(classes[1]),
        training=TrainingData.of(inputs, pandas.Series(y), len(used.kept), used.counts, values, levels),
        imputations=int(imputing.imputations),
        sweeps=int(imputing.sweeps),
        grouping=parsed.grouping or None,
    )
    return learn_encoding(encoding, inputs, y, used.kept, classes, imputing, used.groups)


class UsedRows(NamedTuple):
    """A formula with the rows and columns that it uses, the target first."""

    parsed: ParsedFormula
    columns: list[str]
    frame: "pandas.DataFrame"
    counts: dict[str, int]  # missing values by column
    kept: np.ndarray  # positions of these rows in the data
    groups: "pandas.DataFrame | None"


def used_rows(formula: str, data: Any, missing: str) -> UsedRows:
    """Parse a formula, and apply the rule for missing values to the columns that it names."""
    if missing not in MISSING_RULES:
        raise FormulaError(f"missing must be one of {list(MISSING_RULES)}; got {missing!r}.")
    check_powers(formula)
    frame = as_frame(data)
    if not len(frame.columns):
        raise FormulaError("a formula needs a table with columns; got none. Pass the columns that the formula names.")
    categories = [name for name in frame if is_text(frame[name])]
    parsed = parse_formula(formula, frame.columns, categories, left_out_by_dot(formula, frame))
    columns = list(dict.fromkeys([parsed.target, *parsed.plain, *parsed.variables.values()]))
    check_column_count(len(columns) - 1)
    grouping = [name for name in parsed.grouping if name not in columns]
    frame = with_plain_columns(frame[[*columns, *grouping]], parsed)
    frame, counts, kept = apply_missing_rule(frame, parsed.target, missing)
    groups = read_groups(frame, parsed, missing)
    if len(columns) == 1 and groups is None:
        raise FormulaError(f"a formula must name at least one column to the right of ~; got {formula!r:.80}.")
    text = [name for name in columns[1:] if name in {*categories}]
    parsed = parse_formula(parsed.formula, [*columns, *parsed.grouping], text)
    return UsedRows(parsed, columns, frame, counts, kept, groups)


def levels_by_column(frame: "pandas.DataFrame", parsed: ParsedFormula) -> dict[str, list[Any]]:
    """Return the levels of each categorical column, the reference level first."""
    levels = {
        column: reference_first(levels_of(frame[column], MOST_LEVELS), parsed.reference.get(column), column)
        for name, column in parsed.variables.items()
        if name.startswith("c")
    }
    check_levels_occur_again(frame, levels)
    return levels


def with_missing_levels(
    frame: "pandas.DataFrame", levels: dict[str, list[Any]], common: dict[str, Any], numbers: set[str]
) -> tuple["pandas.DataFrame", dict[str, list[Any]], dict[str, Any]]:
    """Return rows, levels and most common levels, with an extra level for missing values of a category."""
    added = {name: missing_level(levels[name]) for name in levels if name not in numbers and frame[name].isna().any()}
    filled = {name: frame[name].astype(object).fillna(level) for name, level in added.items()}
    return (
        frame.assign(**filled),
        levels | {name: [*levels[name], level] for name, level in added.items()},
        common | added,
    )


def learn_encoding(
    encoding: Encoding,
    inputs: "pandas.DataFrame",
    y: np.ndarray,
    kept: np.ndarray,
    classes: np.ndarray | None,
    imputing: Imputing,
    groups: "pandas.DataFrame | None",
) -> Learned:
    """Apply an encoding to the rows it was learned from, and learn its transforms, centres and scales on the way."""
    transforms: dict[str, Any] = {}
    tables: Sequence[CodedColumns] = ()
    if encoding.missing == "multiple":
        labels = y if classes is None else y == classes[1]
        tables = complete_inputs(encoding.coded(inputs), labels, imputing)
        encoding = replace(encoding, imputation=Imputation.learn(tables))
        raw = encoding._design(encoding.raw_columns(tables[0], inputs.index), transforms)
    else:
        raw = encoding._design(encoding._filled(inputs), transforms)
    if not len(raw.columns) and groups is None:
        raise FormulaError(f"a formula must leave at least one term; got {encoding.formula!r:.80}, whose terms cancel.")
    if encoding.missing == "indicator":
        raw = with_missing_columns(raw, inputs[[name for name in encoding.means if inputs[name].isna().any()]])
    intercept = formula_has_intercept(encoding.parsed.rest)
    centre, scale = centre_and_scale(raw.to_numpy(), intercept, encoding.standardize)
    learned = {"names": list(raw), "intercept": intercept, "centre": centre.tolist(), "scale": scale.tolist()}
    encoding = replace(encoding, **learned, transforms=decode_transforms(encode_transforms(transforms)))
    return Learned(encoding, (raw - centre) / scale, y, kept, classes, tables, imputing, groups)


def read_groups(frame: "pandas.DataFrame", parsed: ParsedFormula, missing: str) -> "pandas.DataFrame | None":
    """Return the columns of groups, if the formula has group terms. Each row must have a group."""
    if not parsed.groups:
        return None
    if missing == "multiple":
        raise FormulaError(
            f"missing='multiple' does not draw values within groups; got {parsed.groups[0]}. Choose missing='mean' or "
            "missing='drop'."
        )
    for name in parsed.grouping:
        check_plain_values(frame[name])
        if frame[name].isna().any():
            row = frame.index[int(np.flatnonzero(frame[name].isna())[0])]
            raise RowError(f"rows must have a group in column {name!r}", "none", row, "Choose missing='drop'.")
    return frame[parsed.grouping].apply(without_blanks)


def check_levels_occur_again(frame: "pandas.DataFrame", levels: dict[str, list[Any]]) -> None:
    """Raise a FormulaError for a category with a different level in every row, which says nothing about new rows."""
    for name in levels:
        known = frame[name].dropna()
        if differs_in_every_row(known, len(levels[name])):
            raise FormulaError(
                f"a category must have levels that occur in several rows; got {name!r}, which differs in all "
                f"{len(known):,} rows, so it tells nothing about new ones. Leave it out."
            )


def with_plain_columns(frame: "pandas.DataFrame", parsed: ParsedFormula) -> "pandas.DataFrame":
    """Return the frame with dates as days, and categories without the blanks around them."""
    for name in parsed.dates:
        if not is_date(frame[name]):
            ways = ", ".join(f"{function}()" for function in DATE_FUNCTIONS)
            raise FormulaError(f"{ways} must contain dates, such as 2024-12-31; got column {name!r}, which has others.")
    categories = {column for name, column in parsed.variables.items() if name[0] == "c"}
    return with_days(frame, parsed.dates).assign(**{name: without_blanks(frame[name]) for name in categories})


def missing_level(levels: list[Any]) -> str:
    """Return a name for the level of missing values that no other level has."""
    return MISSING_LEVEL if MISSING_LEVEL not in levels else f"({MISSING_LEVEL})"


def complete_inputs(coded: CodedColumns, labels: np.ndarray, imputing: Imputing) -> CompletedTables:
    """Draw the missing values of the inputs, given the labels and each other."""
    number = read_labels(labels, len(labels), many=True)[1].numpy()
    outcome = (number[:, None] == np.arange(1, int(number.max()) + 1)).astype(float)
    with closing(StepProgress(imputing.verbose, "drawing missing values: sweep")) as progress:
        return complete_tables(coded, outcome, imputing.imputations, imputing.sweeps, imputing.seed, progress.step)


def with_missing_columns(raw: "pandas.DataFrame", incomplete: "pandas.DataFrame") -> "pandas.DataFrame":
    """Add a column of zeros and ones for each column that has missing values."""
    added = {missing_name(str(name)): incomplete[name].isna().astype(float) for name in incomplete}
    if twice := [name for name in added if name in raw]:
        raise FormulaError(f"missing='indicator' adds a column {twice[0]!r}; got one of that name. Rename it.")
    return raw.assign(**added)


def left_out_by_dot(formula: str, frame: "pandas.DataFrame") -> list[str]:
    """Return the columns that `.` does not stand for, because they are no use by themselves, and warn of them."""
    tokens = tokenize(formula) if "." in str(formula) else []
    if ("sign", ".") not in tokens:
        return []
    words = {text for kind, text in tokens if kind in ("word", "quoted")}
    how_to_use = "Write '. - {0}' to leave it out, or '. + {0}' to use it anyway.".format
    found = left_out_columns(frame, split_sides(tokens)[0][0][1], words, how_to_use)
    reasons = "; ".join(f"{name!r}: {why}" for name, why in found.items() if name not in words)
    if reasons:
        warnings.warn(f"`.` leaves out {reasons}.", LeftOutWarning, users_line())
    return [*found]


def target_labels(column: "pandas.Series[Any]") -> np.ndarray:
    """Return the target as an array. Labels regain their own type if pandas changed it because some are missing.

    Blanks around text are removed if only they make more than two classes.
    """
    import pandas

    if isinstance(column.dtype, pandas.CategoricalDtype):
        column = column.astype(column.cat.categories.dtype)
    column = target_without_blanks(column)
    y = column.infer_objects().to_numpy()
    if y.dtype.kind == "O" and not isinstance(column.dtype, np.dtype) and column.dtype.kind in "iub":
        y = y.astype(column.dtype.kind)
    whole = y.dtype.kind == "f" and bool((y == np.round(y)).all()) and bool((np.abs(y) < 2**53).all())
    return y.astype(np.int64) if whole else y


def ordered_classes(column: "pandas.Series[Any]", y: np.ndarray, positive: Any) -> np.ndarray | None:
    """Return the two classes with the positive one second, or None if sorting puts them in that order.

    Without `positive` the order is that of pandas' categories; text that spells numbers is ordered like the numbers.
    """
    import pandas

    if isinstance(column.dtype, pandas.CategoricalDtype):
        there = {*pandas.unique(y)}
        classes = [label for label in column.cat.categories if label in there]
    elif positive is None and not is_text(column):
        return None
    else:
        classes = sorted_values(pandas.unique(y))
    if len(classes) > 2 and positive is not None:
        raise FormulaError(
            f"positive names the one of two classes whose probability is modelled; got {positive!r} for {len(classes)} "
            f"classes of {column.name!r}. Leave it out: all classes have a probability."
        )
    if len(classes) != 2:  # the estimator raises for one; more are sorted
        return None
    if positive is not None:
        chosen = matching_class(classes, positive, str(column.name))
        classes = [label for label in classes if label != chosen] + [chosen]
    found = np.array(classes, dtype=y.dtype)
    return None if classes == sorted(classes) else found


def matching_class(classes: list[Any], positive: Any, target: str) -> Any:
    """Return the class that `positive` names, by value or by spelling."""
    for alike in (
        lambda label: label == positive and isinstance(label, str) == isinstance(positive, str),
        lambda label: str(label) == str(positive),
        lambda label: str(label).casefold() == str(positive).casefold(),
    ):
        if len(found := [label for label in classes if alike(label)]) == 1:
            return found[0]
    shown = ", ".join(repr(python_value(label)) for label in classes)
    raise FormulaError(f"positive must be one of the classes of {target!r}, {shown}; got {positive!r}.")


def apply_missing_rule(
    frame: "pandas.DataFrame", target: str, missing: str
) -> tuple["pandas.DataFrame", dict[str, int], np.ndarray]:
    """Return the rows that the rule for missing values keeps, missing values by column, and which rows are kept."""
    holes = frame.isna()
    counts = {str(name): int(number) for name, number in holes.sum().items() if number}
    if counts and missing == "error":
        raise FormulaError(
            f"the data must have no missing values; got {counted(counts)} in {len(frame)} rows. Choose missing='drop' "
            "to leave such rows out, missing='multiple' to draw the values from the other columns, or missing='mean' "
            "to fill in means and the most common levels."
        )
    kept = ~(holes.any(axis=1) if missing == "drop" else holes[target]).to_numpy()
    if not len(frame):
        raise FormulaError("the data must have rows; got none.")
    if not kept.any():
        raise FormulaError(f"some rows must be complete; got {counted(counts)} in {len(frame)} rows. Drop a column.")
    empty = holes.columns[holes[kept].all()]
    if len(empty):
        raise FormulaError(f"every column must have values; got none in {empty[0]!r}. Leave it out of the formula.")
    return frame.loc[kept], counts, kept


def reference_first(levels: list[Any], reference: str | None, column: str) -> list[Any]:
    """Return the levels with the reference first."""
    if reference is None:
        return levels
    chosen = [level for level in levels if str(level) == reference]
    if not chosen:
        raise FormulaError(f"the reference of C({column}) must be one of {listed(levels)}; got {reference!r}.")
    return chosen + [level for level in levels if level != chosen[0]]


def centre_and_scale(raw: np.ndarray, intercept: bool, standardize: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return each column's mean and standard deviation, or 0 and 1 for constant columns and columns of zeros and ones.

    Without an intercept nothing is centred, because that would change the model.
    """
    if not standardize or not raw.shape[1]:
        return np.zeros(raw.shape[1]), np.ones(raw.shape[1])
    mean, spread = column_moments(raw)
    as_is = np.all((raw == 0) | (raw == 1), 0) | (spread <= SAME_TO * np.abs(raw).max(0))
    centre = np.zeros(raw.shape[1]) if not intercept else np.where(as_is, 0.0, mean)
    return centre, np.where(as_is, 1.0, spread)


def known_mean(values: np.ndarray) -> float:
    """Return the mean of the values that are not missing."""
    return float(column_moments(values[~np.isnan(values)][:, None])[0][0])


class FormulaMixin:
    """Estimators that a formula can fit to a table. Their methods then take tables, which `formula_` encodes."""

    formula_: Encoding
    _template: Encoding | None = None  # the encoding of the estimator of which this is a clone

    def __sklearn_clone__(self: FormulaModel) -> FormulaModel:
        model = super().__sklearn_clone__()  # type: ignore[misc]
        if (encoding := formula_template(self)) is not None:
            model._template = encoding
        return model

    @classmethod
    def from_formula(
        cls: type[FormulaModel],
        formula: str,
        data: Any,
        *,
        missing: str = "error",
        imputations: int = 20,
        sweeps: int = 10,
        standardize: bool = True,
        positive: Any = None,
        unseen: str = "error",
        beyond: str = "refuse",
        sample_weight: Any = None,
        offset: Any = None,
        **options: Any,
    ) -> FormulaModel:
        """Fit to a table with named columns, by a formula such as ``y ~ age + C(ward) + x1:x2``.

        The fitted estimator stores the encoding as `formula_`, and saves it with the model. Its methods take tables
        (pandas, polars, Arrow) with the same raw columns and ignore all others.

        `fit` of such a model, or of a clone as in cross-validation, learns the same formula again from the table it is
        given. The labels are `y`, or by default the target's column, which is never a feature. To get an estimator
        without the formula, make a new one: ``type(model)(**model.get_params())``.

        Parameters
        ----------
        formula : str
            The target, ``~``, and terms joined by + - * / : ^. A term is a column, C(column) or
            C(column, Treatment("reference")) for categories, or a function of numbers: log, log1p, exp, sqrt, abs, I,
            and center, scale, poly, bs, which learn from the data. `.` stands for all other columns, ``- 1`` removes
            the intercept, and `backticks` enclose unusual names. Text and booleans are categories. For
            VariationalMixedRegression, (1 + age | patient) is an intercept and a slope that vary between patients.
        data : DataFrame
            The table, with the target and the columns that the formula names.
        missing : {"error", "drop", "mean", "indicator", "multiple"}, default "error"
            What to do with missing values. "error" raises one; "drop" leaves out the rows; "mean" fills in the mean of
            numbers and the most common level of categories; "indicator" also adds a column that marks where a number
            was missing, and a level for missing categories; "multiple" draws the values several times given all other
            columns and the outcome, fits every completed table and pools the posteriors (multiple imputation, for
            logistic regression). Everything that predictions need is stored.
        imputations, sweeps : int, default 20 and 10
            For missing="multiple": the number of completed tables, and how often every incomplete column is drawn
            before a table counts as complete.
        standardize : bool, default True
            Whether to centre the columns of X and divide them by their standard deviations, so that the prior suits
            columns of any scale. A logistic regression does not standardise columns of zeros and ones.
            `formula_.units` gives the change in raw units to which each coefficient refers.
        positive : label, optional
            The class whose probability is modelled, which becomes the second of `classes_`. By default the last in
            order: of pandas' categories if the target has them, otherwise of the sorted numbers or texts. A later
            `fit` with labels passed as y sorts the classes, as scikit-learn's tools expect.
        unseen : {"error", "missing", "baseline"}, default "error"
            What predictions do with a level that was not in the training data: raise an error (`predict_table` leaves
            the row without a prediction), treat it as missing, or as the reference level.
        beyond : {"refuse", "clamp"}, default "refuse"
            What predictions do with a number beyond the range of a spline: raise an error, or use the nearest number
            within the range.
        sample_weight, offset : array (n,), optional
            As in `fit`, with one entry per row of `data`.
        **options
            Parameters of the estimator.
        """
        own = cls._get_param_names()  # type: ignore[attr-defined]
        if "fit_intercept" in options:
            raise FormulaError(INTERCEPT_IN_FORMULA)
        if "standardize" in own:
            options |= {"standardize": standardize}
        check_can_pool(cls, missing, options.get("components", 1))
        imputing = Imputing(imputations, sweeps, seed_of(options.get("random_state")), options.get("verbose", "auto"))
        learned = learn_formula(formula, data, missing, standardize and "standardize" not in own, positive, imputing)
        return fit_learned(cls, learned.with_rules(unseen, beyond), options, sample_weight, offset)


def fit_learned(
    estimator: type[FormulaModel],
    learned: Learned,
    options: dict[str, Any],
    sample_weight: Any = None,
    offset: Any = None,
) -> FormulaModel:
    """Return an estimator fitted to the rows that a formula encoded from a table."""
    if "fit_intercept" in estimator._get_param_names():  # type: ignore[attr-defined]
        options = options | {"fit_intercept": learned.encoding.intercept}
    rows = (kept_entries(vector, learned.kept) for vector in (sample_weight, offset))
    check_can_pool(estimator, learned.encoding.missing, options.get("components", 1))
    check_takes_groups(estimator, learned.encoding)
    if groups := learned.encoding.parsed.groups:
        options = options | {"effects": " + ".join(map(str, groups))}
    model = estimator(**options)
    fit_tables(model.fit, model, learned, *rows, **learned.group_arguments())  # type: ignore[attr-defined]
    return keep_learned(model, learned)


def check_can_pool(estimator: type, missing: str, components: Any = 1) -> None:
    if missing == "multiple" and not hasattr(estimator, "_pool"):
        raise FormulaError(
            f"missing='multiple' pools the posteriors of coefficients, so it is for logistic regression only; got "
            f"{estimator.__name__}. Choose missing='indicator' or missing='mean'."
        )
    if missing == "multiple" and components != 1:
        raise FormulaError(
            f"missing='multiple' pools Gaussian posteriors; got components={components!r}. Choose missing='indicator' "
            "or missing='mean', or components=1."
        )


def check_takes_groups(estimator: type, encoding: Encoding) -> None:
    """Raise unless the estimator and the formula agree on whether there are effects of groups."""
    takes = "effects" in estimator._get_param_names()  # type: ignore[attr-defined]
    if encoding.parsed.groups and not takes:
        raise FormulaError(
            f"{encoding.parsed.groups[0]} is for effects of groups, which belong to VariationalMixedRegression; got "
            f"{estimator.__name__}. Use VariationalMixedRegression.from_formula."
        )
    if takes and not encoding.parsed.groups:
        raise FormulaError(
            f"the formula of a {estimator.__name__} must have a term such as (1 | hospital); got none. Add one, or use "
            "VariationalLogisticRegression."
        )


def fit_tables(fit: Callable[..., Any], model: Any, learned: Learned, *rows: Any, **given: Any) -> None:
    """Fit the model to X. With several completed tables, fit copies of it to each X, and pool their posteriors."""
    if len(learned.tables) < 2:
        fit(learned.X, learned.labels_for(model), *rows, **given)
        return
    fits: list[Any] = []
    for X in learned.designs():
        copy = type(model)(**model.get_params())
        if fits:  # one prior for all tables; if it is chosen, the first table chooses it
            copy.set_params(prior_scale=fits[0].prior_scale_)
        fits.append(copy.fit(X, learned.labels, *rows, **given))
    model._pool(fits)


def keep_learned(model: Any, learned: Learned) -> Any:
    """Give a fitted model the encoding and the classes."""
    model.formula_ = learned.encoding
    if learned.classes is not None:
        model.classes_ = learned.classes
    return model


def formula_template(model: Any) -> Encoding | None:
    """Return the encoding whose formula `fit` learns again, or None for an estimator without a formula."""
    return getattr(model, "formula_", None) or getattr(model, "_template", None)


def by_formula(fit: WrappedFit) -> WrappedFit:
    """Wrap `fit` so that a model with a formula learns it again from the table, and is fitted to the resulting X."""

    @wraps(fit)
    def learning(model: Any, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None, **given: Any) -> Any:
        known = formula_template(model)
        if known is None:
            return fit(model, X, y, sample_weight, offset, **given)
        frame = with_labels(as_frame(X), known.target, y)
        # files and pickles older than the field `standardize` reveal it by their scales
        standardize = known.standardize or any(scale != 1.0 for scale in known.scale)
        # scikit-learn's scorers assume that the classes of labels passed as y are sorted
        positive = known.positive if y is None else None
        imputing = Imputing(known.imputations, known.sweeps, seed_of(model.random_state), model.verbose)
        learned = learn_formula(known.formula, frame, known.missing, standardize, positive, imputing)
        learned = learned.with_rules(known.unseen, known.beyond)
        if getattr(model, "fit_intercept", learned.encoding.intercept) != learned.encoding.intercept:
            raise FormulaError(INTERCEPT_IN_FORMULA)
        rows = (kept_entries(vector, learned.kept) for vector in (sample_weight, offset))
        fit_tables(partial(fit, model), model, learned, *rows, **given, **learned.group_arguments())
        return keep_learned(model, learned)

    return cast(WrappedFit, learning)


def with_labels(frame: "pandas.DataFrame", target: str, y: Any) -> "pandas.DataFrame":
    """Return the table with y as its target column. Without y the table is not changed."""
    from sklearn.utils import column_or_1d

    if y is None:
        return frame
    y = column_or_1d(y)
    if len(y) != len(frame):
        raise FormulaError(f"X and y must have the same number of rows; got {len(frame)} and {len(y)}.")
    return frame.assign(**{target: y})


def kept_entries(vector: Any, kept: np.ndarray) -> Any:
    """Return the entries of the rows that were kept."""
    if vector is None or np.ndim(vector) == 0 or len(vector) != len(kept):
        return vector  # the estimator raises the error for a wrong length
    return np.asarray(vector)[kept]
