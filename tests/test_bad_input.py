"""Bad and hard input, as a table: what goes in, and exactly what comes of it."""

import re

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
import torch

import viper.errors
from viper import VariationalLogisticRegression
from viper.data.checks import MANY_ENTRIES, read_features

GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((40, 3))
Y = (X.sum(1) + GENERATOR.standard_normal(40) > 0).astype(int)
FRAME = pd.DataFrame(X, columns=["a", "b", "c"])
ONES = np.ones(40)


def holed(value):
    """X with one entry replaced."""
    changed = X.copy()
    changed[3, 1] = value
    return changed


def fit(X=X, y=Y, sample_weight=None, offset=None, **options):
    return VariationalLogisticRegression(**options).fit(X, y, sample_weight=sample_weight, offset=offset)


def message(**given):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is what is tested)
        fit(**given)
    return str(caught.value)


# --- rejected: the rule, the value and what to do ---

SCALE = "must be positive and finite, between 1e-150 and 1e+150; got"
COVARIANCE = "prior_scale as a covariance matrix must be"

REJECTED = {
    # rows
    "NaN in X": ({"X": holed(np.nan)}, "Input X contains NaN."),
    "NaN in sparse X": ({"X": scipy.sparse.csr_array(holed(np.nan))}, "Input X contains NaN."),
    "NaN in a tensor": ({"X": torch.tensor(holed(np.nan))}, "Input X contains NaN."),
    "NaN in a frame": ({"X": pd.DataFrame(holed(np.nan))}, "Input X contains NaN."),
    "missing in a frame": ({"X": FRAME.assign(c=pd.array([None, 1] * 20, dtype="Int64"))}, "Input X contains NaN."),
    "NaN and inf by column": (
        {"X": FRAME.assign(a=[np.nan, np.inf] * 20, c=[np.nan] + [0.0] * 39)},
        "X must be finite; Input X contains NaN. Entries that are not finite: 40 in 'a', 1 in 'c'. Leave those "
        "rows out or fill them",
    ),
    "NaN by number of the column": (
        {"X": scipy.sparse.csr_array(holed(np.nan))},
        "Entries that are not finite: 1 in 'x1'. Leave those rows out",
    ),
    "inf in X": ({"X": holed(np.inf)}, "Input X contains infinity or a value too large for dtype('float64')."),
    "empty": ({"X": X[:0], "y": Y[:0]}, "Found array with 0 sample(s) (shape=(0, 3)) while a minimum of 1 is required"),
    "no columns": ({"X": X[:, :0]}, "Found array with 0 feature(s) (shape=(40, 0)) while a minimum of 1 is required"),
    "a frame without columns": ({"X": FRAME[[]]}, "X must have at least one column; got a table of 40 rows without"),
    "a polars frame without columns": ({"X": pl.DataFrame()}, "X must have at least one column; got a table of 0 rows"),
    "one row": (
        {"X": X[:1], "y": Y[:1]},
        f"y must have at least two classes; got 1 class: {Y[0]}. Add rows of another class.",
    ),
    "1-D X": ({"X": X[:, 0]}, "Expected 2D array, got 1D array instead"),
    "3-D X": ({"X": X[:, :, None]}, "Found array with dim 3, while dim <= 2 is required"),
    "a number for X": ({"X": 3.0}, "Expected 2D array, got scalar array instead"),
    "complex X": ({"X": X + 1j}, "Complex data not supported"),
    "text": (
        {"X": np.array([["u", "v"]] * 40)},
        "X must be numeric; could not convert string to float: np.str_('u'). Encode text and dates as numbers, or use",
    ),
    "text among objects": (
        {"X": np.array([[1.0, "v"]] * 40, dtype=object)},
        "X must be numeric; could not convert string to float: 'v'. Encode text and dates as numbers, or use",
    ),
    "a column of text": (
        {"X": FRAME.assign(c="u")},
        "X must be numeric; got column 'c' (str). Encode text and dates as numbers, or use from_formula",
    ),
    "a polars column of text": (
        {"X": pl.DataFrame(X, schema=["a", "b", "c"]).with_columns(c=pl.lit("u"))},
        "X must be numeric; got column 'c' (String). Encode text and dates as numbers, or use from_formula",
    ),
    "a column of categories": (
        {"X": FRAME.assign(b=pd.Categorical(["u", "v"] * 20))},
        "X must be numeric; got column 'b' (category). Encode text and dates as numbers, or use from_formula",
    ),
    # labels
    "no y": ({"y": None}, "This estimator requires y to be passed, but the target y is None."),
    "one class": ({"y": 0 * Y}, "y must have at least two classes; got 1 class: 0. Add rows of another class."),
    "one class of text": (
        {"y": ["yes"] * 40},
        "y must have at least two classes; got 1 class: 'yes'. Add rows of another",
    ),
    "a regression target": ({"y": X[:, 0]}, "Unknown label type: continuous."),
    "NaN in y": (
        {"y": np.where(Y, np.nan, 0.0)},
        "y must be finite; Input y contains NaN or infinity. Drop those rows.",
    ),
    "None in y": (
        {"y": np.where(Y, None, "a")},
        f"y must have a label in every row; got none in {Y.sum()} of 40 rows. Fill them in, or drop those rows.",
    ),
    "NaN among text in y": (
        {"y": [float("nan") if k else "a" for k in Y]},
        f"y must have a label in every row; got none in {Y.sum()} of 40 rows. Fill them in, or drop those rows.",
    ),
    "NA among text in y": (
        {"y": pd.Series(["a", "b"] * 20, dtype="string").where(Y == 0)},
        f"y must have a label in every row; got none in {Y.sum()} of 40 rows. Fill them in, or drop those rows.",
    ),
    "NaN among booleans in y": (
        {"y": pd.Series([True, False] * 20, dtype=object).where(Y == 0)},
        f"y must have a label in every row; got none in {Y.sum()} of 40 rows. Fill them in, or drop those rows.",
    ),
    "numbers and text in y": (
        {"y": np.array([1 if k else "a" for k in Y], dtype=object)},
        "y must have labels of one type; got int, str. Recode them, or drop those rows.",
    ),
    "too few labels": (
        {"y": Y[:-1]},
        "X and y must have the same number of rows; got inconsistent numbers of samples: 40 and 39.",
    ),
    # weights and offset
    "too few weights": (
        {"sample_weight": ONES[:-1]},
        "sample_weight must have shape (40,), one entry per row; got sample_weight.shape == (39,).",
    ),
    "a negative weight": ({"sample_weight": -ONES}, "sample_weight must not be negative; got -1.0."),
    "zero weights": (
        {"sample_weight": 0.0 * ONES},
        "sample_weight must be positive somewhere; got all zero. Leave it out to weigh rows equally.",
    ),
    "NaN weights": ({"sample_weight": np.nan * ONES}, "sample_weight must be finite; got nan."),
    "text weights": ({"sample_weight": ["a"] * 40}, "sample_weight must be numeric; got ['a', 'a',"),
    "a huge weight": ({"sample_weight": [10**400] * 40}, "sample_weight must be numeric; got [1000"),
    "a huge whole number": (
        {"X": [[10**400, 1]] * 40},
        "X must be finite; got a whole number too large for a float. Rescale its column.",
    ),
    "too few offsets": (
        {"offset": ONES[:-1]},
        "offset must have shape (40,), one entry per row; got offset.shape == (39,).",
    ),
    "an infinite offset": ({"offset": np.inf * ONES}, "offset must be finite; got inf."),
    # prior
    "a scale of 0": ({"prior_scale": 0}, f"prior_scale {SCALE} 0."),
    "a negative scale": ({"prior_scale": -1.0}, f"prior_scale {SCALE} -1.0."),
    "a scale of NaN": ({"prior_scale": np.nan}, f"prior_scale {SCALE} nan."),
    "no scale": ({"prior_scale": None}, f"prior_scale {SCALE} None."),
    "one scale of 0": ({"prior_scale": [1.0, 0.0, 1.0]}, f"prior_scale {SCALE} 0.0."),
    "a scale beyond float64": ({"prior_scale": 1e200}, f"prior_scale {SCALE} 1e+200."),
    "two scales for three features": (
        {"prior_scale": [1.0, 2.0]},
        "prior_scale must be a number, a vector of 3 (one per feature) or a 3×3 covariance matrix; got shape (2,).",
    ),
    "an unknown word for the scale": (
        {"prior_scale": "best"},
        "prior_scale must be numbers, 'auto' or 'ard'; got 'best'. Pass one number for all columns, or 'auto' to have",
    ),
    "a covariance of 2 × 2": ({"prior_scale": np.eye(2)}, f"{COVARIANCE} 3×3; got (2, 2)."),
    "a covariance that is not symmetric": (
        {"prior_scale": np.eye(3) + np.triu(np.ones((3, 3)))},
        f"{COVARIANCE} finite and symmetric; got one that is not.",
    ),
    "an indefinite covariance": (
        {"prior_scale": np.diag([1.0, 1.0, -1.0])},
        f"{COVARIANCE} positive definite; got smallest eigenvalue -1. Add a small multiple of the identity.",
    ),
    "a singular covariance": ({"prior_scale": np.ones((3, 3))}, f"{COVARIANCE} positive definite; got smallest eigen"),
    "a zero intercept scale": ({"intercept_scale": 0.0}, f"intercept_scale {SCALE} 0.0."),
    "no intercept scale": ({"intercept_scale": None}, f"intercept_scale {SCALE} None."),
    "text for a scale": ({"intercept_scale": "wide"}, "intercept_scale must be numeric; got 'wide'."),
    "two prior means": (
        {"prior_mean": [0.0, 1.0]},
        "prior_mean must be a number or a vector of 3, one per feature; got shape (2,).",
    ),
    "an infinite prior mean": ({"prior_mean": np.inf}, "prior_mean must be finite; got inf."),
    # options
    "an unknown bound": (
        {"bound": "best"},
        "bound must be one of ['viper', 'pg', 'mc', 'quadrature']; got 'best'.",
    ),
    "an unknown family": (
        {"covariance": "banded"},
        "covariance must be one of ['full', 'diagonal', 'low-rank']; got 'banded'.",
    ),
    "an unknown solver": ({"solver": "sgd"}, "solver must be one of ['newton', 'adam']; got 'sgd'."),
    "an unknown dtype": ({"dtype": "float16"}, "dtype must be one of ['float64', 'float32']; got 'float16'."),
    "an unknown device": (
        {"device": "abacus"},
        "device must be a device of torch, such as 'cpu' or 'cuda'; got 'abacus'.",
    ),
    "an unknown verbosity": ({"verbose": "loud"}, "verbose must be one of ['auto', True, False]; got 'loud'."),
    "no iterations": ({"max_iter": 0}, "max_iter must be a positive integer; got 0."),
    "half an iteration": ({"max_iter": 0.5}, "max_iter must be a positive integer; got 0.5."),
    "a negative tolerance": ({"tol": -1e-3}, "tol must be a positive number; got -0.001."),
    "an empty batch": ({"solver": "adam", "batch_size": 0}, "batch_size must be a positive integer; got 0."),
    "no terms": ({"terms": 0}, "terms must be an integer >= 1; got 0."),
    "terms of another bound": (
        {"bound": "pg", "terms": 3},
        "terms belongs to bound='viper'; got bound='pg', terms=3. Leave terms out.",
    ),
    "an odd number of samples": ({"bound": "mc", "samples": 3}, "samples must be an even integer >= 2; got 3."),
}


