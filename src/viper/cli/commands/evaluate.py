"""`viper evaluate`: how good a model's probabilities, and decisions based on them, are on rows with known classes."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.text import Text

from viper.cli import options
from viper.cli.terminal import (
    note,
    note_if_slow,
    plus_minus,
    print_json,
    print_table,
    say,
    share_text,
    significant_number,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas

    from viper.data.table_file import TableFile
    from viper.models.prediction import TablePredictions

BAR_WIDTH = 20  # characters of the longest bar
DECIDING = {"rich_help_panel": "Decisions (act on rows whose probability reaches the threshold)"}
RATES = {  # rate -> its name and what it is a share of; {0} and {1} are the two classes
    "sensitivity": ("sensitivity, recall", "of those with {1}, acted on"),
    "specificity": ("specificity", "of those with {0}, left alone"),
    "ppv": ("PPV, precision", "of those acted on, with {1}"),
    "npv": ("NPV", "of those left alone, with {0}"),
    "acted": ("acted on", "of all rows"),
}
MOST_CHECKED_COLUMNS = 12  # columns whose residuals are listed


class JudgedRows(NamedTuple):
    """Rows with a class and a prediction."""

    label: "np.ndarray"
    predicted: "pandas.DataFrame"
    frame: "pandas.DataFrame"
    classes: list[str]  # "died = no", "died = yes"

    @property
    def probability(self) -> "np.ndarray":
        return self.predicted["probability"].to_numpy(dtype=float)


def evaluate_model(
    model: options.ModelPath,
    data: options.TablePath,
    target: options.KnownTarget = None,
    bins: Annotated[int, typer.Option(help="Number of bins in the calibration table.", min=1)] = 10,
    by: Annotated[
        list[str] | None,
        options.optional("Column that groups the rows, to score each group. Repeat for more columns."),
    ] = None,
    weights: Annotated[
        str | None,
        options.optional("Column with the weights of the rows: a weight of 3 counts a row three times in the scores."),
    ] = None,
    checks: Annotated[
        bool,
        typer.Option("--checks", help="Also check residuals by column, and compare with simulated outcomes."),
    ] = False,
    cost_fp: Annotated[
        float | None, options.optional("Cost of acting on a row of the first class. (default: 1)", min=0, **DECIDING)
    ] = None,
    cost_fn: Annotated[
        float | None,
        options.optional("Cost of not acting on a row of the second class. (default: 1)", min=0, **DECIDING),
    ] = None,
    budget: Annotated[
        str | None,
        options.optional("Most rows to act on: a number, such as 200, or a share, such as 5%.", **DECIDING),
    ] = None,
    threshold: Annotated[
        float | None, options.optional("Smallest probability at which to act.", min=0, max=1, **DECIDING)
    ] = None,
    level: options.Level = 0.95,
    as_json: options.Json = False,
    *,
    reading: options.Reading,
) -> None:
    """Score a model on rows whose classes are known: skill, calibration, decisions at a threshold, subgroups.

    Examples
    --------
    viper evaluate model.viper test.csv
    viper evaluate model.viper test.csv --cost-fp 1 --cost-fn 10
    viper evaluate model.viper test.csv --budget 5% --by sex --by age
    viper evaluate model.viper test.csv --target died --bins 20 --json
    """
    deciding = {"threshold": threshold, "cost_fp": cost_fp, "cost_fn": cost_fn, "budget": read_budget(budget)}
    if threshold is not None and (cost_fp is not None or cost_fn is not None or budget is not None):
        raise typer.BadParameter("--threshold cannot be combined with costs or a budget, which choose one; got both")
    fitted, table = options.open_model_and_rows(model, data, reading)
    from viper.cli.classes import model_of_label, table_of_labels
    from viper.cli.preparing import check_option_column, labelled_rows

    fitted = model_of_label(fitted, target)
    decides = any(value is not None for value in deciding.values())
    check_for_two_classes(fitted, weights, bool(by or checks or decides))
    if getattr(fitted, "multilabel_", False):
        scored = score_rows(fitted, table, table_of_labels(fitted, table), weights, level, "label")
        show_labels(fitted, scored, bins, level, as_json)
        return
    rows = labelled_rows(fitted, table, target)
    for name in by or ():
        check_option_column(rows.frame, name, "--by")
    scored = score_rows(fitted, table, rows, weights, level, "class")
    note_if_fitted(fitted, table, scored)
    if len(fitted.classes_) > 2:
        show_classes(fitted, scored, bins, level, as_json)
        return
    judged = judged_rows(fitted, scored)
    document = score_document(judged, scored.weight, bins, level)
    if decides:
        document["decision"] = decision_document(judged, level, **deciding)
    if by:
        document["groups"] = {name: group_document(judged, name, level) for name in by}
    if checks:
        with note_if_slow("Drawing outcomes from the posterior", as_json):
            document["checks"] = check_document(fitted, judged, level)
    show_with_drift(fitted, scored, document, lambda: print_evaluation(document, judged.classes), as_json)


def note_if_fitted(fitted: Any, table: "TableFile", scored: "ScoredRows") -> None:
    """Note that the model was fitted to these very rows, if so: its scores are then too optimistic.

    With effects of groups, which are shrunk, probabilities also look too cautious.
    """
    from viper.cli.model_card import is_file_of_fit
    from viper.cli.preparing import input_columns
    from viper.report.study import was_fitted_to

    rows, used = scored.rows, scored.used
    frame = rows.frame[used] if hasattr(fitted, "formula_") else rows.frame.loc[used, input_columns(fitted)]
    if not (is_file_of_fit(fitted, table) or was_fitted_to(fitted, frame, fitted.classes_[rows.number[used]])):
        return
    if hasattr(fitted, "factors_"):
        note(
            "the model was fitted to these rows, and learned the effects of groups from them. Because the effects are "
            "shrunk, probabilities look too cautious here. Evaluate other rows, or see viper report, which predicts "
            "each row from all others."
        )
    else:
        note(
            "the model was fitted to these rows, so the scores are too optimistic. Evaluate rows that it has not seen; "
            "the scores that viper fit prints are for such rows."
        )


# --- what is read ---


def read_budget(text: str | None) -> float | None:
    """Read '200', a number of rows, or '5%' or '0.05', a share of them."""
    if text is None:
        return None
    try:
        value = float(text.rstrip("% ")) / (100 if text.rstrip().endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not (0 < value < 1 or (value >= 1 and value == int(value) and not text.rstrip().endswith("%"))):
        raise typer.BadParameter(f"--budget must be a number of rows, or a share such as 5%; got {text!r}")
    return value


class ScoredRows(NamedTuple):
    """The rows of a table, what is predicted for each, and which have both a class and a prediction."""

    rows: Any  # LabelledRows or LabelTable
    found: "TablePredictions"
    used: "np.ndarray"
    weight: "np.ndarray | None"  # of the rows that are used

    @property
    def predicted(self) -> "pandas.DataFrame":
        return self.found.table[self.used]


def check_for_two_classes(fitted: Any, weights: str | None, two_classes_only: bool) -> None:
    """Raise if --by, --checks or a decision is combined with --weights, or the model does not have two classes."""
    labels = getattr(fitted, "multilabel_", False)
    if two_classes_only and (len(fitted.classes_) > 2 or labels):
        raise typer.BadParameter(
            f"decisions, --by and --checks are for two classes; got a model with {len(fitted.classes_)}"
            + (" labels. Name one of them by --target" if labels else " classes. Leave them out")
        )
    if two_classes_only and weights is not None:
        raise typer.BadParameter(
            "--weights counts rows in scores and calibration; decisions, --by and --checks count each row once. "
            "Leave one of them out"
        )


def score_rows(fitted: Any, table: "TableFile", rows: Any, weights: str | None, level: float, what: str) -> ScoredRows:
    """Predict the rows, and note how many are left out for want of a class (or `what` they need) or a prediction."""
    from viper.cli.classes import without_prediction
    from viper.cli.preparing import check_option_column, read_weight_column
    from viper.cli.remarks import note_counts, table_predictions

    if weights is not None:
        check_option_column(rows.frame, weights, "--weights")
    with table.located():
        found = table_predictions(fitted, rows.frame, level)
    empty = without_prediction(fitted, found.table)
    note_counts(found.counts(), int(empty.sum()), len(empty))
    used = rows.known & ~empty
    if not used.any():
        needed = "all labels" if what == "label" else f"a {what}"
        raise ValueError(f"some rows must have {needed} and a prediction; got none.")
    if not used.all():
        note(f"{int((~used).sum()):,} rows without a {what} or a prediction are left out.")
    weight = None if weights is None else read_weight_column(rows.frame[weights], table)[used]
    return ScoredRows(rows, found, used, weight)


def judged_rows(fitted: Any, scored: ScoredRows) -> JudgedRows:
    from viper.cli.remarks import kept_rows

    rows, used = scored.rows, scored.used
    classes = [f"{rows.target} = {value}" for value in fitted.classes_]
    return JudgedRows(rows.number[used] == 1, scored.predicted, kept_rows(fitted, rows.frame, used), classes)


# --- output for a model of more than two classes, or of several labels ---


def show_labels(fitted: Any, scored: ScoredRows, bins: int, level: float, as_json: bool) -> None:
    """Show the scores over all labels and for each."""
    from viper.cli.classes import label_document, print_label_evaluation

    names, label = [str(name) for name in fitted.classes_], scored.rows.label[scored.used]
    document = label_document(label, scored.predicted, names, bins, level, scored.weight)
    if as_json:
        print_json({**document, "remarks": scored.found.counts()})
    else:
        print_label_evaluation(document)


def show_classes(fitted: Any, scored: ScoredRows, bins: int, level: float, as_json: bool) -> None:
    from viper.cli.classes import class_document, print_class_evaluation

    number = scored.rows.number[scored.used]
    document = class_document(number, scored.predicted, fitted.classes_, bins, level, scored.weight)
    show = lambda: print_class_evaluation(document, scored.rows.target)  # noqa: E731
    show_with_drift(fitted, scored, document, show, as_json)


def show_with_drift(
    fitted: Any, scored: ScoredRows, document: dict[str, Any], show: Callable[[], None], as_json: bool
) -> None:
    """Print the document, and how the rows differ from those of the fit."""
    from viper.cli.remarks import drift_of, print_drift

    drifts = drift_of(fitted, scored.rows.frame)
    if as_json:
        print_json({**document, "remarks": scored.found.counts(), "drift": [one._asdict() for one in drifts]})
    else:
        show()
        print_drift(drifts)


# --- what is computed ---


def score_document(judged: JudgedRows, weight: "np.ndarray | None", bins: int, level: float) -> dict[str, Any]:
    """Return the scores, the calibration table, and a verdict on it."""
    from viper.report.metrics import calibration, judge_calibration, scores

    label, probability = judged.label, judged.probability
    return {
        **scores(label, probability, judged.predicted[["lower", "upper"]], bins, weight)._asdict(),
        "level": level,
        "calibration": calibration(label, probability, bins, level, weight).to_dict("records"),
        "calibration_verdict": with_sentence(judge_calibration(label, probability, bins, sample_weight=weight)),
    }


def with_sentence(verdict: Any) -> dict[str, Any]:
    return {**verdict._asdict(), "sentence": verdict.sentence}


def group_document(judged: JudgedRows, name: str, level: float) -> dict[str, Any]:
    """Return the scores of each group, and one verdict on all groups."""
    from viper.report.metrics import by_group, judge_calibration
    from viper.report.shares import named_groups

    column = judged.frame[name]
    table = by_group(judged.label, judged.probability, column, level)
    verdict = judge_calibration(judged.label, judged.probability, groups=named_groups(column).place)
    return {
        "groups": table.reset_index(names="group").to_dict("records"),
        "calibration_verdict": with_sentence(verdict),
    }


def decision_document(
    judged: JudgedRows,
    level: float,
    threshold: float | None,
    cost_fp: float | None,
    cost_fn: float | None,
    budget: float | None,
) -> dict[str, Any]:
    """Return the threshold and its reason, the counts, the rates with intervals, and the cost of the decisions."""
    from viper.report.decisions import budget_rows, budget_threshold, confusion, cost_threshold

    label, probability = judged.label, judged.probability
    has_costs = cost_fp is not None or cost_fn is not None
    fp, fn = 1.0 if cost_fp is None else cost_fp, 1.0 if cost_fn is None else cost_fn
    reasons = []
    if threshold is None:
        threshold = 0.0
        if has_costs:
            threshold = cost_threshold(fp, fn)
            reasons.append(f"a false alarm costs {fp:g}, a miss costs {fn:g}")
        if budget is not None:
            threshold = max(threshold, budget_threshold(probability, budget))
            reasons.append(f"at most {budget_rows(budget, len(label)):,} of {len(label):,} rows are acted on")
    else:
        reasons.append("as given")
    found = confusion(label, probability, threshold)
    inside = (judged.predicted["lower"] < threshold) & (threshold <= judged.predicted["upper"])
    document = {
        "threshold": threshold,
        "because": "; ".join(reasons),
        "true_positive": found.true_positive,
        "false_positive": found.false_positive,
        "false_negative": found.false_negative,
        "true_negative": found.true_negative,
        "rates": found.rates(level).to_dict("index"),
        "within_interval": int(inside.sum()),
    }
    if has_costs:
        positive = int(label.sum())
        document |= {
            "cost": found.cost(fp, fn),
            "cost_of_acting_on_none": fn * positive,
            "cost_of_acting_on_all": fp * (len(label) - positive),
        }
    return document


def check_document(fitted: Any, judged: JudgedRows, level: float) -> dict[str, Any]:
    """Return a comparison with simulated outcomes, and the residuals by column, the worst column first."""
    from viper.cli.preparing import input_columns
    from viper.report.checks import binned_residuals, predictive_check
    from viper.report.metrics import judge_calibration
    from viper.report.shares import named_groups

    inputs = input_columns(fitted)
    drawn = predictive_check(fitted, judged.frame[inputs], fitted.classes_[judged.label.astype(int)], level=level)
    residuals = []
    for name in inputs:
        verdict = judge_calibration(judged.label, judged.probability, groups=named_groups(judged.frame[name], 10).place)
        residuals.append({"column": name, **with_sentence(verdict)})
    residuals.sort(key=lambda row: -row["loss"])
    overall = binned_residuals(judged.label, judged.probability, level=level)
    return {
        "predictive": drawn.reset_index().to_dict("records"),
        "residuals": overall.to_dict("records"),
        "columns": residuals,
    }


# --- what is printed ---


def print_evaluation(document: dict[str, Any], classes: list[str]) -> None:
    rows = "1 row" if document["rows"] == 1 else f"{document['rows']:,} rows"
    say(f"[bold]{rows}[/], probability that [bold cyan]{escape(classes[1])}[/]")
    print_score_table(document)
    print_calibration(document)
    if "decision" in document:
        print_decision(document["decision"], classes, document["level"])
    for name, found in document.get("groups", {}).items():
        print_groups(name, found, document["level"])
    if "checks" in document:
        print_checks(document["checks"], classes, document["level"])
    if "decision" not in document:
        say("[dim]For decisions, pass --cost-fp and --cost-fn, --budget or --threshold; for subgroups, --by COLUMN.[/]")


def print_score_table(document: dict[str, Any]) -> None:
    """Print each score, the score of predicting the base rate for every row, and the share of its loss avoided."""
    base = document["base_rate"]
    both = 0 < base < 1
    skill = lambda name: "–" if document[name] is None else f"{100 * document[name]:.1f} %"  # noqa: E731
    known_log = document["log_score"] / (1 - document["log_skill"]) if both and document["log_skill"] != 1 else None
    rows: list[tuple[str, Any, Any, str, int]] = [
        ("AUC: ranking of pairs", document["auc"], 0.5 if both else None, "", 3),
        ("average precision", document["average_precision"], base if both else None, "", 3),
        ("log score", document["log_score"], known_log, skill("log_skill"), 4),
        ("Brier score", document["brier"], base * (1 - base), skill("brier_skill"), 4),
        ("accuracy", document["accuracy"], document["base_accuracy"], "", 3),
        ("calibration error", document["calibration_error"], None, "", 3),
        ("mean interval width", document["interval_width"], None, "", 3),
    ]
    number = lambda value, digits: "" if value is None else significant_number(value, digits)  # noqa: E731
    cells = [
        [title, significant_number(value, digits), number(known, digits), gained]
        for title, value, known, gained, digits in rows
    ]
    print_table(["score", "", "base rate only", "skill"], cells)
    say(f"  [dim]base rate only: {share_text(base)} predicted for every row; skill: the share of its loss avoided[/]\n")


def print_calibration(document: dict[str, Any]) -> None:
    table, verdict, level = document["calibration"], document["calibration_verdict"], document["level"]
    say("[bold]Calibration[/]: predicted probability against observed frequency")
    longest = max(max(row["observed"], row["predicted"]) for row in table) or 1.0
    rows: list[list[str | Text]] = []
    for row in table:
        bar = Text("█" * round(BAR_WIDTH * row["observed"] / longest) or "▏", style="cyan", justify="left")
        ends = f"{share_text(row['lower'])} … {share_text(row['upper'])}"
        rows.append([share_text(row["predicted"]), share_text(row["observed"]), ends, f"{row['rows']:,}", bar])
    print_table(["predicted", "observed", f"{100 * level:g} %", "rows", ""], rows, left=0)
    mark = {"good": "[green]✓[/]", "unclear": "[dim]?[/]"}.get(verdict["verdict"], "[yellow]![/]")
    say(f"  {mark} {escape(verdict['sentence'])}")
    say(f"    [dim]miscalibration costs {share_range(verdict)} of the log score of the base rate[/]")
    if verdict["slope"] is not None and verdict["shift"] is not None:
        slope = f"slope of the log-odds {plus_minus(verdict['slope'], verdict['slope_error'])} (1 is right)"
        say(f"    [dim]{slope}, shift {plus_minus(verdict['shift'], verdict['shift_error'])} (0 is right)[/]")
    say()


def share_range(verdict: dict[str, Any]) -> str:
    if verdict["lower"] > 1:
        return "over 100 %"
    upper = f"{100 * verdict['upper']:.2g}" if verdict["upper"] <= 1 else "over 100"
    return f"{100 * verdict['lower']:.2g} to {upper} %"


def print_decision(found: dict[str, Any], classes: list[str], level: float) -> None:
    say(f"[bold]Decision[/]: act where the probability is at least [bold]{share_text(found['threshold'])}[/]")
    say(f"  [dim]{escape(found['because'])}[/]")
    tp, fp, fn, tn = (found[name] for name in ("true_positive", "false_positive", "false_negative", "true_negative"))
    counts = [
        ["acted on", f"{tp:,}", f"{fp:,}", f"{tp + fp:,}"],
        ["left alone", f"{fn:,}", f"{tn:,}", f"{fn + tn:,}"],
        ["all", f"{tp + fn:,}", f"{fp + tn:,}", f"{tp + fp + fn + tn:,}"],
    ]
    print_table(["", classes[1], classes[0], "all"], counts)
    rows: list[list[str | Text]] = []
    for name, (title, what) in RATES.items():
        rate = found["rates"][name]
        value = "–" if not rate["rows"] else share_text(rate["value"])
        of = f"{rate['count']:,} of {rate['rows']:,}"
        ends = f"{share_text(rate['lower'])} … {share_text(rate['upper'])}"
        rows.append([title, value, ends, of, Text(what.format(*classes), style="dim")])
    print_table(["rate", "", f"{100 * level:g} %", "rows", ""], rows, spare=(4,))
    if "cost" in found:
        total = tp + fp + fn + tn
        others = {"none": found["cost_of_acting_on_none"], "all": found["cost_of_acting_on_all"]}
        against = " and ".join(
            f"{significant_number(cost / total)} for acting on {who}" for who, cost in others.items()
        )
        say(f"  Cost per row [bold]{significant_number(found['cost'] / total)}[/], against {against}.")
    near = found["within_interval"]
    which = {0: "No row has", 1: "One row has"}.get(near, f"{near:,} rows have")
    say(f"  [dim]{which} a probability whose interval contains the threshold: there, the decision is uncertain.[/]")
    say("  [dim]The intervals of rates allow for the number of rows. Use rows that the model was not fitted to.[/]\n")


def print_groups(name: str, found: dict[str, Any], level: float) -> None:
    say(f"[bold]By {escape(name)}[/]")
    rows: list[list[str | Text]] = []
    for row in found["groups"]:
        flags = ["few rows"] * row["few"] + ["differs"] * row["differs"]
        area = (
            ["–", ""]
            if row["auc"] != row["auc"]
            else [f"{row['auc']:.3f}", f"{row['auc_lower']:.2f} … {row['auc_upper']:.2f}"]
        )
        rows.append(
            [
                row["group"],
                f"{row['rows']:,}",
                share_text(row["predicted"]),
                share_text(row["observed"]),
                f"{share_text(row['observed_lower'])} … {share_text(row['observed_upper'])}",
                *(area if math.isfinite(row["auc"]) else ("–", "")),
                significant_number(row["brier"]),
                Text(", ".join(flags), style="yellow"),
            ]
        )
    percent = f"{100 * level:g} %"
    titles = ["group", "rows", "predicted", "observed", percent, "AUC", percent, "Brier", ""]
    print_table(titles, rows, spare=(7, 6))
    sentence = found["calibration_verdict"]["sentence"]
    say(f"  Across these groups: {escape(sentence[0].lower() + sentence[1:])}")
    say("  [dim]differs: further off than chance would put any group; few rows: fewer than 10 of one class[/]\n")


def print_checks(found: dict[str, Any], classes: list[str], level: float) -> None:
    say("[bold]Outcomes drawn from the posterior[/]: would the model have produced these?")
    rows: list[list[str | Text]] = []
    for row in found["predictive"]:
        count = row["statistic"] == "positives"
        title = f"rows with {classes[1]}" if count else row["statistic"]
        values = [row[name] for name in ("observed", "expected", "lower", "upper")]
        shown = [f"{value:,.0f}" if count else significant_number(value, 4) for value in values]
        flag = Text("unusual" if row["unusual"] else "", style="yellow")
        rows.append([title, shown[0], shown[1], f"{shown[2]} … {shown[3]}", flag])
    print_table(["statistic", "observed", "expected", f"{100 * level:g} %", ""], rows)
    outside, groups = sum(row["outside"] for row in found["residuals"]), len(found["residuals"])
    say(
        f"[bold]Residuals[/]: {outside} of {groups} groups of similar probability are outside their bands "
        f"({(1 - level) * groups:.1f} expected by chance)"
    )
    columns = found["columns"]
    cells = [[row["column"], row["verdict"], share_range(row)] for row in columns[:MOST_CHECKED_COLUMNS]]
    print_table(["residuals by", "verdict", "log score lost"], cells, left=2)
    if len(columns) > MOST_CHECKED_COLUMNS:
        say(f"  [dim]{len(columns) - MOST_CHECKED_COLUMNS} more columns, with smaller residuals.[/]")
