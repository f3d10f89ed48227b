"""Would a kernel for each class predict better than one that all classes share? Held-out log loss, and the objective.

The data and splits are those of gp_classes.py. With all rows as inducing points, a common shift of f_1, ..., f_K at the
rows changes no probability, whatever the kernels. So q(f_1, ..., f_K) is still a star, and only its prior changes:
f_k ~ N(0, K_k), with a covariance for each class that includes the linear mean. Hyperparameters start from those of the
shared kernel, and L-BFGS maximises the profile plus their log priors; at the best q, the gradient of the profile is
that of -KL(q ‖ p) alone.
"""

import copy
import json
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

import viper
from benchmarks.gp_classes import SETS, read_results, split_rows
from benchmarks.gp_quality import Split, append
from benchmarks.table import Table, machine
from viper.gp.classes.profile import QuickProblem, QuickRun
from viper.gp.kernels import covariance, weight_columns
from viper.gp.model import SparseGP
from viper.inference.classes.star import Star
from viper.inference.classes.sums import EXACT_CLASSES, ROUGH_CLASSES
from viper.inference.rows import Arrays
from viper.inference.threads import one_thread

NAMES = ("iris", "wine", "penguins", "anes96", "contraceptive")
SPLITS, STEPS = 2, 30
JITTER = 1e-6  # relative to the mean variance
INNER, INNER_STEPS = 1e-2, 40  # tolerance in nats, and most steps, of the search for q
FARTHEST = 4.0  # largest change of a log scale
KEPT = Path(__file__).parent / "results" / "gp_own_kernels"


def prior_covariance(model: SparseGP, X: Tensor, Z: Tensor | None = None) -> Tensor:
    """Prior covariance of f between rows, linear mean included; jitter on the diagonal if `Z` is not given."""
    other = X if Z is None else Z
    K = covariance(model.kernel, X, other) + weight_columns(model.mean, X) @ weight_columns(model.mean, other).T
    return K + JITTER * K.diagonal().mean() * torch.eye(len(K), dtype=K.dtype) if Z is None else K


class OwnKernels:
    """θ_1, ..., θ_K -> max_q F + Σ log prior(θ_k), in coordinates f_k = Rv_k; RRᵀ is the shared kernel's covariance."""

    def __init__(self, shared: SparseGP, split: Split) -> None:
        self.X, self.classes = torch.from_numpy(split.X), int(split.y.max()) + 1
        self.models = [shared.copy_at() for _ in range(self.classes)]
        with torch.no_grad():
            self.root = torch.linalg.cholesky(prior_covariance(shared, self.X))
        self.source = Arrays(self.root, torch.from_numpy(split.y).double(), intercept=False)
        self.q: Star | None = None

    def precisions(self) -> Tensor:
        """Q_k = Rᵀ K_k⁻¹ R."""
        factors = [torch.linalg.cholesky(prior_covariance(model, self.X)) for model in self.models]
        halves = [torch.linalg.solve_triangular(factor, self.root, upper=False) for factor in factors]
        return torch.stack([half.T @ half for half in halves])

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """The objective and its gradient, negated for a minimiser."""
        for model, part in zip(self.models, np.split(x, self.classes), strict=True):
            model.set_free(part)
            model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            Q = self.precisions()
        problem = QuickProblem(
            self.source, self.classes, Star(self.root.new_zeros(self.classes, len(self.X)), Q.detach())
        )
        q = self.q = QuickRun(problem, INNER, INNER_STEPS, None).best_from(self.q)
        value = problem.evaluate(q, ROUGH_CLASSES, gram=False).objective
        with torch.enable_grad():
            log_prior = sum(model.log_prior() for model in self.models)
            (log_prior - divergence(q, Q)).backward()
        return -value - float(log_prior.detach()), -np.concatenate([model.free_gradient() for model in self.models])

    def climb(self) -> float:
        """Climb from the shared kernel; return the gain of the objective."""
        start = np.concatenate([model.free_vector() for model in self.models])
        first = self(start)[0]
        box = scipy.optimize.Bounds(start - FARTHEST, start + FARTHEST)
        options = {"maxiter": STEPS, "maxfun": 2 * STEPS, "ftol": 1e-7, "gtol": 0.05}
        found = scipy.optimize.minimize(self, start, jac=True, method="L-BFGS-B", bounds=box, options=options)
        return first - self(found.x)[0]

    def probabilities(self, X: np.ndarray) -> np.ndarray:
        """E softmax(f) at new rows."""
        new, thetas, variances = torch.from_numpy(X), [], []
        assert self.q is not None
        with torch.no_grad():
            for k, model in enumerate(self.models):
                cross = prior_covariance(model, new, self.X)
                A = torch.cholesky_solve(cross.T, torch.linalg.cholesky(prior_covariance(model, self.X))).T
                prior = torch.stack([prior_covariance(model, x[None], x[None])[0, 0] for x in new])
                design = A @ self.root
                thetas.append(design @ self.q.mean[k])
                rest = (prior - (A * cross).sum(1)).clamp(min=0.0)
                variances.append((design @ self.q.factor[k]).square().sum(1) + rest)
        return EXACT_CLASSES(torch.stack(thetas, 1), torch.stack(variances, 1))[1].numpy()


