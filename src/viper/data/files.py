"""Rows in Parquet, Arrow or CSV files, read in chunks, once per pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from viper.data import arrow
from viper.data.blocks import Chunk, check_names
from viper.errors import shown
from viper.inference.memory import SHARE_FOR_CACHE, available_memory


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
            file.check_unchanged()  # and remember what it is like
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

    def may_hold(self, rows: int) -> bool:
        others = len(self.targets) + 8 * sum(self.others[name] is not None for name in ("weight", "offset"))
        needed = rows * (self.width * self.dtype.itemsize + others)
        return needed <= (SHARE_FOR_CACHE * available_memory() if self.cache is None else self.cache)

    def check_unchanged(self) -> None:
        for file in self.files:
            file.check_unchanged()

    def read(self, rows: int, features: bool = True) -> Iterator[Chunk]:
        named = [name for name in self.others.values() if name is not None]
        wanted = list(dict.fromkeys([*(self.names if features else []), *named]))
        numbers = {*self.names, *named} - {*self.targets}
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
                several = len(self.targets) > 1
                y = (
                    np.column_stack([arrow.batch_vector(batch, n) for n in self.targets])
                    if several
                    else found["target"]
                )
                yield Chunk(X, y, weight=found["weight"], offset=found["offset"], place=file.place(start))
                start += batch.num_rows
            if not self.multiline:
                file.check_line_breaks(start)
