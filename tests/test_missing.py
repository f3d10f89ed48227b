"""Missing data: what is reported, indicator columns, and multiple imputation against R's mice and statsmodels."""

import json
import re
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pages import ROOT, blocks_of, difference
from sklearn.base import clone
from sklearn.model_selection import cross_val_predict
from typer.testing import CliRunner

import viper
from viper import VariationalGPClassifier, VariationalLogisticRegression
from viper.cli.app import app
from viper.cli.scoring import Folds, cross_validated
from viper.errors import ConvergenceWarning, FormulaError, StorageError
from viper.formula.encoding import Encoding
from viper.formula.imputation import (
    DRAWS,
    CodedColumns,
    Imputation,
    balanced_noise,
    chain_agreement,
    nearest_donors,
)
from viper.formula.learn import Imputing, learn_formula
from viper.inference.posterior import Diagonal, Full
from viper.models.pooling import pool_posteriors
from viper.report.missing import difference_of_shares, missing_values

FOLDER = Path(__file__).parent / "data" / "missing"
HOLES = pd.read_csv(FOLDER / "holes.csv")
FORMULA = "y ~ x1 + x2 + g"
FLAT = {"standardize": False, "prior_scale": 100.0, "intercept_scale": 100.0}  # nearly maximum likelihood


@cache
def fitted(missing="multiple", imputations=20, sweeps=5, **options):
    return VariationalLogisticRegression.from_formula(
        FORMULA, HOLES, missing=missing, imputations=imputations, sweeps=sweeps, **FLAT, **options
    )


def normal_rows(rows, generator):
    """Correlated normal columns a, b, c."""
    factor = np.array([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [-0.3, 0.5, 0.8]])
    return pd.DataFrame(generator.standard_normal((rows, 3)) @ factor.T, columns=list("abc"))


# --- multiple imputation: the fit ---


def test_pooled_coefficients_are_those_of_mice():
    """Both with Monte Carlo error: of a mean over m tables √(B/m), of B itself √(2/(m - 1)) of it."""
    expected = pd.read_csv(FOLDER / "mice.csv")  # R 4.2.2, mice 3.15.0, 200 tables: see mice.R
    expected.index = ["intercept", "x1", "x2", "g[T.b]", "g[T.c]"]
    found = fitted(imputations=40).summary().loc[expected.index]
    between = expected["missing_information"] * expected["sd"] ** 2
    error = np.sqrt(between * (1 / 40 + 1 / 200))
    assert (np.abs(found["mean"] - expected["estimate"]) < 3.5 * error + 0.02).all()  # posterior means are not modes
    np.testing.assert_allclose(found["sd"], expected["sd"], rtol=0.12)
    assert np.abs(found["missing_information"] - expected["missing_information"]).max() < 0.15
    left = HOLES.dropna()  # and the complete rows give something else
    complete = VariationalLogisticRegression.from_formula(FORMULA, left, **FLAT).summary()
    assert abs(complete.loc["intercept", "mean"] - expected.loc["intercept", "estimate"]) > 4 * 0.12


