"""What a fitted estimator shows in a notebook: scikit-learn's diagram, and below it what was learned.

Plain HTML without scripts, in the colours of whatever surrounds it.
"""

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from viper.inference.rows import Arrays

if TYPE_CHECKING:
    import pandas

LONGEST = 12  # rows of a table
LARGEST_DIAGNOSED = 1 << 17  # rows × coefficients for which a verdict takes no noticeable time


class Notebook:
    """The HTML representation of estimators with `_notebook() -> (facts, table)`."""

    def _html_repr(self) -> str:
        diagram = super()._html_repr()  # type: ignore[misc]
        if not hasattr(self, "posterior_"):
            return diagram
        facts, table = self._notebook()
        return f"{diagram}{card(facts, table)}"

    def _notebook(self) -> tuple[dict[str, str], "pandas.DataFrame"]:
        raise NotImplementedError


def facts(model: Any) -> dict[str, str]:
    """ELBO and convergence, and for small data the verdict of importance sampling."""
    allowance = model.elbo_ - model.elbo_bound_
    about = {"ELBO": f"{model.elbo_:.3f}, certified to {allowance:.0e} nats", "Solver": str(model.status_)}
    rows = getattr(model, "_training_rows", None)
    # rows in memory only: looking at a model opens no files
    if not isinstance(rows, Arrays) or rows.rows * rows.dimension > LARGEST_DIAGNOSED:
        return about
    diagnosis = model.diagnose()
    return about | {"Verdict": f"k̂ = {diagnosis.k_hat:.2f}. {diagnosis.verdict}"}


def card(facts: dict[str, str], table: "pandas.DataFrame") -> str:
    """Facts as lines, the head of a table with its intervals drawn."""
    lines = "".join(f"<div><b>{escape(name)}</b>&ensp;{escape(text)}</div>" for name, text in facts.items())
    head = table.head(LONGEST)
    more = f"<div>and {len(table) - LONGEST} more: see <code>summary()</code></div>" if len(table) > LONGEST else ""
    return f'<div style="margin-top:.6em;font-size:.9em">{lines}{html_table(head)}{more}</div>'


def html_table(table: "pandas.DataFrame") -> str:
    drawn = {"lower", "upper"} <= {*table.columns}
    columns = [name for name in table.columns if not name.startswith("odds_") or name == "odds_ratio"]
    names = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in columns)
    body = ""
    reach = float(np.abs(table[["lower", "upper"]].to_numpy()).max()) if drawn and len(table) else 1.0
    for label, row in table.iterrows():
        cells = "".join(f'<td style="text-align:right;padding:.1em .6em">{row[name]:.3g}</td>' for name in columns)
        picture = f"<td>{interval(row['mean'], row['lower'], row['upper'], reach)}</td>" if drawn else ""
        body += f'<tr><th style="text-align:left">{escape(str(label))}</th>{cells}{picture}</tr>'
    style = "border-collapse:collapse;font-size:1em;margin:.4em 0"
    head = f"<tr><th></th>{names}{'<th></th>' if drawn else ''}</tr>"
    return f"<table style='{style}'><thead>{head}</thead><tbody>{body}</tbody></table>"


def interval(mean: float, low: float, high: float, reach: float) -> str:
    """A line from low to high with a dot at the mean, on an axis of ± reach with a tick at zero."""
    at = lambda value: 60.0 + 56.0 * value / (reach or 1.0)  # noqa: E731
    return (
        '<svg width="120" height="14" role="img" aria-label="interval" stroke="currentColor">'
        '<line x1="60" x2="60" y1="1" y2="13" stroke-opacity=".3"/>'
        f'<line x1="{at(low):.1f}" x2="{at(high):.1f}" y1="7" y2="7" stroke-width="1.5"/>'
        f'<circle cx="{at(mean):.1f}" cy="7" r="2.5" fill="currentColor"/></svg>'
    )
