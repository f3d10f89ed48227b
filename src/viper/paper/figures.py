"""One style for every figure, saved as PNG and PDF."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viper.data.writing import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Blue, orange and green as in the paper (VI-PER, Pólya-Gamma, Monte Carlo), in shades that the colour-blind can tell
# apart.
COLOURS = {"VI-PER": "#0072b2", "limit": "#003f5c", "VI-PG": "#e69f00", "VI-MC": "#009e73", "MCMC": "#666666"}
# How each method's points are drawn.
METHOD_MARKS: dict[str, dict[str, Any]] = {
    "VI-PER": {"color": COLOURS["VI-PER"], "marker": "o"},
    "VI-PER limit": {"color": COLOURS["limit"], "marker": "D"},
    "VI-MC": {"color": COLOURS["VI-MC"], "marker": "s"},
    "VI-PG": {"color": COLOURS["VI-PG"], "marker": "^"},
    "MCMC": {"color": COLOURS["MCMC"], "marker": "x"},
}
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 10,
    "legend.frameon": False,
    "legend.fontsize": "small",
    "figure.constrained_layout.use": True,
}


def figure_style() -> AbstractContextManager[None]:
    """The style, for a `with` block; figures are drawn to files whether or not there is a screen."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need Matplotlib; install it with pip install 'vi-per[plot]'") from error
    return matplotlib.rc_context({**STYLE, "backend": "agg"})


def save_figure(figure: "Figure", path: Path) -> list[Path]:
    """Write `path`.png and `path`.pdf, and close the figure."""
    import matplotlib.pyplot as plt

    paths = []
    for ending, metadata in (("png", None), ("pdf", {"CreationDate": None})):
        paths.append(path.with_name(f"{path.name}.{ending}"))
        with atomic_file(paths[-1], overwrite=True) as file:
            figure.savefig(file, format=ending, dpi=160, metadata=metadata)
    plt.close(figure)
    return paths
