"""Ordinal regression beyond the estimator: the command line, the report, and the GPyTorch likelihood."""

import json

import numpy as np
import pandas
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from scipy.special import expit
from typer.testing import CliRunner

import viper
from viper.cli.app import app
from viper.gp.likelihood import LogitLikelihood, OrdinalLikelihood

LEVELS = ["poor", "fair", "good", "great"]


def viper_command(*arguments, status=0):
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert (done.exit_code == 0) == (status == 0), done.output
    return done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("health")
    generator = np.random.default_rng(0)
    age, smoker = generator.uniform(20, 80, 150), generator.random(150) < 0.3
    number = np.digitize(-0.05 * (age - 50) - smoker + generator.logistic(size=150), [-1.0, 0.5, 1.5])
    frame = pandas.DataFrame({"age": age.round(1), "smoker": np.where(smoker, "yes", "no"), "grade": number})
    frame.assign(health=np.array(LEVELS)[number]).drop(columns="grade").to_csv(path / "words.csv", index=False)
    frame.to_csv(path / "numbers.csv", index=False)
    order = ("--ordered", "--levels", ",".join(LEVELS))
    given = ("--target", "health", *order, "--cv", 2, "--out", path / "m.viper", "--json")
    (path / "fit.json").write_text(viper_command("fit", path / "words.csv", *given))
    return path


def test_fit_saves_the_estimator(folder):
    document = json.loads((folder / "fit.json").read_text())
    table = pandas.read_csv(folder / "words.csv")
    model = viper.VariationalOrdinalRegression.from_formula("health ~ .", table, categories=LEVELS)
    assert document["model"] == "ordinal"
    assert document["classes"] == LEVELS
    assert document["elbo"] == pytest.approx(model.elbo_, rel=1e-9)
    assert [row["name"] for row in document["coefficients"]][-1] == "good | great"
    # both against the shares of the levels: a model that took the levels in another order would be worse
    assert document["scores"]["log_skill"] > 0.05
    numbers = viper_command("fit", folder / "numbers.csv", "--target", "grade", "--ordered", "--cv", 0, "--json")
    assert json.loads(numbers)["elbo"] == pytest.approx(model.elbo_, rel=1e-9)


def test_predict_evaluate_report(folder):
    model, table = viper.load(folder / "m.viper"), pandas.read_csv(folder / "words.csv")
    viper_command("predict", folder / "m.viper", folder / "words.csv", "--out", folder / "p.csv")
    predicted = pandas.read_csv(folder / "p.csv")
    assert np.allclose(predicted[[f"probability_{name}" for name in LEVELS]], model.predict_proba(table))
    ends = np.stack([predicted[[f"{end}_{name}" for name in LEVELS]] for end in ("lower", "upper")], -1)
    assert np.allclose(ends, model.predict_interval(table))
    said = viper_command("evaluate", folder / "m.viper", folder / "words.csv", "--json")
    assert said.startswith("note: the model was fitted to these rows")
    found = json.loads(said[said.index("{") :])
    assert found["accuracy"] == pytest.approx(model.score(table, table["health"]))
    assert list(found["confusion"]) == LEVELS
    viper_command("report", folder / "m.viper", folder / "words.csv", "--out", folder / "page.html")
    page = (folder / "page.html").read_text()
    assert "Bayesian ordinal regression" in page
    assert "any higher level" in page
    assert "Ordinal regression of health, 4 levels" in viper_command("summary", folder / "m.viper")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("words.csv", "--target", "health", "--ordered"), "got words: 'fair', 'good', 'great', 'poor'"),
        (("words.csv", "--target", "health", "--ordered", "--levels", "poor,fair,god,great"), "Did you mean 'good'"),
        (("words.csv", "--target", "health", "--ordered", "--levels", "poor,fair,good"), "got a list without 'great'"),
        (("words.csv", "--target", "health", "--levels", "poor,fair"), "--levels needs --ordered"),
        (("numbers.csv", "--target", "grade", "--ordered", "--model", "gp"), "cannot be combined with --model"),
        (("words.csv", "--target", "smoker", "--ordered"), "three levels or more; got 2"),
    ],
)
def test_bad_orders(folder, arguments, words):
    output = viper_command("fit", folder / arguments[0], *arguments[1:], status=2)
    assert words in " ".join(output.replace("│", " ").split())


def test_effects(folder):
    model, table = viper.load(folder / "m.viper"), pandas.read_csv(folder / "words.csv")
    found = json.loads(viper_command("effects", folder / "m.viper", folder / "words.csv", "-v", "age", "--json"))
    assert found["probability_of"] == "a row has the level"
    known = model.contrast(table, "age").set_index("class")["estimate"].to_dict()
    assert {row["class"]: row["estimate"] for row in found["contrasts"]} == pytest.approx(known)


