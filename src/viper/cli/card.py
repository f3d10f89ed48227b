"""A fitted model as a document, and the document on the screen: what `viper fit` and `viper summary` show."""

import shlex
from typing import Any

import numpy as np
from rich.markup import escape
from rich.text import Text

from viper.cli.terminal import console, fixed, grid, number, say, show, strip

WIDE = 116  # columns of a terminal that has room for drawn intervals
SCORES = {
    "auc": ("AUC", 3),
    "log_score": ("log score", 4),
    "brier": ("Brier", 4),
    "calibration_error": ("calibration error", 3),
    "accuracy": ("accuracy", 3),
    "interval_width": ("mean interval width", 3),
}


def describe(model: Any, level: float) -> dict[str, Any]:
    """Everything there is to say, as JSON."""
    encoding = getattr(model, "formula_", None)
    record = {} if encoding is None else encoding.record
    gp = not hasattr(model, "coef_")
    return {
        "model": "gp" if gp else "logistic",
        "formula": None if encoding is None else encoding.formula,
        "target": None if encoding is None else encoding.target,
        "classes": [getattr(label, "item", lambda label=label: label)() for label in model.classes_],
        "standardised": bool(encoding is not None and any(scale != 1 for scale in encoding.scale)),
        "missing": None if encoding is None else encoding.missing,
        "levels": {} if encoding is None else encoding.levels,
        "bound": model.bound if model.terms is None else f"{model.bound}, {model.terms} terms",
        "covariance": model.covariance,
        "elbo": model.elbo_,
        "elbo_certified": model.elbo_bound_,
        "converged": model.converged_,
        "status": model.status_,
        "iterations": model.n_iter_,
        "level": level,
        **(gp_facts(model) if gp else logistic_facts(model, level)),
        **record,
    }


def logistic_facts(model: Any, level: float) -> dict[str, Any]:
    table = model.summary(level)
    units = model.formula_.units if hasattr(model, "formula_") else {}
    rows = [{"name": name, **row, "unit": units.get(name, "")} for name, row in table.to_dict("index").items()]
    scale = np.asarray(model.prior_scale_)
    sds = (np.sqrt(np.diag(scale)) if scale.ndim == 2 else scale).tolist()
    return {"prior": model.prior_scale, "prior_scales": dict(zip(table.index, sds, strict=False)), "coefficients": rows}


def gp_facts(model: Any) -> dict[str, Any]:
    table = model.summary()
    rows = [{"name": name, **row} for name, row in table.to_dict("index").items()]
    kernel = model.kernel if isinstance(model.kernel, str) else type(model.kernel).__name__
    facts = {"kernel": kernel, "inducing": len(model.inducing_points_), "columns": rows}
    return facts | {"output_scale": table.attrs.get("output_scale")}


def draw(document: dict[str, Any], most: int | None, saved: Any = None) -> None:
    """The document for people, with at most that many coefficients; all are seen where the model is `saved`."""
    say(headline(document))
    for line in facts(document):
        say(f"  {line}")
    if document["model"] == "logistic":
        coefficients(document, most, saved)
    else:
        columns(document, most, saved)
    trust(document)
    quality(document)


def headline(document: dict[str, Any]) -> str:
    name = "Logistic regression" if document["model"] == "logistic" else "Gaussian-process classification"
    if document["target"] is None:
        return f"[bold]{name}[/]"
    positive = escape(f"{document['target']} = {document['classes'][1]}")
    return f"[bold]{name}[/] of the probability that [bold cyan]{positive}[/]"


def facts(document: dict[str, Any]) -> list[str]:
    lines = []
    if data := document.get("data"):
        counts = ", ".join(f"{label}: {n:,}" for label, n in data["class_counts"].items())
        share = list(data["class_counts"].values())[1] / max(1, data["rows_used"])
        lines.append(escape(f"data      {data['file']}, {data['rows_used']:,} rows ({counts}; {share:.1%})"))
        if data["missing"]:
            lines.append(escape(f"missing   {missing(document, data)}"))
    if document["formula"]:
        text = document["formula"]
        if len(text) > 100:
            terms = document["coefficients" if "coefficients" in document else "columns"]
            text = f"{document['target']} ~ {sum(term['name'] != 'intercept' for term in terms)} columns"
        lines.append(escape(f"formula   {text}"))
    ways = [f"covariance {document['covariance']}", "exact ELBO" if document["bound"] == "viper" else document["bound"]]
    if document["model"] == "logistic":
        low, high = min(document["prior_scales"].values()), max(document["prior_scales"].values())
        chosen = " chosen by the ELBO" if isinstance(document["prior"], str) else ""
        ways.append(f"prior sd {low:.3g}{'' if low == high else f' to {high:.3g}'}{chosen}")
    else:
        ways.append(f"{document['kernel']} kernel, {document['inducing']} inducing points")
    lines.append(escape(f"method    {', '.join(ways)}"))
    end = "converged" if document["converged"] else f"[bold red]{escape(document['status'])}[/]"
    seconds = f" in {document['seconds']:.2f} s" if "seconds" in document else ""
    lines.append(f"ELBO      [bold]{document['elbo']:,.4f}[/], {end}{seconds}")
    return lines


