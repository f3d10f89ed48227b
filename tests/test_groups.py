"""Effects of groups: the arrow equals the dense posterior, evidence by brute force, predictions, files, commands."""

import math
from dataclasses import replace

import numpy as np
import pandas
import pytest
import scipy.integrate
import scipy.sparse
import torch
from typer.testing import CliRunner

import viper
from viper.cli.app import app
from viper.errors import FormulaError, StorageError
from viper.formula.grammar import parse_formula, parse_groups
from viper.inference.groups.arrow import Arrow, Split, invert_arrow
from viper.inference.groups.components import ComponentPrior, component_count, covariance_of
from viper.inference.groups.conditional import group_integrals
from viper.inference.groups.evidence import ComponentProfile, component_posterior, starting_components
from viper.inference.groups.met import meetings_of
from viper.inference.groups.pooling import Pool
from viper.inference.groups.quadrature import missed_evidence
from viper.inference.groups.rows import Factor, sorted_rows
from viper.inference.groups.solver import GroupPrior, fit_effects
from viper.inference.rows import Dense, Sparse
from viper.models.groups.effects import AllEffects
from viper.models.groups.fitting import GroupPosterior, MetPosterior
from viper.models.groups.tables import mixture_interval

ROUNDING = 1e-12  # of a few products and a decomposition
DENSE = 2e-6  # two solvers, each of which stops within 1e-11 nats, about: the root of that in means and sds


def simulated(seed=0, rows=300, groups=12, items=5, slope=False):
    rng = np.random.default_rng(seed)
    g, k = rng.integers(groups, size=rows), rng.integers(items, size=rows)
    X = rng.standard_normal((rows, 2))
    f = -0.4 + X @ [0.7, -0.3] + rng.normal(0, 1, groups)[g] + rng.normal(0, 0.5, items)[k]
    f += X[:, 0] * rng.normal(0, 0.5, groups)[g] * slope
    return X, (rng.random(rows) < 1 / (1 + np.exp(-f))).astype(float), g, k


def with_ones(X):
    return np.column_stack([X, np.ones(len(X))])


# --- the arrow ---


def dense(arrow):
    """The whole matrix, border first."""
    G, r, d = arrow.cross.shape
    whole = np.zeros((d + G * r, d + G * r))
    whole[:d, :d] = arrow.border
    whole[d:, :d] = arrow.cross.reshape(G * r, d)
    whole[:d, d:] = whole[d:, :d].T
    for g in range(G):
        at = slice(d + g * r, d + (g + 1) * r)
        whole[at, at] = arrow.blocks[g]
    return whole


@pytest.mark.parametrize("width", [1, 3])
def test_the_inverse_of_an_arrow_is_that_of_the_matrix(width):
    rng = np.random.default_rng(width)
    G, d = 7, 4
    root = rng.standard_normal((G, width, width))
    blocks = root @ root.transpose(0, 2, 1) + np.eye(width)
    arrow = Arrow(20.0 * np.eye(d), rng.standard_normal((G, width, d)), blocks)
    found, whole = invert_arrow(arrow), dense(arrow)
    inverse = np.linalg.inv(whole)
    kept = dense(Arrow(np.ones((d, d)), np.ones((G, width, d)), np.ones((G, width, width)))) > 0
    np.testing.assert_allclose(dense(found.covariance), np.where(kept, inverse, 0.0), atol=1e-13)
    assert found.log_determinant == pytest.approx(np.linalg.slogdet(whole)[1], rel=ROUNDING)
    v = rng.standard_normal(len(whole))
    solved = found.solve(Split(v[:d], v[d:].reshape(G, width)))
    np.testing.assert_allclose(np.r_[solved.border, solved.groups.ravel()], inverse @ v, atol=1e-13)


def dense_fit(A, y, sds, **given):
    """The same posterior by logistic regression on indicators, where the last column of A is the intercept."""
    model = viper.VariationalLogisticRegression(
        prior_scale=np.asarray(sds[:-1]), intercept_scale=sds[-1], tol=1e-13, n_jobs=1
    )
    return model.fit(A[:, :-1], y, **given)


@pytest.mark.parametrize("weighted", [False, True])
def test_crossed_factors_give_the_dense_posterior(weighted):
    X, y, g, k = simulated()
    ones, rng = np.ones((len(y), 1)), np.random.default_rng(5)
    given = {"weight": rng.uniform(0.5, 2, len(y)), "offset": rng.standard_normal(len(y))} if weighted else {}
    rows, order = sorted_rows(with_ones(X), y, [Factor(k, 5, ones), Factor(g, 12, ones)], **given)
    assert order == [1, 0]
    prior = GroupPrior(np.zeros(3), np.diag([1.0, 1.0, 0.01]), (np.array([[0.8]]), np.array([[0.3]])))
    fit = fit_effects(rows, prior, tol=1e-12)
    A = np.column_stack([X, np.eye(5)[k], np.eye(12)[g], np.ones(len(y))])
    sds = [1.0, 1.0, *[math.sqrt(0.3)] * 5, *[math.sqrt(0.8)] * 12, 10.0]
    named = {"weight": "sample_weight", "offset": "offset"}
    reference = dense_fit(A, y, sds, **{named[name]: x for name, x in given.items()})
    place = [0, 1, 19, *range(2, 7)]  # fixed effects and items
    assert fit.elbo == pytest.approx(reference.elbo_, abs=1e-8)
    mean, covariance = reference.posterior_.mean.numpy(), reference.covariance_
    np.testing.assert_allclose(fit.q.mean.border, mean[place], atol=DENSE)
    np.testing.assert_allclose(fit.q.mean.groups[:, 0], mean[7:19], atol=DENSE)
    np.testing.assert_allclose(fit.q.covariance.border, covariance[np.ix_(place, place)], atol=DENSE)
    np.testing.assert_allclose(fit.q.covariance.cross[:, 0], covariance[np.ix_(range(7, 19), place)], atol=DENSE)
    np.testing.assert_allclose(fit.q.covariance.blocks[:, 0, 0], np.diag(covariance)[7:19], atol=DENSE)


