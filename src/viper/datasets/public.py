"""The five public data sets of the paper's Section 4.2, from the LIBSVM project's site or a folder.

Every file is verified by the SHA-256 of its labels and features as parsed: line ends and the way numbers are written
make no difference, but one wrong digit does.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from viper.datasets.download import FETCH_BY_HAND, cache_folder, download
from viper.errors import DataError

LIBSVM_SITE = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
TABLE_ENDINGS = (".csv.gz", ".csv")  # of files with a header x1, …, xp, y


class LibsvmFile(NamedTuple):
    """A file of the LIBSVM site: its name there and as a table, its number of rows, the SHA-256 of its values."""

    name: str
    table: str
    rows: int
    sha256: str


class SetFiles(NamedTuple):
    """The number of features of a set, and its files."""

    columns: int
    train: LibsvmFile
    test: LibsvmFile | None = None


class PublicData(NamedTuple):
    """Rows in the order and units of the file. Label 1 is the larger of the file's two labels.

    `X_test` and `y_test` are None where the set has no test file.
    """

    name: str
    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray | None
    y_test: np.ndarray | None


VALUES_SHA256 = {
    "breast-cancer": "665164759a9100a4cb08e261314cf5ddf3b566673f75d7ff8465d1472b948076",
    "svmguide1": "2f59d65e383655868e59f72d5cc9745d5b9fb8e0d9d1bfef300b08624a5ebf97",
    "svmguide1.t": "0a0a4e8d915cf316b7da5f6df35dff15da79bb5f5b17b969df8602f816e1b9c7",
    "australian": "2a540878f3d43cf0a5b6037cb3412f3c1835bee28889484ada675fb5dee31b15",
    "fourclass": "5553464b7659324c0d2b3ce5bf9842475b463a98d28b6ebb8ded3cbc9d693177",
    "heart": "63ec604a5108c6d3d71e4082226a18fa51d82999fa926cb7c9478ef057fd01e7",
}
SETS = {
    "breast-cancer": SetFiles(10, LibsvmFile("breast-cancer", "breast-cancer", 683, VALUES_SHA256["breast-cancer"])),
    "svmguide1": SetFiles(
        4,
        LibsvmFile("svmguide1", "svmguide1_train", 3089, VALUES_SHA256["svmguide1"]),
        LibsvmFile("svmguide1.t", "svmguide1_test", 4000, VALUES_SHA256["svmguide1.t"]),
    ),
    "australian": SetFiles(14, LibsvmFile("australian", "australian", 690, VALUES_SHA256["australian"])),
    "fourclass": SetFiles(2, LibsvmFile("fourclass", "fourclass", 862, VALUES_SHA256["fourclass"])),
    "heart": SetFiles(13, LibsvmFile("heart", "heart", 270, VALUES_SHA256["heart"])),
}


def load_public(name: str, data: str | Path | None = None, *, address: str = LIBSVM_SITE) -> PublicData:
    """Read a public data set: "breast-cancer", "svmguide1", "australian", "fourclass" or "heart".

    Parameters
    ----------
    name : str
    data : path, optional
        A folder with the files, as LIBSVM text (`heart`) or tables (`heart.csv.gz`, `heart.csv`), in it or in a
        sub-folder with the set's name. By default the cache folder (the environment variable VIPER_DATA, or the
        platform's), into which missing files are downloaded from the LIBSVM project's site.
    address : str
        Where to download from.

    Raises
    ------
    DataError
        If the files cannot be found or downloaded, or their values are not the paper's.
    """
    if name not in SETS:
        raise DataError(f"name must be one of {list(SETS)}; got {name!r}. Read your own files with pandas.")
    columns, train, test = SETS[name]
    rows = find_or_download(name, train, columns, data, address)
    held = None if test is None else find_or_download(name, test, columns, data, address)
    return PublicData(name, rows[:, :-1], rows[:, -1], *((None, None) if held is None else (held[:, :-1], held[:, -1])))


def find_or_download(name: str, file: LibsvmFile, columns: int, data: str | Path | None, address: str) -> np.ndarray:
    """The verified values of a file: features, then the label."""
    folder = cache_folder() if data is None else Path(data).expanduser()
    own = folder / name / file.name  # where a download is kept
    candidates = [place / (file.table + ending) for place in (folder / name, folder) for ending in TABLE_ENDINGS]
    found = next((path for path in (*candidates, own, folder / file.name) if path.is_file()), None)
    if found is not None:
        try:
            return verified_values(found, file, columns)
        except DataError:
            if data is not None or found != own:  # not a download, so it must not be replaced
                raise
    elif data is not None:
        names = f"{file.table}.csv.gz, {file.table}.csv or {file.name}"
        raise DataError(f"data must be a folder with {names}, or these in {name}/; got {folder}. Check its name.")
    download(address + file.name, own, lambda temporary: verified_values(temporary, file, columns))
    return verified_values(own, file, columns)


def verified_values(path: Path, file: LibsvmFile, columns: int) -> np.ndarray:
    """The values of a file. Raises unless they are the expected ones."""
    rows = read_values(path, columns)
    if (found := values_sha256(rows)) != file.sha256:
        expected = f"{file.rows} × {columns}, SHA-256 of its values {file.sha256[:12]}…"
        got = f"{rows.shape[0]} × {rows.shape[1] - 1}, {found[:12]}…, in {path}"
        raise DataError(f"{file.name} must be the LIBSVM file ({expected}); got {got}. {FETCH_BY_HAND}")
    return rows


def values_sha256(rows: np.ndarray) -> str:
    """SHA-256 of the values as little-endian float64, row by row."""
    return hashlib.sha256((rows + 0.0).astype("<f8").tobytes()).hexdigest()  # + 0.0 makes -0 a 0


def read_values(path: Path, columns: int) -> np.ndarray:
    """n × (columns + 1) numbers: features, then the label as 0 or 1."""
    from sklearn.datasets import load_svmlight_file

    try:
        if path.name.endswith(TABLE_ENDINGS):
            table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
            X, label = table[:, :-1], table[:, -1]
        else:
            with path.open("rb") as file:
                sparse, label = load_svmlight_file(file, n_features=columns)
            X = sparse.toarray()
    except (ValueError, OverflowError, EOFError, OSError) as error:
        raise DataError(f"{path} must be LIBSVM text or a table of numbers; got {error}. {FETCH_BY_HAND}") from error
    classes = np.unique(label)
    if len(classes) != 2:
        raise DataError(
            f"{path} must have exactly two labels; got {len(classes)}: {classes[:5].tolist()}. {FETCH_BY_HAND}"
        )
    return np.column_stack([X, label == classes[1]])