def test_pooled_coefficients_are_those_of_statsmodels():
    imputation = pytest.importorskip("statsmodels.imputation.mice")
    families = pytest.importorskip("statsmodels.genmod.families")
    from statsmodels.genmod.generalized_linear_model import GLM

    rows = HOLES[["y", "x1", "x2"]]
    ours = VariationalLogisticRegression.from_formula(
        "y ~ x1 + x2", rows, missing="multiple", imputations=40, sweeps=1, **FLAT
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = imputation.MICEData(rows.copy(), k_pmm=5, rng=np.random.default_rng(0))
        model = imputation.MICE("y ~ x1 + x2", GLM, data, init_kwds={"family": families.Binomial()})
        theirs = model.fit(n_burnin=2, n_imputations=40)
    mean = dict(zip(["intercept", "x1", "x2"], theirs.params, strict=True))
    sd = dict(zip(["intercept", "x1", "x2"], theirs.bse, strict=True))
    table = ours.summary()
    for name in mean:  # two Monte Carlo errors of √(B/40) ≈ 0.1 sd each
        assert table.loc[name, "mean"] == pytest.approx(mean[name], abs=0.35 * sd[name])
        # its sd varies by 10 % between seeds, and is below those of mice and ours
        assert table.loc[name, "sd"] == pytest.approx(sd[name], rel=0.35)


def test_intervals_cover_the_truth_where_complete_rows_are_biased():
    """y ~ a + b with b missing at random, given y and a: of 60 tables, 95 % intervals contain the truth about 57 times.

    Fewer than 50 have probability 0.0006. docs/missing.md gives the result of 1,000 tables.
    """
    truth, covered, complete = np.array([1.0, -1.0, -0.5]), np.zeros(3), np.zeros(3)
    generator = np.random.default_rng(5)
    for _ in range(60):
        rows = simulated(300, generator)
        options = {"standardize": False, "prior_scale": 5.0, "verbose": False}
        model = VariationalLogisticRegression.from_formula(
            "y ~ a + b", rows, missing="multiple", imputations=10, sweeps=1, random_state=1, **options
        )
        left = VariationalLogisticRegression.from_formula("y ~ a + b", rows, missing="drop", **options)
        covered += contains(model.coefficient_interval(), truth)
        complete += contains(left.coefficient_interval(), truth)
    assert (covered >= 50).all(), covered
    assert complete[2] < 30, complete


def contains(interval, truth):
    return (interval[:, 0] < truth) & (truth < interval[:, 1])


def simulated(rows, generator):
    """Two columns, an outcome, and b missing more often where y is true and a is large."""
    table = normal_rows(rows, generator)[["a", "b"]]
    sigmoid = lambda f: 1.0 / (1.0 + np.exp(-f))  # noqa: E731
    table["y"] = generator.random(rows) < sigmoid(-0.5 + table["a"] - table["b"])
    hole = generator.random(rows) < sigmoid(-1.5 + 2.0 * table["y"] + 0.5 * table["a"])
    return table.assign(b=table["b"].where(~hole))


def test_without_missing_values_the_fit_is_the_plain_one():
    rows = HOLES.dropna()
    plain, multiple = (
        VariationalLogisticRegression.from_formula("y ~ x1 * g + log(x2 + 10)", rows, missing=rule)
        for rule in ("error", "multiple")
    )
    assert torch.equal(plain.posterior_.mean, multiple.posterior_.mean)
    assert torch.equal(plain.posterior_.factor, multiple.posterior_.factor)
    np.testing.assert_array_equal(plain.predict_interval(rows), multiple.predict_interval(rows))
    assert "missing_information" not in multiple.summary()


def test_seeds_repeat_and_differ():
    first, again, other = (
        VariationalLogisticRegression.from_formula(
            FORMULA, HOLES, missing="multiple", imputations=3, sweeps=1, random_state=seed
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(first.posterior_.factor, again.posterior_.factor)
    assert not torch.equal(first.posterior_.mean, other.posterior_.mean)


def test_functions_and_interactions_are_those_of_the_drawn_values():
    learned = learn_formula("y ~ exp(x2) + x1:g + g", HOLES, "multiple", imputing=Imputing(3, 1))
    assert len(learned.tables) == 3
    for X, table in zip(learned.designs(), learned.tables, strict=True):
        np.testing.assert_array_equal(X["exp(x2)"], np.exp(table.numbers["x2"]))
        code = table.codes["g"]
        np.testing.assert_array_equal(X["g[T.b]"], code == 1)
        np.testing.assert_array_equal(X["x1:g[T.c]"] if "x1:g[T.c]" in X else X["x1:g[c]"], HOLES["x1"] * (code == 2))
    drawn = HOLES["x2"].isna().to_numpy()
    first, second = (learned.tables[k].numbers["x2"] for k in (0, 1))
    assert (first[~drawn] == second[~drawn]).all()
    assert (first[drawn] != second[drawn]).mean() > 0.9
    assert set(first[drawn]) <= set(HOLES["x2"].dropna())  # matched, so always values that occur


def test_rubins_rules_by_hand():
    generator = np.random.default_rng(0)
    means, factors = generator.standard_normal((4, 3)), generator.standard_normal((4, 3, 3))
    pooled = pool_posteriors([Full(torch.tensor(m), torch.tensor(f)) for m, f in zip(means, factors, strict=True)])
    within, between = np.mean([f @ f.T for f in factors], 0), np.cov(means.T)
    np.testing.assert_allclose(pooled.posterior.mean, means.mean(0), rtol=1e-14)
    np.testing.assert_allclose(pooled.posterior.covariance(), within + 1.25 * between, rtol=1e-12)
    total = np.diag(within + 1.25 * between)
    np.testing.assert_allclose(pooled.missing_information, 1.25 * np.diag(between) / total, rtol=1e-12)
    flat = pool_posteriors(
        [Diagonal(torch.tensor(m), torch.tensor(f[0] ** 2)) for m, f in zip(means, factors, strict=True)]
    )
    np.testing.assert_allclose(flat.posterior.variance, (factors[:, 0] ** 2).mean(0) + 1.25 * np.diag(between))


def test_draws_that_have_not_settled_are_reported():
    """b is nearly a, and both are missing in the same rows: each is drawn close to the other, wherever they began."""
    generator = np.random.default_rng(0)
    a = generator.standard_normal(300)
    rows = pd.DataFrame({"a": a, "b": a + 0.02 * generator.standard_normal(300), "y": generator.random(300) < 0.5})
    rows.loc[:99, ["a", "b"]] = np.nan
    with pytest.warns(ConvergenceWarning, match="still depend on where they began"):
        learn_formula("y ~ a + b", rows, "multiple", imputing=Imputing(10, 10))
    learn_formula("y ~ a", rows, "multiple", imputing=Imputing(10, 10))
    learn_formula(FORMULA, HOLES, "multiple", imputing=Imputing(10, 10))  # these settle


def test_r_hat_is_that_of_arviz():
    from arviz_stats.base.array import array_stats

    means = np.random.default_rng(0).standard_normal((6, 20, 2)) + np.arange(6)[:, None, None] * [0.0, 1.0]
    expected = [array_stats.rhat(means[:, 10:, j], chain_axis=0, draw_axis=1, method="identity") for j in (0, 1)]
    np.testing.assert_allclose(chain_agreement(means), expected, rtol=1e-12)


def test_one_prior_is_chosen_for_all_tables():
    model = VariationalLogisticRegression.from_formula(
        FORMULA, HOLES, missing="multiple", imputations=3, sweeps=1, prior_scale="auto"
    )
    scales = {float(fit.prior_scale_[0]) for fit in model._completed_fits}
    assert scales == {float(model.prior_scale_[0])}


def test_a_pooled_posterior_is_diagnosed_on_its_tables(tmp_path):
    model = fitted()
    found = model.diagnose()
    assert found.draws == 4000
    assert found.k_hat < 0.7
    parts = [fit.diagnose(draws=400, random_state=1).log_evidence for fit in model._completed_fits]
    assert found.log_evidence == pytest.approx(np.mean(parts), abs=0.05)
    corrected = model.corrected()
    sd = model.summary()["sd"]
    np.testing.assert_allclose(corrected.mean_, model.posterior_.mean, atol=0.12 * sd.min())
    model.save(tmp_path / "model.viper")
    with pytest.raises(ValueError, match="pooled from several completed tables"):
        viper.load(tmp_path / "model.viper").diagnose()


def test_a_formula_learned_again_keeps_the_rules_and_cross_validates():
    model = VariationalLogisticRegression.from_formula(FORMULA, HOLES, missing="multiple", imputations=2, sweeps=1)
    copy = clone(model).fit(HOLES)
    assert torch.equal(copy.posterior_.factor, model.posterior_.factor)
    assert (copy.formula_.imputations, copy.formula_.sweeps) == (2, 1)
    assert np.isfinite(cross_val_predict(model, HOLES, HOLES["y"], cv=3, method="predict_proba")).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"imputations": 1}, "imputations must be an integer of at least 2; got 1"),
        ({"sweeps": 0}, "sweeps must be an integer of at least 1; got 0"),
        ({"missing": "often"}, "missing must be one of"),
        ({"data": HOLES.assign(x1=HOLES["x1"] * 1e200)}, r"takes numbers up to 1e\+100; got .*e\+200 in 'x1'"),
        ({"data": HOLES.assign(x2=np.nan)}, "every column must have values; got none in 'x2'"),
    ],
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(FormulaError, match=message):
        VariationalLogisticRegression.from_formula(FORMULA, **{"data": HOLES, "missing": "multiple", **options})


