"""Ordinal regression: its identities, the exact posterior on a grid, its peers, and scikit-learn's rules."""

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from scipy.special import expit, logsumexp
from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks
from tolerances import TOLERANCE

import viper
from viper import VariationalLogisticRegression, VariationalOrdinalRegression
from viper.errors import FormulaError, WeightWarning
from viper.inference.ordinal.gaps import GapPrior, Gaps, level_shares, log_one_minus_exp, thresholds_of
from viper.inference.ordinal.posterior import OrdinalPosterior
from viper.inference.ordinal.rows import LevelRows
from viper.inference.rows import Arrays
from viper.models.ordinal.fitting import gap_state
from viper.models.ordinal.reading import distance_of_level, logit_of_level, ordinal_reading

LEVELS = ["low", "middle", "high", "top"]


def simulated(n=200, slopes=(2.0, -1.0, 0.0), cuts=(-1.0, 0.5, 2.0), seed=1):
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((n, len(slopes)))
    score = X @ np.array(slopes) + generator.logistic(size=n)
    return X, np.digitize(score, cuts)


@pytest.fixture(scope="module")
def fitted():
    return VariationalOrdinalRegression().fit(*simulated())


@parametrize_with_checks(
    [VariationalOrdinalRegression()],
    expected_failed_checks=lambda _: {
        "check_classifiers_classes": "words have no order of their own",
    },
)
def test_scikit_learn(estimator, check):
    check(estimator)


# --- identities ---


def test_two_levels_are_two_classes():
    X, y = simulated()
    weight, offset = np.linspace(0.5, 2.0, len(X)), 0.3 * X[:, 1]
    given = {"sample_weight": weight, "offset": offset}
    ordinal = VariationalOrdinalRegression().fit(X, y > 1, **given)
    binary = VariationalLogisticRegression().fit(X, y > 1, **given)
    assert np.array_equal(ordinal.coef_, binary.coef_[0])
    assert ordinal.thresholds_[0] == -binary.intercept_[0]
    assert ordinal.elbo_ == pytest.approx(binary.elbo_, rel=TOLERANCE["converged"])
    sign = np.array([1, 1, 1, -1])
    assert np.allclose(ordinal.covariance_, binary.covariance_ * np.outer(sign, sign), rtol=TOLERANCE["special"])
    for method in ("predict", "predict_proba", "predict_std", "predict_interval", "decision_function"):
        assert np.array_equal(getattr(ordinal, method)(X), getattr(binary, method)(X)), method
    assert ordinal.corrected().predict_interval(X[:3]).shape == (3, 2)


def test_reversed_levels_reverse_signs(fitted):
    X, y = simulated()
    other = VariationalOrdinalRegression().fit(X, 3 - y)
    assert np.allclose(other.coef_, -fitted.coef_, atol=1e-10)
    assert np.allclose(other.thresholds_, -fitted.thresholds_[::-1], atol=1e-10)
    assert np.allclose(other.predict_proba(X), fitted.predict_proba(X)[:, ::-1], atol=1e-10)
    assert np.allclose(other.predict_interval(X[:9]), fitted.predict_interval(X[:9])[:, ::-1], atol=1e-7)
    assert other.elbo_ == pytest.approx(fitted.elbo_, rel=1e-12)


def test_a_weight_of_two_is_a_row_twice():
    X, y = simulated(60)
    weighted = VariationalOrdinalRegression().fit(X, y, sample_weight=np.full(len(X), 2.0))
    twice = VariationalOrdinalRegression().fit(np.r_[X, X], np.r_[y, y])
    assert np.allclose(weighted.covariance_, twice.covariance_, rtol=1e-6)
    assert weighted.elbo_ == pytest.approx(twice.elbo_, rel=1e-12)


def test_a_constant_offset_moves_the_thresholds():
    X, y = simulated()
    plain, moved = (
        VariationalOrdinalRegression(threshold_scale=1e6).fit(X, y, offset=np.full(len(X), c)) for c in (0.0, 1.5)
    )
    assert np.allclose(moved.thresholds_ - plain.thresholds_, 1.5, atol=1e-6)
    assert np.allclose(moved.coef_, plain.coef_, atol=1e-6)


