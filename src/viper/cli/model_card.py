"""A fitted model as a JSON document, and that document as text: what `viper fit` and `viper summary` show."""

import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.text import Text

from viper.cli.terminal import fixed_number, interval_strip, print_table, say, short_number, significant_number
from viper.data.csv_text import decimal_of, separator_of
from viper.data.table_file import TableFile
from viper.formula.encoding import Encoding
from viper.formula.training import FEWEST_RECORDED, TrainingFile, file_digest
from viper.models.facts import WeightingFacts, model_card, model_facts, scales_by_name

LONGEST_FORMULA = 100  # characters; longer formulas are shown as a number of columns
MOST_SHOWN = 20  # coefficients or columns, without --all
MOST_ENTANGLED = 4  # columns in interactions or splines that are listed
MOST_MISSING_SHOWN = 8  # columns with missing values that are listed
SCORE_TITLES = {  # score -> title and decimals
    "auc": ("AUC", 3),
    "log_score": ("log score", 4),
    "brier": ("Brier", 4),
    "calibration_error": ("calibration error", 3),
    "accuracy": ("accuracy", 3),
    "interval_width": ("mean interval width", 3),
}
LEAST_GAP_SHOWN = 1e-9  # nats; below that, rounding differs between processors
RARE = 0.05  # share of a class below which scores are shown beside those of the base rate
MOST_LEVELS_SHOWN = 5
LONGEST_SPREAD = 64  # characters of a range or a list of levels
MODEL_NAMES = {
    "logistic": "Logistic regression",
    "mixed": "Logistic regression",
    "ordinal": "Ordinal regression",
    "gp": "Gaussian-process classification",
}
COLUMN_TITLES = {"mean_weight": "slope of the mean"}


def model_document(model: Any, level: float) -> dict[str, Any]:
    """Return everything that is known about a fitted model, ready for JSON."""
    facts, encoding = model_facts(model), getattr(model, "formula_", None)
    return {
        "model": facts.kind,
        "formula": facts.formula,
        "target": facts.target,
        "classes": facts.classes,
        "multilabel": bool(getattr(model, "multilabel_", False)),
        "standardised": bool(encoding is not None and any(scale != 1 for scale in encoding.scale)),
        "missing": None if encoding is None else encoding.missing,
        "missing_treatment": "" if encoding is None else encoding.missing_treatment,
        "levels": {} if encoding is None else encoding.levels,
        "bound": facts.bound if facts.terms is None else f"{facts.bound}, {facts.terms} terms",
        "covariance": facts.covariance,
        "gaussians": facts.components,
        "elbo": facts.elbo,
        "elbo_certified": facts.elbo_certified,
        "converged": facts.converged,
        "status": facts.status,
        "iterations": facts.iterations,
        "level": level,
        **(coefficient_document(model, facts, level) if facts.prior else process_document(model, facts)),
        **({} if encoding is None else {**training_document(encoding), **encoding.record}),
        "weighting": asdict(facts.weighting),
        "card": model_card(model),
    }


def training_document(encoding: Encoding) -> dict[str, Any]:
    """Return what is known about the training data; a model saved by version 0.1 has only its record."""
    training = encoding.training
    if training is None:
        return {}
    about = {"rows": training.rows, "rows_used": training.rows_used, "class_counts": training.class_counts}
    file = {"file": None} if training.file is None else {"file": training.file.name, "left_out": training.file.left_out}
    return {"data": {**file, **about, "missing": encoding.counts}}


def file_record(table: TableFile, left_out: dict[str, str]) -> TrainingFile:
    """Return what a model remembers of its training file."""
    kind, path = table.kind().word, table.source
    return TrainingFile(
        name=table.path.name,
        sha256=file_digest(path) if path.is_file() else None,
        size=path.stat().st_size,
        format=kind,
        separator=separator_of(table) if kind == "csv" else None,
        decimal=decimal_of(table) if kind == "csv" else table.decimal or ".",
        encoding=table.encoding,
        na=list(table.missing),
        left_out=left_out,
    )