def test_a_gaussian_process_names_the_alternative():
    with pytest.raises(FormulaError, match="for logistic regression only; got VariationalGPClassifier"):
        VariationalGPClassifier.from_formula(FORMULA, HOLES, missing="multiple")


# --- multiple imputation: predictions ---


def gaussian_prediction(model, rows):
    """ϑ and τ² of f = xᵀβ in closed form, where x_m | x_o is normal with the moments of the model's columns."""
    imputation = model.formula_.imputation
    mu, sigma = model.posterior_.mean.numpy(), model.covariance_
    latent = []
    for row in rows.to_numpy():
        hole = np.isnan(row)
        S = imputation.covariance
        x, C = np.append(row, 1.0), np.zeros((len(row) + 1, len(row) + 1))
        if hole.any():
            slope = np.linalg.solve(S[np.ix_(~hole, ~hole)], S[np.ix_(~hole, hole)])
            x[:-1][hole] = imputation.mean[hole] + (row[~hole] - imputation.mean[~hole]) @ slope
            where = np.append(hole, False)
            C[np.ix_(where, where)] = S[np.ix_(hole, hole)] - S[np.ix_(hole, ~hole)] @ slope
        latent.append([x @ mu, x @ sigma @ x + mu @ C @ mu + np.trace(C @ sigma)])
    return np.array(latent).T


