"""The paper's data, against servers and files made here; the public sets themselves only where VIPER_DATA has them."""

import errno
import gzip
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from viper import VariationalLogisticRegression, datasets, expected_sigmoid
from viper.datasets import download, liquefaction, public
from viper.errors import DataError

ROWS = np.array([[1.5, 0.0, 1.0], [-2.0, 3e-7, 0.0], [0.1, 22.08, 1.0]])
TEXT = b"+1 1:1.500000 \n-1 1:-2 2:3.000000e-07\n+1 1:0.1 2:22.08"
TABLE = "x1,x2,y\n1.5,0,1\n-2,3e-7,0\n0.1,22.08,1\n"
MADE = public.SetFiles(2, public.LibsvmFile("small", "small", 3, public.values_sha256(ROWS)))


class Server(ThreadingHTTPServer):
    """Answers every request as `mode` says, and counts them."""

    mode, requests, content = "whole", 0, TEXT

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.stalled, self.done = threading.Event(), threading.Event()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.requests += 1
        if server.mode in ("404", "500"):
            self.send_error(int(server.mode))
            return
        self.send_response(200)
        if server.mode != "unannounced":
            self.send_header("Content-Length", str(len(server.content)))
        self.end_headers()
        half = len(server.content) // 2
        self.wfile.write(server.content[:half])
        if server.mode == "truncated":
            return
        if server.mode == "slow":
            self.wfile.flush()
            server.stalled.set()
            server.done.wait(30)
        self.wfile.write(server.content[half:])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.done.set()
        running.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """A set "small" among the public ones, and a cache folder of our own."""
    monkeypatch.setitem(public.SETS, "small", MADE)
    monkeypatch.setenv("VIPER_DATA", str(tmp_path / "cache"))


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


# --- downloads ---


@pytest.mark.parametrize("mode", ["whole", "unannounced"])
def test_a_set_is_downloaded_once(server, tmp_path, mode):
    server.mode = mode
    first = datasets.load("small", address=server.address)
    again = datasets.load("small", address=server.address)
    assert server.requests == 1
    assert files(tmp_path / "cache") == ["small/small"]
    for found in (first, again):
        np.testing.assert_array_equal(found.X, ROWS[:, :-1])
        np.testing.assert_array_equal(found.y, ROWS[:, -1])


def test_a_test_file_comes_along(server, monkeypatch):
    both = public.LibsvmFile("small.t", "small_test", 3, public.values_sha256(ROWS))
    monkeypatch.setitem(public.SETS, "small", MADE._replace(test=both))
    found = datasets.load("small", address=server.address)
    np.testing.assert_array_equal(found.X_test, found.X)
    np.testing.assert_array_equal(found.y_test, found.y)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("404", "must exist on the server; got 404 Not Found"),
        ("500", "got 500 Internal Server Error"),
        ("truncated", r"got 27 of 54 bytes"),
    ],
)
def test_faults_of_the_server_are_named_and_nothing_is_kept(server, tmp_path, mode, message):
    server.mode = mode
    with pytest.raises(DataError, match=message) as caught:
        datasets.load("small", address=server.address)
    assert "--data DIR" in str(caught.value)
    assert files(tmp_path) == []


@pytest.mark.parametrize("content", [TEXT.replace(b"22.08", b"22.09"), TEXT[:-30], b"<html>moved</html>", b""])
def test_other_values_than_the_papers_are_refused(server, tmp_path, content):
    server.content = content
    with pytest.raises(DataError, match="must") as caught:
        datasets.load("small", address=server.address)
    assert "--data DIR" in str(caught.value)
    assert files(tmp_path) == []


def test_no_network(tmp_path):
    with pytest.raises(DataError, match=r"must be reachable; got URLError.*refused.*--data DIR"):
        datasets.load("small", address="http://127.0.0.1:9/")
    assert files(tmp_path) == []


def test_a_damaged_download_is_replaced(server, tmp_path):
    path = tmp_path / "cache" / "small" / "small"
    path.parent.mkdir(parents=True)
    path.write_bytes(TEXT[:20])
    np.testing.assert_array_equal(datasets.load("small", address=server.address).X, ROWS[:, :-1])
    assert path.read_bytes() == TEXT


def test_eight_downloads_at_once(server, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: datasets.load("small", address=server.address), range(8)))
    assert all((ROWS[:, :-1] == one.X).all() for one in found)
    assert files(tmp_path) == ["cache/small/small"]


