"""The HTML representation, and output configured as pandas."""

import html.parser

import numpy as np
import pandas
import pytest
import sklearn
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import StackingClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import viper
from viper.models import notebook
from viper.models.notebook import notebook_card

own = pytest.mark.skipif(not hasattr(sklearn.base.BaseEstimator, "_html_repr"), reason="scikit-learn before 1.7")


class Balance(html.parser.HTMLParser):
    """Every tag that opens closes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        if tag not in ("br", "img", "input", "meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = pandas.DataFrame(rng.normal(size=(120, 2)), columns=["<script>alert(1)</script>", "b & c"])
    return X, rng.random(120) < 1 / (1 + np.exp(-X.iloc[:, 0]))


@own
def test_a_fitted_model_shows_what_it_learned(data):
    model = viper.VariationalLogisticRegression()
    assert "ELBO" not in model._repr_html_()
    model.fit(*data)
    extra = notebook_card(model)
    assert model._repr_html_().endswith(extra)
    parsed = Balance(extra)
    assert not parsed.open
    assert parsed.seen.count("svg") == 3
    assert "script" not in parsed.seen
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in extra
    assert f"{model.elbo_:.3f}" in extra
    assert "Verdict" in extra
    assert f"{model.coef_[0, 0]:.3g}" in extra


@own
def test_looking_changes_nothing(data):
    model = viper.VariationalLogisticRegression(random_state=np.random.RandomState(0)).fit(*data)
    before, own_state = np.random.get_state()[1].copy(), model.random_state.get_state()[1].copy()  # noqa: NPY002
    assert notebook_card(model) == notebook_card(model)
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002
    assert np.array_equal(model.random_state.get_state()[1], own_state)


@own
def test_long_tables_and_large_data_are_kept_short(monkeypatch):
    rng = np.random.default_rng(0)
    model = viper.VariationalLogisticRegression().fit(rng.normal(size=(200, 20)), rng.random(200) < 0.5)
    monkeypatch.setattr(notebook, "LARGEST_DIAGNOSED", 10)
    text = model._repr_html_()
    assert "and 9 more" in text
    assert "Verdict" not in text


@own
def test_a_loaded_model_and_a_gaussian_process(data, tmp_path):
    viper.VariationalLogisticRegression().fit(*data).save(tmp_path / "m.viper")
    assert "ELBO" in viper.load(tmp_path / "m.viper")._repr_html_()
    gp = viper.VariationalGPClassifier(n_inducing=5, n_starts=1, max_iter=3, tol=1e9, random_state=0).fit(*data)
    assert "lengthscale" in gp._repr_html_()
    assert not Balance(notebook_card(gp)).open


@own
def test_text_display_is_left_alone(data):
    with sklearn.config_context(display="text"):
        assert not hasattr(viper.VariationalLogisticRegression(), "_repr_html_")


# --- set_output ---


def test_set_output_is_for_transformers_and_passes_through_pipelines(data):
    """A classifier has nothing to configure; what feeds it may hand over DataFrames, and their names arrive."""
    X, y = data[0].set_axis(["a", "b"], axis=1).assign(ward=np.array(list("xyz"))[np.arange(120) % 3]), data[1]
    columns = ColumnTransformer(
        [("z", StandardScaler(), ["a", "b"]), ("o", OneHotEncoder(sparse_output=False), ["ward"])]
    )
    pipeline = make_pipeline(columns, viper.VariationalLogisticRegression()).set_output(transform="pandas")
    pipeline.fit(X, y)
    assert pipeline[-1].summary().index.tolist() == ["z__a", "z__b", "o__ward_x", "o__ward_y", "o__ward_z", "intercept"]
    plain = (
        make_pipeline(clone(columns), viper.VariationalLogisticRegression()).set_output(transform="default").fit(X, y)
    )
    assert np.allclose(pipeline.predict_proba(X), plain.predict_proba(X))
    with sklearn.config_context(transform_output="pandas"):
        assert isinstance(pipeline[-1].predict_proba(pipeline[:-1].transform(X)), np.ndarray)


def test_inside_a_stack_with_pandas_output(data):
    X = data[0].set_axis(["a", "b"], axis=1)
    stack = StackingClassifier(
        [("viper", viper.VariationalLogisticRegression())], viper.VariationalLogisticRegression()
    )
    stack.set_output(transform="pandas").fit(X, data[1])
    assert stack.transform(X).columns.tolist() == ["stackingclassifier_viper"]
