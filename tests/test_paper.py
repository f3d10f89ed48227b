"""The pipeline of the paper's artefacts: every finished run is kept once, whatever happens; tables and figures."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from pages import ROOT

from viper.paper import artefacts, reproduce
from viper.paper.artefact import Artefact, Request
from viper.paper.figures import figure_style, save_figure
from viper.paper.pipeline import make_runs, reproduce_one
from viper.paper.records import Records, csv_cell, folder_lock
from viper.paper.tables import ResultTable, Spread, escape_latex, format_number, spread_of

CALLS: list[int] = []


class Multiples(Artefact):
    """Four runs of three rows each: the seed times a factor."""

    name = "multiples"
    keys = ("seed",)
    columns = ("method", "value")

    def __init__(self, factor=1, **config):
        self.config = {"factor": factor, **config}

    def configure(self, request):
        return self.config

    def jobs(self, request):
        return [{"seed": s} for s in request.seeds(4, 2)]

    def run(self, job, config, data):
        CALLS.append(job["seed"])
        if job["seed"] == config.get("fails"):
            raise ArithmeticError("no such number")
        return [{"method": m, "value": job["seed"] * config["factor"]} for m in ("a", "b", "c")]

    def tables(self, frame, config):
        rows = [[method, float(part.value.sum())] for method, part in frame.groupby("method")]
        return [ResultTable("sums", "Sums", ["method", "value"], rows)]


def asked(runs: int | None = None) -> Request:
    return Request(runs, 1, False, None)


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


@pytest.fixture
def calls():
    CALLS.clear()
    return CALLS


# --- runs ---


def test_runs_are_made_once_and_more_can_be_added(tmp_path, calls):
    assert reproduce_one(Multiples(), asked(2), 1, tmp_path, "run").made == 2
    outcome = reproduce_one(Multiples(), asked(), 1, tmp_path, "run")
    assert (outcome.made, outcome.runs, calls) == (2, 4, [1, 2, 3, 4])
    rows = read(tmp_path / "multiples" / "runs.csv")
    assert [(int(r["seed"]), r["method"], int(r["value"])) for r in rows] == [(s, m, s) for s in calls for m in "abc"]
    assert all(float(r["seconds"]) >= 0.0 and "torch" in r["versions"] for r in rows)


def test_a_failing_run_loses_no_other(tmp_path):
    with pytest.raises(ArithmeticError) as caught:
        reproduce_one(Multiples(fails=3), asked(), 1, tmp_path, "run")
    assert "seed = 3 of multiples" in "".join(caught.value.__notes__)
    assert {r["seed"] for r in read(tmp_path / "multiples" / "runs.csv")} == {"1", "2"}


def test_a_file_torn_anywhere_keeps_whole_runs_only(tmp_path):
    make_runs(Multiples(), asked(), 1, records := Records(tmp_path, Multiples()))
    whole = records.csv.read_bytes()
    ends = [m + 1 for m in range(len(whole)) if whole[m : m + 1] == b"\n"]
    for cut in range(0, len(whole), 3):
        records.csv.write_bytes(whole[:cut])
        lines = sum(end <= cut for end in ends[1:])
        assert records.repair() == {(str(s),) for s in range(1, 1 + lines // 3)}
        assert records.csv.read_bytes() == (whole[: ends[lines - lines % 3]])
    make_runs(Multiples(), asked(), 1, records)
    assert [(r["seed"], r["part"]) for r in read(records.csv)] == [(s, f"{k}/3") for s in "1234" for k in (1, 2, 3)]


def test_another_configuration_is_noticed(tmp_path):
    reproduce_one(Multiples(), asked(), 1, tmp_path, "run")
    before = (tmp_path / "multiples" / "runs.csv").read_bytes()
    with pytest.raises(ValueError, match=r"got factor = 2 where .*runs.csv was made with 1"):
        reproduce_one(Multiples(factor=2), asked(), 1, tmp_path, "run")
    assert (tmp_path / "multiples" / "runs.csv").read_bytes() == before
    assert json.loads((tmp_path / "multiples" / "runs.json").read_text())["factor"] == 1


def test_one_process_at_a_time(tmp_path):
    with folder_lock(tmp_path), pytest.raises(RuntimeError, match="one process at a time"), folder_lock(tmp_path):
        pass
    with folder_lock(tmp_path):  # and free again
        pass


def test_unknown_columns_are_refused(tmp_path):
    records = Records(tmp_path, Multiples())
    with pytest.raises(ValueError, match=r"columns it declares; got \['other'\]"):
        records.append({"seed": 1}, [{"other": 1}], 0.0, "")


@pytest.mark.parametrize(("value", "text"), [(None, ""), (3, "3"), ("x", "x"), (1 / 3, "0.3333333333"), (True, "True")])
def test_cells(value, text):
    assert csv_cell(value) == text


KILLED = """
import sys
from pathlib import Path
from viper.paper import reproduce
reproduce("logistic", quick=True, jobs=2, out=Path(sys.argv[1]), step="run")
"""


def logistic_keys(path: Path) -> list[tuple[str, ...]]:
    return [(r["setting"], r["n"], r["p"], r["seed"], r["method"], r["family"]) for r in read(path)]


@pytest.mark.slow
def test_a_killed_study_continues_where_it_stopped(tmp_path):
    path = tmp_path / "quick" / "logistic" / "runs.csv"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not (path.exists() and path.read_bytes().count(b"9/9") >= 2):
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = path.read_bytes()
    whole = kept[: kept.rfind(b"9/9") + 4]  # but for what the kill tore
    (outcome,) = reproduce("logistic", quick=True, out=tmp_path, step="run")
    assert path.read_bytes().startswith(whole)
    assert outcome.made == 12 - whole.count(b"9/9")
    keys = logistic_keys(path)
    assert len(keys) == len(set(keys)) == 12 * 9


# --- on a cluster ---


@pytest.mark.slow
def test_a_dask_cluster_makes_the_same_runs(tmp_path):
    distributed = pytest.importorskip("distributed")
    (here,) = reproduce("elbo-terms", quick=True, out=tmp_path / "here", step="run")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        distributed.Client(cluster),
    ):
        (there,) = reproduce("elbo-terms", quick=True, out=tmp_path / "there", step="run")
    assert there.made == here.made == 2
    one, two = (sorted(map(numbers, read(o.files[0]))) for o in (here, there))
    np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-9)


def numbers(row: dict[str, str]) -> list[float]:
    return [float(row[k].replace("limit", "0")) for k in ("n", "seed", "terms", "elbo", "gap", "loss", "kl_optimum")]


# --- tables and figures ---

TABLE = ResultTable(
    "example",
    "η & others",
    ["method", "ELBO", "published"],
    [["VI-PER_1", Spread(-264.04, -336.6, -225.4), 1e-9], ["VI-PG 5 %", None, 0.25]],
    ["A note."],
)


def test_markdown():
    lines = TABLE.as_markdown().splitlines()
    assert lines[0] == "# η & others"
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in lines[2:6]]
    assert cells[0] == list(TABLE.columns)
    assert cells[2:] == [["VI-PER_1", "-264 (-337, -225)", "1.00e-09"], ["VI-PG 5 %", "-", "0.25"]]


def test_csv_has_every_number():
    rows = list(csv.DictReader(io.StringIO(TABLE.as_csv())))
    assert [float(rows[0][k]) for k in ("ELBO", "ELBO 2.5%", "ELBO 97.5%")] == [-264.04, -336.6, -225.4]
    assert rows[1]["ELBO"] == ""


def test_latex_is_escaped():
    text = TABLE.as_latex()
    assert r"VI-PER\_1 & -264 (-337, -225) & 1.00e-09 \\" in text
    assert r"\caption{$\eta$ \& others. A note.}" in text
    assert escape_latex("a_b {5 %} ∞") == r"a\_b \{5 \%\} $\infty$"


def test_a_narrow_terminal_gets_every_column_in_pieces(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "26")
    TABLE.show()
    out = capsys.readouterr().out
    assert "-264" in out
    assert "1.00e-09" in out
    assert "-337" not in out
    assert max(map(len, out.splitlines())) <= 26
    assert out.count("VI-PER_1") == 2


def test_a_spread_is_the_papers_summary():
    values = np.random.default_rng(1).normal(size=101)
    assert spread_of([*values, float("nan")]) == tuple(np.quantile(values, [0.5, 0.025, 0.975]))
    assert spread_of([float("nan")]) is None


@pytest.mark.parametrize(
    ("x", "text"), [(0.0, "0"), (-264.04, "-264"), (1234567.0, "1,234,567"), (0.0341, "0.0341"), (1.5e-12, "1.50e-12")]
)
def test_number(x, text):
    assert format_number(x) == text


def test_figures_are_complete_files_of_both_kinds(tmp_path):
    import matplotlib.pyplot as plt

    with figure_style():
        figure, axis = plt.subplots()
        axis.plot([0, 1])
        png, pdf = save_figure(figure, tmp_path / "line")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert pdf.read_bytes().startswith(b"%PDF")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["line.pdf", "line.png"]


# --- what was asked for ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"artefact": "table-9"}, "artefact must be 'all' or one of .*'logistic'.*; got 'table-9'"),
        ({"artefact": "figure-1", "step": "plot"}, "step must be one of .*; got 'plot'"),
        ({"artefact": "figure-1", "runs": 0}, "runs must be at least 1; got 0"),
        ({"artefact": "figure-1", "jobs": -2}, "jobs must be at least 1; got -2"),
    ],
)
def test_bad_requests(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        reproduce(**options, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_table_without_runs(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"need finished runs; got none in .*Run `viper reproduce errors` first"
    ):
        reproduce("errors", step="table", out=tmp_path)


def test_every_artefact_says_what_it_is():
    assert len({a.name for a in artefacts()}) == len(artefacts())
    assert all(a.what and a.where and a.minutes > 0.0 for a in artefacts())


@pytest.mark.parametrize("artefact", artefacts(), ids=lambda artefact: artefact.name)
def test_the_minutes_listed_are_those_of_the_committed_runs(artefact):
    runs = Records(ROOT / "results" / artefact.name, artefact).frame().drop_duplicates(list(artefact.keys))
    # to the minute, or to the tenth of one; studies of seconds are listed as 0.1
    assert artefact.minutes == pytest.approx(runs.seconds.sum() / 120.0, rel=0.03, abs=0.1)
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| `{artefact.name}` \|[^|]*\| {artefact.minutes:g} \|$", page, flags=re.MULTILINE)
