"""Output for models of more than two classes or of several labels: scores, confusion matrix, calibration."""

from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from rich.markup import escape

from viper.cli.terminal import print_table, say, share_text, significant_number

if TYPE_CHECKING:
    import numpy as np
    import pandas

    from viper.data.table_file import TableFile

PROBABILITY = "probability"  # the column for two classes; for more, the name of a class is appended


def probability_columns(model: Any) -> list[str]:
    """Return the names of the probability columns in a table of predictions."""
    if len(model.classes_) == 2 and not getattr(model, "multilabel_", False):
        return [PROBABILITY]
    return [f"{PROBABILITY}_{name}" for name in model.classes_]


def without_prediction(model: Any, table: "pandas.DataFrame") -> "np.ndarray":
    """Return which rows of a table of predictions are without one."""
    return table[probability_columns(model)[0]].isna().to_numpy()


def what_is_predicted(model: Any, target: str | None) -> str:
    """Return 'died = yes', or for more classes 'each class of species: setosa, versicolor, virginica'."""
    from viper.errors import listed

    if getattr(model, "multilabel_", False):
        return f"each label: {listed(map(str, model.classes_))}"
    if len(model.classes_) > 2:
        return f"each class of {target or 'the target'}: {listed(map(str, model.classes_))}"
    return f"{target or 'class'} = {model.classes_[1]}"


def check_ordered_options(ordered: bool, only: dict[str, Any], never: dict[str, Any]) -> None:
    """Raise for an option that needs --ordered, or that cannot be combined with it."""
    if not ordered and (given := [name for name, value in only.items() if value is not None]):
        raise typer.BadParameter(f"{given[0]} needs --ordered; got it alone. Add --ordered")
    if ordered and (given := [name for name, value in never.items() if value is not None]):
        raise typer.BadParameter(f"--ordered cannot be combined with {given[0]}; got both. Leave one of them out")


def ordered_categories(column: "pandas.Series[Any]", y: "np.ndarray", levels: str | None) -> list[Any]:
    """Return the target's levels in order: as in --levels, as in the file's categories, or as numbers."""
    import pandas

    from viper.errors import instead, listed

    there = pandas.unique(y).tolist()
    if len(there) < 3:
        raise ValueError(
            f"--ordered needs three levels or more; got {len(there)}: {listed(map(str, there))}. Leave it out: with "
            "two levels, it is the same model as logistic regression."
        )
    if levels is not None:
        named, by_text = [name.strip() for name in levels.split(",")], {str(label): label for label in there}
        for name in named:
            if name not in by_text:
                raise ValueError(f"--levels must name levels of the target; got {name!r}. {instead(name, by_text)}")
        if len({*named}) < len(named) or len(named) < len(there):
            left = [text for text in by_text if text not in named]
            got = f"a list without {listed(left)}" if left else f"{max(named, key=named.count)!r} twice"
            raise ValueError(f"--levels must name every level of the target exactly once; got {got}.")
        return [by_text[name] for name in named]
    if isinstance(column.dtype, pandas.CategoricalDtype) and column.dtype.ordered:
        return [label for label in column.dtype.categories.tolist() if label in {*there}]
    if any(isinstance(label, str) for label in there):
        first = ",".join(sorted(map(str, there))[:3])
        raise ValueError(
            f"the levels of an ordered target must have an order; got words: {listed(sorted(map(str, there)))}. Name "
            f"them from the lowest to the highest, such as --levels {first}."
        )
    return sorted(there)


