"""What an artefact of the paper is: runs to be made, and the tables and figures made from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viper.paper.tables import Table

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Job = dict[str, int | float | str]  # one run: the values of the artefact's keys, such as {"n": 500, "seed": 7}
Row = Mapping[str, Any]  # one line of results: column -> number or word; a column left out is empty
Config = dict[str, Any]  # what else determines the results; plain JSON values


@dataclass(frozen=True)
class Request:
    """What was asked for: number of runs (None: as in the paper), first seed, the quick version, a folder of data."""

    runs: int | None
    seed: int
    quick: bool
    data: Path | None

    def seeds(self, published: int, quick: int) -> range:
        """The seeds of a study with `published` runs in the paper and `quick` in the quick version."""
        count = self.runs or (quick if self.quick else published)
        return range(self.seed, self.seed + count)


def no_figures(frame: "pandas.DataFrame", config: Config) -> "dict[str, Figure]":
    return {}


def equal(job: Job) -> float:
    return 1.0


@dataclass(frozen=True)
class Artefact:
    """A table or figure of the paper: how its runs are made, and what is made from them.

    Attributes
    ----------
    name, what, where : str
        The word on the command line, what it shows, and its place in the paper.
    minutes : float
        Of a full run on two cores.
    keys : names of the columns that identify a run; every job has exactly these.
    columns : names of the columns of results, in the order in which they are written.
    configure : request -> configuration
        Everything else that determines the numbers, as JSON: it is kept beside the CSV, and runs made with another
        configuration are never mixed with these. It must not depend on the number of runs or on the first seed.
    jobs : request -> list of jobs
        In the order in which to run them; seeds outermost, so that an interrupted study covers everything a little.
    run : (job, configuration, data folder) -> rows
        Makes one run, in a process of its own: a function of a module, one thread, global generators untouched. Rows
        hold `columns`; seconds of the whole run, versions and the keys are added.
    tables : (frame, configuration) -> tables
    figures : (frame, configuration) -> figures by file name
        From all finished runs, as a data frame in the order of the jobs' keys, one row per row of the CSV.
    joined : names of artefacts whose finished runs, if there are any in the same folder, are appended to the frame.
    cost : job -> expected effort, in any unit, for the estimate of the time left.
    """

    name: str
    what: str
    where: str
    minutes: float
    keys: Sequence[str]
    columns: Sequence[str]
    configure: Callable[[Request], Config]
    jobs: Callable[[Request], list[Job]]
    run: Callable[[Job, Config, Path | None], Sequence[Row]]
    tables: Callable[["pandas.DataFrame", Config], list[Table]]
    figures: "Callable[[pandas.DataFrame, Config], dict[str, Figure]]" = no_figures
    joined: Sequence[str] = ()
    cost: Callable[[Job], float] = equal
