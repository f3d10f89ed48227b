"""A fitted logistic regression as an ONNX graph, which computes posterior-averaged probabilities without Python.

The graph computes ϑ = μᵀx and τ² = xᵀΣx in double precision and E[s(f)] = Σ_j p_j Φ(ϑ/√(τ² + σ_j²)), with the logistic
function as a mixture of normals. The errors of the mixture and of erfc add up to less than 2e-11, whatever ϑ and τ.
More than two classes need an integral for each row (classes/softmax_graph.py), intervals of levels in order one for
each level (ordinal/level_graph.py).
"""

from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils.validation import check_is_fitted

from viper.data import checks, model_file
from viper.inference.ordinal.posterior import OrdinalPosterior
from viper.inference.posterior import Diagonal, Full, LowRank, Posterior
from viper.models.classes.contrasts import ContrastGaussian, to_independent
from viper.models.classes.softmax_graph import softmax_nodes
from viper.models.graph import FormulaGraph, OnnxGraph, expected_tail
from viper.models.mixture.refined import check_one_component
from viper.models.ordinal.level_graph import level_nodes
from viper.models.prediction import half_width

OPSET, ML_OPSET, IR_VERSION = 17, 2, 8  # released by 2022, so every runtime in use reads them
LARGEST_FILE = (1 << 31) - (1 << 20)  # bytes; a protobuf message holds at most 2 GB


class OnnxMixin:
    """Regressions that can be exported as ONNX graphs."""

    def to_onnx(
        self,
        path: str | PathLike[str] | None = None,
        *,
        dtype: str = "float32",
        level: float = 0.95,
        overwrite: bool = False,
    ) -> Any:
        """Export `predict`, `predict_proba` and `predict_interval` as an ONNX model.

        Its outputs are "label", "probabilities" and "interval". Its input is "X"; a model with a formula has one input
        for each raw column, of that column's name and with shape (rows, 1): numbers, booleans, or text, where an empty
        text is a missing value. Encoding and standardisation are inside. A row that cannot be predicted, because of a
        new level for instance, gets NaN as probabilities and interval, and a meaningless label. There is no offset.
        For more than two classes, or levels, probabilities and intervals are n × K and n × K × 2, within 1e-6 of those
        of this estimator.

        Parameters
        ----------
        path : str or Path, optional
            File to write the model to.
        dtype : {"float32", "float64"}, default "float32"
            Type of numbers and probabilities. The model computes in float64.
        level : float, default 0.95
            Probability that the interval contains the probability of the second class.
        overwrite : bool, default False
            Whether to replace a file that exists.

        Returns
        -------
        onnx.ModelProto
        """
        check_is_fitted(self, "posterior_")
        check_one_component(self, "to_onnx")
        return export_onnx(self, path, dtype, level, overwrite)


def export_onnx(model: Any, path: str | PathLike[str] | None, dtype: str, level: float, overwrite: bool) -> Any:
    """Return the `onnx.ModelProto` of a fitted logistic regression, and write it to `path` if that is given."""
    try:
        import onnx
    except ImportError as error:
        raise ImportError("to_onnx needs the package onnx. pip install 'vi-per[onnx]'") from error
    checks.check_word(dtype, "dtype", ("float32", "float64"))
    fits = getattr(model, "estimators_", [model])
    if (size := 8 * sum(x.numel() for fit in fits for x in vars(fit.posterior_).values())) > LARGEST_FILE:
        raise ValueError(
            f"an ONNX file holds at most 2 GB; got a posterior of {size / 1e9:.1f} GB. Fit covariance='low-rank' or "
            "'diagonal'."
        )
    reach = half_width(level)
    graph = OnnxGraph(onnx)
    real = onnx.TensorProto.FLOAT if dtype == "float32" else onnx.TensorProto.DOUBLE
    if (encoding := getattr(model, "formula_", None)) is None:
        X = graph.add("Cast", graph.input("X", real, model.n_features_in_), to=onnx.TensorProto.DOUBLE)
    else:
        X = FormulaGraph(graph, encoding, real).columns()
    graph_of_outputs(model)(graph, X, model, real, reach)
    proto = build_proto(graph, model, dtype, level)
    onnx.checker.check_model(proto)
    if path is not None:
        model_file.write_bytes(path, proto.SerializeToString(), overwrite)
    return proto