def test_rows_with_two_classes_make_up_the_likelihood():
    generator = np.random.default_rng(3)
    f, (a, b) = 4 * generator.standard_normal(50), (-0.7, 0.9)
    direct = np.log(expit(b - f) - expit(a - f))
    constant = log_one_minus_exp(torch.tensor([b - a], dtype=torch.float64)).item()
    terms = -np.logaddexp(0, f - b) - np.logaddexp(0, a - f) + constant
    assert np.allclose(terms, direct, rtol=1e-10)


def test_gradient_and_curvature_of_the_profile():
    X, y = simulated(80)
    rows = LevelRows(Arrays(torch.tensor(X), torch.tensor(y), intercept=True), 4)
    gaps = Gaps(rows.counts(), GapPrior.independent(2, 4, 2.0))
    model = VariationalOrdinalRegression(tol=1e-13)
    model.n_features_in_ = 3
    prior, options = model._prior(model._scale()), model._options()

    def state(delta):
        from viper.models.fitting import fit_posterior

        return gap_state(rows, gaps, prior, delta, fit_posterior(rows.at(thresholds_of(delta)), prior, options, 0))

    at, step = torch.tensor([0.3, -0.2], dtype=torch.float64), 1e-3
    found = state(at)
    for j, unit in enumerate(torch.eye(2, dtype=torch.float64)):
        ahead, behind = state(at + step * unit), state(at - step * unit)
        assert (ahead.value - behind.value) / (2 * step) == pytest.approx(float(found.slope[j]), rel=1e-5)
        # the covariance of q is held in H, but follows δ in the difference: some per cent at 80 rows
        bend = (behind.slope - ahead.slope) / (2 * step)
        assert torch.allclose(bend, found.bend[j], rtol=0.05, atol=0.05 * float(found.bend.abs().max()))
        moved = (ahead.fit.posterior.mean - behind.fit.posterior.mean) / (2 * step)
        assert torch.allclose(moved, found.response[:, j], rtol=0.05, atol=0.02)


@pytest.fixture(scope="module")
def on_a_grid():
    """A small problem of one slope and three levels, with its exact posterior on a grid."""
    generator = np.random.default_rng(5)
    x = generator.standard_normal(60)
    y = np.digitize(1.5 * x + generator.logistic(size=60), [0.0, 1.2])
    model = VariationalOrdinalRegression(prior_scale=2.0, threshold_scale=5.0, gap_scale=1.5).fit(x[:, None], y)
    place, sd = [], []
    q = model.posterior_
    for mean, width in zip(
        [*q.mean, *q.log_gaps], [*q.variance.sqrt(), *(q.gap_factor @ q.gap_factor.T).diagonal().sqrt()], strict=True
    ):
        place.append(float(mean) + float(width) * np.linspace(-6, 6, 49))
        sd.append(float(width))
    beta, alpha, delta = np.meshgrid(*place, indexing="ij")
    half = 0.5 * np.exp(delta)
    f = beta[..., None] * x + alpha[..., None]
    edges = np.stack([np.full_like(half, -np.inf), -half, half, np.full_like(half, np.inf)], -1)
    below, above = edges[..., y], edges[..., y + 1]
    likelihood = np.log(expit(above - f) - expit(below - f)).sum(-1)
    scales = (2.0, 5.0, 1.5)
    prior = sum(-0.5 * (v / s) ** 2 - np.log(s * np.sqrt(2 * np.pi)) for v, s in zip((beta, alpha, delta), scales))  # noqa: B905
    log_cell = np.log([one[1] - one[0] for one in place]).sum()
    joint = likelihood + prior + log_cell
    evidence = logsumexp(joint)
    weight = np.exp(joint - evidence)
    values = {"beta": beta, "low": -half - alpha, "high": half - alpha}
    mean = {name: float((weight * v).sum()) for name, v in values.items()}
    spread = {name: float(np.sqrt((weight * (v - mean[name]) ** 2).sum())) for name, v in values.items()}
    return model, x, y, evidence, np.array([*mean.values()]), np.array([*spread.values()])


def test_the_exact_posterior(on_a_grid):
    model, *_, mean, sd = on_a_grid
    found = model.summary()
    # a Gaussian of 60 rows: the exact posterior is a little skewed and wider
    assert np.abs((found["mean"] - mean) / sd).max() < 0.05
    assert np.abs(found["sd"] / sd - 1.0).max() < 0.05
    held = model.posterior_.factor.square().sum(1).sqrt()[0].item()
    assert held / sd[0] < 0.95, "with thresholds held, the slope would be this much too certain"