def test_correlated_slopes_give_the_dense_posterior():
    X, y, g, _ = simulated(slope=True)
    D = np.array([[0.9, 0.2], [0.2, 0.4]])
    rows, _ = sorted_rows(with_ones(X), y, [Factor(g, 12, np.column_stack([np.ones(len(y)), X[:, 0]]))])
    fit = fit_effects(rows, GroupPrior(np.zeros(3), np.diag([1.0, 1.0, 0.01]), (D,)), tol=1e-12)
    hot = np.eye(12)[g]
    A = np.column_stack([X, np.stack([hot, hot * X[:, :1]], 2).reshape(len(y), 24)])
    scale = np.eye(26)
    scale[2:, 2:] = np.kron(np.eye(12), D)
    reference = viper.VariationalLogisticRegression(prior_scale=scale, tol=1e-13).fit(A, y)
    assert fit.elbo == pytest.approx(reference.elbo_, abs=1e-8)
    np.testing.assert_allclose(fit.q.mean.groups.ravel(), reference.coef_[0, 2:], atol=DENSE)
    np.testing.assert_allclose(fit.q.covariance.blocks[3], reference.covariance_[8:10, 8:10], atol=DENSE)


def test_a_large_variance_makes_groups_fixed_intercepts():
    X, y, g, _ = simulated(groups=4)
    rows, _ = sorted_rows(X, y, [Factor(g, 4, np.ones((len(y), 1)))])
    fit = fit_effects(rows, GroupPrior(np.zeros(2), np.eye(2), (np.array([[1e8]]),)), tol=1e-12)
    fixed = viper.VariationalLogisticRegression(prior_scale=[1, 1, *[1e4] * 4], fit_intercept=False, tol=1e-13)
    fixed.fit(np.column_stack([X, np.eye(4)[g]]), y)
    np.testing.assert_allclose(fit.q.mean.groups[:, 0], fixed.coef_[0, 2:], atol=1e-5)


@pytest.mark.parametrize("slope", [False, True])
def test_pairs_that_meet_are_enough(monkeypatch, slope, tmp_path):
    """Two crossed factors where few pairs meet: the same model, whose covariances of other pairs follow from these."""
    X, y, g, k = simulated(rows=300, groups=60, items=25, slope=slope)
    groups, effects = {"g": g, "k": k}, "(1 + x0 | g) + (1 | k)" if slope else None
    whole = viper.VariationalMixedRegression(effects=effects).fit(X, y, groups=groups)
    monkeypatch.setattr("viper.inference.groups.rows.DENSE_CROSS", 0)
    monkeypatch.setattr("viper.inference.groups.rows.SPARSE_SHARE", 1.0)
    met = viper.VariationalMixedRegression(effects=effects).fit(X, y, groups=groups)
    assert type(met.posterior_) is MetPosterior
    np.testing.assert_allclose(met.summary(), whole.summary(), rtol=1e-8)
    np.testing.assert_allclose(met.group_effects("g"), whole.group_effects("g"), atol=1e-9)
    np.testing.assert_allclose(met.predict_latent(X, groups=groups), whole.predict_latent(X, groups=groups), rtol=1e-9)
    assert met.diagnose(draws=200).log_evidence == pytest.approx(whole.diagnose(draws=200).log_evidence, abs=1e-8)
    mine, its = (one.average(X, groups=groups).to_numpy() for one in (met, whole))
    np.testing.assert_allclose(mine, its, atol=1e-3)
    other = {"g": rng_pairs(60, 200, 1), "k": rng_pairs(25, 200, 2)}  # a mixture's are near those of its parts
    sds = [one.predict_latent(X[:200], groups=other)[1] for one in (met, whole)]
    np.testing.assert_allclose(*sds, rtol=0.05)
    met.save(tmp_path / "met.viper")
    loaded = viper.load(tmp_path / "met.viper")
    np.testing.assert_array_equal(loaded.predict_proba(X, groups=groups), met.predict_proba(X, groups=groups))
    broken = replace(met.posterior_, count=met.posterior_.count.flip(0) + 1.0)
    assert not broken.is_whole()


def rng_pairs(levels, rows, seed):
    return np.random.default_rng(seed).integers(levels, size=rows)


def test_pairs_that_never_met_are_exact_in_one_gaussian(monkeypatch):
    """Given what a group met, it is independent of all other effects: the rest of the covariance follows."""
    monkeypatch.setattr("viper.inference.groups.rows.DENSE_CROSS", 0)
    monkeypatch.setattr("viper.inference.groups.rows.SPARSE_SHARE", 1.0)
    X, y, g, k = simulated(rows=80, groups=30, items=10)
    one = np.ones((len(y), 1))
    rows, _ = sorted_rows(with_ones(X), y, [Factor(g, 30, one), Factor(k, 10, one)])
    q = fit_effects(rows, GroupPrior(np.zeros(3), np.eye(3), (np.array([[0.9]]), np.array([[0.5]])))).q
    precision = Arrow(q.precision.border, q.precision.cross.matrix.toarray()[:, None], q.precision.blocks)
    covariance = np.linalg.inv(dense(precision))
    every = [np.repeat(np.arange(30), 10), np.tile(np.arange(3, 13), 30)]
    found = q.covariance.cross.completed(meetings_of(every[0], 30, [every[1]], 13, 3), q.covariance.border)
    np.testing.assert_allclose(found.values.reshape(30, 13), covariance[13:, :13], atol=1e-12)


# --- variance components ---