def class_document(
    label: "np.ndarray", predicted: "pandas.DataFrame", classes: Any, bins: int, level: float, weight: Any
) -> dict[str, Any]:
    """Return the scores over all classes and for each, the confusion matrix, and the calibration of each class."""
    import numpy as np

    from viper.report.metrics import by_class, calibration, class_scores, confusion_table, judge_calibration

    names = [str(name) for name in classes]
    p = predicted[[f"{PROBABILITY}_{name}" for name in classes]].to_numpy(dtype=float)
    columns = [[f"{end}_{name}" for name in classes] for end in ("lower", "upper")]
    ends = np.stack([predicted[some].to_numpy(dtype=float) for some in columns], -1)
    each = by_class(label, p, names, bins, weight).replace({np.nan: None}).to_dict("index")
    for k, name in enumerate(names):
        verdict = judge_calibration(label == k, p[:, k], bins, sample_weight=weight)
        each[name]["calibration"] = calibration(label == k, p[:, k], bins, level, weight).to_dict("records")
        each[name]["calibration_verdict"] = {**verdict._asdict(), "sentence": verdict.sentence}
    confusion = confusion_table(label, p, names)
    return {
        **class_scores(label, p, ends, bins, weight)._asdict(),
        "level": level,
        "classes": each,
        "confusion": {name: row.to_dict() for name, row in confusion.iterrows()},
    }


# --- several labels ---


def model_of_label(model: Any, target: str | None) -> Any:
    """Return the model of one label if there are several and the target names one, otherwise the model itself."""
    from viper.errors import instead, listed

    if not getattr(model, "multilabel_", False) or target is None:
        return model
    names = [str(name) for name in model.classes_]
    if target not in names:
        raise ValueError(
            f"--target must be one of the labels, {listed(names)}; got {target!r}. {instead(target, names)}"
        )
    return model.estimators_[names.index(target)]


class LabelTable(NamedTuple):
    """Rows and their labels, with a column of zeros and ones for each label."""

    frame: "pandas.DataFrame"
    label: "np.ndarray"
    known: "np.ndarray"  # whether a row has all of its labels


def table_of_labels(model: Any, table: "TableFile") -> LabelTable:
    """Read the rows of a table, and check that it has the model's columns and labels."""
    import numpy as np

    from viper.cli.preparing import check_model_columns, check_option_column, input_columns, text_inputs

    frame = table.read(text_inputs(model))
    check_model_columns(frame, input_columns(model))
    columns = []
    for name in map(str, model.classes_):
        check_option_column(frame, name, "the labels")
        column = frame[name]
        wrong = (column.notna() & ~column.isin([0, 1, True, False])).to_numpy()
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(
                f"column {name!r} must be 1 for rows with that label and 0 for the others; got "
                f"{str(column.iloc[row])!r} in {table.place(row)}. Recode it."
            )
        columns.append(column.astype(float).to_numpy())
    label = np.column_stack(columns)
    known = ~np.isnan(label).any(1)
    return LabelTable(frame, np.where(known[:, None], label, 0.0).astype(int), known)


def label_document(
    label: "np.ndarray", predicted: "pandas.DataFrame", names: list[str], bins: int, level: float, weight: Any
) -> dict[str, Any]:
    """Return the scores over all labels and for each, and the calibration of each label."""
    import numpy as np

    from viper.report.metrics import calibration, each_label, judge_calibration, label_scores

    p, lower, upper = (
        predicted[[f"{part}_{name}" for name in names]].to_numpy(dtype=float)
        for part in (PROBABILITY, "lower", "upper")
    )
    each = each_label(label, p, names, bins, weight).replace({np.nan: None}).to_dict("index")
    for j, name in enumerate(names):
        own = label[:, j] == 1
        verdict = judge_calibration(own, p[:, j], bins, sample_weight=weight)
        each[name]["calibration"] = calibration(own, p[:, j], bins, level, weight).to_dict("records")
        each[name]["calibration_verdict"] = {**verdict._asdict(), "sentence": verdict.sentence}
    together = label_scores(label, p, np.stack([lower, upper], -1), bins, weight)
    return {**together._asdict(), "level": level, "labels": each}