def test_elbo_and_evidence(on_a_grid):
    model, x, y, evidence, mean, sd = on_a_grid
    assert evidence - 0.1 < model.elbo_ < evidence
    assert model.elbo(x[:, None], y) == pytest.approx(model.elbo_, rel=1e-12)
    found = model.diagnose()
    assert found.log_evidence == pytest.approx(evidence, abs=4 * found.log_evidence_error + 1e-4)
    corrected = model.corrected()
    error = sd / np.sqrt(found.effective_sample_size)
    assert (np.abs(corrected.mean_ - mean) < 4 * error).all()
    assert (np.abs(corrected.sd_ / sd - 1.0) < 0.08).all()


# --- predictions ---


def test_predictions_are_those_of_draws(fitted):
    X = simulated()[0][:40]
    draws = fitted.sample(40_000, random_state=1)
    assert (np.diff(draws[:, 3:], axis=1) > 0).all(), "thresholds are in order"
    below = expit(draws[:, None, 3:] - (draws[:, :3] @ X.T)[..., None])
    edges = np.concatenate([np.zeros_like(below[..., :1]), below, np.ones_like(below[..., :1])], -1)
    p = np.diff(edges, axis=-1)
    sd = fitted.predict_std(X)
    error = sd / np.sqrt(len(draws))
    assert (np.abs(fitted.predict_proba(X) - p.mean(0)) < 5 * error + 2e-4).all()
    assert (np.abs(sd / p.std(0) - 1.0) < 0.03).all()
    ends = np.quantile(p, [0.05, 0.95], axis=0).transpose(1, 2, 0)
    # Monte Carlo error of a 5 % quantile is a hundredth of an sd; a level given its gap is taken for normal
    assert (np.abs(fitted.predict_interval(X, 0.9) - ends) < 0.06 * sd[..., None]).all()
    mean, spread = fitted.predict_latent(X)
    f = draws[:, :3] @ X.T - draws[:, 3:].mean(1)[:, None]
    assert np.allclose(mean, f.mean(0), atol=5 * spread.max() / 200)
    assert np.allclose(spread, f.std(0), rtol=0.03)


def known_gaps(gaps, width=1e-9):
    """A posterior of one coefficient and the intercept, whose gaps are known."""
    m = len(gaps)
    eye = torch.eye(m, dtype=torch.float64)
    zero = torch.zeros(2, m, dtype=torch.float64)
    delta = torch.tensor(gaps, dtype=torch.float64).log()
    return OrdinalPosterior(zero.sum(1), torch.eye(2, dtype=torch.float64), zero, delta, width * eye)


def test_moments_and_intervals_of_levels_with_known_gaps():
    q = known_gaps([0.4, 2.0, 0.05])
    mean = torch.tensor([-3.0, -0.5, 0.1, 4.0], dtype=torch.float64)
    variance = torch.tensor([0.2, 1.5, 4.0, 1e-4], dtype=torch.float64)
    reading, count = ordinal_reading(q), len(q.points()[1])
    given = (mean[:, None].expand(-1, count), variance[:, None].expand(-1, count))
    z = np.linspace(-12.0, 12.0, 6001)  # equal weights: errors beyond all digits for a smooth integrand
    weight = np.exp(-0.5 * z**2)
    f = mean.numpy()[:, None] + np.sqrt(variance.numpy())[:, None] * z
    t = thresholds_of(q.log_gaps).numpy()
    p = level_shares(*(torch.tensor(expit(s * (t - f[..., None]))) for s in (1, -1))).numpy()
    weight = weight / weight.sum()
    first, second = (np.einsum("nzk,z->nk", x, weight) for x in (p, p**2))
    assert np.allclose(reading.probabilities(*given), first, rtol=1e-6)
    assert np.allclose(reading.sds(*given), np.sqrt(second - first**2), rtol=1e-5, atol=1e-12)
    ends = reading.intervals(*given, z=1.0)
    fine = np.random.default_rng(0).standard_normal(400_000)
    g = mean.numpy()[:, None] + np.sqrt(variance.numpy())[:, None] * np.sort(fine)
    for k in range(p.shape[-1]):
        edge = np.r_[-np.inf, t, np.inf]
        values = expit(edge[k + 1] - g) - expit(edge[k] - g)
        share = [(values <= ends[:, k, side, None]).mean(1) for side in (0, 1)]
        assert np.allclose(share[0], 0.1587, atol=0.004), k
        assert np.allclose(share[1], 0.8413, atol=0.004), k