def divergence(q: Star, Q: Tensor) -> Tensor:
    """KL from q to N(0, Q_k⁻¹), for contrasts, up to a constant and differentiable in Q (star.py)."""
    total = torch.linalg.cholesky(Q.sum(0))
    pulled = (Q @ q.mean[..., None])[..., 0]
    common = torch.cholesky_solve(pulled.sum(0)[:, None], total)
    half = torch.linalg.solve_triangular(total, Q, upper=False)
    expected = ((Q - half.mT @ half) * (q.factor @ q.factor.mT)).sum()
    volume = torch.linalg.cholesky(Q).diagonal(dim1=1, dim2=2).log().sum() - total.diagonal().log().sum()
    return 0.5 * ((q.mean * (pulled - (Q @ common)[..., 0])).sum() + expected) - volume


def log_loss(probability: np.ndarray, y: np.ndarray) -> float:
    return float(-np.log(np.maximum(probability[np.arange(len(y)), y], 1e-15)).mean())


def compare(split: Split) -> dict[str, float]:
    """Held-out log loss with a shared kernel and with one for each class, and the gain of the objective."""
    X, first = np.unique(split.X, axis=0, return_index=True)
    split = split._replace(X=X, y=split.y[first])
    start = time.process_time()
    options: dict[str, Any] = {"lengthscales": "one", "hyperparameters": "mode", "standardize": False}
    shared = viper.VariationalGPClassifier(**options, verbose=False).fit(split.X, split.y)
    between = time.process_time()
    own = OwnKernels(copy.deepcopy(shared.model_), split)
    gain = own.climb()
    return {
        "rows": len(split.y),
        "classes": own.classes,
        "shared": log_loss(shared.predict_proba(split.X_test), split.y_test),
        "own": log_loss(own.probabilities(split.X_test), split.y_test),
        "gain": gain,
        "seconds, shared": between - start,
        "seconds, own": time.process_time() - between,
    }


def run(quick: bool, device: str = "cpu") -> Table:
    names, splits = (NAMES[:1], 1) if quick else (NAMES, SPLITS)
    lines = [] if quick else read_results(KEPT)
    KEPT.mkdir(exist_ok=True)
    done = {(line["data"], line["split"]) for line in lines}
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(splits):
            for name in (name for name in names if find_spec(SETS[name][0]) and (name, number) not in done):
                line = {"data": name, "split": number} | compare(split_rows(SETS[name][1](), number))
                lines.append(line)
                print(json.dumps(line), flush=True)
                if not quick:
                    append(KEPT / "lines.jsonl", line)
    columns = ["data", "training rows", "classes", "shared", "own", "gain, nats", "seconds, shared", "seconds, own"]
    rows: list[list[str | float]] = []
    for name in names:
        found = [line for line in lines if line["data"] == name]
        mean = {key: float(np.mean([line[key] for line in found])) for key in found[0] if key not in ("data", "split")}
        losses = [f"{mean['shared']:.4f}", f"{mean['own']:.4f}"]
        times = [f"{mean[f'seconds, {kind}']:.1f}" for kind in ("shared", "own")]
        rows.append([name, f"{mean['rows']:.0f}", f"{mean['classes']:.0f}", *losses, f"{mean['gain']:.1f}", *times])
    notes = [
        f"Mean held-out log loss over {splits} splits, one lengthscale, predictions at the best hyperparameters. Gain: "
        f"that of the ELBO plus log priors. Processor seconds of a fit. {machine(device)}"
    ]
    return Table("A kernel that all classes share, and one for each", columns, rows, notes)