@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_prior_of_components_is_a_density(width):
    prior = ComponentPrior(1.7)
    if width == 1:
        total, _ = scipy.integrate.quad(lambda u: math.exp(prior.log_density(np.array([u]), 1)), -40, 20)
        assert total == pytest.approx(1.0, abs=1e-8)
    theta = np.random.default_rng(width).normal(0, 0.5, component_count(width))
    for k, slope in enumerate(prior.gradient(theta, width)):
        step = 1e-6 * np.eye(len(theta))[k]
        change = prior.log_density(theta + step, width) - prior.log_density(theta - step, width)
        assert slope == pytest.approx(change / 2e-6, abs=1e-7)
    D = covariance_of(theta, width)
    np.testing.assert_allclose(np.sqrt(np.diag(D)), np.exp(theta[:width]), rtol=ROUNDING)
    assert np.linalg.eigvalsh(D).min() > 0
    if width == 3:  # the prior of each correlation is Beta on (-1, 1), whatever their order (LKJ)
        found = prior.log_density(np.r_[np.zeros(3), 0.3, 0.0, 0.0], 3) - prior.log_density(np.zeros(6), 3)
        assert found == pytest.approx(2.5 * math.log(1 - math.tanh(0.3) ** 2))


@pytest.mark.parametrize("quadrature", [False, True])
def test_the_gradient_of_the_evidence_is_its_slope(quadrature):
    X, y, g, k = simulated(slope=True)
    one = np.ones((len(y), 1))
    Z = one if quadrature else np.column_stack([one, X[:, 0]])
    rows, _ = sorted_rows(with_ones(X), y, [Factor(g, 12, Z), Factor(k, 5, one)])
    profile = ComponentProfile(rows, np.zeros(3), np.eye(3), ComponentPrior(2.5), quadrature)
    theta = np.array([-0.2, 0.1]) if quadrature else np.array([-0.2, -0.6, 0.3, -0.5])
    _, gradient = profile(theta, tol=1e-12)
    for j in range(len(theta)):
        step = 1e-3 * np.eye(len(theta))[j]
        change = (profile(theta + step, tol=1e-12)[0] - profile(theta - step, tol=1e-12)[0]) / 2e-3
        # Δ is taken at the posterior mean, whose own move with θ its gradient leaves out
        assert gradient[j] == pytest.approx(change, abs=0.02 if quadrature else 1e-5)


def test_quadrature_finds_the_evidence_of_single_groups():
    rng = np.random.default_rng(2)
    g = np.repeat(np.arange(6), 4)
    y = (rng.random(24) < 0.2).astype(float)
    rows, _ = sorted_rows(np.ones((24, 1)), y, [Factor(g, 6, np.ones((24, 1)))])
    variance = 1.3
    fit = fit_effects(rows, GroupPrior(np.zeros(1), np.eye(1), (np.array([[variance]]),)), tol=1e-12)
    found = missed_evidence(rows, fit.q, variance)
    beta = fit.q.mean.border[0]

    def likelihood(b, labels):
        f = beta + b
        density = math.exp(-0.5 * b * b / variance) / math.sqrt(2 * math.pi * variance)
        return math.exp(float(labels.sum()) * f - len(labels) * math.log1p(math.exp(f))) * density

    exact = sum(math.log(scipy.integrate.quad(likelihood, -12, 12, args=(y[g == k],))[0]) for k in range(6))
    # the groups' best Gaussians given β: each by itself
    bound = 0.0
    for k in range(6):
        one, _ = sorted_rows(np.ones((4, 1)), y[g == k], [Factor(np.zeros(4, int), 1, np.ones((4, 1)))])
        tight = GroupPrior(np.array([beta]), np.array([[1e12]]), (np.array([[variance]]),))
        bound += fit_effects(one, tight, tol=1e-12).elbo
    assert found.value == pytest.approx(exact - bound, abs=1e-5)
    assert found.value > 0


def test_the_posterior_is_that_of_brute_force():
    """β and σ of 8 sparse groups, against the exact posterior on a grid of both."""
    rng = np.random.default_rng(6)
    g = np.repeat(np.arange(8), 6)
    y = (rng.random(48) < 1 / (1 + np.exp(1.2 - rng.normal(0, 1.5, 8)[g]))).astype(float)
    rows, _ = sorted_rows(np.ones((48, 1)), y, [Factor(g, 8, np.ones((48, 1)))])
    prior = ComponentPrior(2.5)
    profile = ComponentProfile(rows, np.zeros(1), np.array([[0.01]]), prior, True)
    with torch.no_grad():
        found = component_posterior(profile, starting_components(rows), np.random.default_rng(0))
    z, w = np.polynomial.hermite_e.hermegauss(60)
    wins = np.bincount(g, y)
    betas, logs = np.linspace(-9, 6, 241), np.linspace(-7, 3.2, 141)
    density = np.empty((len(betas), len(logs)))
    for j, u in enumerate(logs):
        f = betas[:, None, None] + math.exp(u) * z  # β × 1 × nodes
        each = np.exp(wins[:, None] * f - 6 * np.logaddexp(0, f)) @ (w / w.sum())
        density[:, j] = np.log(each).sum(1) + prior.log_density(np.array([u]), 1) - 0.5 * 0.01 * betas**2
    density = np.exp(density - density.max())
    density /= density.sum()
    by_beta, by_log = density.sum(1), density.sum(0)
    mean = by_beta @ betas
    sd = math.sqrt(by_beta @ (betas - mean) ** 2)
    assert found.pooled.mean.border[0] == pytest.approx(mean, abs=0.05 * sd)
    assert math.sqrt(found.pooled.covariance.border[0, 0]) == pytest.approx(sd, rel=0.04)
    assert found.shares @ np.exp(found.values[:, 0]) == pytest.approx(by_log @ np.exp(logs), rel=0.02)