def test_for_numbers_the_prediction_is_the_closed_form():
    generator = np.random.default_rng(2)
    rows = normal_rows(400, generator)
    rows["y"] = generator.random(400) < 1 / (1 + np.exp(-(rows["a"] - rows["b"] + 0.5 * rows["c"])))
    rows.loc[generator.random(400) < 0.3, "b"] = np.nan
    model = VariationalLogisticRegression.from_formula(
        "y ~ a + b + c", rows, missing="multiple", imputations=5, sweeps=2, standardize=False
    )
    new = normal_rows(8, generator)
    for k, names in enumerate(["", "a", "b", "c", "ab", "bc", "ac", "abc"]):
        new.loc[k, list(names)] = np.nan
    mean, variance = gaussian_prediction(model, new)
    found = model.predict_latent(new)
    np.testing.assert_allclose(found[0], mean, rtol=1e-6, atol=1e-6)  # the ridge of the covariance is 1e-8
    np.testing.assert_allclose(found[1] ** 2, variance, rtol=1e-6)
    expected = viper.expected_sigmoid(torch.tensor(mean), torch.tensor(variance)).mean
    np.testing.assert_allclose(model.predict_proba(new)[:, 1], expected, rtol=1e-6)


def test_a_row_is_predicted_alike_whatever_its_neighbours():
    model, new = fitted(), HOLES.drop(columns="y").head(70)
    whole = model.predict_interval(new)
    parts = np.concatenate([model.predict_interval(new.iloc[k : k + 7]) for k in range(0, len(new), 7)])
    np.testing.assert_allclose(parts, whole, rtol=1e-12)


def test_a_missing_value_widens_the_interval_and_more_missing_values_widen_it_more():
    model = fitted()
    row = pd.DataFrame({"x1": [0.5], "x2": [-0.2], "g": ["b"]})
    patterns = ([], ["x2"], ["x2", "g"], ["x1", "x2", "g"])
    sds = [model.predict_latent(row.assign(**dict.fromkeys(names, np.nan)))[1][0] for names in patterns]
    assert sds == sorted(sds)
    assert sds[0] < 0.7 * sds[1]


