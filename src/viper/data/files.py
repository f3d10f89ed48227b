"""Rows in Parquet, Arrow or CSV files, read in chunks, once per pass."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from viper.data import arrow
from viper.data.blocks import Chunk, check_finite_chunk, check_names
from viper.data.kept import KeptRows, room_for_rows
from viper.errors import shown
from viper.inference.kernels.compiled import join_columns

BATCH_BYTES = 1 << 23  # bytes decoded at a time; most are still in the cache when they are copied


@dataclass(frozen=True)
class Files:
    """Rows in Parquet, Arrow (Feather) or CSV files, read chunk by chunk and never all at once.

    Parameters
    ----------
    path : str, path, or list of them
        A file, a directory of files, or a pattern such as ``"rows/*.parquet"``, in the order of their names.
        Alternatively, a pyarrow dataset.
    target : str or list of str, optional
        The column of labels: any two values. Required for fitting. A list names a column of zeros and ones for each of
        several labels.
    features : list of str, optional
        The columns of X, all numeric. By default, every column except the others named here, the index of a pandas
        frame, and an unnamed first column of a CSV file; for predictions, the columns of the fit.
    weight, offset : str, optional
        The columns of row weights and of the known part of the log-odds.
    multiline : bool, default False
        Whether cells of CSV files, in quotes, may span lines. Otherwise they are an error: a quote that is not closed
        would swallow rows.
    cache : int, optional
        Bytes in which a fit may keep the rows it has read, if all of them fit; files are then decoded once instead of
        once per pass. Rows are kept in memory if they fit in a quarter of what is available, and otherwise in a
        temporary file, which the system deletes when the fit ends. The default is the available memory, or half of the
        free disk space if that is less; 0 keeps none.

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
    target: str | Sequence[str] | None = None
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
        targets = [] if self.target is None else [self.target] if isinstance(self.target, str) else [*self.target]
        check_names(targets, "target")
        if both := [name for name in targets if self.features is not None and name in self.features]:
            raise ValueError(f"features must not contain the target; got {shown(both[0])} as both. Leave it out.")
        files = arrow.find_files(self.path)
        others = {"target": targets[0] if labels else None, "weight": self.weight if labels else None}
        others |= {"offset": self.offset} | {f"target {j}": name for j, name in enumerate(targets[1:], 2) if labels}
        apart = {name for name in (*targets, self.weight, self.offset) if name is not None}
        chosen = known if known is not None else self.features
        for file in files:
            file.check_unchanged()  # also records its size and time of change
        kinds = arrow.feature_types(files, None if chosen is None else list(chosen), apart, others)
        return FileReader(files, kinds, others, self.multiline, self.cache)


