"""Gaussian processes on rows that are not in memory: a sample chooses hyperparameters, all rows the posterior."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch

import viper
from viper import VariationalGPClassifier
from viper.gp import classifier
from viper.gp.model import Features, InducedView
from viper.gp.profile import identity_prior
from viper.inference.newton import newton
from viper.inference.problem import Problem
from viper.inference.rows import Arrays

pytest.importorskip("gpytorch")
OPTIONS = {"n_inducing": 12, "n_starts": 1, "random_state": 0}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (1500, 2))
    y = rng.random(1500) < 1 / (1 + np.exp(-3 * np.sin(2 * X[:, 0]) * X[:, 1]))
    path = tmp_path_factory.mktemp("rows") / "X.npy"
    np.save(path, X)
    return np.load(path, mmap_mode="r"), y, rng.uniform(0.5, 1.5, 1500), rng.uniform(-0.2, 0.2, 1500)


def in_blocks(*columns):
    return viper.Blocks(lambda: (tuple(x[i : i + 77] for x in columns) for i in range(0, 1500, 77)))


def kept_as(kind, X, y, folder):
    """The same rows as what `fit` takes."""
    if kind == "array":
        return X, y
    if kind == "memory map":
        np.save(folder / "X.npy", X)
        return np.load(folder / "X.npy", mmap_mode="r"), y
    if kind == "blocks":
        return (viper.Blocks(lambda: ((X[i : i + 40], y[i : i + 40]) for i in range(0, len(X), 40))),)
    if kind == "files":
        pd.DataFrame(X, columns=["a", "b"]).assign(ill=y).to_csv(folder / "rows.csv", index=False)
        return (viper.Files(folder / "rows.csv", target="ill"),)
    dask = pytest.importorskip("dask.array")
    return dask.from_array(X, chunks=(40, 2)), dask.from_array(y, chunks=60)


@pytest.mark.parametrize("kind", ["memory map", "blocks", "files", "dask"])
def test_few_rows_give_the_same_answer_wherever_they_are(rows, kind, tmp_path):
    """Averaged over the same hyperparameters, to rounding, whatever holds the rows."""
    X, y = np.array(rows[0][:150]), rows[1][:150]
    given = kept_as("array", X, y, tmp_path), kept_as(kind, X, y, tmp_path)
    here, there = (VariationalGPClassifier(random_state=0).fit(*x) for x in given)
    assert len(here.components_) == len(there.components_) > 1
    assert there.elbo_ == pytest.approx(here.elbo_, rel=1e-12)
    named = pd.DataFrame(X, columns=["a", "b"]) if kind == "files" else X
    np.testing.assert_allclose(there.predict_proba(named), here.predict_proba(X), rtol=0.0, atol=1e-10)


def test_few_rows_with_weights_and_offsets(rows):
    X, y, weight, offset = rows
    memory = VariationalGPClassifier(**OPTIONS).fit(np.array(X), y, weight, offset)
    blocks = VariationalGPClassifier(**OPTIONS).fit(in_blocks(*rows))
    assert blocks.elbo_ == pytest.approx(memory.elbo_, rel=1e-12)
    np.testing.assert_allclose(blocks.predict_proba(np.array(X)), memory.predict_proba(np.array(X)), atol=1e-10)


@pytest.fixture(scope="module")
def halved(rows):
    """A model whose search saw 800 of the 1500 rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classifier, "SEARCH_ROWS", 800)
        return VariationalGPClassifier(**OPTIONS).fit(*rows)


def test_the_posterior_is_the_best_for_all_rows(rows, halved):
    """Given the same kernel, mean and inducing points, an independent fit in memory ends at the same q."""
    X, y, weight, offset = rows
    fixed = VariationalGPClassifier(**OPTIONS, warm_start=True, max_iter=1, tol=1e9)
    vars(fixed).update({name: x for name, x in vars(halved).items() if name.endswith("_") or name == "_scaler"})
    for parameter in fixed.model_.parameters():
        parameter.requires_grad_(False)
    fixed.fit(np.array(X), y, weight, offset)
    np.testing.assert_allclose(halved.posterior_.mean, fixed.posterior_.mean, rtol=1e-6, atol=1e-8)
    assert halved.elbo_ == pytest.approx(fixed.elbo_, rel=1e-10)
    assert halved.history_[-1].rows == 1500


def test_progress_of_the_search_and_of_the_posterior(rows, monkeypatch, capsys):
    monkeypatch.setattr(classifier, "SEARCH_ROWS", 800)
    VariationalGPClassifier(**OPTIONS, verbose=True).fit(*rows)
    lines = capsys.readouterr().err.splitlines()
    assert "800 rows  objective" in lines[0]
    assert "1,500 rows  objective" in lines[-1]


def test_a_warm_start_goes_on_from_the_last_fit(rows, monkeypatch):
    monkeypatch.setattr(classifier, "SEARCH_ROWS", 800)
    model = VariationalGPClassifier(**OPTIONS, warm_start=True).fit(*rows)
    first, steps = model.elbo_, model.n_iter_
    again = model.fit(*rows)
    assert again.elbo_ == pytest.approx(first, abs=0.5)  # both stop when gains on the sample are about 1e-3 nats
    assert again.n_iter_ < steps