def test_pooling_adds_up_a_mixture():
    X, y, g, k = simulated(rows=80, groups=5, items=3)
    one = np.ones((80, 1))
    rows, _ = sorted_rows(with_ones(X), y, [Factor(g, 5, one), Factor(k, 3, one)])
    fits = [
        fit_effects(rows, GroupPrior(np.zeros(3), np.eye(3), (np.array([[v]]), np.array([[0.5]])))).q
        for v in (0.2, 1.0, 4.0)
    ]
    pool, logs = Pool(rows, fits[0].mean), np.array([-3.0, 0.5, -1.0])
    for q, log_weight in zip(fits, logs, strict=True):
        pool.add(np.zeros(2), log_weight, q, None)
    found, weights = pool.result(), np.exp(logs) / np.exp(logs).sum()
    whole = [np.r_[q.mean.border, q.mean.groups[:, 0]] for q in fits]
    mean = weights @ np.array(whole)
    np.testing.assert_allclose(np.r_[found.mean.border, found.mean.groups[:, 0]], mean, atol=1e-13)
    second = sum(
        w * (dense(q.covariance) + np.outer(m - mean, m - mean)) for w, q, m in zip(weights, fits, whole, strict=True)
    )
    kept = dense(found.covariance) != 0
    np.testing.assert_allclose(dense(found.covariance)[kept], second[kept], atol=1e-13)


def test_the_interval_of_a_mixture_has_its_mass():
    weights, means, sds = np.array([0.3, 0.7]), np.array([[0.0], [2.0]]), np.array([[1.0], [0.2]])
    low, high = mixture_interval(weights, means, sds, 0.9)[0]
    draws = torch.distributions.Normal(torch.from_numpy(means[:, 0]), torch.from_numpy(sds[:, 0]))
    below = [float(torch.from_numpy(weights) @ draws.cdf(torch.tensor(x))) for x in (low, high)]
    np.testing.assert_allclose(below, [0.05, 0.95], atol=1e-8)


# --- the exact posterior ---


@pytest.mark.parametrize("width", [1, 2])
def test_integrals_over_effects_are_those_of_quadrature(width):
    """log I, mean and variance of a group's effects given the border, and a row's density without it."""
    rng = np.random.default_rng(width)
    g, n = np.repeat(np.arange(4), 6), 24
    Z = np.column_stack([np.ones(n), rng.standard_normal(n)])[:, :width]
    y = (rng.random(n) < 0.3).astype(float)
    weight = rng.uniform(0.5, 1.5, n)
    X = rng.standard_normal((n, 1))
    rows, _ = sorted_rows(X, y, [Factor(g, 4, Z)], weight)
    D = np.array([[1.1, 0.3], [0.3, 0.6]])[:width, :width]
    q = fit_effects(rows, GroupPrior(np.zeros(1), np.eye(1), (D,)), tol=1e-12).q
    border = np.array([[0.4], [-0.2]])
    ((_, _, _, found),) = group_integrals(rows, q, D, border)
    moments, without = found.moments(), found.log_without_row()
    axis = np.linspace(-9, 9, 1201 if width == 1 else 361)
    grid = np.stack(np.meshgrid(*[axis] * width, indexing="ij"), -1).reshape(-1, width)
    prior = np.exp(-0.5 * np.einsum("mi,ij,mj->m", grid, np.linalg.inv(D), grid))
    prior *= (axis[1] - axis[0]) ** width / math.sqrt(np.linalg.det(2 * math.pi * D))
    for k in range(4):
        at = np.flatnonzero(g == k)
        f = (X[at] @ border[1])[:, None] + Z[at] @ grid.T
        each = weight[at, None] * (y[at, None] * f - np.logaddexp(0, f))
        density = np.exp(each.sum(0)) * prior
        assert moments.log_integral[k, 1] == pytest.approx(math.log(density.sum()), abs=2e-5)
        share = density / density.sum()
        mean = share @ grid
        np.testing.assert_allclose(moments.mean[k, 1], mean, atol=2e-4)
        np.testing.assert_allclose(
            moments.covariance[k, 1], (share[:, None] * (grid - mean)).T @ (grid - mean), atol=1e-3
        )
        left_out = np.exp(each.sum(0) - each[0]) * prior
        assert without[at[0], 1] == pytest.approx(math.log(density.sum() / left_out.sum()), abs=2e-4)


@pytest.fixture(scope="module")
def few():
    """Eight sparse groups with an intercept: all of it can be integrated on a grid of β and log σ."""
    rng = np.random.default_rng(6)
    g = np.repeat(np.arange(8), 6)
    y = (rng.random(48) < 1 / (1 + np.exp(1.2 - rng.normal(0, 1.5, 8)[g]))).astype(float)
    model = viper.VariationalMixedRegression(quadrature=False).fit(None, y, groups={"g": g})
    return model, g, y


def grid_of(model, g, y):
    """log p(y_g | β, σ) by group, and log p(β, σ), with β at 121 values and log σ at those of the mixture."""
    z, w = np.polynomial.hermite_e.hermegauss(60)
    betas, logs = np.linspace(-9, 6, 301), model._points["points.theta"].numpy()[:, 0]
    wins, sizes = np.bincount(g, y), np.bincount(g)
    f = betas[:, None, None, None] + np.exp(logs)[:, None, None] * z
    each = np.log(np.exp(wins[:, None] * f - sizes[:, None] * np.logaddexp(0, f)) @ (w / w.sum()))
    return betas, each, -0.005 * betas**2


