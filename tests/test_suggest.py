"""Active learning from tables: information against quadrature, batches against dense algebra, and the command."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.integrate import quad
from scipy.special import expit, xlogy
from sklearn.datasets import load_iris
from tolerances import TOLERANCE

import viper
from viper.decisions import suggest
from viper.decisions.pool import chosen_together, joint_block
from viper.inference.classes.sums import EXACT_CLASSES
from viper.softplus.information import answer_information, class_information
from viper.softplus.mixture_table import QUADRATURE

RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 3))
Y = RNG.random(40) < expit(2.0 * X[:, 0] - X[:, 1])
POOL = RNG.standard_normal((60, 3))


def entropy(p):
    return -xlogy(p, p) - xlogy(1.0 - p, 1.0 - p)


def by_quadrature(function, mean, sd):
    inside = lambda z: function(mean + sd * z) * np.exp(-0.5 * z * z) / np.sqrt(2.0 * np.pi)  # noqa: E731
    return quad(inside, -12.0, 12.0, epsabs=1e-14, epsrel=1e-13, limit=300)[0]


@pytest.mark.parametrize(("mean", "sd"), [(0.0, 1.0), (1.3, 0.2), (-4.0, 2.0), (3.0, 8.0), (0.0, 30.0)])
def test_information_is_that_of_quadrature(mean, sd):
    expected = entropy(by_quadrature(expit, mean, sd)) - by_quadrature(lambda f: entropy(expit(f)), mean, sd)
    found = answer_information(*(torch.tensor(x, dtype=torch.float64) for x in (mean, sd**2)))
    assert float(found) == pytest.approx(expected, abs=1e-12)  # of numbers up to log 2: that of the quadrature


def test_the_entropy_is_a_mixture_of_normal_densities():
    """H(s(f)) by its components and by itself; averages over f are no farther apart."""
    f = np.linspace(0.0, 60.0, 3_001)
    variances = np.array(QUADRATURE.variances)
    parts = np.exp(-0.5 * f[:, None] ** 2 / variances) * np.sqrt(variances / (2.0 * np.pi))
    np.testing.assert_allclose(parts @ QUADRATURE.weights, entropy(expit(f)), rtol=0, atol=TOLERANCE["special"])


def test_information_vanishes_for_certain_f_and_has_gradients():
    mean = torch.linspace(-5.0, 5.0, 7, dtype=torch.float64, requires_grad=True)
    variance = torch.full_like(mean, 2.0, requires_grad=True)
    assert float(answer_information(mean, 0.0 * mean).detach().max()) < TOLERANCE["special"]
    assert torch.autograd.gradcheck(answer_information, (mean, variance))


def test_two_classes_by_softmax_tell_what_their_difference_tells():
    mean, variance = torch.tensor([[0.3, -1.0]], dtype=torch.float64), torch.tensor([[0.5, 2.0]], dtype=torch.float64)
    found = class_information(mean, variance, EXACT_CLASSES(mean, variance))
    expected = answer_information(mean[:, 0] - mean[:, 1], variance.sum(1))
    assert float(found) == pytest.approx(float(expected), abs=1e-8)  # the accuracy of the expected log-sum-exp


def test_every_kind_of_model_has_information():
    iris = load_iris()
    model = viper.VariationalLogisticRegression().fit(X, Y)
    mean, sd = (torch.from_numpy(x) for x in model.predict_latent(POOL))
    expected = answer_information(mean, sd.square()).numpy()
    np.testing.assert_allclose(model.predict_information(POOL), expected, rtol=TOLERANCE["roundoff"])
    labels = viper.VariationalLogisticRegression().fit(X, np.column_stack([Y, ~Y]).astype(int))
    np.testing.assert_allclose(labels.predict_information(POOL), 2.0 * expected, rtol=TOLERANCE["converged"])
    for three in (viper.VariationalLogisticRegression(), viper.VariationalOrdinalRegression(categories=[0, 1, 2])):
        found = three.fit(iris.data[::4], iris.target[::4]).predict_information(iris.data)
        assert found.shape == (150,)
        assert 0.0 <= found.min() < found.max() < np.log(3.0)


def test_information_of_levels_is_that_of_quadrature():
    iris = load_iris()
    model = viper.VariationalOrdinalRegression(categories=[0, 1, 2]).fit(iris.data[::4], iris.target[::4])
    reading = model._reading
    mean, sd = model._read_latent(iris.data[::30])
    thresholds, weights = (reading.probabilities.keywords[name].numpy() for name in ("thresholds", "weights"))

    def level(x, t, k):
        return np.diff([0.0, *expit(t - x), 1.0])[k]

    def loss(x, t, k):
        return -xlogy(level(x, t, k), level(x, t, k))

    for m, s, found in zip(mean, sd, model.predict_information(iris.data[::30]), strict=True):
        points = list(zip(weights, thresholds, m, s, strict=True))
        average, given = (
            np.array(
                [
                    sum(w * by_quadrature(lambda x, t=t, k=k, of=of: of(x, t, k), f, one) for w, t, f, one in points)
                    for k in range(3)
                ]
            )
            for of in (level, loss)
        )
        assert found == pytest.approx(-xlogy(average, average).sum() - given.sum(), abs=1e-6)  # 48 nodes


# --- batches ---


def test_a_batch_is_chosen_by_the_joint_posterior():
    model = viper.VariationalLogisticRegression().fit(X, Y)
    design = np.column_stack([POOL, np.ones(len(POOL))])
    mean, S = design @ model.posterior_.mean.numpy(), model.posterior_.covariance().numpy()
    rows, gains = [], []
    for _ in range(6):
        variance = np.einsum("ij,jk,ik->i", design, S, design)
        gain = answer_information(*map(torch.from_numpy, (mean, variance))).numpy()
        gain[rows] = -1.0
        i = int(gain.argmax())
        rows.append(i)
        gains.append(gain[i])
        h = viper.expected_softplus(mean[i], variance[i]).curvature
        S = np.linalg.inv(np.linalg.inv(S) + h * np.outer(design[i], design[i]))
    found = suggest(model, POOL, 6)
    assert found.rows.tolist() == rows
    np.testing.assert_allclose(found.gain, gains, rtol=1e-9)  # inverses lose digits
    assert (found.gain <= found.information + 1e-15).all()


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_the_same_question_is_not_asked_again_and_again(classes, covariance):
    y = Y.astype(int) + (X[:, 2] > 0.5) * (classes - 2)
    model = viper.VariationalLogisticRegression(covariance=covariance).fit(X, y)
    best = POOL[np.argmax(model.predict_information(POOL))]
    pool = np.vstack([np.tile(best, (8, 1)), POOL])
    assert (suggest(model, pool, 8, alone=True).rows < 8).all()
    found = suggest(model, pool, 8)
    assert found.rows[0] == 0
    assert (found.rows < 8).sum() <= 5  # labels are noisy: some rows are worth asking more than once, not eight times
    assert (found.gain[1:] < found.information[1:]).all()


def test_gaussian_processes_suggest_too():
    model = viper.VariationalGPClassifier(hyperparameters="mode", n_starts=1, verbose=False).fit(X, Y)
    found = suggest(model, POOL, 4)
    np.testing.assert_allclose(found.information, model.predict_information(POOL[found.rows]), rtol=1e-12)
    block, posterior = joint_block(model, POOL, None)
    rows, gain = chosen_together(block, posterior, 4)
    assert rows.tolist() == found.rows.tolist()
    assert (np.diff(gain) <= 1e-15).all()


def test_bad_questions_are_refused():
    model = viper.VariationalLogisticRegression().fit(X, Y)
    with pytest.raises(ValueError, match="n must be a whole number, 1 or more; got 0"):
        suggest(model, POOL, 0)
    with pytest.raises(TypeError, match="the model must be one of viper's; got object"):
        suggest(object(), POOL)
    assert len(suggest(model, POOL, 1000).rows) == len(POOL)
    offset = np.linspace(-1.0, 1.0, len(POOL))
    found = suggest(model, POOL, 3, offset=offset)
    np.testing.assert_allclose(found.information, model.predict_information(POOL, offset)[found.rows])


# --- the command ---


@pytest.fixture
def tables():
    frame = pd.DataFrame(X, columns=["a", "b", "c"]).assign(y=np.where(Y, "yes", "no"))
    pool = pd.DataFrame(POOL, columns=["a", "b", "c"]).assign(name=[f"r{i}" for i in range(len(POOL))])
    pool.loc[7, "a"] = None
    return frame, pool


def test_the_command_suggests_what_python_does(command, tables):
    frame, pool = tables
    frame.to_csv("train.csv", index=False)
    pool.to_csv("pool.csv", index=False)
    assert command("fit", "train.csv", "--target", "y", "--cv", "0", "-o", "m.viper")[0] == 0
    code, out, err = command("suggest", "m.viper", "pool.csv", "--n", "5", "--keep", "name", "-o", "s.csv")
    assert code == 0, err
    assert "1 of 60 rows has no prediction" in err
    assert "5 of 60 rows written to s.csv, the most informative first" in err
    table = pd.read_csv("s.csv")
    assert list(table)[:5] == ["row", "gain", "information", "name", "probability"]
    kept = pool.drop(index=7)
    found = suggest(viper.load("m.viper"), kept, 5)
    assert (table["row"] - 1).tolist() == kept.index[found.rows].tolist()
    assert table["name"].tolist() == kept["name"].iloc[found.rows].tolist()
    np.testing.assert_allclose(
        table[["gain", "information"]], np.column_stack([found.gain, found.information]), rtol=1e-12
    )
    code, out, _ = command("suggest", "m.viper", "pool.csv", "-n", "2", "--alone", "--json")
    document = json.loads(out)
    assert (document["rows"], document["without_probability"], len(document["suggested"])) == (60, 1, 2)


def test_the_command_says_what_is_wrong(command, tables):
    frame, pool = tables
    frame.to_csv("train.csv", index=False)
    pool.drop(columns="b").to_csv("less.csv", index=False)
    pool.rename(columns={"name": "gain"}).to_csv("gain.csv", index=False)
    command("fit", "train.csv", "--target", "y", "--cv", "0", "-o", "m.viper")
    assert "got no 'b'" in command("suggest", "m.viper", "less.csv")[2]
    code, _, err = command("suggest", "m.viper", "gain.csv", "--keep", "gain")
    assert code == 3
    assert "--keep must not name a column that suggest writes; got 'gain'" in err
    assert command("suggest", "m.viper", "pool.csv")[0] == 3
