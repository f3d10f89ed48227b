"""Progress: what is written and when, and what scikit-learn's callbacks hear."""

import io
import os
import pty
import subprocess
import sys
import textwrap
from contextlib import closing

import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import viper
from viper.inference import progress
from viper.inference.newton import Iteration
from viper.inference.progress import Progress

callbacks = pytest.mark.skipif(not hasattr(progress.Callbacks, "set_callbacks"), reason="scikit-learn before 1.9")


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 3))
    return X, rng.random(300) < 1 / (1 + np.exp(-X @ [1.0, -1.0, 0.5]))


class Recorder:
    """A callback that writes down what it hears."""

    def __init__(self):
        self.events = []
        self.fitted = None

    def setup(self, estimator, context):
        self.events.append("setup")

    def on_fit_task_begin(self, estimator, context, *, metadata=None):
        self.events.append(f"begin {context.task_name}")
        if context.parent is None:
            self.metadata = metadata

    def on_fit_task_end(self, estimator, context, *, fitted_estimator=None):
        self.events.append(f"end {context.task_name}")
        self.fitted = fitted_estimator

    def teardown(self, estimator, context):
        self.events.append("teardown")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def step(seconds, rows=1000):
    return Iteration(rows, False, -12.5, 1.0, 1e-3, seconds)


def aged(seconds, *args, **kwargs):
    """A Progress that began some time ago."""
    report = Progress(*args, **kwargs)
    report.began -= seconds
    return report


# --- on stderr ---


@pytest.mark.parametrize(
    ("verbose", "age", "terminal", "shown"),
    [
        (True, 0.0, False, True),
        (False, 9.0, True, False),
        ("auto", 1.0, True, False),
        ("auto", 9.0, True, True),
        ("auto", 9.0, False, False),
    ],
)
def test_verbose(monkeypatch, verbose, age, terminal, shown):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    report = aged(age, verbose)
    report(step(age))
    report.close()
    assert ("objective -12.5" in stream.getvalue()) == shown
    assert ("rows/s" in stream.getvalue()) == shown


def test_passes_and_rate_come_from_the_rows():
    report = aged(10.0, "auto", rows=1000)
    for _ in range(3):
        report(step(9.0))
    assert "pass 3.0" in report.text
    assert "300 rows/s" in report.text
    by_block = aged(10.0, "auto", rows=1000)
    for _ in range(5):
        by_block.rows_done(500)
    by_block(step(9.0))  # the same rows, not more of them
    assert "pass 2.5" in by_block.text
    assert "250 rows/s" in by_block.text


def test_on_a_real_terminal_the_line_appears_and_goes(tmp_path):
    program = """
        import sys, time
        from viper.inference.progress import Progress
        from viper.inference.newton import Iteration
        report = Progress("auto", rows=1000)
        report.began -= 10
        for k in range(3):
            report(Iteration(1000, False, -12.5, 1.0, 1e-3, 10.0))
            time.sleep(0.15)
        report.close()
        print("done", file=sys.stderr)
    """
    outer, inner = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    process = subprocess.Popen(command, stderr=inner, env=environment)
    os.close(inner)
    text = b""
    while chunk := read(outer):
        text += chunk
    assert process.wait() == 0
    assert b"rows/s" in text
    assert b"\x1b[2K" in text  # the line is erased
    assert text.rstrip().endswith(b"done")


def read(descriptor):
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other end is closed
        return b""


def test_a_fit_that_fails_closes_its_line(monkeypatch, data):
    closed = []
    monkeypatch.setattr(Progress, "close", lambda self: closed.append(True))
    monkeypatch.setattr(Progress, "__call__", lambda self, step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        viper.VariationalLogisticRegression().fit(*data)
    assert closed == [True]


# --- scikit-learn's callbacks ---


@callbacks
def test_a_callback_hears_every_iteration(data):
    heard = Recorder()
    model = viper.VariationalLogisticRegression().set_callbacks(heard).fit(*data, sample_weight=np.ones(300))
    begins, ends = (heard.events.count(f"{word} iteration") for word in ("begin", "end"))
    assert begins == ends == len(model.history_) + 1  # the last is opened and found to be superfluous
    assert [heard.events[i] for i in (0, 1, -2, -1)] == ["setup", "begin fit", "end fit", "teardown"]
    assert list(heard.metadata) == ["sample_weight"]
    assert np.array_equal(heard.fitted.predict_proba(data[0]), model.predict_proba(data[0]))


@callbacks
def test_callbacks_change_nothing(data):
    plain = viper.VariationalLogisticRegression(random_state=0).fit(*data)
    told = viper.VariationalLogisticRegression(random_state=0).set_callbacks(Recorder()).fit(*data)
    assert np.array_equal(plain.coef_, told.coef_)
    assert {*vars(told)} - {*vars(plain)} == {"_skl_callbacks"}
    assert clone(told)._skl_callbacks == told._skl_callbacks


@callbacks
def test_a_failing_fit_is_torn_down(data):
    heard = Recorder()
    with pytest.raises(ValueError, match="at least two classes"):
        viper.VariationalLogisticRegression().set_callbacks(heard).fit(data[0], np.zeros(300))
    assert heard.events == ["setup", "begin fit", "teardown"]


@callbacks
def test_the_progress_bar_of_scikit_learn_sees_through_a_pipeline(data, capsys):
    from sklearn.callback import ProgressBar

    pipeline = make_pipeline(StandardScaler(), viper.VariationalLogisticRegression())
    pipeline.set_callbacks(ProgressBar()).fit(*data)
    assert "VariationalLogisticRegression" in capsys.readouterr().out


@callbacks
def test_gp_callbacks(data):
    heard = Recorder()
    model = viper.VariationalGPClassifier(n_inducing=5, n_starts=1, max_iter=3, tol=1e9, random_state=0)
    model.set_callbacks(heard).fit(data[0][:40, :1], data[1][:40])
    assert heard.events.count("end iteration") > 1
    assert heard.events[-1] == "teardown"


def test_version():
    """The mixin is scikit-learn's own as soon as it has one."""
    has = tuple(map(int, sklearn.__version__.split(".")[:2])) >= (1, 9)
    assert hasattr(progress.Callbacks, "set_callbacks") == has


def test_what_is_expected_is_shown_until_something_is_reported(monkeypatch):
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with closing(Progress("auto")) as report:
        report.expect("compiling")
        report._waiting.join()
    assert "compiling" in screen.getvalue()
    monkeypatch.setattr(progress, "SILENT_SECONDS", 60.0)
    with closing(aged(100.0, "auto")) as report:
        report.expect("nothing that takes long")
        report(step(100.0))
    assert "nothing" not in screen.getvalue()
    assert "rows/s" in screen.getvalue()