def test_a_distance_from_the_middle_of_a_level_gives_its_probability_back():
    half = torch.tensor([1e-3, 0.4, 3.0, 40.0, 2000.0], dtype=torch.float64)[:, None]  # half a gap
    r = torch.tensor([0.0, 0.5, 3.0, 30.0, 500.0], dtype=torch.float64)
    logit = logit_of_level(r, half)
    # p = s(h - r) - s(-h - r), which is 1 to the last digit in the middle of a wide level
    p = torch.sigmoid(half - r) - torch.sigmoid(-half - r)
    known = (p > 1e-12) & (p < 1.0 - 1e-9)
    assert torch.allclose(torch.sigmoid(logit)[known], p[known], rtol=1e-9)
    assert torch.allclose(distance_of_level(logit, half), r.expand_as(logit), rtol=1e-6, atol=1e-5)


def test_small_probabilities_keep_their_digits():
    f = torch.tensor([60.0, -60.0], dtype=torch.float64)
    t = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    p = level_shares(torch.sigmoid(t - f[:, None]), torch.sigmoid(f[:, None] - t))
    exact = np.exp(-60.0) * (np.exp(1.0) - np.exp(-1.0))
    assert p[0, 1].item() == pytest.approx(exact, rel=1e-10) == p[1, 1].item()


# --- where rows and levels come from ---


def test_order_of_levels():
    X, y = simulated()
    numbers = VariationalOrdinalRegression().fit(X, y)
    words = np.array(LEVELS)[y]
    ordered = pd.Series(pd.Categorical(words, LEVELS, ordered=True))
    for target, given in ((words, LEVELS), (ordered, None), (y.astype(float), None), (torch.tensor(y), None)):
        model = VariationalOrdinalRegression(categories=given).fit(X, target)
        assert np.array_equal(model.coef_, numbers.coef_)
    model = VariationalOrdinalRegression().fit(X, ordered)
    assert model.classes_.tolist() == LEVELS
    assert model.score(X, ordered) == numbers.score(X, y)
    assert [*model.summary().index] == ["x0", "x1", "x2", "low | middle", "middle | high", "high | top"]


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        ({}, lambda y: np.array(LEVELS)[y], "must have an order; got words such as"),
        ({}, lambda y: pd.Series(pd.Categorical(np.array(LEVELS)[y])), "got unordered categories"),
        ({}, lambda y: pd.Series(pd.Categorical(y, [0, 1, 2, 3, 4], ordered=True)), "got none for 4"),
        ({"categories": LEVELS}, lambda y: np.array([*LEVELS[:3], "best"])[y], "known levels .*; got 'best'"),
        ({"categories": ["low", "low"]}, lambda y: y, "at least two different levels in order"),
        ({}, lambda y: 0 * y, "at least two levels; got 1 class"),
        ({"gap_scale": 0.0}, lambda y: y, "gap_scale must be a positive number"),
        ({}, lambda y: pd.Series(pd.Categorical([None, *y[1:]], [0, 1, 2, 3], ordered=True)), "level in every row"),
        ({}, lambda y: [float("nan"), *np.array(LEVELS)[y[1:]].tolist()], "label in every row; got none in 1 of"),
        ({"prior_scale": "Auto"}, lambda y: y, "prior_scale must be numbers, 'auto' or 'ard'; got 'Auto'"),
    ],
)
def test_bad_levels(options, change, words):
    X, y = simulated(60)
    with pytest.raises(ValueError, match=words):
        VariationalOrdinalRegression(**options).fit(X, change(y))


@pytest.mark.filterwarnings("ignore:The number of unique classes")
def test_a_level_for_every_row_is_refused():
    X = np.random.default_rng(0).normal(size=(120, 2))[:40]
    with pytest.raises(ValueError, match=r"levels must have more rows .* got 40 levels\. Merge neighbours"):
        VariationalOrdinalRegression().fit(X, np.arange(40))