def test_weights_and_other_models(folder):
    given = "words.csv", "--target", "health", "--ordered", "--levels", ",".join(LEVELS)
    path = folder / given[0]
    fit = viper_command("fit", path, *given[1:], "--class-weight", "balanced", "--robust", "--cv", 0, "--json")
    assert json.loads(fit[fit.index("{") :])["weighting"]["robust_groups"] == 150
    viper_command("suggest", folder / "m.viper", path, "--n", 3)
    only = "--only", "ordinal", "--only", "share"
    results = json.loads(viper_command("compare", path, *given[1:], "--cv", 2, *only, "--json"))["results"]
    assert [row["model"] for row in results] == ["viper ordinal", "class shares only"]
    # the folds are those of the fit
    scores = json.loads((folder / "fit.json").read_text())["scores"]
    assert results[0]["log_score"] == pytest.approx(scores["log_score"], rel=1e-6)


# --- the likelihood for GPyTorch ---


def latent(n=7):
    generator = np.random.default_rng(2)
    mean, sd = torch.tensor(generator.normal(0, 2, n)), torch.tensor(generator.uniform(0.1, 2, n))
    return MultivariateNormal(mean, torch.diag(sd**2)), mean.numpy(), sd.numpy()


def test_two_levels_are_the_logit_likelihood():
    f, *_ = latent()
    y = torch.arange(7) % 2
    ordinal, binary = OrdinalLikelihood(2).double(), LogitLikelihood()
    for method in ("expected_log_prob", "log_marginal"):
        pair = [getattr(one, method)(y.double(), f) for one in (ordinal, binary)]
        assert torch.allclose(*pair, rtol=1e-12)
    assert torch.allclose(ordinal(f).probs[:, 1], binary(f).probs, rtol=1e-12)


def test_expectations_of_the_ordinal_likelihood():
    f, mean, sd = latent()
    y, cuts = np.arange(7) % 4, np.array([-1.0, 0.2, 1.7])
    likelihood = OrdinalLikelihood(4, cuts).double()
    z = np.linspace(-12, 12, 4001)
    weight = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    edges = np.r_[-np.inf, cuts, np.inf]
    values = (mean[:, None] + sd[:, None] * z)[..., None]
    p = expit(edges[1:] - values) - expit(edges[:-1] - values)
    own = np.take_along_axis(p, y[:, None, None], 2)[..., 0]
    with np.errstate(divide="ignore"):
        expected = np.where(weight > 1e-25, np.log(own) * weight, 0.0).sum(1)
    assert np.allclose(likelihood.expected_log_prob(torch.tensor(y), f).detach(), expected, rtol=1e-9)
    assert np.allclose(likelihood(f).probs.detach(), np.einsum("nzk,z->nk", p, weight), rtol=1e-9)
    assert np.allclose(likelihood.log_marginal(torch.tensor(y), f).detach(), np.log(own @ weight), rtol=1e-9)
    given = likelihood(torch.tensor(mean)).probs.detach().numpy()
    assert np.allclose(given, expit(edges[1:] - mean[:, None]) - expit(edges[:-1] - mean[:, None]), rtol=1e-9)


def test_thresholds_are_learned_in_order():
    f, *_ = latent()
    y = torch.arange(7) % 3
    likelihood = OrdinalLikelihood(3).double()

    def loss(first, gaps):
        with torch.no_grad():
            likelihood.first_threshold.copy_(first)
            likelihood.log_gaps.copy_(gaps)
        return likelihood.expected_log_prob(y, f).sum()

    start = torch.tensor([-0.4], dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)
    loss(*start).backward()
    step = 1e-5
    for k, parameter in enumerate((likelihood.first_threshold, likelihood.log_gaps)):
        ends = [loss(*(x + sign * step * (j == k) for j, x in enumerate(start))).item() for sign in (1, -1)]
        assert parameter.grad.item() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)
    optimiser = torch.optim.Adam(likelihood.parameters(), 0.1)
    for _ in range(100):
        optimiser.zero_grad()
        (-likelihood.expected_log_prob(y, f).sum()).backward()
        optimiser.step()
    assert (likelihood.thresholds.diff() > 0).all()
    assert not any(one.requires_grad for one in OrdinalLikelihood(3, learn=False).parameters())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OrdinalLikelihood(1), "num_levels must be a whole number from 2 on; got 1"),
        (lambda: OrdinalLikelihood(3, [1.0, 0.0]), "thresholds must be 2 increasing numbers"),
        (
            lambda: OrdinalLikelihood(3).expected_log_prob(torch.tensor([3.0]), latent(1)[0]),
            "whole numbers from 0 to 2",
        ),
    ],
)
def test_bad_likelihoods(make, words):
    with pytest.raises(ValueError, match=words):
        make()