def graph_of_outputs(model: Any) -> Any:
    """The function that adds the nodes from X to the outputs, for this kind of target."""
    if getattr(model, "multilabel_", False):
        return labels_graph
    if not model.multiclass_:
        return prediction_graph
    return ordinal_graph if isinstance(model.posterior_, OrdinalPosterior) else softmax_graph


def build_proto(graph: OnnxGraph, model: Any, dtype: str, level: float) -> Any:
    helper, types = graph.onnx.helper, graph.onnx.TensorProto
    real = types.FLOAT if dtype == "float32" else types.DOUBLE
    labels = helper.np_dtype_to_tensor_dtype(np.asarray(exported_labels(model.classes_)).dtype)
    outputs = {"label": (labels, [None]), "probabilities": (real, [None, 2]), "interval": (real, [None, 2])}
    what = "of the two classes, and the interval that contains the second one"
    several = getattr(model, "multilabel_", False)
    if several or model.multiclass_:
        count, kind = len(model.classes_), "labels" if several else "classes"
        what = f"of the {kind}, and the intervals that contain each of them"
        outputs |= {"probabilities": (real, [None, count]), "interval": (real, [None, count, 2])}
    if several:
        outputs["label"] = types.INT64, [None, count]
    whole = helper.make_graph(
        graph.nodes,
        type(model).__name__,
        graph.inputs,
        [helper.make_tensor_value_info(name, *shape) for name, shape in outputs.items()],
        graph.constants,
    )
    versions = {"": OPSET, **({"ai.onnx.ml": ML_OPSET} if graph.uses_ml else {})}
    return helper.make_model(
        whole,
        producer_name="viper",
        producer_version=model_file.viper_version(),
        opset_imports=[helper.make_opsetid(*version) for version in versions.items()],
        ir_version=IR_VERSION,
        doc_string=f"Posterior-averaged probabilities E[s(f(x))] {what} with probability {level:g}.",
    )


def exported_labels(classes: np.ndarray) -> np.ndarray:
    """Return the classes as int64, bool, double or text, the types that ONNX supports."""
    kind = classes.dtype.kind
    if kind in "iu":
        return classes.astype(np.int64)
    if kind in "bf":
        return classes.astype(bool if kind == "b" else np.float64)
    return np.array([str(label) for label in classes], dtype=object)


class LatentNodes(NamedTuple):
    """Nodes with a column for one f ~ N(ϑ, τ²): whether ϑ > 0, E[s(-f)] and E[s(f)]; and s(ϑ ± zτ) in two columns."""

    positive: str
    sides: list[str]
    interval: str


def prediction_graph(graph: OnnxGraph, X: str, model: Any, real: int, reach: float) -> None:
    """Add the nodes from X to the outputs for two classes."""
    found = latent_nodes(graph, X, model, reach)
    both = graph.add("Concat", *found.sides, axis=1)
    graph.add("Cast", both, name="probabilities", to=real)
    graph.add("Cast", found.interval, name="interval", to=real)
    index = graph.add("Squeeze", graph.add("Cast", found.positive, to=graph.onnx.TensorProto.INT64), np.array([1]))
    graph.add("Gather", exported_labels(model.classes_), index, name="label")


def labels_graph(graph: OnnxGraph, X: str, model: Any, real: int, reach: float) -> None:
    """Add the nodes from X to the outputs for several labels, a column for each."""
    found = [latent_nodes(graph, X, fit, reach) for fit in model.estimators_]
    graph.add("Cast", graph.add("Concat", *(one.sides[1] for one in found), axis=1), name="probabilities", to=real)
    ends = [graph.add("Unsqueeze", one.interval, np.array([1])) for one in found]
    graph.add("Cast", graph.add("Concat", *ends, axis=1), name="interval", to=real)
    positive = graph.add("Concat", *(one.positive for one in found), axis=1)
    graph.add("Cast", positive, name="label", to=graph.onnx.TensorProto.INT64)