def test_a_level_without_weight_is_refused():
    X, y = simulated(60)
    with pytest.raises(ValueError, match="got none for 1"):
        VariationalOrdinalRegression().fit(X, y, sample_weight=(y != 1).astype(float))


def test_rows_of_every_kind(tmp_path, fitted):
    X, y = simulated()
    sparse = VariationalOrdinalRegression().fit(scipy.sparse.csr_matrix(X), y)
    assert np.allclose(sparse.coef_, fitted.coef_, rtol=1e-9)
    frame = pd.DataFrame(X, columns=["a", "b", "c"]).assign(y=np.array(LEVELS)[y])
    frame.to_parquet(tmp_path / "rows.parquet")
    files = viper.Files(tmp_path / "rows.parquet", target="y")
    model = VariationalOrdinalRegression(categories=LEVELS).fit(files)
    assert np.allclose(model.covariance_, fitted.covariance_, rtol=1e-9)
    assert model.score(files) == fitted.score(X, y)
    assert model.elbo(files) == pytest.approx(fitted.elbo_, rel=1e-12)
    with pytest.raises(ValueError, match="must have an order"):
        VariationalOrdinalRegression().fit(files)


def test_more_columns_than_rows():
    generator = np.random.default_rng(0)
    X, y = generator.standard_normal((30, 50)), np.arange(30) % 3
    model = VariationalOrdinalRegression(prior_scale=0.3).fit(X, y)
    given = VariationalOrdinalRegression(prior_scale=0.09 * np.eye(50)).fit(X, y)  # a matrix: not in the rows' span
    assert np.allclose(model.covariance_, given.covariance_, atol=1e-6)
    assert model.elbo_ == pytest.approx(given.elbo_, abs=1e-6)


def test_save_and_load(fitted, tmp_path):
    X, y = simulated()
    words = VariationalOrdinalRegression(categories=LEVELS, prior_scale="auto").fit(X, np.array(LEVELS)[y])
    for k, model in enumerate((fitted, words, VariationalOrdinalRegression().fit(X, y > 1))):
        model.save(tmp_path / f"{k}.viper")
        again = viper.load(tmp_path / f"{k}.viper")
        assert np.array_equal(again.predict_interval(X[:5]), model.predict_interval(X[:5]))
        assert again.get_params() == model.get_params()
        assert again.diagnose(X, model.classes_[y if k < 2 else (y > 1).astype(int)]).k_hat == model.diagnose().k_hat


def test_formula(fitted):
    X, y = simulated()
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    frame = frame.assign(y=pd.Categorical(np.array(LEVELS)[y], LEVELS, ordered=True))
    model = VariationalOrdinalRegression.from_formula("y ~ a + b + c", frame, standardize=False)
    assert np.allclose(model.coef_, fitted.coef_)
    assert model.classes_.tolist() == LEVELS
    table = model.predict_table(frame[:3])
    assert np.allclose(table[[f"probability_{name}" for name in LEVELS]], fitted.predict_proba(X[:3]))
    assert np.allclose(clone(model).fit(frame).coef_, model.coef_)
    two = frame.assign(y=pd.Categorical(np.where(y > 1, "more", "less"), ["more", "less"], ordered=True))
    assert VariationalOrdinalRegression.from_formula("y ~ a", two).coef_[0] < 0.0
    with pytest.raises(FormulaError, match="positive names the one of two classes"):
        VariationalOrdinalRegression.from_formula("y ~ a", frame, positive="low")
    with pytest.raises(ValueError, match="unordered categories"):
        VariationalOrdinalRegression.from_formula("y ~ a", frame.assign(y=frame["y"].cat.as_unordered()))


def test_draws_for_arviz(fitted):
    X, y = simulated()
    found = fitted.to_arviz(draws=50, chains=2, random_state=0)
    values = found["posterior"].dataset
    assert values["threshold"].shape == (2, 50, 3)
    assert [*values["between"].values] == ["0 | 1", "1 | 2", "2 | 3"]
    pointwise = found["log_likelihood"].dataset["y"].values[1, 7]
    beta, cuts = (values[name].values[1, 7] for name in ("coefficient", "threshold"))
    edges = np.r_[-np.inf, cuts, np.inf]
    exact = np.log(expit(edges[y + 1] - X @ beta) - expit(edges[y] - X @ beta))
    assert np.allclose(pointwise, exact, rtol=1e-8)