def is_file_of_fit(model: Any, table: TableFile) -> bool:
    """Return whether the model was fitted to a file with the same bytes."""
    training = getattr(getattr(model, "formula_", None), "training", None)
    file = None if training is None else training.file
    return file is not None and table.source.is_file() and file.sha256 == file_digest(table.source)


def coefficient_document(model: Any, facts: Any, level: float) -> dict[str, Any]:
    units = model.formula_.units if hasattr(model, "formula_") else {}
    rows = []
    table = model.summary(level)
    if components := grouping_document(model, level):
        table = table.loc[[name for name in table.index if name not in components["components"]]]
    for key, row in table.to_dict("index").items():
        label, name = key if isinstance(key, tuple) else (None, key)
        named = {"name": name} if label is None else {"name": f"{label}: {name}", "class": label, "column": name}
        rows.append({**named, **row, "unit": units.get(name, "")})
    entangled = model.formula_.entangled if hasattr(model, "formula_") else []
    prior = {"prior": facts.prior.scale, "prior_scales": facts.prior.sds}
    return {**prior, "coefficients": rows, "entangled": entangled, **components}


def grouping_document(model: Any, level: float) -> dict[str, Any]:
    """Return variance components, and the number of groups of each group term, if there are any."""
    if not hasattr(model, "factors_"):
        return {}
    groups = {str(factor.term): len(factor.levels) for factor in model.factors_}
    return {"components": model.components(level).to_dict("index"), "groups": groups}


def process_document(model: Any, facts: Any) -> dict[str, Any]:
    table = model.summary()
    rows = [{"name": name, **row} for name, row in table.to_dict("index").items()]
    process = {"kernel": facts.process.kernel, "inducing": facts.process.inducing, "columns": rows}
    return process | {"output_scale": table.attrs.get("output_scale")}


def print_model(document: dict[str, Any], most: int | None, saved: Path | None = None) -> None:
    """Print the document, with at most `most` coefficients; `saved` is the file to see the others in."""
    say(model_headline(document))
    for line in fact_lines(document):
        say(f"  {line}")
    if document["model"] != "gp":
        print_coefficients(document, most, saved)
        if "components" in document:
            print_components(document)
    else:
        print_process_columns(document, most, saved)
    print_trust(document)
    print_scores(document)


def model_headline(document: dict[str, Any]) -> str:
    name = MODEL_NAMES[document["model"]]
    name += " with effects of groups" if "components" in document else ""
    if document["multilabel"]:
        return f"[bold]{name}[/] of [bold cyan]{len(document['classes'])} labels[/], each with its own posterior"
    if document["target"] is None:
        return f"[bold]{name}[/]"
    if len(document["classes"]) > 2:
        what = "levels" if document["model"] == "ordinal" else "classes"
        return f"[bold]{name}[/] of [bold cyan]{escape(document['target'])}[/], {len(document['classes'])} {what}"
    positive = escape(f"{document['target']} = {document['classes'][1]}")
    return f"[bold]{name}[/] of the probability that [bold cyan]{positive}[/]"


