"""Several labels at once: y has a column of zeros and ones for each, and each has its own posterior.

    y_il ~ Bernoulli(s(x_iᵀβ_l)),      l = 1 … L

Given X the labels are independent, so the posterior is that of L logistic regressions, which `estimators_` holds. They
share the rows: one pass reads X for all of them.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from torch import Tensor

from viper.data.model_file import MANY_LABELS, decode_labels, encode_labels
from viper.data.schema import NUMBER, PLAIN, TEXT, WHOLE, Entries, Fields, Items, Layout, Numbers, or_none
from viper.errors import StorageError, shown
from viper.inference.classes.together import LabelRows, fit_together
from viper.inference.posterior import Several
from viper.inference.progress import StepProgress
from viper.inference.rows import RowSource
from viper.inference.threads import count_threads, pass_threads
from viper.models.prediction import (
    TargetReading,
    columns_by_class,
    log_odds,
    means_and_sds,
    probability_interval,
    probability_std,
)
from viper.models.saving import State
from viper.softplus.expectation import expected_sigmoid
from viper.softplus.information import answer_information

if TYPE_CHECKING:
    import pandas

SUMS = ("elbo_", "elbo_bound_", "kl_", "objective_")  # attributes that add up over labels
Method = TypeVar("Method", bound=Callable[..., Any])


# --- how log-odds are read, n × L ---


def label_probabilities(mean: Tensor, variance: Tensor) -> np.ndarray:
    """E[s(f)] of each label."""
    return expected_sigmoid(mean, variance).mean.cpu().numpy()


def label_log_odds(mean: Tensor, variance: Tensor) -> np.ndarray:
    """Log-odds of the posterior-averaged probability of each label."""
    sides = [expected_sigmoid(sign * mean, variance).mean.cpu().numpy() for sign in (-1.0, 1.0)]
    return log_odds(np.stack(sides, -1))


def probable_labels(mean: Tensor, variance: Tensor, classes: np.ndarray) -> np.ndarray:
    """1 for each label that is more probable than not, otherwise 0."""
    return (mean > 0).cpu().numpy().astype(np.int64)


def labels_table(mean: Tensor, variance: Tensor, classes: np.ndarray, z: float) -> dict[str, np.ndarray]:
    """Five columns for each label, with its name appended: `label`, `probability`, `sd`, `lower` and `upper`."""
    readings = label_probabilities, probability_std, probability_interval
    found = probable_labels(mean, variance, classes)
    columns = columns_by_class(*readings, mean, variance, classes, z)
    return {f"label_{name}": found[:, j] for j, name in enumerate(classes)} | columns


def labels_information(mean: Tensor, variance: Tensor) -> np.ndarray:
    """Mutual information of the labels of a row and the model, in nats, summed over labels."""
    return answer_information(mean, variance).sum(-1).cpu().numpy()


LABELS_READING = TargetReading(
    label_probabilities,
    probability_std,
    probability_interval,
    label_log_odds,
    probable_labels,
    labels_table,
    labels_information,
    means_and_sds,
)


# --- fitting ---


def fit_labels(model: Any, source: RowSource, fit_one: Callable[[Any, RowSource], Any], kept: RowSource) -> Any:
    """Fit each label by `fit_one(estimator, rows)`, all with the same passes over the rows, and keep the results.

    `kept` are the rows that the model keeps; `source` is the same, or wraps them in a log of passes.
    """
    names, threads = model.classes_.tolist(), count_threads(model.n_jobs)
    members = [label_estimator(model, j, threads) for j in range(len(names))]
    fits = [partial(fit_one, fit, LabelRows(source, j)) for j, fit in enumerate(members)]
    on_cpu = source.device.type == "cpu"
    with (
        closing(StepProgress(model.verbose, "fitted label")) as progress,
        pass_threads(threads) if on_cpu else nullcontext(),
    ):
        progress.step(0, len(names))
        source.observe(progress.rows_done)
        _, model.passes_ = fit_together(source, fits, names, progress.step)
    for j, fit in enumerate(members):
        fit.n_jobs, fit.verbose = model.n_jobs, model.verbose
        fit._training_rows = fit._known_weights(LabelRows(kept, j))
    model._training_rows = kept
    kept.release()
    return keep_labels(model, members)


def label_estimator(model: Any, column: int, threads: int) -> Any:
    """Return the estimator of one label: the fitted one, or a new one that knows the columns of X."""
    known = getattr(model, "estimators_", None)
    params = model.get_params(deep=False) | {"n_jobs": threads, "verbose": model.verbose is True}
    fit = copy.copy(known[column]).set_params(**params) if known is not None else type(model)(**params)
    for name in ("n_features_in_", "feature_names_in_"):
        if hasattr(model, name):
            setattr(fit, name, getattr(model, name))
    fit.classes_ = np.array([0, 1])
    return fit


def keep_labels(model: Any, fits: list[Any]) -> Any:
    """Set the fitted attributes: one entry for each label, or the sum over labels."""
    model.estimators_, model.prior_ = fits, fits[0].prior_
    model.posterior_ = Several(tuple(fit.posterior_ for fit in fits))
    for name in ("coef_", "intercept_"):
        setattr(model, name, np.concatenate([getattr(fit, name) for fit in fits]))
    for name in ("prior_scale_", "class_weight_", "class_share_"):
        setattr(model, name, np.stack([getattr(fit, name) for fit in fits]))
    for name in SUMS:
        setattr(model, name, float(sum(getattr(fit, name) for fit in fits)))
    worst = min(fits, key=lambda fit: fit.converged_)
    model.converged_, model.status_ = worst.converged_, worst.status_
    model.n_iter_, model.mean_weight_ = max(fit.n_iter_ for fit in fits), fits[0].mean_weight_
    model.history_, model.robust_groups_ = [fit.history_ for fit in fits], fits[0].robust_groups_
    model._largest_sd = None
    return model


# --- one answer from those of the labels ---


def by_label(join: Callable[[Any, list[Any]], Any]) -> Callable[[Method], Method]:
    """Wrap a method so that a model of several labels joins the answers of its estimators.

    Rows are opened once, and each pass over them serves all labels.
    """

    def wrap(method: Method) -> Method:
        takes_rows = "y" in inspect.signature(method).parameters

        @wraps(method)
        def answer(model: Any, *args: Any, **given: Any) -> Any:
            if not model.multilabel_:
                return method(model, *args, **given)
            bound = inspect.signature(method).bind(model, *args, **given)
            asked = dict(list(bound.arguments.items())[1:])
            return join(model, (answers_about_rows if takes_rows else answers_of_labels)(model, method, asked))

        return cast(Method, answer)

    return wrap


def answers_of_labels(model: Any, method: Callable[..., Any], asked: dict[str, Any]) -> list[Any]:
    """Return the answer of each label's estimator; offsets may have a column for each."""
    offset = asked.pop("offset", None)
    given = [{} if offset is None else {"offset": column_of_offset(offset, j)} for j in range(len(model.classes_))]
    return [method(fit, **asked, **own) for fit, own in zip(model.estimators_, given, strict=True)]


