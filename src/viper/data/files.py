"""Rows in Parquet, Arrow or CSV files, read in chunks, once per pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from viper.data import arrow
from viper.data.blocks import Chunk, check_names
from viper.errors import shown

SHARE_FOR_CACHE = 0.25  # of the available memory, for decoded rows
ASSUMED_MEMORY = float(1 << 32)  # bytes, where the system does not say
GROUP = "/sys/fs/cgroup"  # where Linux tells the limits of a container


@dataclass(frozen=True)
class Files:
    """Rows in Parquet, Arrow (Feather) or CSV files, read chunk by chunk and never all at once.

    Parameters
    ----------
    path : str, path, or list of them
        A file, a directory of files, or a pattern such as ``"rows/*.parquet"``, in the order of their names.
        Alternatively, a pyarrow dataset.
    target : str, optional
        The column of labels: any two values. Required for fitting.
    features : list of str, optional
        The columns of X, all numeric. By default, every column except the others named here, the index of a pandas
        frame, and an unnamed first column of a CSV file; for predictions, the columns of the fit.
    weight, offset : str, optional
        The columns of row weights and of the known part of the log-odds.
    multiline : bool, default False
        Whether cells of CSV files, in quotes, may span lines. Otherwise they are an error: a quote that is not closed
        would swallow rows.
    cache : int, optional
        Bytes of memory in which a fit may keep the rows it has read, if all of them fit; then files are decoded once
        instead of once per pass. By default a quarter of the memory that is available; 0 keeps none.

    Examples
    --------
    >>> import tempfile, pandas, viper
    >>> rows = pandas.DataFrame(
    ...     {"dose": [0.1, 0.4, 0.8, 1.5, 2.0, 2.5], "ill": ["no", "no", "yes", "no", "yes", "yes"]}
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows.to_csv(f"{folder}/rows.csv", index=False)
    ...     model = viper.VariationalLogisticRegression().fit(viper.Files(f"{folder}/*.csv", target="ill"))
    >>> model.feature_names_in_, model.classes_
    (array(['dose'], dtype=object), array(['no', 'yes'], dtype=object))
    """

    path: Any
    target: str | None = None
    features: Sequence[str] | None = None
    weight: str | None = None
    offset: str | None = None
    multiline: bool = False
    cache: int | None = None

    def open(self, labels: bool, known: Sequence[str] | None) -> "FileReader":
        if labels and self.target is None:
            raise ValueError("target must name the column of labels; got None. Write Files(path, target='y').")
        check_names(self.features, "features")
        if self.cache is not None and (
            isinstance(self.cache, bool) or not isinstance(self.cache, int) or self.cache < 0
        ):
            raise ValueError(f"cache must be a number of bytes or None; got {self.cache!r}. Use 0 to keep no rows.")
        if self.target is not None and self.features is not None and self.target in self.features:
            raise ValueError(f"features must not contain the target; got {shown(self.target)} as both. Leave it out.")
        files = arrow.find_files(self.path)
        others = {"target": self.target if labels else None, "weight": self.weight if labels else None}
        others["offset"] = self.offset
        apart = {name for name in (self.target, self.weight, self.offset) if name is not None}
        chosen = known if known is not None else self.features
        for file in files:
            file.check_unchanged()  # and remember what it is like
        kinds = arrow.feature_types(files, None if chosen is None else list(chosen), apart, others)
        return FileReader(files, kinds, others, self.multiline, self.cache)


@dataclass(frozen=True)
class FileReader:
    """The files of one table, and the columns to read."""

    files: list[arrow.ArrowFile]
    kinds: dict[str, Any]  # feature -> NumPy dtype
    others: dict[str, str | None]  # target, weight, offset -> column
    multiline: bool = False
    cache: int | None = None

    @property
    def names(self) -> list[str]:
        return list(self.kinds)

    @property
    def width(self) -> int:
        return len(self.kinds)

    @property
    def dtype(self) -> np.dtype:
        return np.result_type(*self.kinds.values())

    def may_hold(self, rows: int) -> bool:
        others = 1 + 8 * sum(self.others[name] is not None for name in ("weight", "offset"))
        needed = rows * (self.width * self.dtype.itemsize + others)
        return needed <= (SHARE_FOR_CACHE * available_memory() if self.cache is None else self.cache)

    def check_unchanged(self) -> None:
        for file in self.files:
            file.check_unchanged()

    def read(self, rows: int, features: bool = True) -> Iterator[Chunk]:
        named = [name for name in self.others.values() if name is not None]
        wanted = list(dict.fromkeys([*(self.names if features else []), *named]))
        numbers = {*self.names, *named} - {self.others["target"]}
        self.check_unchanged()
        for file in self.files:
            start = 0
            for batch in file.batches(wanted, numbers, rows):
                if gone := [name for name in wanted if name not in batch.schema.names]:
                    raise ValueError(
                        f"every pass must find the same columns; got no {shown(gone[0])} in {file.path} now."
                    )
                X = arrow.batch_matrix(batch, self.names, self.dtype) if features else None
                found = {part: None if n is None else arrow.batch_vector(batch, n) for part, n in self.others.items()}
                yield Chunk(X, found["target"], weight=found["weight"], offset=found["offset"], place=file.place(start))
                start += batch.num_rows
            if not self.multiline:
                file.check_line_breaks(start)


def available_memory() -> float:
    """Return the bytes that this process may still use: those of the system, or of its control group if fewer."""
    known = system_numbers("/proc/meminfo")
    free = 1024.0 * known["MemAvailable:"] if "MemAvailable:" in known else ASSUMED_MEMORY
    limit, used = system_text(f"{GROUP}/memory.max"), system_text(f"{GROUP}/memory.current")
    if not limit.isdigit() or not used.isdigit():
        return free
    return max(
        0.0, min(free, float(limit) - float(used) + system_numbers(f"{GROUP}/memory.stat").get("inactive_file", 0))
    )


def system_numbers(path: str) -> dict[str, int]:
    """Return the names and numbers in the lines of a file of the system."""
    words = (line.split() for line in system_text(path).splitlines())
    return {first: int(rest[0]) for first, *rest in words if rest and rest[0].isdigit()}


def system_text(path: str) -> str:
    """Return the content of a file of the system, or nothing if there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