def missing(document: dict[str, Any], data: dict[str, Any]) -> str:
    cells = ", ".join(f"{name}: {count:,}" for name, count in list(data["missing"].items())[:8])
    cells += f" and {len(data['missing']) - 8} more columns" if len(data["missing"]) > 8 else ""
    gone = data["rows"] - data["rows_used"]
    done = "filled in with means and most common levels" if document["missing"] == "mean" else ""
    left = f"{gone:,} of {data['rows']:,} rows left out" if gone else ""
    return f"{cells} ({'; '.join(part for part in (done, left) if part)})"


def coefficients(document: dict[str, Any], most: int | None, saved: Any) -> None:
    """Coefficients with intervals and odds ratios; if there are many, those farthest from zero."""
    rows = document["coefficients"]
    shown = rows
    if most is not None and len(rows) > most:
        by_size = sorted(rows, key=lambda row: -abs(row["mean"]) / row["sd"])[:most]
        shown = [row for row in rows if row in by_size]
    ends = reach([row for row in shown if row["name"] != "intercept"] or shown)
    digits = decimals([row["sd"] for row in shown])
    wide = console().width >= WIDE
    percent = f"{100 * document['level']:g} %"
    titles = ["coefficient", *(["per", "log-odds", "sd", percent, ""] if wide else ["log-odds", percent])]
    titles += ["odds ×", percent, "sign"]
    show(grid(titles, [coefficient(row, ends, digits, wide) for row in shown], left=2 if wide else 1))
    if len(shown) < len(rows):
        say(f"  [dim]{len(rows) - len(shown)} more, closer to zero{how_to_see(saved)}[/]")
    if document["standardised"]:
        say("  [dim]Numbers are standardised: their coefficients are per standard deviation (sd), others per 1.[/]")
    say("  [dim]sign: probability that the coefficient has the sign of its mean.[/]\n")


def reach(rows: list[dict[str, Any]]) -> tuple[float, float]:
    low, high = min(0.0, *(row["lower"] for row in rows)), max(0.0, *(row["upper"] for row in rows))
    return (low, high) if high > low else (-1.0, 1.0)


def decimals(sds: list[float]) -> int:
    """So many that the smallest standard deviation has two digits, within reason."""
    return int(np.clip(1 - np.floor(np.log10(min(sds))), 2, 4))


def coefficient(row: dict[str, Any], ends: tuple[float, float], digits: int, wide: bool) -> list[str | Text]:
    text = {name: fixed(row[name], digits) for name in row if isinstance(row[name], float)}
    interval = f"{text['lower']} … {text['upper']}"
    drawn = strip(row["lower"], row["mean"], row["upper"], ends)
    return [
        row["name"],
        *([row["unit"]] if wide else []),
        text["mean"],
        *([text["sd"], interval, drawn] if wide else [interval]),
        text["odds_ratio"],
        f"{text['odds_lower']} … {text['odds_upper']}",
        f"{row['p_direction']:.1%}" if row["p_direction"] < 0.9995 else "> 99.9%",
    ]


def columns(document: dict[str, Any], most: int | None, saved: Any) -> None:
    """What a Gaussian process learned of each column."""
    rows = sorted(document["columns"], key=lambda row: -row.get("relevance", 0.0))[:most]
    names = [name for name in (rows[0] if rows else {}) if name != "name"]
    titles = {"lengthscale": "lengthscale", "relevance": "relevance", "mean_weight": "slope of the mean"}
    cells = [[row["name"], *(number(row[name], 3) for name in names)] for row in rows]
    show(grid(["column", *(titles.get(name, name.replace("_", " ")) for name in names)], cells))
    if len(rows) < len(document["columns"]):
        say(f"  [dim]{len(document['columns']) - len(rows)} more, less relevant{how_to_see(saved)}[/]")


def how_to_see(saved: Any) -> str:
    return "." if saved is None else escape(f": viper summary {shlex.quote(str(saved))} --all")


def trust(document: dict[str, Any]) -> None:
    say("[bold]Is the approximation good?[/]")
    if found := document.get("diagnosis"):
        mark = "[green]✓[/]" if found["reliable"] or found.get("close") else "[yellow]![/]"
        k_hat = "" if found["k_hat"] is None else f"k̂ = {found['k_hat']:.2f}. "
        say(f"  {mark} {k_hat}{escape(found['verdict'])}")
    gap = document["elbo"] - document["elbo_certified"]
    floor = f"{document['elbo_certified']:,.4f}"
    say(f"  The ELBO is certified to {gap:.0e} nats: the log evidence is surely above {floor}.")
    say()


def quality(document: dict[str, Any]) -> None:
    found = document.get("scores")
    if not found:
        return
    say(f"[bold]How well does it predict?[/]  {escape(found['how'])}; the model itself saw all rows")
    say("  " + "   ".join(f"{title} [bold]{number(found[name], d)}[/]" for name, (title, d) in SCORES.items()))
    say()
