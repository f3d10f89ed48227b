"""Try the viper that is installed beside the Python that runs this file, from outside the source tree.

python tests/installed.py
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1]
PROGRAM = [sys.executable, "-m", "viper"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path = [path for path in sys.path if not Path(path or ".").resolve().is_relative_to(SOURCES / "tests")]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try_library()
        try_command_line(environment)


def try_library() -> None:
    """Fit, save, load: the loaded model predicts what the fitted one does."""
    import numpy as np

    import viper
    from viper.inference.kernels.library import is_compiled

    home = Path(viper.__file__).resolve()
    assert not home.is_relative_to(SOURCES / "src"), f"viper must be installed; got the sources, {home}"
    assert (home.parent / "py.typed").is_file()
    generator = np.random.default_rng(0)
    X = generator.normal(size=(300, 3))
    y = generator.random(300) < 1 / (1 + np.exp(-X[:, 0]))
    model = viper.VariationalLogisticRegression().fit(X, y)
    model.save("model.viper")
    np.testing.assert_array_equal(viper.load("model.viper").predict_proba(X), model.predict_proba(X))
    print(f"library: {home.parent}, pass over rows {'compiled' if is_compiled() else 'not compiled'}")  # noqa: T201


def try_command_line(environment: dict[str, str]) -> None:
    """Fit, predict and report: every file that ships with the package is found."""
    rows = "".join(f"{i % 17},{'ab'[i % 2]},{'yes' if (i * 7919) % 10 > i % 9 else 'no'}\n" for i in range(200))
    Path("data.csv").write_text("age,ward,died\n" + rows)
    for arguments in (
        ["fit", "data.csv", "--target", "died", "--out", "m.viper", "--cv", "3"],
        ["predict", "m.viper", "data.csv", "--out", "p.csv"],
        ["report", "m.viper", "data.csv", "--out", "r.html"],
    ):
        done = subprocess.run([*PROGRAM, *arguments], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert len(Path("p.csv").read_text().splitlines()) == 201
    assert Path("r.html").read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    summary = subprocess.check_output([*PROGRAM, "summary", "m.viper", "--json"], env=environment)
    assert json.loads(summary)["converged"]
    print("command line: fit, predict, report, summary")  # noqa: T201


if __name__ == "__main__":
    main()
