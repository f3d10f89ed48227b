"""Missing values of a table: how many, where, together with which others, and whether they go with the outcome."""

from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from viper.report.shares import named_groups
from viper.report.svg import column_heading, data_table, paragraph, row_heading, section, table_cell
from viper.report.words import percent

if TYPE_CHECKING:
    import pandas

    from viper.report.study import Study

QUANTILES = 400  # quantiles of each posterior; all pairs of them represent the difference of two shares
MOST_PATTERNS = 10  # combinations of missing columns that are listed
SUREST = 1e-3  # a link is named if chance would produce one this strong, over all pairs of columns, less often
MOST_PAIRS = 20_000  # pairs of columns that are compared


class MissingData(NamedTuple):
    """What is missing in a table.

    rows, complete : number of rows, and of those without missing values
    columns : one row per incomplete column, the worst first. `missing` values, their `share`, and `goes_with`, the
        other column that best predicts where they are missing, in words. With a target also the `observed` share of
        the positive class in rows that have a value, that share where it is `absent`, and the interval from `lower` to
        `upper` of the difference, absent - observed, under Jeffreys' priors
    patterns : which columns are missing together, the most common combination first, in `rows` and as a `share`
    target, positive : the column and its class that the shares refer to, or None
    """

    rows: int
    complete: int
    columns: "pandas.DataFrame"
    patterns: "pandas.DataFrame"
    target: str | None = None
    positive: Any = None

    @property
    def related(self) -> list[str]:
        """Return the columns whose missing values go with the outcome: the interval of the difference excludes zero."""
        if self.target is None:
            return []
        table = self.columns.drop(index=self.target, errors="ignore")
        return list(table.index[(table["lower"] > 0) | (table["upper"] < 0)])


def missing_values(data: Any, target: str | None = None, positive: Any = None, level: float = 0.95) -> MissingData:
    """Report what is missing in a table: by column, together, and in relation to the target if there is one.

    Parameters
    ----------
    data : DataFrame
        The table; polars, Arrow or a dictionary of columns too.
    target : str, optional
        The column with the two classes.
    positive : label, optional
        The class whose share is reported; by default the last in order.
    level : float, default 0.95
        Posterior mass of the interval of the difference.

    Examples
    --------
    >>> found = missing_values({"age": [1.0, None, 3.0, None], "dose": [1.0, 2.0, 3.0, None]})
    >>> found.columns["missing"].to_dict(), found.complete
    ({'age': 2, 'dose': 1}, 2)
    """
    import pandas

    from viper.formula.columns import as_frame

    frame = as_frame(data).reset_index(drop=True)
    if target is not None and target not in frame:
        raise ValueError(f"target must be a column of the table; got {target!r}.")
    holes = frame.isna()
    counts = holes.sum().sort_values(ascending=False, kind="stable")
    incomplete = [str(name) for name in counts.index[counts > 0]]
    table = pandas.DataFrame({"missing": counts[incomplete], "share": counts[incomplete] / max(1, len(frame))})
    if target is not None:
        label, known, positive = positive_rows(frame[target], positive)
        found = [difference_of_shares(label[known], holes.loc[known, name].to_numpy(), level) for name in incomplete]
        table[["observed", "absent", "lower", "upper"]] = np.array(found).reshape(len(found), 4)
    table["goes_with"] = linked_columns(frame.drop(columns=[] if target is None else [target]), holes, incomplete)
    complete = int((~holes.any(axis=1)).sum())
    return MissingData(len(frame), complete, table, missing_patterns(holes[incomplete]), target, positive)


