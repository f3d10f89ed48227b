"""A few hundred hostile cases of every kind; `make hostile` runs thousands, and prints what became of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = {"models": 100, "tables": 60, "formulas": 100, "designs": 12, "reports": 4, "kills": 4}
TESTS = Path(__file__).parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and processes are watched as Linux does it")


@pytest.mark.parametrize("kind", CASES)
def test_hostile_cases_end_right_or_with_one_clear_line(kind, tmp_path):
    faults = tmp_path / "faults.json"
    command = [sys.executable, "-m", "hostile", kind, "-n", str(CASES[kind]), "--seed", "1", "--json", str(faults)]
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert faults.exists(), done.stderr
    assert json.loads(faults.read_text()) == {kind: []}, done.stdout


def test_a_fault_is_noticed(tmp_path):
    """The harness itself tells right from wrong, raw, crash and memory."""
    (tmp_path / "faulty.py").write_text(
        "import os\n"
        "def prepare(folder):\n    return None\n"
        "def run_case(material, seed):\n"
        "    if seed == 1: raise KeyError('x')\n"
        "    if seed == 2: os.abort()\n"
        "    if seed == 3: bytearray(700_000_000)[::4096] = b'x' * 170_899\n"
        "    if seed == 4: raise ValueError('x must be 1; got 2.')\n"
        "    if seed == 5: raise ValueError('x must be 1; got 2.\\nAnd more.')\n"
        "    return 'right'\n"
    )
    script = (
        "import sys, pathlib; sys.path[:0] = sys.argv[1:3]\n"
        "import faulty\nfrom hostile.harness import run_cases\n"
        "print(dict(run_cases(faulty, pathlib.Path(sys.argv[2]), range(7)).counts))\n"
    )
    command = [sys.executable, "-c", script, str(TESTS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    counts = {"right": 2, "raw": 2, "crash": 1, "memory": 1, "line": 1}
    assert json.loads(done.stdout.replace("'", '"')) == counts