def fact_lines(document: dict[str, Any]) -> list[str]:
    lines = []
    if data := document.get("data"):
        known = data["class_counts"]
        labels = [str(label) for label in document["classes"]] if document["model"] == "ordinal" else [*known]
        counts = ", ".join(f"{label}: {known.get(label, 0):,}" for label in labels)
        share = data["class_counts"].get(str(document["classes"][1]), 0) / max(1, data["rows_used"])
        counts += f"; {share:.1%}" if len(document["classes"]) == 2 else ""
        name = "" if data["file"] is None else f"{data['file']}, "
        lines.append(escape(f"data      {name}{data['rows_used']:,} rows ({counts})"))
        if data["missing"]:
            lines.append(escape(f"missing   {missing_cells(document, data)}"))
    if text := document["formula"]:
        if len(text) > LONGEST_FORMULA:
            kind = "coefficients" if "coefficients" in document else "columns"
            names = {term.get("column", term["name"]) for term in document[kind]} - {"intercept"}
            text = f"{document['target']} ~ {len(names)} {kind}"
        lines.append(escape(f"formula   {text}"))
    mixed = f"mixture of {document['gaussians']} Gaussians, " if document["gaussians"] > 1 else ""
    ways = [
        f"{mixed}covariance {document['covariance']}",
        "exact ELBO" if document["bound"] == "viper" else document["bound"],
    ]
    if document["model"] != "gp":
        sds = [*document["prior_scales"].values()] or [1.0]  # only an intercept
        low, high = min(sds), max(sds)
        chosen = " chosen by the ELBO" if isinstance(document["prior"], str) else ""
        ways.append(f"prior sd {low:.3g}{'' if low == high else f' to {high:.3g}'}{chosen}")
    else:
        ways.append(f"{document['kernel']} kernel, {document['inducing']} inducing points")
    lines.append(escape(f"method    {', '.join(ways)}"))
    if "groups" in document:
        lines.append(escape(f"groups    {', '.join(f'{n:,} of {term}' for term, n in document['groups'].items())}"))
    if scales := scales_by_name(document.get("prior_scales") or {"": 0.0}):
        lines.append(escape(f"priors    sd {scales}"))
    lines += [escape(f"{title:<9} {text}") for title, text in WeightingFacts(**document["weighting"]).lines().items()]
    end = "converged" if document["converged"] else f"[bold red]{escape(document['status'])}[/]"
    seconds = f" in {document['seconds']:.2f} s" if "seconds" in document else ""
    lines.append(f"ELBO      [bold]{document['elbo']:,.4f}[/], {end}{seconds}")
    return lines


def missing_cells(document: dict[str, Any], data: dict[str, Any]) -> str:
    """Return how many cells are missing in which columns, and what was done about them."""
    cells = ", ".join(f"{name}: {count:,}" for name, count in list(data["missing"].items())[:MOST_MISSING_SHOWN])
    more = len(data["missing"]) - MOST_MISSING_SHOWN
    cells += f" and {more} more columns" if more > 0 else ""
    gone = data["rows"] - data["rows_used"]
    done = document["missing_treatment"]
    left = f"{gone:,} of {data['rows']:,} rows left out" if gone else ""
    return f"{cells} ({'; '.join(part for part in (done, left) if part)})"


def print_coefficients(document: dict[str, Any], most: int | None, saved: Path | None) -> None:
    """Print coefficients with intervals and odds ratios; if there are many, only those most sds from zero."""
    rows = document["coefficients"]
    shown = rows
    if most is not None and len(rows) > most:
        by_size = sorted(rows, key=lambda row: -abs(row["mean"]) / row["sd"])[:most]
        shown = [row for row in rows if row in by_size]
    ends = axis_ends([row for row in shown if row.get("column", row["name"]) != "intercept"] or shown)
    digits = shared_decimals([row["sd"] for row in shown])
    percent = f"{100 * document['level']:g} %"
    titles = ["coefficient", "per", "log-odds", "sd", percent, "", "odds ×", percent, "sign"]
    kept = print_table(titles, [coefficient_cells(row, ends, digits) for row in shown], spare=(5, 3, 1, 7, 6, 8))
    if len(shown) < len(rows):
        order = "fewer standard deviations from zero"
        say(f"  [dim]{len(rows) - len(shown)} more, {order}{how_to_see_all(saved)}[/]")
    if document["standardised"]:
        say("  [dim]Numeric columns are standardised: their coefficients are per standard deviation (sd).[/]")
    if "class" in rows[0] and not document["multilabel"]:
        say("  [dim]Each class is relative to the mean over classes; in Python, summary(baseline=…) compares two.[/]")
    if document["model"] == "ordinal":
        say("  [dim]odds: of a higher level; at a threshold “a | b”, of a or below if all columns are zero.[/]")
    if 8 in kept:
        say("  [dim]sign: probability that the coefficient has the sign of its mean.[/]")
    if document["entangled"]:
        say(f"  [yellow]![/] [dim]{entangled_note(document['entangled'], saved)}[/]")
    if "missing_information" in rows[0]:
        most_lost = max(rows, key=lambda row: row["missing_information"])
        share = f"{most_lost['missing_information']:.0%}"
        say(f"  [dim]Missing values cause up to {share} of a coefficient's variance ({escape(most_lost['name'])}).[/]")
    say()