def test_a_killed_download_leaves_no_half_file(server, tmp_path):
    server.mode = "slow"
    code = (
        "from pathlib import Path; from viper.datasets.download import download;"
        f"download({server.address + 'small'!r}, Path({str(tmp_path / 'small' / 'small')!r}), print)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert server.stalled.wait(60)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not (tmp_path / "small" / "small").exists()


def test_a_full_disk(server, monkeypatch, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(OSError, match="No space left") as caught:
        full.writelines(download.received_chunks(server.address))
    monkeypatch.setattr(download, "received_chunks", lambda url: (_ for _ in ()).throw(caught.value))
    with pytest.raises(DataError, match=r"must be writable; got .*No space left.*Free some space.*VIPER_DATA"):
        datasets.load("small", address=server.address)
    assert caught.value.errno == errno.ENOSPC
    assert files(tmp_path) == []


def test_an_impossible_folder(server, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIPER_DATA", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"must be writable; got .*VIPER_DATA"):
        datasets.load("small", address=server.address)


def test_progress_after_two_seconds_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    report = download.DownloadProgress("https://example.org/heart", 4_000)
    report(500)
    assert capsys.readouterr().err == ""
    report.began -= 3.0
    report(1_000)
    report.close()
    assert capsys.readouterr().err == "\rheart: 1,000 bytes of 4,000, 9 s left\n"


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [("linux", "XDG_CACHE_HOME", "{}/viper"), ("win32", "LOCALAPPDATA", "{}/viper"), ("linux", "VIPER_DATA", "{}")],
)
def test_the_cache_folder_is_the_platforms(monkeypatch, tmp_path, platform, variable, expected):
    monkeypatch.delenv("VIPER_DATA")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv(variable, str(tmp_path))
    assert datasets.cache_folder() == Path(expected.format(tmp_path))


# --- folders ---


@pytest.mark.parametrize("place", ["", "small"])
@pytest.mark.parametrize(
    ("name", "content"),
    [("small", TEXT), ("small.csv", TABLE.encode()), ("small.csv.gz", gzip.compress(TABLE.encode(), mtime=0))],
)
def test_a_folder_may_hold_text_or_tables(tmp_path, place, name, content):
    path = tmp_path / place / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    found = datasets.load("small", tmp_path)
    np.testing.assert_array_equal(np.column_stack([found.X, found.y]), ROWS)
    assert found.X_test is None


def test_a_folder_is_never_written_to(tmp_path):
    (tmp_path / "small").write_bytes(TEXT[:20])
    with pytest.raises(DataError, match="must"):
        datasets.load("small", tmp_path)
    (tmp_path / "small").unlink()
    with pytest.raises(DataError, match=r"data must be a folder with small.csv.gz, small.csv or small"):
        datasets.load("small", tmp_path)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TABLE.replace("-2", "word"), "must be LIBSVM text or a table of numbers"),
        (TABLE.replace(",0\n", ",1\n"), r"must have exactly two labels; got 1: \[1.0\]"),
        (TABLE.replace("1.5", "1.6"), r"got 3 × 2, [0-9a-f]{12}…"),
    ],
)
def test_a_wrong_table_is_named(tmp_path, content, message):
    (tmp_path / "small.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        datasets.load("small", tmp_path)


def test_an_unknown_name():
    with pytest.raises(DataError, match=r"name must be one of .*'heart'.*; got 'iris'"):
        datasets.load("iris")


SHAPES = {"breast-cancer": (683, 10), "svmguide1": (3089, 4), "australian": (690, 14), "fourclass": (862, 2)}
SHAPES["heart"] = (270, 13)
REAL = os.environ.get("VIPER_DATA")  # before the fixture changes it


@pytest.mark.skipif(REAL is None, reason="needs the public data sets; VIPER_DATA names their folder")
@pytest.mark.parametrize("name", SHAPES)
def test_the_public_sets(name):
    assert datasets.load(name, REAL).X.shape == SHAPES[name]


# --- soil liquefaction: the stand-in ---


@pytest.fixture(scope="module")
def standin():
    return datasets.make_liquefaction(seed=3, rows=200_000, grid=(62, 58))


def test_the_stand_in_has_the_papers_size():
    assert liquefaction.TRAINING_ROWS == 1_719_400
    assert liquefaction.GRID[0] * liquefaction.GRID[1] == 89_900
    assert liquefaction.TRAINING_QUAKES + 1 == 25


def test_the_stand_in_is_given_by_its_seed(standin):
    again = datasets.make_liquefaction(seed=3, rows=200_000, grid=(62, 58))
    for one, two in zip(standin, again, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(datasets.make_liquefaction(seed=4, rows=100, grid=(3, 3)).X, standin.X[:100])
    assert "stand-in" in standin.source


def test_the_stand_in_has_the_mixtures_moments(standin):
    c = liquefaction.generator_constants()
    share = np.array([c["pi"], 1.0 - c["pi"]])
    means, covariances = np.stack([c["mu1"], c["mu2"]]), np.stack([c["C1"], c["C2"]])
    np.testing.assert_allclose(share @ means, 0.0, atol=1e-9)
    expected = np.einsum("k,kij->ij", share, covariances + np.einsum("ki,kj->kij", means, means))
    found = standin.X.T @ standin.X / len(standin.X)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.abs((found - expected) / scale).max() < 4.0 * np.sqrt(2.0 / len(standin.X))
    # E[y], in closed form
    f = [torch.tensor([float(v) for v in pair]) for pair in ((c["intercept"] + means @ c["beta"]),)]
    spread = torch.tensor([float(c["beta"] @ C @ c["beta"]) for C in covariances])
    prevalence = float(share @ expected_sigmoid(f[0].double(), spread.double()).mean.numpy())
    assert abs(standin.y.mean() - prevalence) < 4.0 * np.sqrt(0.2 / len(standin.y))


def test_the_stand_in_gives_the_published_coefficients(standin):
    c = liquefaction.generator_constants()
    model = VariationalLogisticRegression(intercept_scale=1.0, random_state=0).fit(standin.X, standin.y)
    shift = (model.coef_[0] - c["beta"]) / np.sqrt(np.diag(model.covariance_))[:-1]
    assert np.abs(shift).max() < 4.0
    # the published sds (VI-MC, full covariance) for 1,719,400 rows
    published = np.array([0.00190, 0.01178, 0.00413, 0.00377, 0.00310])
    found = np.sqrt(np.diag(model.covariance_))[:-1] * np.sqrt(len(standin.y) / 1_719_400)
    np.testing.assert_allclose(found, published, rtol=0.02)


def test_every_row_belongs_to_an_earthquake(standin):
    assert standin.quakes[0] == "standin01"
    assert np.bincount(standin.quake, minlength=24).min() > 0
    assert standin.position.shape == (62 * 58, 2)
    assert len(np.unique(standin.position, axis=0)) == 62 * 58


def test_a_smooth_field_is_standard_normal_in_each_cell():
    generator = np.random.default_rng(0)
    fields = np.stack([liquefaction.smooth_field((20, 16), generator) for _ in range(4000)])
    variance = (fields**2).mean(0)
    assert np.abs(variance - 1.0).max() < 6.0 * np.sqrt(2.0 / 4000)
    neighbours = (fields[:, :-1] * fields[:, 1:]).mean()
    assert 0.5 < neighbours < 1.0


# --- soil liquefaction: the real file ---


@pytest.fixture
def table():
    """In the layout of the real file, columns that are not needed included."""
    generator = np.random.default_rng(5)
    frame = pd.DataFrame(generator.normal(3.0, 1.0, (40, 7)), columns=["lon", "lat", *liquefaction.FEATURES])
    frame.insert(0, "Unnamed: 0", range(40))
    frame["liq"] = generator.integers(0, 2, 40)
    frame["earthquake"] = np.repeat(["kobe1995", "lomaprieta1989", "arequipa2001", "lomaprieta1989"], 10)
    frame["PGV"] = np.exp(frame.lnPGV)
    return frame


def test_the_real_file_is_read_in_pieces_as_in_one(table, tmp_path):
    table.to_csv(tmp_path / "soil.csv", index=False)
    whole, pieces = (datasets.read_liquefaction(tmp_path / "soil.csv", chunk=chunk) for chunk in (1000, 7))
    for one, two in zip(whole, pieces, strict=True):
        np.testing.assert_array_equal(one, two)
    train = table[table.earthquake != "lomaprieta1989"]
    names = list(liquefaction.FEATURES)
    np.testing.assert_allclose(whole.X, train[names] - train[names].mean(), atol=1e-12)
    np.testing.assert_array_equal(whole.y, train.liq)
    assert [whole.quakes[k] for k in whole.quake] == list(train.earthquake)
    np.testing.assert_allclose(whole.X_test + train[names].mean().to_numpy(), table[names].drop(train.index))
    np.testing.assert_array_equal(whole.position, table[["lon", "lat"]].drop(train.index))
    assert whole.source == "soil.csv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns=["lndw", "liq"]), r"got none named \['liq', 'lndw'\]"),
        (lambda t: t.assign(lnPGV=t.lnPGV.mask(t.index == 12)), "lnPGV must be a finite number; got nan in line 14 of"),
        (lambda t: t.assign(lnwtd=t.lnwtd.astype(str).mask(t.index == 30, "dry")), "got dry in line 32 of"),
        (lambda t: t.assign(liq=t.liq.mask(t.index == 3, 2)), "liq must be 0 or 1; got 2 in line 5 of"),
        (lambda t: t.assign(earthquake=t.earthquake.mask(t.index == 0)), "earthquake must be a name; got nothing in"),
        (lambda t: t[t.earthquake != "lomaprieta1989"], "must contain lomaprieta1989.*; got .*'kobe1995'"),
        (lambda t: t[:0], "must contain lomaprieta1989"),
    ],
)
def test_faults_of_the_real_file_are_named(table, tmp_path, change, message):
    change(table).to_csv(tmp_path / "soil.csv", index=False)
    with pytest.raises(DataError, match=message):
        datasets.read_liquefaction(tmp_path / "soil.csv", chunk=16)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "must be a readable file"), (b"", "must be a table"), (b"\xff\xfe\x00", "must be")]
)
def test_a_file_that_is_not_a_table(tmp_path, content, message):
    if content is not None:
        (tmp_path / "soil.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        datasets.read_liquefaction(tmp_path / "soil.csv")