# --- peers, and coverage ---


def test_agrees_with_statsmodels():
    from statsmodels.miscmodels.ordinal_model import OrderedModel

    X, y = simulated(4000)
    model = VariationalOrdinalRegression(prior_scale=100.0, threshold_scale=100.0, gap_scale=10.0).fit(X, y)
    peer = OrderedModel(y, X, distr="logit").fit(method="newton", disp=0)
    cuts = peer.model.transform_threshold_params(peer.params)[1:-1]
    sd = np.sqrt(np.diag(model.covariance_))
    # mean and mode differ by O(1/n)
    assert np.abs(np.r_[peer.params[:3] - model.coef_, cuts - model.thresholds_] / sd).max() < 0.05
    assert np.abs(sd[:4] / peer.bse[:4] - 1.0).max() < 0.01


def covered(count, n, seed):
    """Shares of 95 % intervals that hold the truth: of the strong slope, of the thresholds, and with gaps held."""
    slopes, cuts = (2.0, -1.0), (-0.5, 1.0)
    found = np.zeros((count, 4))
    for k in range(count):
        X, y = simulated(n, slopes, cuts, seed=[seed, k])
        model = VariationalOrdinalRegression(prior_scale=5.0).fit(X, y)
        ends, truth = model.coefficient_interval(), np.array([*slopes, *cuts])
        found[k, :3] = ((ends[:, 0] < truth) & (truth < ends[:, 1]))[[0, 2, 3]]
        held = 1.96 * float(model.posterior_.factor[0].norm())
        found[k, 3] = abs(model.coef_[0] - slopes[0]) < held
    return found.mean(0)


def test_coverage():
    found = covered(100, 100, 7)
    # the standard error of a coverage of 0.95 in 100 trials is 0.02
    assert (found[:3] > 0.90).all()
    assert found[3] < found[0]


@pytest.mark.slow
def test_coverage_in_many_trials():
    found = covered(2000, 100, 2)
    assert (np.abs(found[:3] - 0.95) < 0.015).all(), found  # three standard errors
    assert found[3] < 0.93, "with thresholds held, intervals of a strong effect are too narrow"


@pytest.mark.slow
def test_agrees_with_nuts():
    X, y = simulated(300, (2.0, -1.0, 0.5), (-1.0, 0.0, 0.3, 2.0))
    model = VariationalOrdinalRegression(prior_scale=3.0).fit(X, y)
    exact = viper.reference.sample_posterior(model, draws=4000)
    assert np.abs((model.summary()["mean"] - exact.mean()) / exact.sd()).max() < 0.06
    assert np.abs(model.summary()["sd"] / exact.sd() - 1.0).max() < 0.04


# --- what two classes have, too ---


def test_partial_fit_is_a_fit_of_all_rows(fitted, tmp_path):
    X, y = simulated()
    again = VariationalOrdinalRegression().partial_fit(X, y)
    assert np.array_equal(again.covariance_, fitted.covariance_)
    # the posterior so far is taken for Gaussian, and that of 100 rows is a little skewed
    parts = VariationalOrdinalRegression()
    for rows in (slice(0, 100), slice(100, 150), slice(150, 200)):
        parts.partial_fit(X[rows], y[rows], classes=[0, 1, 2, 3])
    sds = np.sqrt(np.diag(fitted.covariance_))
    apart = np.r_[parts.coef_ - fitted.coef_, parts.thresholds_ - fitted.thresholds_] / sds
    assert np.abs(apart).max() < 0.2
    assert np.allclose(np.sqrt(np.diag(parts.covariance_)), sds, rtol=0.06)
    parts.save(tmp_path / "m.viper")
    loaded = viper.load(tmp_path / "m.viper")
    last = X[150:], y[150:]
    assert loaded.diagnose(*last).log_evidence == parts.diagnose().log_evidence
    assert loaded.elbo(*last) == pytest.approx(parts.elbo_, abs=1e-9)
    # rows of no weight change nothing, and forgetting widens
    before = parts.covariance_.copy(), parts.coef_.copy()
    with pytest.warns(WeightWarning):
        parts.partial_fit(*last, sample_weight=np.full(50, 1e-12))
    assert np.allclose(parts.covariance_, before[0], rtol=1e-9)
    assert np.allclose(parts.coef_, before[1], atol=1e-9)
    with pytest.warns(WeightWarning):
        parts.partial_fit(*last, sample_weight=np.full(50, 1e-12), forget=0.5)
    assert np.allclose(joint_precision(parts), 0.5 * joint_precision(loaded), rtol=1e-8)