def print_components(document: dict[str, Any]) -> None:
    """Print standard deviations, correlations and intraclass correlations of group effects."""
    digits = shared_decimals([row["sd"] for row in document["components"].values()])
    rows: list[list[Any]] = []
    for name, row in document["components"].items():
        mean, sd, low, high = (fixed_number(row[part], digits) for part in ("mean", "sd", "lower", "upper"))
        rows.append([name, mean, sd, f"{low} to {high}"])
    print_table(["variance component", "mean", "sd", f"{100 * document['level']:g} %"], rows, spare=(2, 3, 1))
    say("  [dim]sd: of the log-odds between groups; icc: share of the variance of log-odds that is between groups.[/]")
    say()


def entangled_note(columns: list[str], saved: Path | None) -> str:
    """Say that no single coefficient is the effect of these columns, and which command shows their effects."""
    named = f"{', '.join(columns[:MOST_ENTANGLED])}{' …' if len(columns) > MOST_ENTANGLED else ''}"
    why = "in interactions or splines, so no single coefficient is the effect of a column"
    return escape(f"{named}: {why}. See: viper effects {shlex.quote(str(saved or 'model.viper'))} data.csv")


def axis_ends(rows: list[dict[str, Any]]) -> tuple[float, float]:
    low, high = min(0.0, *(row["lower"] for row in rows)), max(0.0, *(row["upper"] for row in rows))
    return (low, high) if high > low else (-1.0, 1.0)


def shared_decimals(sds: list[float]) -> int:
    """Return the decimals, from 2 to 4, at which the smallest standard deviation has two digits."""
    return int(np.clip(1 - np.floor(np.log10(min(sds))), 2, 4))


def coefficient_cells(row: dict[str, Any], ends: tuple[float, float], digits: int) -> list[str | Text]:
    text = {name: fixed_number(row[name], digits) for name in row if isinstance(row[name], float)}
    return [
        row["name"],
        Text(row["unit"]),
        text["mean"],
        text["sd"],
        f"{text['lower']} … {text['upper']}",
        interval_strip(row["lower"], row["mean"], row["upper"], ends),
        text["odds_ratio"],
        f"{text['odds_lower']} … {text['odds_upper']}",
        f"{row['p_direction']:.1%}" if row["p_direction"] < 0.9995 else "> 99.9%",
    ]


def print_process_columns(document: dict[str, Any], most: int | None, saved: Path | None) -> None:
    """Print what a Gaussian process learned about each column, the most relevant first."""
    rows = sorted(document["columns"], key=lambda row: -row.get("relevance", 0.0))[:most]
    names = [name for name in (rows[0] if rows else {}) if name != "name"]
    cells = [[row["name"], *(short_number(row[name], 3) for name in names)] for row in rows]
    titles = ["column", *(COLUMN_TITLES.get(name, escape(name.replace("_", " "))) for name in names)]
    print_table(titles, cells)
    if len(rows) < len(document["columns"]):
        say(f"  [dim]{len(document['columns']) - len(rows)} more, less relevant{how_to_see_all(saved)}[/]")


def how_to_see_all(saved: Path | None) -> str:
    return "." if saved is None else escape(f": viper summary {shlex.quote(str(saved))} --all")


def power_of_ten(x: float) -> str:
    """Return the smallest power of ten that is not below x."""
    return f"{10.0 ** math.ceil(math.log10(x)):.0e}"