def positive_rows(column: "pandas.Series[Any]", positive: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """Return which rows are positive, which have a label, and the positive label."""
    from viper.formula.columns import python_value
    from viper.formula.learn import ordered_classes, target_labels

    known = column.notna().to_numpy()
    y = target_labels(column[known])
    classes = ordered_classes(column[known], y, positive)
    classes = np.unique(y) if classes is None else classes
    if len(classes) != 2:
        raise ValueError(
            f"the target must have exactly two classes; got {len(classes)} in {column.name!r}. Name another column."
        )
    label = np.zeros(len(column), dtype=bool)
    label[known] = y == classes[1]
    return label, known, python_value(classes[1])


def difference_of_shares(label: np.ndarray, absent: np.ndarray, level: float) -> tuple[float, float, float, float]:
    """Return the share of `label` among rows with and without a value, and the ends of the interval of the difference.

    The interval is that of the difference of two independent Beta posteriors with Jeffreys' prior.
    """
    from scipy.special import betaincinv

    grid = (np.arange(QUANTILES) + 0.5) / QUANTILES
    draws, shares = [], []
    for part in (label[~absent], label[absent]):
        draws.append(betaincinv(part.sum() + 0.5, len(part) - part.sum() + 0.5, grid))
        shares.append(float(part.mean()) if len(part) else np.nan)
    ends = np.quantile(draws[1][:, None] - draws[0], [0.5 - 0.5 * level, 0.5 + 0.5 * level])
    return shares[0], shares[1], float(ends[0]), float(ends[1])


def linked_columns(frame: "pandas.DataFrame", holes: "pandas.DataFrame", incomplete: list[str]) -> list[str]:
    """Describe, for each incomplete column, the other column that best predicts where it is missing."""
    from scipy.stats import chi2

    columns = list(frame.columns)[: max(1, MOST_PAIRS // max(1, len(incomplete)))]
    groups = {name: named_groups(frame[name]) for name in columns} if incomplete else {}
    threshold = SUREST / max(1, len(incomplete) * len(columns))
    described = []
    for name in incomplete:
        hole = holes[name].to_numpy()
        best, text = threshold, ""
        for other, (place, names) in groups.items():
            rows = np.bincount(place, minlength=len(names))
            share = np.bincount(place, weights=hole, minlength=len(names)) / np.maximum(rows, 1)
            spread = hole.mean() * (1.0 - hole.mean())
            if other == name or len(names) < 2 or not spread:
                continue
            chance = float(chi2.sf(rows @ np.square(share - hole.mean()) / spread, len(names) - 1))
            if chance < best:
                most, least = int(share.argmax()), int(share.argmin())
                best = chance
                text = f"{other}: {percent(share[most])} at {names[most]}, {percent(share[least])} at {names[least]}"
        described.append(text)
    return described


def missing_patterns(holes: "pandas.DataFrame") -> "pandas.DataFrame":
    """Count the rows of each combination of missing columns; the index lists them, and is empty for complete rows."""
    import pandas

    if not holes.shape[1]:
        return pandas.DataFrame({"rows": [len(holes)], "share": [1.0]}, index=[""])
    found, rows = np.unique(holes.to_numpy(), axis=0, return_counts=True)
    order = np.argsort(-rows, kind="stable")
    names = [", ".join(np.array(holes.columns)[pattern]) for pattern in found[order]]
    return pandas.DataFrame({"rows": rows[order], "share": rows[order] / max(1, len(holes))}, index=names)


# --- on the page ---


def missing_section(study: "Study") -> str:
    """The section on missing values: how many there were in the fit and in these rows, and what was done."""
    encoding = getattr(study.model, "formula_", None)
    if encoding is None or not encoding.fills:
        return ""
    here = study.frame.isna().sum()
    counts = {name: (encoding.counts.get(name, 0), int(here.get(name, 0))) for name in encoding.inputs}
    found = sorted(((name, *pair) for name, pair in counts.items() if any(pair)), key=lambda row: -max(row[1:]))
    if not found:
        return ""
    fitted = encoding.training.rows if encoding.training is not None else None
    head = [column_heading("Column"), *(column_heading(t, "number") for t in ("In the fit", "In these rows"))]
    rows = [
        [row_heading(escape(name)), count_cell(in_fit, fitted), count_cell(in_rows, len(study.frame))]
        for name, in_fit, in_rows in found
    ]
    sentence = f"Missing values were {encoding.missing_treatment}. {allowance_sentence(study.model)}"
    listing = data_table("Missing values by column", head, rows)
    return section("missing", "What was missing", paragraph(sentence), listing)


def count_cell(count: int, rows: int | None) -> str:
    return table_cell(f"{count:,}{f' ({percent(count / rows)})' if rows and count else ''}", count)


def allowance_sentence(model: Any) -> str:
    """Say whether the intervals allow for missing values."""
    if not hasattr(model, "missing_information_"):
        return "The intervals treat what was filled in as if it had been observed, so they are a little too narrow."
    largest = model.missing_information_.reshape(-1, len(model._names())).max(0)  # the largest over classes
    shares = dict(zip(model._names(), largest.tolist(), strict=True))
    name = max(shares, key=lambda one: shares[one])
    return (
        f"All intervals allow for this. It matters most for {name}: missing values cause {percent(shares[name])} of "
        "the uncertainty (variance) of its coefficient."
    )