def test_the_probability_is_close_to_the_mean_over_draws():
    """The log-odds of the draws are a mixture; a normal distribution with its moments gives nearly its mean."""
    model = fitted()
    encoding = model.formula_
    rows = HOLES[HOLES["g"].isna() & HOLES["x2"].isna()].head(20)
    X = encoding._drawn_designs(encoding._select(rows))
    exact = np.stack(
        [
            viper.expected_sigmoid(torch.tensor(mean), torch.tensor(variance)).mean.numpy()
            for mean, variance in (
                (x @ model.coef_[0] + model.intercept_, np.einsum("kd,de,ke->k", x1, model.covariance_, x1))
                for x in X
                for x1 in [np.column_stack([x, np.ones(len(x))])]
            )
        ]
    )
    np.testing.assert_allclose(model.predict_proba(rows)[:, 1], exact.mean(1), atol=0.02)


def test_levels_are_drawn_with_the_probabilities_of_bayes_rule():
    """Normal columns with one covariance in every level: then the rule is exact, and draws have its shares."""
    generator = np.random.default_rng(3)
    code = generator.choice(3, 4000, p=[0.5, 0.3, 0.2])
    centres = np.array([[0.0, 0.0], [1.0, 0.5], [-1.0, 1.0]])
    z = centres[code] + generator.standard_normal((4000, 2)) @ np.array([[1.0, 0.3], [0.0, 0.9]])
    columns = CodedColumns({"a": z[:, 0], "b": z[:, 1]}, {"g": code}, {"g": 3})
    imputation = Imputation.learn([columns])
    some = columns.take(np.arange(30))
    some.codes["g"][:] = -1
    drawn = imputation.draws(some).codes["g"].reshape(30, DRAWS)
    W = np.mean([np.cov(z[code == level].T, bias=True) * (code == level).mean() for level in range(3)], 0) * 3
    means = [z[code == level].mean(0) for level in range(3)]
    score = np.stack(
        [
            np.log((code == level).mean()) - 0.5 * np.einsum("ij,jk,ik->i", d, np.linalg.inv(W), d)
            for level, d in enumerate(z[:30] - m for m in means)
        ],
        1,
    )
    expected = np.exp(score) / np.exp(score).sum(1, keepdims=True)
    shares = np.stack([(drawn == level).mean(1) for level in range(3)], 1)
    assert np.abs(shares - expected).max() <= 1.0 / DRAWS  # stratified: within one draw


def test_draws_stay_where_functions_are_defined():
    rows = HOLES.assign(size=np.exp(HOLES["x2"]))
    model = VariationalLogisticRegression.from_formula(
        "y ~ log(size) + bs(x1, df=4)", rows, missing="multiple", imputations=2, sweeps=1
    )
    new = pd.DataFrame({"size": [np.nan, 1.0, np.nan], "x1": [-3.0, np.nan, np.nan]}).clip(rows["x1"].min())
    assert np.isfinite(model.predict_interval(new)).all()


def test_numbers_that_are_categories_and_truth_values_are_drawn():
    generator = np.random.default_rng(0)
    rows = pd.DataFrame({"grade": generator.integers(1, 4, 200).astype(float), "ill": generator.random(200) < 0.4})
    rows["y"] = generator.random(200) < 0.3 + 0.1 * rows["grade"]
    rows["ill"] = rows["ill"].astype(object)
    rows.loc[generator.random(200) < 0.2, "grade"] = np.nan
    rows.loc[generator.random(200) < 0.2, "ill"] = None
    model = VariationalLogisticRegression.from_formula(
        "y ~ C(grade) + grade + ill", rows, missing="multiple", imputations=2, sweeps=2
    )
    assert list(model.feature_names_in_) == ["C(grade)[T.2.0]", "C(grade)[T.3.0]", "grade", "ill[T.True]"]
    assert np.isfinite(model.predict_proba(rows)).all()