@pytest.mark.parametrize("what", REJECTED)
def test_rejected(what):
    given, expected = REJECTED[what]
    assert expected in message(**given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_absent_device():
    expected = "device must be available; got 'cuda' and no CUDA device. Use device='cpu'."
    assert expected in message(device="cuda")


def test_a_column_vector_of_labels_warns():
    from sklearn.exceptions import DataConversionWarning

    with pytest.warns(DataConversionWarning, match="A column-vector y was passed when a 1d array was expected"):
        fit(y=Y[:, None])


AT_PREDICTION = {
    "other names": (
        FRAME.rename(columns={"a": "z"}),
        "The feature names should match those that were passed during fit",
    ),
    "another order": (FRAME[["b", "a", "c"]], "Feature names must be in the same order as they were in fit"),
    "too few columns": (FRAME[["a", "b"]], "The feature names should match those that were passed during fit"),
    "NaN": (pd.DataFrame(holed(np.nan), columns=["a", "b", "c"]), "Input X contains NaN."),
}


@pytest.mark.parametrize("method", ["predict", "predict_proba", "predict_std", "predict_interval", "predict_latent"])
@pytest.mark.parametrize("what", AT_PREDICTION)
def test_rejected_at_prediction(what, method):
    model = fit(X=FRAME)
    rows, expected = AT_PREDICTION[what]
    with pytest.raises(ValueError, match=re.escape(expected)):
        getattr(model, method)(rows)


def test_another_number_of_columns():
    with pytest.raises(ValueError, match="X has 2 features, but VariationalLogisticRegression is expecting 3 features"):
        fit().predict(X[:, :2])
    with pytest.raises(ValueError, match="Expected 2D array, got 1D array instead"):
        fit().predict(X[0])


def test_offsets_at_prediction_are_checked():
    with pytest.raises(
        ValueError, match=r"offset must have shape \(40,\), one entry per row; got offset.shape == \(3,\)"
    ):
        fit().predict(X, offset=np.ones(3))


# --- accepted: it works, and is right ---


def same(model, other, rtol=1e-6):
    np.testing.assert_allclose(model.coef_, other.coef_, rtol=rtol)
    np.testing.assert_allclose(model.predict_proba(X), other.predict_proba(X), rtol=rtol)


ACCEPTED = {
    "numbers as objects": {"X": X.astype(object)},
    "a frame of floats": {"X": FRAME.astype("Float64").to_numpy(dtype=object)},
    "columns reversed in memory": {"X": np.ascontiguousarray(X[:, ::-1])[:, ::-1]},
    "one weight for all": {"sample_weight": 1.0},
    "one offset for all": {"offset": 0.0},
    "integer weights": {"sample_weight": np.ones(40, dtype=int)},
    "a list of scales": {"prior_scale": [1, 1, 1]},
    "an identity covariance": {"prior_scale": np.eye(3)},
    "a tensor of scales": {"prior_scale": torch.ones(3)},
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_accepted(what):
    same(fit(**ACCEPTED[what], tol=1e-13), fit(tol=1e-13))


@pytest.mark.parametrize("kind", [np.int64, np.int8, np.uint8, bool])
def test_integers_are_their_values(kind):
    whole = np.clip(np.round(X), 0, 3).astype(kind)
    one, other = fit(X=whole, tol=1e-13), fit(X=whole.astype(float), tol=1e-13)
    np.testing.assert_allclose(one.coef_, other.coef_, rtol=1e-9)


@pytest.mark.parametrize("make", [lambda x: x.astype(np.float32), lambda x: torch.tensor(x, dtype=torch.float32)])
def test_float32_features_are_their_values(make):
    one, other = fit(X=make(X), tol=1e-13), fit(X=X.astype(np.float32).astype(float), tol=1e-13)
    np.testing.assert_allclose(one.coef_, other.coef_, rtol=1e-9)


def test_half_precision_tensors():
    one = fit(X=torch.tensor(X, dtype=torch.bfloat16))
    other = fit(X=torch.tensor(X, dtype=torch.bfloat16).double().numpy())
    np.testing.assert_allclose(one.coef_, other.coef_, rtol=1e-6)


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_perfectly_separable(family):
    model = fit(y=X[:, 0] > 0, covariance=family, prior_scale=2.5)
    assert model.converged_
    assert (model.predict(X) == (X[:, 0] > 0)).all()
    # the prior keeps it finite
    assert 0.0 < model.coef_[0, 0] < 4 * 2.5


def test_a_zero_weight_is_no_row():
    weight = np.r_[np.zeros(5), np.ones(35)]
    wild = X.copy()
    wild[:5] = 1e3
    same(fit(X=wild, sample_weight=weight, tol=1e-13), fit(X=X[5:], y=Y[5:], tol=1e-13))


def test_weights_that_leave_one_class_work():
    model = fit(sample_weight=(Y == 1).astype(float))
    assert model.converged_
    assert (model.predict(X) == 1).all()


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_tiny_and_huge_weights(size):
    model = fit(sample_weight=size * ONES)
    assert model.converged_
    if size < 1.0:
        np.testing.assert_allclose(model.covariance_, np.diag([1.0, 1.0, 1.0, 100.0]), rtol=1e-8, atol=1e-8)
    else:
        np.testing.assert_allclose(model.coef_, fit(sample_weight=1e6 * ONES).coef_, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_features_whose_squares_overflow(family):
    expected = "X must have columns of moderate size, so that sums keep enough digits; got numbers up to "
    assert message(X=1e200 * X, covariance=family) == f"{expected}{np.abs(X).max():.3g}e+200. Standardise the features."


CAUSES = {
    "prior": ({"X": np.hstack([X, X]), "prior_scale": 1e120}, "prior_scale must not be far larger than the rows can"),
    "weights": ({"sample_weight": 1e308 * ONES}, "sample_weight must count rows; got 1e+308. Divide the weights by"),
    "offset": ({"offset": 1e307 * ONES}, "offset must be a log-odds; got 1e+307. Scale the offsets."),
}


@pytest.mark.parametrize(("given", "cause"), CAUSES.values(), ids=CAUSES)
def test_overflow_names_its_cause(given, cause):
    assert message(**given).startswith(cause)


def test_nothing_is_fitted_when_input_is_bad():
    model = VariationalLogisticRegression()
    with pytest.raises(ValueError, match="sample_weight must not be negative"):
        model.fit(X, Y, sample_weight=-ONES)
    with pytest.raises(AttributeError):
        _ = model.posterior_


@pytest.mark.parametrize("error", [viper.errors.FileError, viper.errors.FormulaError, viper.errors.StorageError])
@pytest.mark.parametrize("odd", ["a\nb", "\x1b[2J", "\u202e", "\ud800", "x" * 10_000, "\0"])
def test_messages_are_one_printable_line(error, odd):
    text = str(error(f"a name must be short; got {odd}. Rename it."))
    assert text.isprintable()
    assert len(text) <= 1010
    assert text.startswith("a name must be short; got ")
    assert text.endswith(". Rename it.")


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_large_arrays_are_checked_like_small_ones(dtype):
    """Entries whose sum overflows are finite all the same."""
    X = np.zeros((MANY_ENTRIES // 4, 4), dtype)
    y = np.arange(len(X)) % 2
    X[:4] = np.finfo(dtype).max / 2
    model = viper.VariationalLogisticRegression()
    assert read_features(model, X, reset=True).shape == X.shape
    X[-1, 2] = np.nan
    with pytest.raises(ValueError, match=r"X must be finite; .*NaN.* Entries that are not finite: 1 in 'x2'"):
        model.fit(X, y)


@pytest.mark.parametrize("n", [-1, 2.5, True, "3"])
@pytest.mark.parametrize(
    "make", [lambda m: m, lambda m: m.corrected(draws=100, random_state=0)], ids=["q", "corrected"]
)
def test_a_number_of_draws_is_a_whole_number(make, n):
    found = make(fit())
    with pytest.raises(ValueError, match=rf"^n must be a whole number from 0 on; got {re.escape(repr(n))}\.$"):
        found.sample(n)
    assert found.sample(0).shape == (0, 4)
