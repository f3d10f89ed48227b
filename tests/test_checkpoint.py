"""A fit that is killed continues from its last completed pass, and ends where it would have ended."""

import os
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

from viper import VariationalLogisticRegression
from viper.data import model_file
from viper.data.checkpoint import digest
from viper.errors import CheckpointWarning
from viper.inference.rows import Arrays

ROWS = 60_000


def data(seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((ROWS, 5))
    return X, X @ [1.0, -1.0, 0.5, 0.0, 2.0] + rng.logistic(size=ROWS) > 0


class Interrupted(KeyboardInterrupt):
    pass


class Passes:
    """Counts passes over all rows, and interrupts before one pass too many."""

    def __init__(self, monkeypatch):
        self.count, self.most = 0, None
        original = Arrays.reduce

        def reduce(source, function):
            if source.rows == ROWS:
                if self.count == self.most:
                    raise Interrupted
                self.count += 1
            return original(source, function)

        monkeypatch.setattr(Arrays, "reduce", reduce)

    def until(self, most):
        self.count, self.most = 0, most


@pytest.fixture
def passes(monkeypatch):
    return Passes(monkeypatch)


@pytest.mark.parametrize(
    "options", [{}, {"covariance": "diagonal"}, {"prior_scale": "auto"}, {"bound": "mc", "samples": 50}]
)
def test_interrupted_after_every_pass(options, passes, tmp_path):
    """Each run is stopped one pass later, and together the runs make no more passes than a single one."""
    X, y = data()
    model = VariationalLogisticRegression(random_state=1, **options)
    whole = model.fit(X, y)
    expected, total = whole.covariance_, passes.count
    folder, runs = tmp_path / "fit", 0
    assert total > 2
    while True:
        passes.until(2)
        runs += 1
        try:
            resumed = VariationalLogisticRegression(random_state=1, **options).fit(X, y, checkpoint=folder)
            break
        except Interrupted:
            assert folder.is_dir()
    assert runs == -(-total // 2)
    np.testing.assert_array_equal(resumed.covariance_, expected)
    assert [x[:5] for x in resumed.history_] == [x[:5] for x in whole.history_]
    assert not folder.exists()


def test_no_seed_is_needed(passes, tmp_path):
    """Without random_state, a resumed fit continues with the random numbers that it started with."""
    X, y = data()
    passes.until(2)
    with pytest.raises(Interrupted):
        VariationalLogisticRegression().fit(X, y, checkpoint=tmp_path / "fit")
    passes.until(None)
    VariationalLogisticRegression().fit(X, y, checkpoint=tmp_path / "fit")
    resumed = passes.count
    passes.until(None)
    VariationalLogisticRegression().fit(X, y)
    assert abs(resumed - (passes.count - 2)) <= 1  # on other subsets a fit may take one pass more or less


FIT = """
import sys
import numpy as np
import viper

def rows():
    for i in range(60):
        rng = np.random.default_rng(i)
        X = rng.standard_normal((1000, 5))
        yield X, X @ [1.0, -1.0, 0.5, 0.0, 2.0] + rng.logistic(size=1000) > 0

def fit(checkpoint):
    return viper.VariationalLogisticRegression(random_state=0).fit(rows, checkpoint=checkpoint)

if __name__ == "__main__":
    np.save(sys.argv[1] + "/coef.npy", fit(sys.argv[1] + "/fit").coef_)
"""


def test_killed_process(tmp_path):
    """SIGKILL in the middle of a real fit; a second run completes it."""
    command = [sys.executable, "-c", FIT, str(tmp_path)]
    process = subprocess.Popen(command)
    while len(list(tmp_path.glob("fit/*.pass"))) < 6 and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert not (tmp_path / "coef.npy").exists()
    assert len(list(tmp_path.glob("fit/*.pass"))) >= 6
    subprocess.run(command, check=True)
    exec(FIT, program := {"__name__": "program"})
    np.testing.assert_array_equal(np.load(tmp_path / "coef.npy"), program["fit"](None).coef_)
    assert not (tmp_path / "fit").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda X, y: ((X[:-1], y[:-1]), {}), "started with {'rows': 60000}, for {'rows': 59999}"),
        (lambda X, y: ((X[:, :4], y), {}), "'dimension': 6"),
        (lambda X, y: ((X + 1e-9, y), {}), "'first rows'"),
        (lambda X, y: ((X, y), {"prior_scale": 2.0}), "'prior_scale': 1.0"),
        (lambda X, y: ((X, y), {"bound": "pg"}), "'bound': 'viper'"),
    ],
)
def test_checkpoint_of_another_fit(change, message, passes, tmp_path):
    X, y = data()
    passes.until(1)
    with pytest.raises(Interrupted):
        VariationalLogisticRegression().fit(X, y, checkpoint=tmp_path)
    before = sorted(tmp_path.iterdir())
    rows, options = change(X, y)
    with pytest.raises(ValueError, match="checkpoint must belong to the same fit; got .*" + message):
        VariationalLogisticRegression(**options).fit(*rows, checkpoint=tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_folder_of_something_else(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    for place in (tmp_path, tmp_path / "letter.txt"):
        with pytest.raises(ValueError, match="checkpoint must be a new folder or one of an interrupted fit"):
            VariationalLogisticRegression().fit(*data(), checkpoint=place)
    assert (tmp_path / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("place", ["file/a", "file/a/b", 3, True, ""])
def test_what_is_no_folder(place, tmp_path):
    (tmp_path / "file").write_text("dear")
    place = tmp_path / place if isinstance(place, str) and place else place
    with pytest.raises(
        ValueError, match=r"checkpoint must be (a folder that can be created; got .*Not a dir|the name of)"
    ):
        VariationalLogisticRegression().fit(*data(), checkpoint=place)
    assert (tmp_path / "file").read_text() == "dear"


DAMAGE = [lambda x: x[:-1], lambda x: x[:20], lambda x: b"", lambda x: x[:-8] + bytes(8)]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_pass_is_made_again(damage, passes, tmp_path):
    X, y = data()
    expected = VariationalLogisticRegression(random_state=0).fit(X, y).coef_
    passes.until(2)
    with pytest.raises(Interrupted):
        VariationalLogisticRegression(random_state=0).fit(X, y, checkpoint=tmp_path / "fit")
    last = max((tmp_path / "fit").glob("*.pass"))
    last.write_bytes(damage(last.read_bytes()))
    passes.until(None)
    fitted = VariationalLogisticRegression(random_state=0).fit(X, y, checkpoint=tmp_path / "fit")
    np.testing.assert_array_equal(fitted.coef_, expected)
    assert not (tmp_path / "fit").exists()


@pytest.mark.parametrize("damage", DAMAGE[:3])
def test_a_damaged_checkpoint(damage, passes, tmp_path):
    X, y = data()
    passes.until(2)
    with pytest.raises(Interrupted):
        VariationalLogisticRegression(random_state=0).fit(X, y, checkpoint=tmp_path)
    header = tmp_path / "fit.viper"
    header.write_bytes(damage(header.read_bytes()))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(
        ValueError, match=r"checkpoint must be intact; got .*, which is damaged: .* Delete the folder to"
    ):
        VariationalLogisticRegression(random_state=0).fit(X, y, checkpoint=tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_pass_that_was_asked_otherwise_is_made_again(passes, tmp_path):
    """Sums from the log are used only if the same sums are requested; a log cannot make a fit wrong."""
    X, y = data()
    expected = VariationalLogisticRegression(random_state=0).fit(X, y).coef_
    passes.until(2)
    with pytest.raises(Interrupted):
        VariationalLogisticRegression(random_state=0).fit(X, y, checkpoint=tmp_path)
    for path in tmp_path.glob("*.pass"):
        kind, tensors, _ = model_file.read_tensors(path)
        model_file.write_tensors(
            path, kind, {name: x + 1.0 for name, x in tensors.items()}, {"asked": "other"}, overwrite=True
        )
    passes.until(None)
    fitted = VariationalLogisticRegression(random_state=0).fit(X, y, checkpoint=tmp_path)
    np.testing.assert_array_equal(fitted.coef_, expected)


def test_disk_full_costs_the_checkpoint_and_not_the_fit(tmp_path, monkeypatch):
    """ENOSPC as bytes are written: the temporary file is removed, complete files stay, and the fit continues."""
    X, y = data()
    expected = VariationalLogisticRegression(random_state=0).fit(X, y).coef_
    room = iter([True] * 8)  # four files, each with its directory

    def fsync(_):
        if not next(room, False):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    seen = []
    monkeypatch.setattr(
        "viper.data.checkpoint.PassLog.remove", lambda log: seen.extend(sorted(p.name for p in log.folder.iterdir()))
    )
    with pytest.warns(CheckpointWarning, match="No space left on device"):
        model = VariationalLogisticRegression(random_state=0).fit(X, y, checkpoint=tmp_path)
    np.testing.assert_array_equal(model.coef_, expected)
    assert seen == ["000000.pass", "000001.pass", "000002.pass", "fit.viper"]


def test_digests_tell_what_was_asked():
    values = [
        partial(data, seed=np.zeros(2)),
        partial(data, seed=np.zeros(3)),
        partial(digest, seed=np.zeros(2)),
        None,
        1,
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(values[0]) == digest(partial(data, seed=np.zeros(2)))