def column_of_offset(offset: Any, column: int) -> Any:
    return offset if np.ndim(offset) < 2 else np.asarray(offset)[:, column]


def answers_about_rows(model: Any, method: Callable[..., Any], asked: dict[str, Any]) -> list[Any]:
    """Return the answers of the labels' estimators about the given rows, or about those of the fit."""
    X, y, weight, offset = (asked.pop(name, None) for name in ("X", "y", "sample_weight", "offset"))
    if X is None and not hasattr(model, "_training_rows"):
        return [method(fit, **asked) for fit in model.estimators_]  # raises: there are no rows
    if X is None:
        source, fits = model._training_rows, model.estimators_
    else:
        fits = [copy.copy(fit) for fit in model.estimators_]
        source = model._open_labelled_rows(X, y, sample_weight=weight, offset=offset)
        asked["X"] = X
        for j, fit in enumerate(fits):
            fit._open_labelled_rows = partial(rows_of_label, source, j)
    return fit_together(source, [partial(method, fit, **asked) for fit in fits], model.classes_.tolist())[0]


def rows_of_label(source: RowSource, column: int, X: Any, y: Any, **given: Any) -> RowSource:
    return LabelRows(source, column)


def stacked_answers(model: Any, answers: list[Any]) -> np.ndarray:
    """One array, with the labels on its first axis."""
    return np.stack(answers)


def sum_of_labels(model: Any, answers: list[float]) -> float:
    return float(sum(answers))


def answers_by_label(model: Any, answers: list[Any]) -> dict[Any, Any]:
    """A dictionary of the answers by label."""
    return dict(zip(model.classes_.tolist(), answers, strict=True))