def test_weighted_draws_are_the_exact_posterior(few):
    """Given the values of σ in the mixture and what each stands for, β and the weights of σ are those of a grid."""
    model, g, y = few
    corrected = model.corrected(draws=20_000)
    betas, each, prior = grid_of(model, g, y)
    joint = each.sum(2) + prior[:, None]
    points = {name: x.numpy() for name, x in model._points.items()}
    fits = corrected.weighted.draws[:, 1].numpy()
    bounds = []  # F at each value: what the mixture took for log p(y | σ)
    rows = model._grouped_rows
    for theta in points["points.theta"]:
        given = GroupPrior(np.zeros(1), np.array([[0.01]]), (np.array([[math.exp(2 * theta[0])]]),))
        bounds.append(fit_effects(rows, given, tol=1e-10).elbo)
    log_weight = np.log(points["points.weight"]) - np.array(bounds)
    density = np.exp(joint + log_weight - (joint + log_weight).max())
    density /= density.sum()
    mean = density.sum(1) @ betas
    sd = math.sqrt(density.sum(1) @ (betas - mean) ** 2)
    assert corrected.mean_[0] == pytest.approx(mean, abs=0.02 * sd)
    assert corrected.sd_[0] == pytest.approx(sd, rel=0.02)
    shares = [float(corrected.weighted.weights[fits == theta[0]].sum()) for theta in points["points.theta"]]
    np.testing.assert_allclose(shares, density.sum(0), atol=0.01)
    found = model.diagnose(draws=2000)
    assert found.close
    assert found.elbo < model.elbo_
    assert found.log_evidence > found.elbo  # without quadrature, the ELBO is below the evidence
    # a known group: E s(β + b) from its exact effects, given each draw
    for k in (0, 5):
        z, w = np.polynomial.hermite_e.hermegauss(60)
        f = betas[:, None, None] + np.exp(points["points.theta"][:, 0])[:, None] * z
        own = np.exp(y[g == k].sum() * f - 6 * np.logaddexp(0, f)) * w
        chance = (own / (1 + np.exp(-f))).sum(2) / own.sum(2)
        assert corrected.predict_proba(None, groups={"g": [k]})[0, 1] == pytest.approx(
            (density * chance).sum(), abs=0.01
        )


def test_leaving_out_is_integrating_without(few):
    """Rows and whole groups, against the same grid."""
    model, g, y = few
    betas, each, prior = grid_of(model, g, y)
    points = {name: x.numpy() for name, x in model._points.items()}
    bounds = [
        fit_effects(
            model._grouped_rows,
            GroupPrior(np.zeros(1), np.array([[0.01]]), (np.array([[math.exp(2 * theta[0])]]),)),
            tol=1e-10,
        ).elbo
        for theta in points["points.theta"]
    ]
    joint = each.sum(2) + prior[:, None] + np.log(points["points.weight"]) - np.array(bounds)
    density = np.exp(joint - joint.max())

    def left_out(change):
        return -math.log((density * np.exp(change)).sum() / density.sum())

    found = model.loo(draws=8000, leave_out="g")
    np.testing.assert_allclose(found.pointwise, [left_out(-each[:, :, k]) for k in range(8)], atol=0.02)
    z, w = np.polynomial.hermite_e.hermegauss(60)
    by_row = model.loo(draws=8000)
    for i in (0, 17):
        f = betas[:, None, None] + np.exp(points["points.theta"][:, 0])[:, None] * z
        wins, size = y[g == g[i]].sum() - y[i], 5
        without = np.log(np.exp(wins * f - size * np.logaddexp(0, f)) @ (w / w.sum()))
        assert by_row.pointwise[i] == pytest.approx(left_out(without - each[:, :, g[i]]), abs=0.02)
    with pytest.raises(ValueError, match="leave_out must be 'row' or 'g'"):
        model.loo(leave_out="h")


# --- the estimator ---


@pytest.fixture(scope="module")
def table():
    X, y, g, k = simulated(rows=360)
    names = np.array([f"H{j:02d}" for j in range(12)])
    columns = {"died": np.where(y > 0, "yes", "no"), "age": 50 + 10 * X[:, 0], "dose": X[:, 1]}
    return pandas.DataFrame({**columns, "hospital": names[g], "item": k})


@pytest.fixture(scope="module")
def model(table):
    return viper.VariationalMixedRegression.from_formula("died ~ age + dose + (1 | hospital) + (1 | item)", table)


def test_arrays_and_formulas_give_the_same_model(model, table):
    X = model.formula_.encode(table)
    other = viper.VariationalMixedRegression().fit(X, table["died"], groups=table[["hospital", "item"]])
    np.testing.assert_allclose(other.coef_, model.coef_, rtol=1e-12)
    pandas.testing.assert_frame_equal(other.components(), model.components())
    mine = other.predict_proba(X, groups={"hospital": table["hospital"], "item": table["item"]})
    np.testing.assert_allclose(mine, model.predict_proba(table), rtol=1e-12)


def test_order_and_names_of_groups_change_nothing(model, table):
    rng = np.random.default_rng(3)
    names = dict(zip(sorted(table["hospital"].unique()), rng.permutation(12), strict=True))
    other = table.assign(hospital=table["hospital"].map(names)).sample(frac=1.0, random_state=4)
    again = viper.VariationalMixedRegression.from_formula(model.formula_.formula, other)
    np.testing.assert_allclose(again.coef_, model.coef_, atol=1e-8)
    np.testing.assert_allclose(again.components(), model.components(), atol=1e-5)
    mine = model.group_effects("hospital").loc[("H03", "intercept")]
    np.testing.assert_allclose(again.group_effects("hospital").loc[(names["H03"], "intercept")], mine, atol=1e-6)


def test_nested_groups_are_pairs(table):
    wards = table.assign(ward=table["item"] % 2, pair=table["hospital"] + ":" + (table["item"] % 2).astype(str))
    nested = viper.VariationalMixedRegression.from_formula("died ~ age + (1 | hospital/ward)", wards)
    pairs = viper.VariationalMixedRegression.from_formula("died ~ age + (1 | hospital) + (1 | pair)", wards)
    np.testing.assert_allclose(nested.coef_, pairs.coef_, rtol=1e-10)
    assert nested.factors_[1].levels == pairs.factors_[1].levels
    np.testing.assert_allclose(nested.predict_proba(wards.head(3)), pairs.predict_proba(wards.head(3)), rtol=1e-10)


