"""The interface of an artefact of the paper: its runs, and the tables and figures computed from them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viper.paper.tables import ResultTable

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Job = dict[str, int | float | str]  # one run: the values of the artefact's keys, such as {"n": 500, "seed": 7}
Row = Mapping[str, Any]  # one line of results: column -> number or word; a missing column is left empty
Config = dict[str, Any]  # everything else that determines the results, as plain JSON values


@dataclass(frozen=True)
class Request:
    """What the user asked for: number of runs (None: as in the paper), first seed, quick version, data folder."""

    runs: int | None
    seed: int
    quick: bool
    data: Path | None

    def seeds(self, published: int, quick: int) -> range:
        """The seeds of a study with `published` runs in the paper and `quick` in the quick version."""
        count = self.runs or (quick if self.quick else published)
        return range(self.seed, self.seed + count)


class Artefact(ABC):
    """A table or figure of the paper: how to run it, and how to present the results.

    A subclass sets the attributes and defines the methods. Its instances hold no state, so that a run can take place in
    another process.

    Attributes
    ----------
    name, what, where : str
        Its name on the command line, what it shows, and its place in the paper.
    minutes : float
        Duration of a full run on two cores.
    keys : names of the columns that identify a run; every job has exactly these.
    columns : names of the columns of results, in the order in which they are written.
    joined : artefacts whose finished runs, if there are any in the same folder, are appended to the frame.
    """

    name: str
    what: str
    where: str
    minutes: float
    keys: Sequence[str]
    columns: Sequence[str]
    joined: "Sequence[Artefact]" = ()

    @abstractmethod
    def configure(self, request: Request) -> Config:
        """Everything besides the job that determines the numbers, as JSON.

        It is kept beside the CSV, and runs with different configurations are never mixed. It must not depend on
        the number of runs or on the first seed.
        """

    @abstractmethod
    def jobs(self, request: Request) -> list[Job]:
        """The runs, in the order in which to do them.

        The seed is the outermost loop, so that an interrupted study has a few runs of everything.
        """

    @abstractmethod
    def run(self, job: Job, config: Config, data: Path | None) -> Sequence[Row]:
        """Do one run on one thread, leaving global generators untouched; `data` is the folder of data files.

        The rows hold `columns`; the keys, the seconds of the whole run and the versions are added.
        """

    @abstractmethod
    def tables(self, frame: "pandas.DataFrame", config: Config) -> list[ResultTable]:
        """Tables from all finished runs: one row of the frame per row of the CSV, in the order of the keys."""

    def figures(self, frame: "pandas.DataFrame", config: Config) -> "dict[str, Figure]":
        """Figures by file name, from the same frame."""
        return {}

    def cost(self, job: Job) -> float:
        """Expected effort of a run in any unit, for the estimate of the time left."""
        return 1.0