def test_noise_is_balanced():
    noise = balanced_noise(DRAWS, 7, np.random.default_rng(0))
    np.testing.assert_allclose(noise.mean(0), 0.0, atol=1e-14)
    np.testing.assert_allclose(noise.T @ noise / DRAWS, np.eye(7), atol=1e-13)
    wide = balanced_noise(10, 25, np.random.default_rng(0))
    np.testing.assert_allclose(wide.std(0), 1.0)


def test_donors_are_the_nearest_and_ties_are_equally_likely():
    generator = np.random.default_rng(0)
    observed = np.arange(100.0)
    chosen = nearest_donors(observed, np.full(5000, 50.2), generator)
    assert set(chosen) == {48, 49, 50, 51, 52}
    assert set(nearest_donors(observed, np.full(500, -9.0), generator)) == set(range(5))
    same = nearest_donors(np.zeros(40), np.full(4000, 0.3), generator)
    assert len(set(same)) == 40
    assert set(nearest_donors(np.array([1.0, 2.0]), np.zeros(50), generator)) == {0, 1}


def test_a_file_holds_the_imputation_as_arrays(tmp_path):
    model = fitted()
    model.save(tmp_path / "model.viper")
    same = viper.load(tmp_path / "model.viper")
    new = HOLES.drop(columns="y")
    np.testing.assert_array_equal(same.predict_interval(new), model.predict_interval(new))
    pd.testing.assert_frame_equal(same.summary(), model.summary())
    arrays = model.formula_.imputation.arrays()
    assert set(arrays) == {"mean", "covariance", "low", "high"}
    state = json.loads(json.dumps(model.formula_.to_state()))
    assert "imputation" not in state
    for name, wrong in {
        "mean": arrays["mean"][:-1],
        "covariance": arrays["covariance"] * np.nan,
        "low": arrays["high"] + 1.0,
        "high": arrays["high"].astype(np.float32),
    }.items():
        with pytest.raises(StorageError, match="imputation"):
            Encoding.from_state(state, arrays | {name: wrong})
    with pytest.raises(StorageError, match="imputation"):
        Encoding.from_state(state)


# --- indicator columns ---


def test_indicators_say_where_numbers_and_levels_were_missing():
    learned = learn_formula("y ~ x1 + log(x2 + 10) + g", HOLES, "indicator", standardize=True)
    assert list(learned.X)[-3:] == ["g[T.c]", "g[T.missing]", "x2 is missing"]
    np.testing.assert_array_equal(learned.X["x2 is missing"], HOLES["x2"].isna())
    np.testing.assert_array_equal(learned.X["g[T.missing]"], HOLES["g"].isna())
    assert learned.encoding.units["g[T.missing]"] == "vs a"
    stored = Encoding.from_state(json.loads(json.dumps(learned.encoding.to_state())))
    np.testing.assert_array_equal(stored.encode(HOLES), learned.X)
    assert stored.indicators == ["x2"]


def test_an_indicator_model_is_the_one_with_the_columns_made_by_hand():
    by_hand = HOLES.assign(
        hole=HOLES["x2"].isna().astype(float), x2=HOLES["x2"].fillna(HOLES["x2"].mean()), g=HOLES["g"].fillna("z")
    )
    first = VariationalLogisticRegression.from_formula("y ~ x1 + x2 + g + hole", by_hand)
    second = VariationalLogisticRegression.from_formula(FORMULA, HOLES, missing="indicator")
    table = second.summary().rename({"x2 is missing": "hole", "g[T.missing]": "g[T.z]"})
    np.testing.assert_allclose(table.loc[first.summary().index], first.summary(), rtol=1e-6)


def test_a_column_that_was_complete_in_the_fit_is_filled_in_later():
    model = VariationalLogisticRegression.from_formula(FORMULA, HOLES, missing="indicator")
    new = pd.DataFrame({"x1": [np.nan], "x2": [np.nan], "g": [None]})
    expected = new.assign(x1=HOLES["x1"].mean())
    np.testing.assert_allclose(model.predict_proba(new), model.predict_proba(expected))