def print_label_evaluation(document: dict[str, Any]) -> None:
    rows = "1 row" if document["rows"] == 1 else f"{document['rows']:,} rows"
    say(f"[bold]{rows}[/], probabilities of [bold cyan]{len(document['labels'])} labels[/]")
    number = lambda value: "–" if value is None else significant_number(value, 3)  # noqa: E731
    titles = {
        "exact": "rows with all labels right",
        "hamming_loss": "share of wrong labels (Hamming loss)",
        "f1_macro": "F1, mean over labels",
        "f1_micro": "F1, all labels pooled",
        "ranking_precision": "ranking precision",
        "log_score": "log score, mean over labels",
        "auc": "AUC, mean over labels",
        "interval_width": "mean interval width",
    }
    print_table(["score", ""], [[title, number(document[name])] for name, title in titles.items()])
    say("[bold]Each label[/]")
    parts = ("auc", "average_precision", "log_score", "calibration_error")
    share = lambda value: "–" if value is None else share_text(value)  # noqa: E731
    lines = [
        [
            name,
            *(share(row[part]) for part in ("base_rate", "recall", "precision")),
            number(row["f1"]),
            *(number(row[part]) for part in parts),
        ]
        for name, row in document["labels"].items()
    ]
    heads = [
        "label",
        "share",
        "recall",
        "precision",
        "F1",
        "AUC",
        "average precision",
        "log score",
        "calibration error",
    ]
    print_table(heads, lines, left=1)
    print_verdicts(document["labels"])
    say("[dim]For one label in detail, with decisions and subgroups, pass --target LABEL.[/]")


# --- more than two classes ---


def print_verdicts(each: dict[str, Any]) -> None:
    """Print the verdict on the calibration of each class or label."""
    for name, row in each.items():
        verdict = row["calibration_verdict"]
        mark = {"good": "[green]✓[/]", "unclear": "[dim]?[/]"}.get(verdict["verdict"], "[yellow]![/]")
        say(f"  {mark} {escape(name)}: {escape(verdict['sentence'])}")
    say()


def print_class_evaluation(document: dict[str, Any], target: str) -> None:
    rows = "1 row" if document["rows"] == 1 else f"{document['rows']:,} rows"
    say(f"[bold]{rows}[/], probabilities of [bold cyan]{escape(target)}[/], {len(document['classes'])} classes")
    skill = lambda name: "–" if document[name] is None else f"{100 * document[name]:.1f} %"  # noqa: E731
    number = lambda value, digits: "–" if value is None else significant_number(value, digits)  # noqa: E731
    print_table(
        ["score", "", "shares only", "skill"],
        [
            ["log score", number(document["log_score"], 4), "", skill("log_skill")],
            ["Brier score, all classes", number(document["brier"], 4), "", skill("brier_skill")],
            ["accuracy", number(document["accuracy"], 3), number(document["base_accuracy"], 3), ""],
            ["AUC, mean over classes", number(document["auc"], 3), "0.500", ""],
            ["calibration error", number(document["calibration_error"], 3), "", ""],
            ["mean interval width", number(document["interval_width"], 3), "", ""],
        ],
    )
    say("  [dim]shares only: the class shares predicted for every row; skill: the share of its loss avoided[/]\n")
    say("[bold]Confusion matrix[/]: rows by true class (down) and most probable class (across)")
    names = list(document["classes"])
    table = document["confusion"]
    print_table(["", *names], [[name, *(f"{table[name][other]:,}" for other in names)] for name in names], left=1)
    say("[bold]Each class[/] against all others")
    share = lambda value: "–" if value is None else share_text(value)  # noqa: E731
    lines = [
        [
            name,
            *(share(row[part]) for part in ("share", "predicted", "recall", "precision")),
            *(number(row[part], 3) for part in ("auc", "calibration_error")),
        ]
        for name, row in document["classes"].items()
    ]
    titles = ["class", "share", "mean probability", "recall", "precision", "AUC", "calibration error"]
    print_table(titles, lines, left=1)
    print_verdicts(document["classes"])