@dataclass(frozen=True)
class FileReader:
    """The files of one table, and the columns to read."""

    files: list[arrow.ArrowFile]
    kinds: dict[str, Any]  # feature -> NumPy dtype
    others: dict[str, str | None]  # target, weight, offset, and the targets after the first -> column
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

    @property
    def targets(self) -> list[str]:
        return [name for part, name in self.others.items() if part.startswith("target") and name is not None]

    @property
    def without_rows(self) -> str:
        first, *more = self.files
        others = f" and {len(more)} more" if more else ""
        return f"files must have at least one row; got only column names in {first.path}{others}. Name files with rows."

    def keep(self) -> KeptRows | None:
        others = len(self.targets) + 8 * sum(self.others[name] is not None for name in ("weight", "offset"))
        row_bytes, counts = self.width * self.dtype.itemsize + others, [file.count for file in self.files]
        size = 0 if None in counts else row_bytes * sum(counts)  # type: ignore[arg-type]
        room = room_for_rows(self.cache)
        return KeptRows(room, row_bytes, size) if max(size, row_bytes) <= max(room) else None

    def check_unchanged(self) -> None:
        for file in self.files:
            file.check_unchanged()

    def read(self, rows: int, features: bool = True) -> Iterator[Chunk]:
        """Yield chunks of `rows`, except for the last; features are checked, and left out if not asked for."""
        self.check_unchanged()
        chunk = GrowingChunk(rows, self.dtype)
        for batch in self.batches(rows, features):
            start = 0
            while start < batch.rows:
                start = chunk.add(batch, start)
                if chunk.rows == rows:
                    yield chunk.done()
                    chunk = GrowingChunk(rows, self.dtype)
        if chunk.rows:
            yield chunk.done()

    def batches(self, rows: int, features: bool) -> Iterator["Batch"]:
        """Yield all rows as they are decoded, some at a time."""
        named = [name for name in self.others.values() if name is not None]
        wanted = list(dict.fromkeys([*(self.names if features else []), *named]))
        numbers = {*self.names, *named} - {*self.targets}
        few = max(1, BATCH_BYTES // (8 * len(wanted)))
        for file in self.files:
            start = 0
            for batch in file.batches(wanted, numbers, min(rows, few), self.multiline):
                if gone := [name for name in wanted if name not in batch.schema.names]:
                    raise ValueError(
                        f"every pass must find the same columns; got no {shown(gone[0])} in {file.path} now."
                    )
                columns = [arrow.batch_vector(batch, name) for name in self.names] if features else []
                yield Batch(columns, self.vectors(batch), batch.num_rows, file.place(start))
                start += batch.num_rows

    def vectors(self, batch: Any) -> dict[str, np.ndarray | None]:
        """Return the labels, weights and offsets of a batch, if they were asked for."""
        found = {part: None if n is None else arrow.batch_vector(batch, n) for part, n in self.others.items()}
        labels = [x for part, x in found.items() if part.startswith("target") and x is not None]
        label = np.column_stack(labels) if len(labels) > 1 else found["target"]
        return {"label": label, "weight": found["weight"], "offset": found["offset"]}


@dataclass(frozen=True)
class Batch:
    """Some rows of a file: the columns of X, if they were asked for, and the other columns."""

    columns: list[np.ndarray]
    vectors: dict[str, np.ndarray | None]
    rows: int
    place: Callable[[int], str]


@dataclass
class GrowingChunk:
    """A chunk to which batches are added until it has `most` rows."""

    most: int
    dtype: np.dtype
    rows: int = 0
    features: np.ndarray | None = None
    parts: list[dict[str, np.ndarray | None]] = field(default_factory=list)
    places: list[tuple[int, Callable[[int], str]]] = field(default_factory=list)  # and the first row of each

    def add(self, batch: Batch, start: int) -> int:
        """Add as many rows of a batch, from `start` on, as there is room for; return where the rest starts."""
        stop = min(batch.rows, start + self.most - self.rows)
        if batch.columns:
            self.add_features([column[start:stop] for column in batch.columns], lambda i: batch.place(start + i))
        self.parts.append({name: None if x is None else x[start:stop] for name, x in batch.vectors.items()})
        self.places.append((self.rows - start, batch.place))
        self.rows += stop - start
        return stop

    def add_features(self, columns: list[np.ndarray], place: Callable[[int], str]) -> None:
        """Copy columns while the cache holds them. Raises if an entry is not finite."""
        if self.features is None:
            self.features = np.empty((self.most, len(columns)), self.dtype)
        added = self.features[self.rows : self.rows + len(columns[0])]
        if not join_columns(columns, added):
            check_finite_chunk(added, "X", place)

    def done(self) -> Chunk:
        joined: dict[str, Any] = {
            name: None if x is None else np.concatenate([part[name] for part in self.parts])
            for name, x in self.parts[0].items()
        }
        features = None if self.features is None else self.features[: self.rows]
        return Chunk(features, place=self.place, finite=True, **joined)

    def place(self, i: int) -> str:
        """Name a row and its file."""
        first, name = self.places[bisect_right(self.places, i, key=lambda known: known[0]) - 1]
        return name(i - first)