def test_a_level_called_missing_stays_itself_and_names_do_not_collide():
    rows = HOLES.assign(g=HOLES["g"].replace("c", "missing"))
    learned = learn_formula("y ~ g", rows, "indicator")
    assert learned.encoding.levels["g"] == ["a", "b", "missing", "(missing)"]
    with pytest.raises(FormulaError, match="adds a column 'x2 is missing'; got one of that name"):
        learn_formula("y ~ .", HOLES.assign(**{"x2 is missing": HOLES["x1"]}), "indicator")


@pytest.mark.parametrize("kind", ["category", "string", "Int64", "boolean"])
def test_indicators_of_every_type_of_column(kind):
    rows = pd.DataFrame({"y": HOLES["y"], "g": HOLES["g"], "x1": HOLES["x1"]})
    codes = HOLES["g"].map({"a": 0, "b": 1, "c": 1})
    rows["g"] = rows["g"].astype(kind) if kind in ("category", "string") else codes.astype(kind)
    term = "C(g)" if kind == "Int64" else "g"
    for rule in ("indicator", "multiple", "mean"):
        model = VariationalLogisticRegression.from_formula(
            f"y ~ {term} + x1", rows, missing=rule, imputations=2, sweeps=1
        )
        assert np.isfinite(model.predict_proba(rows)).all()


# --- cross-validation ---


def test_no_label_of_a_test_row_is_used():
    """Labels of the test rows are flipped: their predictions must not change."""
    options = {"imputations": 2, "sweeps": 1}
    learned = learn_formula(FORMULA, HOLES, "multiple", imputing=Imputing(*options.values()))
    test = np.arange(0, len(HOLES), 4)
    train = np.setdiff1d(np.arange(len(HOLES)), test)
    flipped = HOLES.assign(y=HOLES["y"].where(~HOLES.index.isin(test), 1 - HOLES["y"]))
    other = learn_formula(FORMULA, flipped, "multiple", imputing=Imputing(*options.values()))
    found = []
    for rows in (learned, other):
        # the encoding is shared, so that only what depends on labels could differ
        one = rows._replace(encoding=learned.encoding)
        model, X = Folds(one, [(train, test)]).fit(VariationalLogisticRegression(verbose=False), 0)
        found.append(model.predict_proba(X))
    np.testing.assert_array_equal(*found)
    # a single fit to all rows would tell: drawn values of the test rows know their labels
    assert not np.array_equal(learned.tables[0].numbers["x2"][test], other.tables[0].numbers["x2"][test])


def test_other_models_are_scored_on_means_of_the_draws():
    from sklearn.linear_model import LogisticRegression

    learned = learn_formula(FORMULA, HOLES, "multiple", imputing=Imputing(2, 1))
    splits = [(np.arange(0, 400), np.arange(400, 600))]
    found = cross_validated(LogisticRegression(), Folds(learned, splits), 0.95, lambda: None).scores()
    assert 0.6 < found["auc"] < 1.0


# --- the report of what is missing ---


def test_counts_patterns_and_shares():
    found = missing_values(HOLES, "y")
    assert found.columns["missing"].to_dict() == HOLES[["x2", "g"]].isna().sum().to_dict()
    assert found.complete == len(HOLES.dropna())
    assert found.patterns["rows"].sum() == len(HOLES)
    assert found.patterns.loc["x2, g", "rows"] == (HOLES["x2"].isna() & HOLES["g"].isna()).sum()
    assert found.patterns.loc["", "rows"] == found.complete
    hole = HOLES["x2"].isna()
    assert found.columns.loc["x2", "absent"] == HOLES.loc[hole, "y"].mean()
    assert found.columns.loc["x2", "observed"] == HOLES.loc[~hole, "y"].mean()
    assert found.related == ["x2", "g"]
    assert found.columns.loc["x2", "goes_with"].startswith("x1: ")


