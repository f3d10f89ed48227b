"""The demonstration runs, twice over its own files, and tells what its models say."""

import contextlib
import io

import numpy as np
import pytest

from viper import demo, views


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    (folder / "report.html").write_text("of an earlier run")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as written:
        patch.setenv("COLUMNS", "160")
        demo.main(folder)
    return folder, written.getvalue()


def test_files_are_written(told):
    folder, _ = told
    assert sorted(file.name for file in folder.iterdir()) == ["bound.png", "posterior.png", "report.html"]
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in ("bound.png", "posterior.png"))
    assert "Probability of malignant" in (folder / "report.html").read_text(encoding="utf-8")


def test_the_unsure_tumour_and_its_twin_are_told(told):
    _, text = told
    data = demo.Data()
    fitted = demo.fit(demo.viper.VariationalLogisticRegression(prior_scale="auto", random_state=0), data, data.columns)
    seen = views.predictions(fitted.model, data.test[data.columns])
    wide, narrow = demo.twins(seen)
    assert abs(seen.probability[wide] - seen.probability[narrow]) < 0.05
    assert seen.width[wide] > 1.5 * seen.width[narrow]
    assert seen.latent_sd[wide] > seen.latent_sd[narrow]
    for k in (wide, narrow):
        assert f"tumour {data.test.index[k]}: malignant with probability {100 * seen.probability[k]:.0f}" in text
        assert f"± {seen.latent_sd[k]:.1f}" in text
    assert f"{fitted.model.elbo_:.2f}" in text


def test_twins_contrast_most():
    generator = np.random.default_rng(0)
    probability, width = generator.random(40), generator.random(40)
    seen = views.Predictions(*[probability] * 4, 0 * width, width)
    wide, narrow = demo.twins(seen)
    pairs = [
        (width[i] - width[j], i, j)
        for i in range(40)
        for j in range(40)
        if abs(probability[i] - probability[j]) < 0.05
        if min(probability[i], probability[j]) > 0.1
        if max(probability[i], probability[j]) < 0.9
    ]
    assert (wide, narrow) == max(pairs)[1:]