def test_slopes_vary_between_groups(table):
    slopes = viper.VariationalMixedRegression.from_formula("died ~ age + dose + (1 + age | hospital)", table)
    assert [*slopes.components().index] == [
        "sd(intercept | hospital)",
        "sd(age | hospital)",
        "cor(intercept, age | hospital)",
        "icc(hospital)",
    ]
    assert slopes.group_effects().index.get_level_values("effect").unique().tolist() == ["intercept", "age"]
    apart = viper.VariationalMixedRegression.from_formula("died ~ age + dose + (age || hospital)", table)
    assert apart.effects == "(1 | hospital) + (0 + age | hospital)"
    assert not [name for name in apart.components().index if name.startswith("cor")]


def test_new_groups_are_averaged_over(model, table):
    rows = table.head(4).assign(hospital="elsewhere")
    with pytest.raises(FormulaError, match="groups of 'hospital' must be among the 12 of the fit; got 'elsewhere'"):
        model.predict_proba(rows)
    other = viper.VariationalMixedRegression(**model.get_params() | {"new_groups": "average"})
    vars(other).update({name: x for name, x in vars(model).items() if name.endswith("_") or name.startswith("_")})
    found, spread = other.predict_proba(rows)[:, 1], other.predict_std(rows)
    # by draws: known items, an effect of a new hospital from its prior
    rng = np.random.default_rng(0)
    points = {name: x.numpy() for name, x in model._points.items()}
    which = rng.choice(model.points_, p=points["points.weight"], size=100_000)
    place = model._order.index(0)
    sd = np.exp(points["points.theta"][which, place])
    known = other.predict_latent(rows)
    base = model.formula_.encode(rows).to_numpy() @ model.coef_[0] + model.intercept_[0]
    base += model.group_effects("item")["mean"].to_numpy()[rows["item"]]
    rest = np.sqrt(
        np.maximum(known[1] ** 2 - points["points.weight"] @ np.exp(2 * points["points.theta"][:, place]), 0)
    )
    f = base + rest * rng.standard_normal((100_000, 4)) + (sd * rng.standard_normal(100_000))[:, None]
    p = 1 / (1 + np.exp(-f))
    np.testing.assert_allclose(found, p.mean(0), atol=0.005)
    np.testing.assert_allclose(spread, p.std(0), atol=0.01)
    noted = other.predict_table(rows)
    assert noted["note"].str.contains("is a new group, averaged").all()
    assert model.predict_table(rows)["probability"].isna().all()
    assert model.predict_table(rows, unseen="baseline")["probability"].notna().all()


def test_a_model_survives_its_file(model, table, tmp_path):
    path = tmp_path / "model.viper"
    model.save(path)
    again = viper.load(path)
    np.testing.assert_array_equal(again.predict_proba(table), model.predict_proba(table))
    np.testing.assert_array_equal(again.predict_interval(table), model.predict_interval(table))
    pandas.testing.assert_frame_equal(again.summary(), model.summary())
    pandas.testing.assert_frame_equal(again.group_effects("item"), model.group_effects("item"))
    assert again.card()["formula"] == model.formula_.formula
    state = model._pack()
    state.metadata["order"] = [0, 0]
    with pytest.raises(StorageError, match="order of group terms"):
        type(model)._unpack(state, {})


def test_only_groups_and_an_intercept(table):
    rasch = viper.VariationalMixedRegression.from_formula("died ~ (1 | hospital) + (1 | item)", table)
    arrays = viper.VariationalMixedRegression().fit(None, table["died"], groups=table[["hospital", "item"]])
    np.testing.assert_allclose(rasch.intercept_, arrays.intercept_, rtol=1e-12)
    assert rasch.coef_.shape == (1, 0)
    assert rasch.predict_proba(table.head(2)).shape == (2, 2)
    groups = table[["hospital", "item"]].head(2)
    np.testing.assert_allclose(arrays.predict_proba(None, groups=groups), rasch.predict_proba(table.head(2)))


def test_counts_are_rows(table):
    few = table.head(120)
    weight = 1 + np.arange(120) % 2
    counted = viper.VariationalMixedRegression.from_formula("died ~ age + (1 | item)", few, sample_weight=weight)
    repeated = few.loc[few.index.repeat(weight)]
    rows = viper.VariationalMixedRegression.from_formula("died ~ age + (1 | item)", repeated)
    # the columns are standardised by other means: compare probabilities
    np.testing.assert_allclose(counted.predict_proba(few), rows.predict_proba(few), atol=0.01)
    offset = np.full(120, 0.7)
    moved = viper.VariationalMixedRegression.from_formula("died ~ age + (1 | item)", few, offset=offset)
    plain = viper.VariationalMixedRegression.from_formula("died ~ age + (1 | item)", few)
    assert moved.intercept_[0] == pytest.approx(plain.intercept_[0] - 0.7, abs=0.02)  # its prior is wide


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        ("died ~ age | hospital", r"effects of groups must be written as \(1 \| hospital\)"),
        ("died ~ age * (1 | hospital)", "one that is not a term of a sum"),
        ("died ~ age + (log(age) | hospital)", "left of |"),
        ("died ~ age + (1 | hospital) + (1 | hospital)", "twice"),
        ("died ~ age + (1 | hopital)", "Did you mean 'hospital'"),
        ("died ~ age + (1 | died)", "target must not be a group"),
        ("died ~ age", "must have a term such as"),
        ("died ~ age + (1 + dose | hospital)", "also a term by itself; got 'dose'"),
        ("died ~ age + (1 | same)", "at least two groups; got one, 'x'"),
        ("died ~ age + (1 | row)", "one row in each of 360 groups"),
        ("died ~ age + level + (1 + level | hospital)", "must vary within some group"),
        ("died ~ age + (1 | gone)", "missing values"),
    ],
)
def test_bad_groups_are_refused(table, formula, words):
    level = table["hospital"].str[1:].astype(float)
    gone = table["hospital"].mask(np.arange(360) == 7)
    data = table.assign(same="x", row=np.arange(360), level=level, gone=gone)
    with pytest.raises(ValueError, match=words):
        viper.VariationalMixedRegression.from_formula(formula, data)