def print_trust(document: dict[str, Any]) -> None:
    if "components" in document and not document.get("diagnosis"):
        return
    say("[bold]Is the approximation good?[/]")
    if found := document.get("diagnosis"):
        mark = "[green]✓[/]" if found["reliable"] or found.get("close") else "[yellow]![/]"
        k_hat = "" if found["k_hat"] is None else f"k̂ = {found['k_hat']:.2f}. "
        say(f"  {mark} {k_hat}{escape(found['verdict'])}")
        if (cost := found.get("residual_cost")) is not None:
            say(f"  The variance that the inducing points leave unexplained costs {cost:.3f} nats.")
    if "components" in document:  # the ELBO is then at the most probable components
        say("  Effects of the largest grouping are integrated out exactly; variance components are averaged over.\n")
        return
    gap = power_of_ten(max(document["elbo"] - document["elbo_certified"], LEAST_GAP_SHOWN))
    floor = f"{document['elbo_certified']:,.4f}"
    if document["model"] == "ordinal":
        say(f"  The ELBO is exact to {gap} nats, but for its mean over the thresholds, a sum over a few points.\n")
        return
    say(f"  The ELBO is certified to {gap} nats: the log evidence is provably above {floor}.\n")


def print_scores(document: dict[str, Any]) -> None:
    if found := document.get("scores"):
        say(f"[bold]How well does it predict?[/]  {escape(found['how'])}; the model itself was fitted to all rows")
        base = found.get("base_rate") or 0.5
        rare = min(base, 1 - base) < RARE and None not in (found.get("log_skill"), found.get("base_accuracy"))
        number = significant_number if rare else short_number
        shown = (f"{t} [bold]{number(found.get(name), d)}[/]" for name, (t, d) in SCORE_TITLES.items())
        say(f"  {'   '.join(shown)}")
        if rare:
            known = f"Brier {significant_number(base * (1 - base), 4)} and accuracy {found['base_accuracy']:.3f}"
            gained = f"the model avoids {100 * found['log_skill']:.1f} % of its loss in the log score"
            say(f"  Predicting {significant_number(base)} for every row gives {known}; {gained}.")
        say()


def print_card(card: dict[str, Any], most: int | None) -> None:
    """Print what the model remembers of its training data, with at most `most` columns."""
    data, columns = card["data"], card["columns"]
    if not data:
        return
    say("[bold]What was it fitted to?[/]")
    if digest := data.get("sha256"):
        say(escape(f"  file      {data['name']}, {data['size']:,} bytes, sha256 {digest[:16]}…"))
    say(escape(f"  date      {data['date']}"))
    say(escape(f"  versions  {', '.join(f'{name} {number}' for name, number in card['versions'].items())}"))
    say(escape(f"  rules     {', '.join(f'{name}: {rule}' for name, rule in card['rules'].items())}"))
    rows = [[column["name"], spread_words(column), f"{column['missing']:.1%}"] for column in columns[:most]]
    print_table(["column", "in the training data", "missing"], rows, left=2, longest=LONGEST_SPREAD)
    if len(rows) < len(columns):
        say(f"  [dim]{len(columns) - len(rows)} more columns: --all[/]\n")


def spread_words(column: dict[str, Any]) -> str:
    """Describe the range of numbers, or the levels of a category, the most common first."""
    if column["kind"] == "number":
        low, high, mean, sd = (f"{column[name]:.4g}" for name in ("low", "high", "mean", "sd"))
        return f"{low} to {high}, mean {mean}, sd {sd}"
    if column["kind"] == "date":
        return f"{column['low']} to {column['high']}"
    levels = sorted(column["levels"].items(), key=lambda item: -item[1])
    counts = [f"{rows:,}" if rows > FEWEST_RECORDED else f"{FEWEST_RECORDED} or fewer" for _, rows in levels]
    shown = [f"{level} ({count})" for (level, _), count in zip(levels, counts, strict=True)][:MOST_LEVELS_SHOWN]
    more = f" and {len(levels) - len(shown)} more" if len(levels) > len(shown) else ""
    return ", ".join(shown) + more