def test_the_interval_of_a_difference_is_that_of_two_beta_posteriors():
    label = np.repeat([True, False, True, False], [30, 70, 12, 8])
    absent = np.repeat([False, True], [100, 20])
    found = difference_of_shares(label, absent, 0.9)
    generator = np.random.default_rng(0)
    draws = generator.beta(12.5, 8.5, 400_000) - generator.beta(30.5, 70.5, 400_000)
    np.testing.assert_allclose(found[2:], np.quantile(draws, [0.05, 0.95]), atol=2e-3)
    assert found[:2] == (0.3, 0.6)


def test_values_missing_by_chance_go_with_nothing():
    generator = np.random.default_rng(1)
    rows = normal_rows(2000, generator)
    rows["y"] = generator.random(2000) < 0.5
    rows.loc[generator.random(2000) < 0.2, "a"] = np.nan
    found = missing_values(rows, "y")
    assert found.related == []
    assert found.columns["goes_with"].tolist() == [""]


def test_nothing_missing():
    found = missing_values(HOLES[["y", "x1"]], "y")
    assert (found.complete, len(found.columns), found.related) == (600, 0, [])
    assert missing_values(HOLES[["x1"]]).patterns["rows"].tolist() == [600]


def test_the_page_says_what_was_done(tmp_path):
    for rule, words in {
        "multiple": ("drawn 20 times, given all other columns. All intervals allow for this.", "of the uncertainty"),
        "indicator": ("filled in, and marked by columns and levels of their own.", "a little too narrow"),
    }.items():
        viper.report.write(fitted(rule), HOLES, "y", tmp_path / f"{rule}.html")
        page = (tmp_path / f"{rule}.html").read_text(encoding="utf-8")
        assert "What was missing" in page
        assert all(one in page for one in words)
        assert ">219 (36\u202f%)<" in page or ">219 (37\u202f%)<" in page
    complete = VariationalLogisticRegression.from_formula("y ~ x1", HOLES, missing="multiple")
    viper.report.write(complete, HOLES, "y", tmp_path / "complete.html")
    assert "What was missing" not in (tmp_path / "complete.html").read_text(encoding="utf-8")


# --- the command line ---


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    HOLES.to_csv("holes.csv", index=False)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_viper_missing(run):
    shown = run("missing", "holes.csv", "--target", "y")
    assert shown.exit_code == 0
    assert "361 of 2,400 values are missing" in shown.output
    assert "Rows without 'x2', 'g' differ in the outcome" in shown.output
    document = json.loads(run("missing", "holes.csv", "--target", "y", "--json").output)
    assert document["columns"]["x2"]["missing"] == 219
    HOLES[["y", "x1"]].to_csv("whole.csv", index=False)
    assert "Nothing is missing in 600 rows and 2 columns." in run("missing", "whole.csv").output
    assert "Did you mean 'x1'?" in run("missing", "whole.csv", "--target", "X1").output


def test_the_page_shows_what_viper_missing_prints(run):
    page = (ROOT / "docs" / "missing.md").read_text(encoding="utf-8")
    exec(blocks_of(page)[0].source, {"print": lambda *_: None})
    ((command, shown),) = re.findall(
        r"^```\n(viper missing .*?)\n```\n\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    assert difference(shown, run(*command.split()[1:]).output) is None


def test_fit_predict_and_summary_with_drawn_values(run):
    options = ["--imputations", "3", "--sweeps", "1", "--cv", "2"]
    shown = run("fit", "holes.csv", "--target", "y", "--missing", "multiple", *options, "--out", "model.viper")
    assert shown.exit_code == 0, shown.output
    assert "(drawn 3 times, given all other columns)" in shown.output
    assert "of a coefficient's variance (" in shown.output
    assert run("predict", "model.viper", "holes.csv", "--out", "found.csv").exit_code == 0
    assert pd.read_csv("found.csv")["probability"].notna().all()
    document = json.loads(run("summary", "model.viper", "--json").output)
    assert 0 < document["coefficients"][1]["missing_information"] < 1
    assert run("evaluate", "model.viper", "holes.csv").exit_code == 0
    again = run("fit", "holes.csv", "--target", "y", "--missing", "multiple", "--model", "gp")
    assert "for logistic regression only" in again.output
