"""`viper predict`: probabilities with intervals for new rows."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from viper.cli import options

if TYPE_CHECKING:
    import numpy as np
    import pandas

EXAMPLES = [
    "viper predict model.viper new.csv --out predictions.csv",
    "viper predict model.viper new.csv --interval 0.9 --keep patient_id | head",
    "viper predict model.viper new.parquet --out predictions.parquet",
]
ROWS = 50_000  # read, predicted and written at a time


def predict(
    model: options.Model,
    data: options.Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="CSV (also .gz) or Parquet; - is the screen.")] = Path("-"),
    interval: Annotated[float, typer.Option(help="Mass of the credible intervals.", min=0.001, max=0.999999)] = 0.95,
    keep: Annotated[list[str] | None, typer.Option(help="Column to copy into the output.", show_default=False)] = None,
    force: options.Force = False,
    as_json: options.Json = False,
    format: options.FormatOption = None,
    encoding: options.Encoding = "utf-8",
    separator: options.Separator = None,
    decimal: options.Decimal = ".",
    na: options.Na = None,
) -> None:
    """Predict new rows: probability, its standard deviation and interval, and the more probable class.

    The rows need the columns of the fit; others are ignored. Rows with missing values follow the rule of the fit.
    """
    from viper.data.table_file import check_input
    from viper.data.writing import check_output, frame_writer

    to_screen = str(out) == "-"
    if to_screen and as_json:
        raise typer.BadParameter("--json tells what was written, so --out must be a file; got -")
    check_input(model)
    if not to_screen:
        check_output(out, force)
    table = options.table(data, format, encoding, separator, decimal, na)
    table.kind()

    import viper

    fitted = viper.load(model)
    job = Job(fitted, table, interval, keep or [])
    with table.located():
        if to_screen:
            for part in job:
                part.to_csv(sys.stdout, index=False, header=job.first_part, lineterminator="\n")
                sys.stdout.flush()
        else:
            with frame_writer(out, force) as write:
                for part in job:
                    write(part)
    report(job, out, to_screen, as_json)


class Job:
    """Parts of the table with their predictions, one after the other, and counts of what happened."""

    def __init__(self, model: Any, table: Any, level: float, keep: list[str]) -> None:
        self.model, self.table, self.level, self.keep = model, table, level, keep
        self.rows = self.empty = 0
        self.ignored: list[str] = []
        self.first_part = True

    def __iter__(self) -> Any:
        from viper.cli.preparing import check_option

        encoding = getattr(self.model, "formula_", None)
        text = (
            () if encoding is None else tuple(n for n, levels in encoding.levels.items() if isinstance(levels[0], str))
        )
        names = inputs(self.model)
        text += tuple(name for name in self.keep if name not in names)  # kept as they are written
        for part in self.table.chunks(ROWS, text):
            frame = with_features(part, names) if self.table.kind().word == "libsvm" else part
            if self.first_part:
                self.ignored = [name for name in frame.columns if name not in {*names, *self.keep, target(self.model)}]
            check_columns(frame, names)
            for name in self.keep:
                check_option(frame, name, "--keep")
            frame.index = range(self.rows, self.rows + len(frame))  # rows of the file, for whoever complains of one
            result = predictions(self.model, frame, self.level)
            self.rows += len(frame)
            self.empty += int(result["probability"].isna().sum())
            for name in reversed(self.keep):
                result.insert(0, name, frame[name])
            yield result
            self.first_part = False


def inputs(model: Any) -> list[str]:
    """The raw columns that a model reads."""
    if hasattr(model, "formula_"):
        return list(model.formula_.inputs)
    if hasattr(model, "feature_names_in_"):
        return [str(name) for name in model.feature_names_in_]
    raise ValueError("the model must know its columns by name; got one fitted to an array. Fit it to a DataFrame.")


def target(model: Any) -> str | None:
    return model.formula_.target if hasattr(model, "formula_") else None


def with_features(frame: "pandas.DataFrame", names: list[str]) -> "pandas.DataFrame":
    """A LIBSVM file leaves out zeros, and so features that are zero in all its rows."""
    return frame.reindex(columns=list(dict.fromkeys([*frame.columns, *names])), fill_value=0.0)


def check_columns(frame: "pandas.DataFrame", names: list[str]) -> None:
    """Every column that is needed is there; if not, say which are not, and which have no use instead."""
    import difflib

    from viper.errors import listed

    absent = [name for name in names if name not in frame.columns]
    if not absent:
        return
    spare = {str(name).casefold(): str(name) for name in frame.columns if name not in names}
    near = [difflib.get_close_matches(name.casefold(), spare, 1, 0.7) for name in absent[:8]]
    shown = [f"{name!r} ({spare[m[0]]!r}?)" if m else repr(name) for name, m in zip(absent, near, strict=False)]
    others = f" It has {listed(spare.values())} instead." if spare else ""
    raise ValueError(
        f"the table must have the {len(names)} columns of the model; got no {', '.join(shown)}"
        f"{f' and {len(absent) - 8} more' if len(absent) > 8 else ''}.{others}"
    )


def predictions(model: Any, frame: "pandas.DataFrame", level: float) -> "pandas.DataFrame":
    """Probability, sd and interval of the second class, and the predicted class; empty where the rule is to drop."""
    import numpy as np
    import pandas
    from scipy.special import expit

    from viper import expected_sigmoid
    from viper.models.prediction import half_width

    complete = usable(model, frame)
    mean, sd = np.full((2, len(frame)), np.nan)
    if complete.any():
        mean[complete], sd[complete] = model.predict_latent(frame.loc[complete, inputs(model)])
    probability, spread = (np.full(len(frame), np.nan) for _ in range(2))
    probability[complete], spread[complete] = expected_sigmoid(mean[complete], sd[complete] ** 2)
    reach = half_width(level) * sd
    label = pandas.Series(model.classes_[(mean > 0).astype(int)], index=frame.index, dtype=object)
    columns = {"probability": probability, "sd": spread, "lower": expit(mean - reach), "upper": expit(mean + reach)}
    return pandas.DataFrame({**columns, "label": label.where(complete)}, index=frame.index)


def usable(model: Any, frame: "pandas.DataFrame") -> "np.ndarray":
    import numpy as np

    if hasattr(model, "formula_") and model.formula_.missing == "drop":
        return model.formula_.complete(frame)
    return np.ones(len(frame), dtype=bool)


def report(job: Job, out: Path, to_screen: bool, as_json: bool) -> None:
    """What was written, and what a person should know about it."""
    from viper.cli.terminal import emit, note
    from viper.errors import listed

    empty = f"rows with missing values, without a probability as --missing drop said in the fit: {job.empty:,}."
    notes = [empty] if job.empty else []
    if job.ignored:
        notes.append(f"columns ignored: {listed(job.ignored)}.")
    for text in notes:
        note(text)
    if as_json:
        emit({"rows": job.rows, "without_probability": job.empty, "ignored": job.ignored, "saved": str(out)})
    elif not to_screen:
        positive = job.model.classes_[1]
        note(f"{job.rows:,} rows written to {out}; probability is that of {target(job.model) or 'class'} = {positive}.")