def softmax_graph(graph: OnnxGraph, X: str, model: Any, real: int, reach: float) -> None:
    """Add the nodes from X to the outputs for more than two classes, a column for each."""
    posterior, intercept = model.posterior_, model.fit_intercept
    theta = affine(graph, X, posterior.mean.numpy().T, intercept)
    kind = Full if posterior.factor.ndim == 3 else Diagonal
    own = [kind(*pair) for pair in zip(posterior.mean, posterior.factor, strict=True)]
    tau2 = graph.add("Concat", *(latent_variance(graph, X, one, intercept) for one in own), axis=1)
    if isinstance(posterior, ContrastGaussian):
        tau2 = graph.add("Relu", graph.add("MatMul", tau2, to_independent(len(own)).numpy()))
    probabilities, interval = softmax_nodes(graph, theta, tau2, len(model.classes_), reach)
    graph.add("Cast", probabilities, name="probabilities", to=real)
    graph.add("Cast", interval, name="interval", to=real)
    index = graph.add("ArgMax", probabilities, axis=1, keepdims=0)
    graph.add("Gather", exported_labels(model.classes_), index, name="label")


def ordinal_graph(graph: OnnxGraph, X: str, model: Any, real: int, reach: float) -> None:
    """Add the nodes from X to the outputs for levels in order, a column for each."""
    q = model.posterior_
    score, loading = (affine(graph, X, x.numpy(), True) for x in (q.mean[:, None], q.moving))
    tau2 = latent_variance(graph, X, Full(q.mean, q.factor), True)
    probabilities, interval = level_nodes(graph, score, loading, tau2, q, reach)
    graph.add("Cast", probabilities, name="probabilities", to=real)
    graph.add("Cast", interval, name="interval", to=real)
    index = graph.add("ArgMax", probabilities, axis=1, keepdims=0)
    graph.add("Gather", exported_labels(model.classes_), index, name="label")


def latent_nodes(graph: OnnxGraph, X: str, model: Any, reach: float) -> LatentNodes:
    mean = model.posterior_.mean.numpy()[:, None]
    theta = affine(graph, X, mean, model.fit_intercept)
    tau2 = latent_variance(graph, X, model.posterior_, model.fit_intercept)
    small = expected_tail(graph, graph.add("Abs", theta), tau2)
    large = graph.add("Sub", 1.0, small)
    positive = graph.add("Greater", theta, 0.0)
    sides = [graph.add("Where", positive, *pair) for pair in ((small, large), (large, small))]
    ends = graph.add("Mul", graph.add("Sqrt", tau2), np.array([[-reach, reach]]))
    return LatentNodes(positive, sides, graph.add("Sigmoid", graph.add("Add", theta, ends)))


def affine(graph: OnnxGraph, X: str, matrix: np.ndarray, intercept: bool) -> str:
    """[X, 1] M, where the last row of M multiplies the ones."""
    product = graph.add("MatMul", X, matrix[:-1] if intercept else matrix)
    return graph.add("Add", product, matrix[-1:]) if intercept else product


def latent_variance(graph: OnnxGraph, X: str, posterior: Posterior, intercept: bool) -> str:
    """τ² = xᵀΣx."""

    def length(matrix: Any) -> str:
        """‖Mᵀx‖²."""
        product = affine(graph, X, matrix.numpy(), intercept)
        return graph.add("ReduceSumSquare", product, axes=[1], keepdims=1)

    def weighted(variances: Any) -> str:
        """Σ_j v_j x_j²."""
        return affine(graph, graph.add("Mul", X, X), variances.numpy()[:, None], intercept)

    if isinstance(posterior, Full | OrdinalPosterior):
        return length(posterior.factor)
    if isinstance(posterior, Diagonal):
        return weighted(posterior.variance)
    assert isinstance(posterior, LowRank)
    scaled = posterior.prior_sd[:, None] * posterior.basis
    sd = posterior.outside_sd
    outside = graph.add("Relu", graph.add("Sub", weighted(sd.square()), length(sd[:, None] * posterior.basis)))
    return graph.add("Add", outside, length(scaled @ posterior.inner_factor))
