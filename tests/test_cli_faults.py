"""Errors at the command line, in real processes: one line on stderr, the right exit code, no file lost."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from processes import run_viper

USAGE, INPUT, OUTPUT, INCOMPLETE, INTERRUPTED, TERMINATED, CLOSED_PIPE = 2, 3, 4, 5, 130, 143, 141
GENERATOR = np.random.default_rng(0)
FRAME = pd.DataFrame({"age": GENERATOR.normal(50, 10, 80).round(2), "ward": GENERATOR.choice(["n", "s"], 80)})
FRAME["died"] = np.where(GENERATOR.random(80) < 0.5, "yes", "no")
COMMAND = [sys.executable, "-m", "viper"]


def run(*arguments, folder):
    """Run a command in a new process of Python; `run_viper` does the same sooner, but not the start of Python."""
    return subprocess.run([*COMMAND, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def refused(done, code, *words):
    """Check that the command printed one line that says what is wrong, and nothing else."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("viper: ")
    assert all(word in line for word in words), line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with valid data, a model fitted to them, and a table that takes a while to predict."""
    folder = tmp_path_factory.mktemp("cli")
    FRAME.to_csv(folder / "data.csv", index=False)
    done = run("fit", "data.csv", "-t", "died", "-o", "model.viper", "--cv", "0", folder=folder)
    assert done.returncode == 0, done.stderr
    (folder / "large.csv").write_text("age,ward\n" + "50.5,n\n" * 400_000)
    return folder


def contents(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


TABLES = {
    "no classes": (
        "a,y\n1,0.5\n2,1.5\n3,2.5\n",
        ["with several rows each; got 3 in 'y': 0.5, 1.5, 2.5"],
    ),
    "one class": ("a,y\n1,u\n2,u\n", ["at least two classes; got 1 in 'y': 'u'"]),
    "ragged": ("a,y\n1,u\n2\n", ["must have 2 fields", "got 1 in line 3 of t.csv"]),
    "not UTF-8": (b"a,y\n1,u\n2,\xff\n", ["byte 0xff at position 10, in line 3", "--encoding latin-1"]),
    "empty": ("", ["must have a header and rows", "t.csv, which is empty"]),
    "text by mistake": (
        "a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(20)) + "1o,1\n",
        ["column 'a' must be numeric", "got '1o' in line 22", "--na '1o'"],
    ),
    "missing values": ("a,y\n1,u\n,v\n3,u\n", ["got 1 in 'a' in 3 rows", "--missing drop"]),
    "a target with holes": ("a,y\n1,u\n2,\n3,v\n", ["the target must have no missing values; got 1 in 'y'"]),
}


@pytest.mark.parametrize(("text", "words"), TABLES.values(), ids=TABLES)
def test_bad_tables(text, words, tmp_path):
    (tmp_path / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(run_viper("fit", "t.csv", "-t", "y", "-o", "m.viper", folder=tmp_path), INPUT, *words)
    assert list(contents(tmp_path)) == ["t.csv"]


def test_missing_file(folder):
    refused(run("fit", "dta.csv", "-t", "died", folder=folder), INPUT, "must exist; got dta.csv", "mean data.csv?")


@pytest.mark.parametrize("name", ["dyed", "DIED", "Dyed"])
def test_wrong_target(folder, name):
    refused(run_viper("fit", "data.csv", "-t", name, folder=folder), INPUT, f"got {name!r}. Did you mean 'died'?")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "data.csv", "-t", "died", "--prior", "wide"], ["--prior must be a number, auto or ard, or NAME="]),
        (["fit", "data.csv", "-t", "died", "--seed", "-3"], ["--seed", "greater than or equal to 0"]),
        (["fit"], ["Missing argument", "viper fit --help"]),
        (["fti", "data.csv"], ["No such command 'fti'. Did you mean 'fit'? See: viper --help"]),
        (["bound", "--mean", "1", "--sd", "-2"], ["--sd must not be negative; got -2"]),
    ],
)
def test_wrong_command_lines(arguments, words, folder):
    refused(run_viper(*arguments, folder=folder), USAGE, *words)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--prior", "agee=2"], "--prior must name columns; got 'agee'. Did you mean 'age'?"),
        (["--prior", "-1"], "--prior must be positive and finite"),
        (["--positive", "maybe"], "--positive must be one of the classes of 'died'"),
    ],
)
def test_messages_name_the_option_that_was_typed(options, line, folder):
    refused(run_viper("fit", "data.csv", "-t", "died", *options, folder=folder), INPUT, f"viper: {line}")


def test_a_model_from_elsewhere(folder):
    (folder / "other.viper").write_bytes(pickle.dumps({"a": 1}))
    refused(run_viper("predict", "other.viper", "data.csv", folder=folder), INPUT, "saved by viper", "a pickle")


def test_a_model_as_a_table(folder):
    done = run_viper("predict", "model.viper", "model.viper", folder=folder)
    refused(done, INPUT, "model.viper must be a table; got a model. Name a table; a model comes before it.")


@pytest.mark.parametrize("name", ["p.xlsx", "p.tsv", "p.XLS"])
def test_output_named_like_another_format(name, folder):
    done = run_viper("predict", "model.viper", "data.csv", "-o", name, folder=folder)
    refused(done, OUTPUT, f"the output must be CSV or Parquet; got {name}. End its name in .csv, .csv.gz or .parquet.")
    assert not (folder / name).exists()


@pytest.mark.parametrize("name", ["page.pdf", "page.DOCX", "page.csv", "page.parquet"])
def test_a_report_named_like_another_format(name, folder):
    done = run_viper("report", "model.viper", "data.csv", "-o", name, folder=folder)
    refused(done, OUTPUT, f"the output must be HTML; got {name}. End its name in .html.")
    assert not (folder / name).exists()


def test_rows_in_another_encoding(folder):
    """The separator and the decimal mark of new rows are looked for before the rows are read."""
    (folder / "latin.csv").write_bytes("age;ward\n50;Köln\n".encode("latin-1"))
    done = run_viper("predict", "model.viper", "latin.csv", folder=folder)
    refused(done, INPUT, "latin.csv must be utf-8 text; got byte 0xf6 at position 13, in line 2. Pass --encoding latin")


def test_a_table_as_a_model(folder):
    done = run_viper("summary", "data.csv", folder=folder)
    refused(done, INPUT, "must be a model saved by viper; got data.csv, which is a file of another format.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["evaluate", "model.viper", "data.csv", "-t", "nosuch"],
            "--target must be a column of the table; got 'nosuch'",
        ),
        (
            ["evaluate", "model.viper", "unlabelled.csv"],
            "the table must have the target of the model, to compare predictions with; got no 'died'. Pass --target",
        ),
        (
            ["predict", "model.viper", "data.csv", "--keep", "agee"],
            "--keep must be a column of the table; got 'agee'. Did",
        ),
        (
            ["fit", "data.csv", "-t", "died", "--drop", "age,ward"],
            "Repeat the option for each column: --drop age --drop",
        ),
        (
            ["fit", "data.csv", "-t", "died", "--drop", "age, ward"],
            "Repeat the option for each column: --drop age --drop ward.",
        ),
        (["fit", "data.csv", "-t", "died", "--drop", "xyz"], "--drop must be a column of the table; got 'xyz'. Choose"),
    ],
)
def test_columns_that_options_name(arguments, words, folder):
    FRAME.drop(columns="died").to_csv(folder / "unlabelled.csv", index=False)
    refused(run_viper(*arguments, folder=folder), INPUT, words)


def test_other_columns(folder):
    (folder / "other.csv").write_text("Age,ward\n50,n\n")
    done = run_viper("predict", "model.viper", "other.csv", "-o", "p.csv", folder=folder)
    refused(done, INPUT, "must have the 2 columns of the model; got no 'age' ('Age'?)")
    assert not (folder / "p.csv").exists()


def test_a_new_level_in_a_late_row(folder):
    (folder / "new.csv").write_text("age,ward\n50,n\n\n51,s\n52,west\n")
    done = run_viper("predict", "model.viper", "new.csv", "-o", "p.csv", folder=folder)
    assert done.returncode == INCOMPLETE
    assert "1 of 3 rows has no prediction, because values are not in the training data (1 in 'ward')" in done.stderr
    *_, last = (folder / "p.csv").read_text().splitlines()
    assert last.startswith(",,,,,")
    assert "west" in last
    (folder / "p.csv").unlink()


def test_output_exists(folder):
    before = contents(folder)
    done = run_viper("predict", "model.viper", "data.csv", "-o", "data.csv", folder=folder)
    refused(done, OUTPUT, "got data.csv, which exists", "--force")
    assert contents(folder) == before


@pytest.mark.parametrize("output", ["data.csv", "./data.csv", "link.csv", "model.viper"])
@pytest.mark.parametrize("command", ["predict", "report", "effects", "suggest"])
def test_an_input_is_never_the_output_too(folder, command, output):
    link = folder / "link.csv"
    if not link.is_symlink():
        link.symlink_to("data.csv")
    before = contents(folder)
    done = run_viper(command, "model.viper", "data.csv", "-o", output, "--force", folder=folder)
    refused(done, OUTPUT, "the output must be a different file from the input", "Rename it.")
    assert contents(folder) == before


def test_a_fit_does_not_replace_its_table(folder):
    done = run_viper("fit", "data.csv", "-t", "died", "-o", "data.csv", "--force", folder=folder)
    refused(done, OUTPUT, "the output must be a different file from the input; got data.csv for both.")


def test_links_that_lead_nowhere(folder, tmp_path):
    for name, there in {"circle": "circle", "gone": "nothing.csv", "far": "nofolder/m.viper"}.items():
        (tmp_path / name).symlink_to(there)
    for name in ("circle", "gone"):
        done = run_viper("predict", "model.viper", tmp_path / name, folder=folder)
        refused(done, INPUT, "the file must exist", name, "a link that leads nowhere")
    for name, words in {"circle": "must be writable", "far": "the directory of the output must exist"}.items():
        refused(run_viper("fit", "data.csv", "-t", "died", "-o", tmp_path / name, folder=folder), OUTPUT, words)
    done = run_viper("predict", "model.viper", "data.csv", "-o", tmp_path / "gone", folder=folder)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "gone").is_symlink()
    assert len(pd.read_csv(tmp_path / "nothing.csv")) == len(FRAME)


def test_predictions_go_through_standard_output(folder, tmp_path):
    """The screen, a pipe and a file that the shell has opened get the same table."""
    command = ["predict", "model.viper", "data.csv"]
    plain, piped = run_viper(*command, folder=folder), run_viper(*command, "-o", "/dev/stdout", folder=folder)
    with (tmp_path / "p.csv").open("w") as file:
        file.write("first\n")
        file.flush()
        assert run_viper(*command, "-o", "/dev/stdout", folder=folder, output=file).returncode == 0
    assert piped.returncode == 0, piped.stderr
    assert plain.stdout == piped.stdout
    assert (tmp_path / "p.csv").read_text() == "first\n" + plain.stdout


def test_an_output_that_is_a_socket(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("s")
        done = run_viper("predict", "model.viper", "data.csv", "-o", str(tmp_path / "s"), "--force", folder=folder)
    refused(done, OUTPUT, "must be a regular file or a new name", "which is a socket")


def test_a_file_as_the_folder_of_the_demo(folder):
    refused(
        run_viper("demo", "--folder", "data.csv", folder=folder),
        OUTPUT,
        "--folder must be a folder that can be written to; got data.csv",
    )


def test_read_only_directory(folder, tmp_path):
    closed = tmp_path
    if os.geteuid() == 0:  # root may write anywhere, but not there
        closed = Path("/proc")
        if not closed.is_dir():
            pytest.skip("no directory that root cannot write to")
    else:
        closed.chmod(0o555)
    done = run_viper("predict", "model.viper", "data.csv", "-o", str(closed / "p.csv"), folder=folder)
    refused(done, OUTPUT, "writable", str(closed))


def started(folder, *arguments):
    """Start a prediction and wait until its first rows are in the temporary file."""
    process = subprocess.Popen(
        [*COMMAND, "predict", "model.viper", "large.csv", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not any(path.stat().st_size for path in folder.glob(".viper-*.tmp")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)])
def test_interrupted(folder, sign, code):
    (folder / "p.csv").write_text("precious")
    before = contents(folder)
    process = started(folder, "-o", "p.csv", "--force")
    process.send_signal(sign)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert out == ""
    assert err.splitlines() == ["viper: interrupted; no partial output is left."]
    assert contents(folder) == before
    (folder / "p.csv").unlink()


def test_closed_pipe(folder):
    process = subprocess.Popen(
        [*COMMAND, "predict", "model.viper", "large.csv"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "probability,sd,lower,upper,label,distance,note\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == CLOSED_PIPE
    process.stderr.close()


# --- signals ---


def catches(pid, sign):
    """Whether a process handles a signal: what Linux says of it. Elsewhere, half a second is taken to be enough."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        time.sleep(0.5)
        return True
    (caught,) = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (sign - 1) & 1)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_of_the_start_is_one_line(folder, sign):
    """Also while torch is imported, which aborts with a page of text if an exception is raised inside it."""
    for delay in (0.0, 0.8):
        process = subprocess.Popen(
            [*COMMAND, "fit", "data.csv", "-t", "died", "--model", "gp"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while not catches(process.pid, signal.SIGTERM):  # before that, Python itself is starting
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(sign)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (128 + sign, 0), err
        if process.returncode:
            assert err.splitlines()[-1:] == ["viper: interrupted; no partial output is left."], err
            assert len(err.splitlines()) <= 3, err  # notes may stand before it


def test_a_signal_during_an_import_comes_back(tmp_path):
    """The signal arrives while a module is loading, which must finish, and is raised right after."""
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.2)\nprint('loaded', flush=True)\n"
    )
    program = (
        "from viper.cli.signals import catch_signals, exit_code; import time; catch_signals()\n"
        "try:\n    import slow\n    time.sleep(10)\n"
        "except KeyboardInterrupt:\n    print(exit_code())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["loaded", "143"]


def test_a_swallowed_signal_still_ends_the_command(tmp_path):
    """A library that turns the interrupt into an error of its own does not keep `compare` running."""
    FRAME.to_csv(tmp_path / "data.csv", index=False)
    program = (
        "import os, signal, sys\nfrom sklearn.linear_model import LogisticRegression\n"
        "def fit(self, X, y):\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGINT)\n        for _ in range(10**8): pass\n"
        "    except KeyboardInterrupt:\n        raise ValueError('callback failed') from None\n"
        "LogisticRegression.fit = fit\n"
        "from viper.cli import main\n"
        "main(['compare', 'data.csv', '-t', 'died', '--only', 'LogisticRegression', '--only', 'trees', '--cv', '2'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == INTERRUPTED, done.stderr
    assert done.stderr.splitlines()[-1] == "viper: interrupted; no partial output is left."
    assert done.stdout == ""


# --- what a file holds, and the terminal ---


def test_names_and_labels_cannot_steer_the_terminal(tmp_path):
    labels = ("n\x1b[5m", "p[bold]")
    rows = "".join(f"{i % 7},{i % 3},{labels[i % 2]}\n" for i in range(40))
    (tmp_path / "t.csv").write_text("a\x1b[31m,:smile:,y\x9b2J\n" + rows)
    done = run_viper("fit", "t.csv", "-t", "y\x9b2J", "--cv", "2", "-o", "m.viper", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in (
        done.stdout + done.stderr,
        run_viper("summary", "m.viper", folder=tmp_path).stdout,
        run_viper("evaluate", "m.viper", "t.csv", folder=tmp_path).stdout,
        run_viper("fit", "t.csv", "-t", "a\x1b[31m", folder=tmp_path).stderr,  # an error names the column
    ):
        assert "\x1b" not in text
        assert "\x9b" not in text
    assert "a\\x1b[31m" in done.stdout
    assert ":smile:" in done.stdout  # not an emoji
    assert "p[bold]" in done.stdout
    assert json.loads(run_viper("summary", "m.viper", "--json", folder=tmp_path).stdout)["target"] == "y\x9b2J"


@pytest.mark.parametrize(("redirection", "code"), [(">&-", OUTPUT), ("<&- >/dev/null 2>&-", 0)])
def test_closed_streams(folder, redirection, code):
    command = f'"$0" -m viper fit data.csv -t died --cv 0 -o closed.viper --force {redirection}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    if code:
        assert done.stderr.splitlines() == [
            "viper: standard output must be open; got a closed one. Redirect it to a file, or to /dev/null."
        ]
    else:
        assert (folder / "closed.viper").read_bytes()[:4] != b"Logi"
        (folder / "closed.viper").unlink()


# --- a disk that is full or cannot be written ---


@pytest.mark.parametrize(
    "command", ["reproduce figure-1 --quick --out out", "fit data.csv -t died --cv 0 -o out.viper"]
)
def test_a_full_disk_is_exit_code_4(folder, tmp_path, command):
    (tmp_path / "data.csv").write_bytes((folder / "data.csv").read_bytes())
    limited = f'ulimit -f 1; "$0" -m viper {command}'  # no file may be larger than a kilobyte
    done = subprocess.run(
        ["bash", "-c", limited, sys.executable], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == OUTPUT, done.stderr
    assert done.stderr.splitlines()[-1].startswith("viper: ")
    assert "File too large" in done.stderr
    assert not list(tmp_path.rglob(".viper*"))


@pytest.mark.parametrize("command", [["demo", "--folder"], ["reproduce", "figure-1", "--quick", "--out"]])
@pytest.mark.parametrize("place", ["data.csv/in"])
def test_a_folder_that_cannot_be_made_is_exit_code_4(folder, command, place):
    done = run_viper(*command, place, folder=folder)
    refused(done, OUTPUT, f"{command[-1]} must be a folder that can be written to; got {place}")


def test_the_intercept_as_a_column(tmp_path):
    """A column of that name is quoted, so that the table says which is which."""
    FRAME.rename(columns={"age": "intercept"}).to_csv(tmp_path / "t.csv", index=False)
    done = run_viper("fit", "t.csv", "-t", "died", "--cv", "2", "-o", "m.viper", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    names = [row["name"] for row in json.loads(done.stdout)["coefficients"]]
    assert names == ["`intercept`", "ward[T.s]", "intercept"]
    assert run_viper("summary", "m.viper", folder=tmp_path).returncode == 0
    assert run_viper("report", "m.viper", "t.csv", folder=tmp_path).returncode == 0


def test_cells_that_a_spreadsheet_would_run(folder, tmp_path):
    rows = FRAME.head(4).assign(remark=["=1+1", "@cmd", "plain", "-2"], **{"+name": "x"})
    rows.to_csv(tmp_path / "t.csv", index=False)
    model = str(folder / "model.viper")
    keep = ("--keep", "remark", "--keep", "+name")
    plain = run_viper("predict", model, "t.csv", *keep, folder=tmp_path).stdout.splitlines()
    safe = run_viper("predict", model, "t.csv", *keep, "--safe-cells", folder=tmp_path).stdout.splitlines()
    assert [line.split(",")[0] for line in plain] == ["remark", "=1+1", "@cmd", "plain", "-2"]
    assert [line.split(",")[0] for line in safe] == ["remark", "'=1+1", "'@cmd", "plain", "'-2"]
    assert safe[0].split(",")[1] == "'+name"
    assert [line.split(",")[2:] for line in safe[1:]] == [line.split(",")[2:] for line in plain[1:]]