def labels_as_table(model: Any, answers: "list[pandas.DataFrame]") -> "pandas.DataFrame":
    """One table, whose first column names the label."""
    import pandas

    tables = [table.assign(label=name) for name, table in answers_by_label(model, answers).items()]
    table = pandas.concat(tables, ignore_index=True)
    return table[["label", *(name for name in table if name != "label")]]


def summary_of_labels(model: Any, answers: "list[pandas.DataFrame]") -> "pandas.DataFrame":
    """One table, indexed by label and coefficient."""
    import pandas

    table = pandas.concat(answers_by_label(model, answers), names=["label", "coefficient"])
    table.attrs |= answers[0].attrs
    return table


def with_estimators(model: Any, answers: list[Any]) -> Any:
    """A copy of the model with new estimators."""
    twin = copy.copy(model)
    rows, passes = getattr(model, "_training_rows", None), model.passes_
    keep_labels(twin, answers)
    twin.passes_, twin._training_rows = passes, rows
    return twin


# --- storage: the state of each estimator, whose tensors are prefixed with the label's number ---

SHARED = ("options", "features", "names")  # metadata that all estimators share
STORED = Fields(
    {
        "options": Entries(PLAIN),
        "features": WHOLE,
        "names": or_none(Items(TEXT)),
        "classes": MANY_LABELS,
        "passes": NUMBER,
        "labels": Items(Entries(PLAIN)),
    }
)
EACH_LABEL = encode_labels(np.array([0, 1]))  # the classes of each estimator


def labels_state(model: Any, pack: Callable[[Any], State]) -> State:
    """Return the state of a model of several labels; `pack` is that of one."""
    states = [pack(fit) for fit in model.estimators_]
    shared = {name: states[0].metadata[name] for name in SHARED}
    own = [{name: x for name, x in one.metadata.items() if name not in (*SHARED, "classes")} for one in states]
    tensors = {name: x for name, x in states[0].tensors.items() if name.startswith("option.")}
    for j, one in enumerate(states):
        tensors |= {f"{j}.{name}": x for name, x in one.tensors.items() if name not in tensors}
    return State(tensors, {**shared, "classes": encode_labels(model.classes_), "passes": model.passes_, "labels": own})


def state_of_label(
    tensors: Mapping[str, Any], metadata: dict[str, Any], column: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors, or their layouts, and the metadata of one label's estimator."""
    start = f"{column}."
    own = {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}
    shared = {name: x for name, x in tensors.items() if name.startswith("option.")}
    known = {name: metadata[name] for name in SHARED} | {"classes": EACH_LABEL}
    return own | shared, metadata["labels"][column] | known


def check_labels_header(
    layouts: Mapping[str, Layout],
    metadata: dict[str, Any],
    check: Callable[[Mapping[str, Layout], dict[str, Any]], dict[str, Numbers]],
) -> dict[str, Numbers]:
    """Raise unless the header is that of a model of several labels; return the rules for the numbers."""
    STORED.check(metadata, "")
    names, count = decode_labels(metadata["classes"], "classes", MANY_LABELS), len(metadata["labels"])
    if len(names) != count:
        raise StorageError(f"labels must be {len(names)}, as many as classes; got {count}.")
    starts = ("option.", *(f"{j}." for j in range(count)))
    if strange := sorted(name for name in layouts if not name.startswith(starts)):
        raise StorageError(f"the file must have only what viper writes; got {shown(strange[0])}.")
    rules: dict[str, Numbers] = {}
    for j in range(count):
        found = check(*state_of_label(layouts, metadata, j))
        rules |= {name if name.startswith("option.") else f"{j}.{name}": rule for name, rule in found.items()}
    return rules


def restored_labels(state: State, unpack: Callable[[State], Any]) -> Any:
    """Return the model whose state this is; `unpack` returns the estimator of one label."""
    metadata = state.metadata
    fits = [unpack(State(*state_of_label(state.tensors, metadata, j))) for j in range(len(metadata["labels"]))]
    model = type(fits[0])(**fits[0].get_params(deep=False))
    model.classes_, model.passes_ = decode_labels(metadata["classes"], "classes", MANY_LABELS), metadata["passes"]
    for name in ("n_features_in_", "feature_names_in_"):
        if hasattr(fits[0], name):
            setattr(model, name, getattr(fits[0], name))
    return keep_labels(model, fits)