def joint_precision(model):
    factor = model.posterior_.joint_factor.numpy()
    return np.linalg.inv(factor @ factor.T)


def test_the_elbo_of_a_prior_that_follows_the_gaps():
    """The evidence of the second half of the rows given the first, in two ways."""
    X, y = simulated(120)
    first = VariationalOrdinalRegression().fit(X[:60], y[:60])
    both = VariationalOrdinalRegression().fit(X, y)
    second = VariationalOrdinalRegression(categories=[0, 1, 2, 3]).partial_fit(X[:60], y[:60])
    second.partial_fit(X[60:], y[60:])
    assert first.elbo_ + second.elbo_ == pytest.approx(both.elbo_, abs=0.15)
    found = second.diagnose(draws=20_000)
    assert second.elbo_ == pytest.approx(found.log_evidence, abs=0.1)
    assert second.elbo_ < found.log_evidence + 3 * found.log_evidence_error


def test_two_levels_have_the_answers_of_two_classes():
    X, y = simulated()
    weights = {False: 1.0, True: 3.0}
    ordinal = VariationalOrdinalRegression(class_weight=weights).fit(X, y > 1)
    binary = VariationalLogisticRegression(class_weight=weights).fit(X, y > 1)
    assert np.array_equal(ordinal.coef_, binary.coef_[0])
    assert ordinal.prevalence_offset() == binary.prevalence_offset()
    given = {"draws": 500, "random_state": 0}
    for name in ("average", "contrast", "slopes"):
        pd.testing.assert_frame_equal(getattr(ordinal, name)(X, **given), getattr(binary, name)(X, **given))
    assert np.allclose(ordinal.loo(draws=500).pointwise, binary.loo(draws=500).pointwise, rtol=1e-9)
    groups = np.arange(len(X)) // 4
    sign = np.array([1, 1, 1, -1])
    for given in ({}, {"groups": groups}):
        robust = binary.robust(**given).covariance_ * sign * sign[:, None]
        assert np.allclose(ordinal.robust(**given).covariance_, robust, rtol=1e-4)


def test_weights_of_levels_are_weights_of_rows():
    X, y = simulated()
    weighted = VariationalOrdinalRegression(class_weight="balanced").fit(X, y)
    factor = len(y) / (4 * np.bincount(y))
    by_row = VariationalOrdinalRegression().fit(X, y, sample_weight=factor[y])
    assert np.allclose(weighted.coef_, by_row.coef_, atol=1e-9)
    assert np.allclose(weighted.class_share_, 0.25)
    assert weighted.elbo(X, y) == pytest.approx(by_row.elbo_, abs=1e-8)
    with pytest.raises(ValueError, match="prevalence_offset is for two classes; got 4 levels in order"):
        weighted.prevalence_offset()
    with pytest.raises(ValueError, match="class_weight must name the classes; got 7"):
        VariationalOrdinalRegression(class_weight={7: 2.0}).fit(X, y)


def of_rows(draws, X):
    """Average probabilities of levels, draws × levels, from draws of coefficients and thresholds."""
    p = X.shape[1]
    under = expit(draws[:, None, p:] - (draws[:, :p] @ X.T)[:, :, None]).mean(1)
    return np.diff(np.c_[np.zeros(len(draws)), under, np.ones(len(draws))], axis=1)