def test_groups_belong_to_the_mixed_model(table):
    with pytest.raises(FormulaError, match=r"Use VariationalMixedRegression\.from_formula"):
        viper.VariationalLogisticRegression.from_formula("died ~ age + (1 | hospital)", table)
    with pytest.raises(ValueError, match="groups must say to which group each row belongs; got none"):
        viper.VariationalMixedRegression().fit(table[["age"]], table["died"])
    with pytest.raises(ValueError, match="one entry per row; got 2 for 360"):
        viper.VariationalMixedRegression().fit(table[["age"]], table["died"], groups=[1, 2])
    with pytest.raises(ValueError, match="component_scale must be a positive number"):
        viper.VariationalMixedRegression(component_scale=0).fit(table[["age"]], table["died"], groups=table["item"])


def test_group_terms_are_read_as_written():
    columns = ["y", "x", "a", "b"]
    parsed = parse_formula("y ~ (1|a/b) + . - x", columns, ["a", "b"])
    assert [str(term) for term in parsed.groups] == ["(1 | a)", "(1 | a:b)"]
    assert parsed.grouping == ["a", "b"]
    assert parsed.plain == ()
    again = parse_formula("y ~ x + (x || `a`)", columns, ["a"])
    assert parse_formula(again.formula, columns, ["a"]) == again
    assert [str(term) for term in parse_groups("(0 + x | a) + (1 | b)")] == ["(0 + x | a)", "(1 | b)"]


def test_diagnosis_needs_the_rows_of_the_fit(model, table, tmp_path):
    found = model.diagnose()
    assert found.close
    assert found.reliable
    model.save(tmp_path / "m.viper")
    loaded = viper.load(tmp_path / "m.viper")
    again = loaded.diagnose(table, table["died"])
    assert again.log_evidence == pytest.approx(found.log_evidence, abs=0.01)
    assert loaded.elbo(table, table["died"]) == pytest.approx(model.elbo_, abs=1e-6)
    with pytest.raises(ValueError, match="diagnose needs the training rows"):
        loaded.diagnose()
    with pytest.raises(ValueError, match=r"with all 12 groups of 'hospital'; got"):
        loaded.loo(table[table["hospital"] != "H03"], table["died"][table["hospital"] != "H03"])
    np.testing.assert_allclose(loaded.loo(table, table["died"]).pointwise, model.loo().pointwise, atol=1e-3)


def test_corrected_predictions_agree_with_the_model(model, table):
    corrected = model.corrected()
    np.testing.assert_allclose(corrected.predict_proba(table), model.predict_proba(table), atol=0.015)
    np.testing.assert_allclose(corrected.predict_std(table), model.predict_std(table), atol=0.015)
    mine, its = model.summary(), corrected.summary()
    np.testing.assert_allclose(its["mean"], mine["mean"], atol=0.05)
    np.testing.assert_allclose(its["sd"], mine["sd"], rtol=0.1)


def test_effects_of_known_groups_and_new_ones(model, table):
    """Averages are those of predictions; a contrast between groups has the moments of a difference of two effects."""
    average = model.average(table)["estimate"].iloc[0]
    assert average == pytest.approx(model.predict_proba(table)[:, 1].mean(), abs=1e-9)
    twin = viper.VariationalMixedRegression.from_formula(model.formula_.formula, table, unseen="baseline")
    fresh = twin.predict_proba(table.assign(hospital="Hxx"))[:, 1].mean()
    # the mixture of new groups' variances, here by its mean
    assert model.average(table, at={"hospital": "new"})["estimate"].iloc[0] == pytest.approx(fresh, abs=2e-3)
    one = table.head(1)
    change = model.contrast(one, {"hospital": ["H00", "H01"]})
    each = [model.predict_proba(one.assign(hospital=name))[0, 1] for name in ("H00", "H01")]
    assert change["estimate"].iloc[0] == pytest.approx(each[1] - each[0], abs=1e-8)
    with pytest.raises(ValueError, match="at must give 'hospital' one of its levels; got 'Hxx'"):
        model.average(table, at={"hospital": "Hxx"})
    assert list(model.contrast(table)["variable"]) == ["age", "dose"]
    X = model.formula_.encode(table)
    arrays = viper.VariationalMixedRegression().fit(X, table["died"], groups=table[["hospital", "item"]])
    mine = arrays.average(X, groups=table[["hospital", "item"]])
    assert mine["estimate"].iloc[0] == pytest.approx(average, abs=1e-8)
    slope, other = arrays.slopes(X, "age", groups=table[["hospital", "item"]]), model.slopes(table, "age")
    spread = model.formula_.scale[0]
    assert slope["estimate"].iloc[0] == pytest.approx(other["estimate"].iloc[0] * spread, rel=1e-5)


