"""How a notebook shows a fitted estimator: scikit-learn's diagram, with a summary of the fit below it.

It is plain HTML without scripts, and takes its colours from the surrounding page.
"""

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from viper.models.facts import model_facts

if TYPE_CHECKING:
    import pandas

MOST_TABLE_ROWS = 12
LARGEST_DIAGNOSED = 1 << 17  # rows × coefficients; up to here a diagnosis takes no noticeable time


class NotebookMixin:
    """Estimators that show a summary of the fit below scikit-learn's diagram."""

    def _html_repr(self) -> str:
        diagram = super()._html_repr()  # type: ignore[misc]
        return f"{diagram}{notebook_card(self)}" if hasattr(self, "posterior_") else diagram


def notebook_card(model: Any) -> str:
    """Return the facts as lines, and the first rows of the summary with their intervals drawn."""
    lines = "".join(
        f"<div><b>{escape(name)}</b>&ensp;{escape(text)}</div>" for name, text in notebook_facts(model).items()
    )
    table = model.summary()
    head, left = table.head(MOST_TABLE_ROWS), len(table) - MOST_TABLE_ROWS
    more = f"<div>and {left} more: see <code>summary()</code></div>" if left > 0 else ""
    return f'<div style="margin-top:.6em;font-size:.9em">{lines}{html_table(head)}{more}{entangled_line(model)}</div>'


def entangled_line(model: Any) -> str:
    """Return a line about columns that are in interactions or splines, if there are any."""
    columns = model.formula_.entangled if hasattr(model, "formula_") and hasattr(model, "coef_") else []
    if not columns:
        return ""
    named = ", ".join(columns[:MOST_TABLE_ROWS]) + " …" * (len(columns) > MOST_TABLE_ROWS)
    return (
        f"<div><b>{escape(named)}</b>: in interactions or splines, where no single coefficient describes it. See "
        "<code>contrast()</code>, <code>average()</code> and <code>slopes()</code>.</div>"
    )


def notebook_facts(model: Any) -> dict[str, str]:
    """Return ELBO and convergence, and for small data the verdict of importance sampling."""
    facts = model_facts(model)
    shown = {"ELBO": f"{facts.elbo:.3f}, {facts.rounding}", "Solver": facts.status}
    rows = getattr(model, "_training_rows", None)
    # only rows in memory, so that showing a model opens no files
    if rows is None or rows.traits.where != "memory" or rows.rows * rows.dimension > LARGEST_DIAGNOSED:
        return shown
    found = model.diagnose()
    diagnosis = max(found.values(), key=lambda one: one.k_hat) if isinstance(found, dict) else found  # the worst
    return shown | {"Verdict": f"k̂ = {diagnosis.k_hat:.2f}. {diagnosis.verdict}"}


def html_table(table: "pandas.DataFrame") -> str:
    drawn = {"lower", "upper"} <= {*table.columns}
    columns = [name for name in table.columns if not name.startswith("odds_") or name == "odds_ratio"]
    names = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in columns)
    body = ""
    reach = float(np.abs(table[["lower", "upper"]].to_numpy()).max()) if drawn and len(table) else 1.0
    for label, row in table.iterrows():
        title = ": ".join(map(str, label if isinstance(label, tuple) else [label]))
        cells = "".join(f'<td style="text-align:right;padding:.1em .6em">{row[name]:.3g}</td>' for name in columns)
        picture = f"<td>{interval_svg(row['mean'], row['lower'], row['upper'], reach)}</td>" if drawn else ""
        body += f'<tr><th style="text-align:left">{escape(title)}</th>{cells}{picture}</tr>'
    style = "border-collapse:collapse;font-size:1em;margin:.4em 0"
    head = f"<tr><th></th>{names}{'<th></th>' if drawn else ''}</tr>"
    return f"<table style='{style}'><thead>{head}</thead><tbody>{body}</tbody></table>"


def interval_svg(mean: float, low: float, high: float, reach: float) -> str:
    """Draw a line from low to high with a dot at the mean, on an axis of ± reach with a tick at zero."""
    at = lambda value: 60.0 + 56.0 * value / (reach or 1.0)  # noqa: E731
    return (
        '<svg width="120" height="14" role="img" aria-label="interval" stroke="currentColor">'
        '<line x1="60" x2="60" y1="1" y2="13" stroke-opacity=".3"/>'
        f'<line x1="{at(low):.1f}" x2="{at(high):.1f}" y1="7" y2="7" stroke-width="1.5"/>'
        f'<circle cx="{at(mean):.1f}" cy="7" r="2.5" fill="currentColor"/></svg>'
    )
