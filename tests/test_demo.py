"""The demonstration runs, replaces the files of an earlier run, and prints what its models say."""

import contextlib
import io
import os
import subprocess
import sys

import numpy as np
import pytest

import viper
from viper.cli.commands import demo
from viper.models.prediction import Predictions, predictions


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    (folder / "report.html").write_text("of an earlier run")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as written:
        patch.setenv("COLUMNS", "160")
        demo.run_demo(folder)
    return folder, written.getvalue()


def test_files_are_written(output):
    folder, _ = output
    assert sorted(file.name for file in folder.iterdir()) == ["bound.png", "posterior.png", "report.html"]
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in ("bound.png", "posterior.png"))
    assert "Probability of malignant" in (folder / "report.html").read_text(encoding="utf-8")


def test_the_unsure_tumour_and_its_twin_are_shown(output):
    _, text = output
    data = demo.load_tumours()
    fitted = demo.timed_fit(viper.VariationalLogisticRegression, data, data.columns, prior_scale="auto")
    seen = predictions(fitted.model, data.test[data.columns])
    wide, narrow = demo.find_twins(seen)
    assert abs(seen.probability[wide] - seen.probability[narrow]) < 0.05
    assert seen.width[wide] > 1.5 * seen.width[narrow]
    assert seen.latent_sd[wide] > seen.latent_sd[narrow]
    for k in (wide, narrow):
        assert f"tumour {k + 1}: malignant with probability {100 * seen.probability[k]:.0f}" in text
        assert f"± {seen.latent_sd[k]:.1f}" in text
    assert f"{fitted.model.elbo_:.2f}" in text


def test_everything_is_shown_in_the_units_of_the_table(output):
    folder, text = output
    data, page = demo.load_tumours(), (folder / "report.html").read_text(encoding="utf-8")
    assert data.train["area"].mean() > 100
    for name in data.columns:
        step = f"{data.train[name].std(ddof=0):.3g}"
        assert any(line.split()[: len(name.split()) + 1] == [*name.split(), step] for line in text.splitlines()), name
        assert f"+{step}" in page
    assert "has learned from none of these rows" in page
    assert "worst relative error" in text


WITHOUT = """
import sys
sys.modules["gpytorch"] = None
import viper
from viper.cli import main
try:
    viper.VariationalGPClassifier()
except ImportError as error:
    print(error)
try:
    viper.load(sys.argv[2])
except ImportError as error:
    print(error)
main(["demo", "--folder", sys.argv[1]])
"""


def test_without_gpytorch_the_extra_is_named_and_the_rest_is_shown(tmp_path):
    """Run in a process of its own, which has not imported it."""
    x = np.linspace(0.0, 5.0, 30)[:, None]
    model = viper.VariationalGPClassifier(n_starts=1, max_iter=2, tol=1e9, n_inducing=5, random_state=0)
    model.fit(x, x[:, 0] > 2).save(tmp_path / "model.viper")
    folder = tmp_path / "new" / "folder"
    command = [sys.executable, "-c", WITHOUT, str(folder), str(tmp_path / "model.viper")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, encoding="utf-8", env=os.environ | {"COLUMNS": "160"}
    )
    needed = "VariationalGPClassifier needs GPyTorch. Run: pip install 'vi-per[gp]'"
    assert done.stdout.splitlines()[:3] == [needed, needed, f"Without the Gaussian process: {needed}"]
    assert "logistic regression" in done.stdout
    assert sorted(file.name for file in folder.iterdir()) == ["bound.png", "posterior.png", "report.html"]


def test_without_matplotlib_one_line_names_the_extra_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(demo, "load_tumours", lambda: pytest.fail("it began to compute"))
    with pytest.raises(ImportError, match=r"^viper demo needs matplotlib\. Run: pip install 'vi-per\[plot\]'$"):
        demo.run_demo(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_twins_contrast_most():
    generator = np.random.default_rng(0)
    probability, width = generator.random(40), generator.random(40)
    seen = Predictions(*[probability] * 4, 0 * width, width)
    wide, narrow = demo.find_twins(seen)
    pairs = [
        (width[i] - width[j], i, j)
        for i in range(40)
        for j in range(40)
        if abs(probability[i] - probability[j]) < 0.05
        if min(probability[i], probability[j]) > 0.1
        if max(probability[i], probability[j]) < 0.9
    ]
    assert (wide, narrow) == max(pairs)[1:]