def test_elbo_and_predictions_stream(rows, halved, tmp_path):
    X, y, weight, offset = rows
    assert halved.elbo(X, y, weight, offset) == pytest.approx(halved.elbo_, rel=1e-12)
    assert halved.elbo(np.array(X), y, weight, offset) == pytest.approx(halved.elbo_, rel=1e-12)
    np.testing.assert_allclose(halved.predict_proba(X), halved.predict_proba(np.array(X)), rtol=1e-12)
    assert halved.score(X, y) == pytest.approx(halved.score(np.array(X), y), rel=1e-14)
    pytest.importorskip("pyarrow")
    assert halved.predict_to(X, tmp_path / "out.parquet") == 1500


def test_a_view_travels(halved):
    """A worker of a cluster receives the parameters, but not their autograd graph."""
    view = InducedView(halved.model_, halved._scaler)
    rows = Arrays(torch.randn(5, 2, dtype=torch.float64), torch.ones(5))
    block = next(rows.blocks())
    here, there = view(block), pickle.loads(pickle.dumps(view))(block)
    torch.testing.assert_close(there.design.matrix, here.design.matrix, rtol=0.0, atol=0.0)
    assert isinstance(view.features, Features)


def test_interrupted(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(classifier, "SEARCH_ROWS", 800)
    expected = VariationalGPClassifier(**OPTIONS).fit(*rows)
    reduce, count = Arrays.reduce, []

    def interrupted(source, function):
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return reduce(source, function)

    with monkeypatch.context() as patch:
        patch.setattr(Arrays, "reduce", interrupted)
        with pytest.raises(KeyboardInterrupt):
            VariationalGPClassifier(**OPTIONS).fit(*rows, checkpoint=tmp_path / "fit")
    assert len(list(tmp_path.glob("fit/*.pass"))) == 2
    model = VariationalGPClassifier(**OPTIONS).fit(*rows, checkpoint=tmp_path / "fit")
    np.testing.assert_array_equal(model.posterior_.mean, expected.posterior_.mean)
    assert not (tmp_path / "fit").exists()


# --- files take the same options ---


@pytest.fixture(scope="module")
def files(rows, tmp_path_factory):
    """The same rows in CSV files, and as a frame."""
    X, y, weight, offset = rows
    frame = pd.DataFrame(np.array(X), columns=["a", "b"]).assign(ill=np.where(y, "yes", "no"), w=weight, o=offset)
    folder = tmp_path_factory.mktemp("csv")
    for k in range(3):
        frame.iloc[500 * k : 500 * (k + 1)].to_csv(folder / f"{k}.csv", index=False)
    return viper.Files(folder / "*.csv", target="ill", weight="w", offset="o"), frame


CHOICES = [
    {},
    {"kernel": "additive + a:b"},
    {"kernel": "matern32", "lengthscales": "one", "mean": "constant"},
    {"kernel": "linear", "mean": "zero"},
    {"priors": None},
    {"covariance": "diagonal"},
    {"bound": "pg", "inducing": "kmeans", "learn_inducing": False},
    {"class_weight": {"yes": 2.0}, "standardize": False, "inducing": "subset"},
]


@pytest.mark.parametrize("options", CHOICES, ids=lambda given: ", ".join(map(str, given.values())) or "default")
@pytest.mark.filterwarnings("ignore::viper.errors.NarrowIntervalsWarning")
@pytest.mark.filterwarnings("ignore::viper.errors.ConvergenceWarning")
def test_files_take_every_option(files, options, monkeypatch):
    """With hyperparameters from 800 rows, q is the best for all rows: a fit of q to them in memory agrees."""
    source, frame = files
    monkeypatch.setattr(classifier, "SEARCH_ROWS", 800)
    model = VariationalGPClassifier(**{**OPTIONS, "max_iter": 5, **options}).fit(source)
    assert list(model.feature_names_in_) == ["a", "b"]
    X, y = frame[["a", "b"]], frame["ill"]
    given = {"sample_weight": frame["w"], "offset": frame["o"]}
    assert model.elbo(X, y, **given) == pytest.approx(model.elbo_, rel=1e-10)
    first = model.diagnose(draws=200)
    assert first.log_evidence == pytest.approx(model.diagnose(X, y, draws=200, **given).log_evidence, rel=1e-9)
    features = model._given_or_training_rows(X, y, frame["w"], frame["o"])
    bound = model._choices.bounds(0)[0]
    problem = Problem(features, identity_prior(features), bound, diagonal=model.covariance == "diagonal")
    best = newton(problem, tol=1e-12).objective
    assert model.objective_ == pytest.approx(best, abs=1e-6)
    model.partial_fit(source)
    doubled = model.elbo(pd.concat([X, X]), pd.concat([y, y]), pd.concat([frame["w"]] * 2), pd.concat([frame["o"]] * 2))
    assert model.elbo_ == pytest.approx(doubled, rel=1e-10)
    if options.get("kernel", "").startswith("additive"):
        assert {effect.name for effect in model.term_effects()} == {"a", "b", "a:b"}
        with pytest.raises(ValueError, match="averages over rows in memory; got Files"):
            model.term_effects(source)