def test_all_effects_are_one_gaussian():
    """Draws and spreads are those of the dense covariance, in a fit with given components."""
    X, y, g, k = simulated(slope=True)
    one = np.ones((len(y), 1))
    rows, _ = sorted_rows(with_ones(X), y, [Factor(g, 12, np.column_stack([one, X[:, :1]])), Factor(k, 5, one)])
    D = np.array([[0.9, 0.2], [0.2, 0.4]])
    q = fit_effects(rows, GroupPrior(np.zeros(3), np.eye(3), (D, np.array([[0.5]])))).q
    parts = (q.mean.border, q.covariance.border, q.mean.groups, q.covariance.cross, q.covariance.blocks)
    everything = AllEffects(GroupPosterior(*(torch.from_numpy(np.ascontiguousarray(x)) for x in parts)))
    whole = np.linalg.inv(dense(q.precision))
    A = np.random.default_rng(0).standard_normal((6, len(whole)))
    np.testing.assert_allclose(everything.spread(Dense(torch.from_numpy(A))), np.diag(A @ whole @ A.T), rtol=1e-9)
    sparse = everything.spread(Sparse(scipy.sparse.csr_array(A)))
    np.testing.assert_allclose(sparse, np.diag(A @ whole @ A.T), rtol=1e-9)
    root = everything.draw(torch.eye(len(whole), dtype=torch.float64)) - everything.mean
    np.testing.assert_allclose(root.T @ root, whole, atol=1e-9)


def test_draws_for_arviz_hold_all_effects(model, table):
    pytest.importorskip("arviz_base")
    found = model.to_arviz(draws=500)
    posterior = found["posterior"]
    assert posterior["effects of hospital"].shape == (4, 500, 12, 1)
    mean = posterior["effects of hospital"].mean(("chain", "draw")).values[:, 0]
    effects = model.group_effects("hospital")
    np.testing.assert_allclose(mean, effects["mean"], atol=0.1)
    sd = posterior["effects of hospital"].std(("chain", "draw")).values[:, 0]
    np.testing.assert_allclose(sd, effects["sd"], rtol=0.1)
    assert list(posterior["parameter"].values) == list(model.components().index)
    likelihood = found["log_likelihood"]["y"].mean(("chain", "draw")).values
    assert (likelihood < 0).all()
    assert likelihood.sum() == pytest.approx(model.loo().elpd_loo + 12, abs=12)
    np.testing.assert_array_equal(found["observed_data"]["y"], table["died"] == "yes")


def test_commands_take_group_terms(table, tmp_path):
    data, path = tmp_path / "data.csv", tmp_path / "model.viper"
    table.to_csv(data, index=False)

    def run(*words):
        return CliRunner().invoke(app, list(map(str, words)))

    formula = "died ~ age + (1 | hospital)"
    made = run("fit", data, "--formula", formula, "--out", path, "--cv", 2)
    assert made.exit_code == 0, made.output
    for words in ("with effects of groups", "sd(intercept | hospital)", "icc(hospital)", "12 of (1 | hospital)"):
        assert words in made.output
    fresh = table.head(3).assign(hospital=["H01", "H02", "new"])
    fresh.to_csv(tmp_path / "new.csv", index=False)
    assert run("predict", path, tmp_path / "new.csv", "--out", tmp_path / "p.csv").exit_code == 5
    averaged = run("predict", path, tmp_path / "new.csv", "--unseen", "baseline", "--out", tmp_path / "q.csv")
    assert averaged.exit_code == 0
    assert pandas.read_csv(tmp_path / "q.csv")["probability"].notna().all()
    said = run("evaluate", path, data)
    assert said.exit_code == 0
    assert "the model was fitted to these rows" in said.output
    table.head(60).to_csv(tmp_path / "some.csv", index=False)
    assert "the model was fitted to these rows" not in run("evaluate", path, tmp_path / "some.csv").output
    assert run("summary", path).exit_code == 0
    assert "new" in run("effects", path, data, "--at", "hospital=H01,new").output
    assert "H01 - H00" in run("effects", path, data, "--contrast", "hospital=H00,H01").output
    assert "'H00'" in run("effects", path, data, "--at", "hospital=Hxx").output
    made = run("report", path, data, "--out", tmp_path / "r.html")
    assert made.exit_code == 0, made.output
    page = (tmp_path / "r.html").read_text()
    for words in ("How do groups differ?", "sd(intercept | hospital)", "with effects of groups of died", "H03"):
        assert words in page
    ranked = run("suggest", path, data, "--n", 2)
    assert ranked.exit_code == 0
    assert len(ranked.output.splitlines()) >= 3


def test_a_picture_of_shrinkage(model):
    plot = pytest.importorskip("matplotlib.pyplot")
    ax = viper.plot.shrinkage(model, "hospital")
    effects = model.group_effects("hospital")["mean"].sort_values().to_numpy()
    shown, own = (line.get_xdata() for line in ax.lines[:2])
    np.testing.assert_allclose(shown, effects)
    assert (np.abs(own) >= np.abs(effects)).all()
    plot.close(ax.figure)
    with pytest.raises(ValueError, match="groups must be the name of one of several"):
        viper.plot.shrinkage(model)


@pytest.mark.slow
def test_intervals_cover_with_few_groups():
    """95 % intervals of the effect of a column between 8 groups, the intercept, and their sd, in 200 simulations."""
    covered = np.zeros(3)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        g = np.repeat(np.arange(8), 25)
        x = (g % 2 - 0.5) * 2
        sd = 0.8
        f = -0.3 + 0.5 * x + rng.normal(0, sd, 8)[g]
        y = rng.random(200) < 1 / (1 + np.exp(-f))
        found = viper.VariationalMixedRegression().fit(x[:, None], y, groups=g).summary()
        truth = [0.5, -0.3, sd]
        inside = (found["lower"] <= [*truth, 0.0]) & (found["upper"] >= [*truth, 1.0])
        covered += [inside.iloc[0], inside.iloc[1], found["lower"].iloc[2] <= sd <= found["upper"].iloc[2]]
    # a binomial of 200 with probability 0.95 has sd 0.015
    assert (covered / 200 > 0.9).all(), covered / 200