def test_effects_are_those_of_draws(fitted):
    X = simulated()[0]
    draws = fitted.sample(10_000, 0)
    before, after = of_rows(draws, X), of_rows(draws, X + np.array([1.0, 0.0, 0.0]))
    slope = (of_rows(draws, X + np.array([0.0, 1e-4, 0.0])) - before) / 1e-4
    found = [fitted.average(X), fitted.contrast(X, {0: 1.0}), fitted.slopes(X, 1)]
    for table, values in zip(found, (before, after - before, slope), strict=True):
        sd = values.std(0)
        assert table["class"].tolist() == [0, 1, 2, 3]
        assert np.allclose(table["estimate"], values.mean(0), atol=0.04 * sd.max())
        assert np.allclose(table["sd"], sd, rtol=0.05)
        ends = np.quantile(values, [0.025, 0.975], axis=0)
        assert np.allclose(table[["lower", "upper"]].T, ends, atol=0.15 * sd.max())
    assert found[0]["estimate"].sum() == pytest.approx(1.0, abs=1e-12)
    assert found[1]["estimate"].sum() == pytest.approx(0.0, abs=1e-12)


def test_the_sandwich_is_that_of_statsmodels():
    from statsmodels.miscmodels.ordinal_model import OrderedModel

    X, y = simulated(400)
    model = VariationalOrdinalRegression(prior_scale=100.0, threshold_scale=100.0, gap_scale=20.0).fit(X, y)
    groups = np.arange(len(y)) // 4
    peer = OrderedModel(y, X, distr="logit")
    for given, kind in (({}, {"cov_type": "HC0"}), ({"groups": groups}, {"cov_type": "cluster"})):
        options = {"cov_kwds": {"groups": groups}} if given else {}
        known = peer.fit(method="newton", disp=False, **kind, **options).bse[:3]
        robust = model.robust(**given)
        assert np.allclose(np.sqrt(np.diag(robust.covariance_))[:3], known, rtol=0.02)
        assert robust.robust_groups_ == (100 if given else 400)
    with pytest.raises(ValueError, match="diagnose judges a posterior; got robust"):
        robust.diagnose()


def test_leaving_a_row_out_is_a_fit_without_it():
    X, y = simulated(80)
    model = VariationalOrdinalRegression(prior_scale=0.5)
    found = model.fit(X, y).loo()
    without = [np.delete(np.arange(80), i) for i in (0, 7, 30)]
    for i, rest in zip((0, 7, 30), without, strict=True):
        exact = clone(model).fit(X[rest], y[rest]).corrected().predict_proba(X[i : i + 1])
        assert found.pointwise[i] == pytest.approx(np.log(exact[0, y[i]]), abs=0.03)


def test_onnx_has_the_same_answers(fitted, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    X, y = simulated()
    frame = pd.DataFrame(X, columns=["a", "b", "c"]).assign(y=pd.Categorical(np.array(LEVELS)[y], LEVELS, ordered=True))
    by_formula = VariationalOrdinalRegression.from_formula("y ~ a + b + c", frame)
    for model in (fitted, VariationalOrdinalRegression().fit(X, y > 1), by_formula):
        model.to_onnx(tmp_path / "m.onnx", dtype="float64", overwrite=True)
        session = runtime.InferenceSession(str(tmp_path / "m.onnx"))
        rows = np.vstack([X[:40], 30.0 * X[:10]])
        table = frame.iloc[:40] if model is by_formula else rows
        columns = {name: frame[[name]].to_numpy()[:40] for name in "abc"} if model is by_formula else {"X": rows}
        label, probabilities, interval = session.run(None, columns)
        assert label.tolist() == model.predict(table).tolist()
        assert np.allclose(probabilities, model.predict_proba(table), rtol=0, atol=1e-9)
        assert np.allclose(interval, model.predict_interval(table), rtol=0, atol=1e-7)
    unknown = runtime.InferenceSession(fitted.to_onnx().SerializeToString()).run(
        None, {"X": np.array([[np.nan, 0, 0]], dtype=np.float32)}
    )
    assert all(np.isnan(x).all() for x in unknown[1:])


@pytest.mark.slow
def test_nuts_after_an_update():
    X, y = simulated(120)
    model = VariationalOrdinalRegression(categories=[0, 1, 2, 3]).partial_fit(X[:60], y[:60])
    model.partial_fit(X[60:], y[60:])
    exact = viper.reference.sample_posterior(model, draws=2000)
    mean, sd = np.r_[model.coef_, model.thresholds_], np.sqrt(np.diag(model.covariance_))
    assert np.abs((mean - exact.mean()) / exact.sd()).max() < 0.08
    assert np.abs(sd / exact.sd() - 1.0).max() < 0.06
