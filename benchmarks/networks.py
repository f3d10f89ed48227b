"""Classifiers on top of a neural network: two moons, digits and a table, beside other treatments of the last layer.

All methods get the same data, width of the body, batches, Adam, learning rate, schedule and epochs, except that the
head fitted to a finished body gets half the epochs. In rows "with a prior of the body", a weight decay of 1/n gives all
weights of the body the prior N(0, 1), and those of the last layer too if they are point estimates; other rows have no
such prior. The covariances of the heads were chosen on other splits (seeds 100 to 103); that prior and half the epochs,
on other data: moons with other noise, circles, and nine tables. Seconds are processor time of training on one thread,
including the post hoc step. Accuracy, log loss and calibration error (ten bins of the largest probability) are on a
held-out quarter of the data. OOD AUROC measures how well the entropy of the prediction tells held-out data from others:
points on a ring around the moons, digits rotated by 90°, and rows of the table five times as far from the mean. All are
means over seeds of split and initial weights, with the standard error of the log loss.

The last table is for `LogitHead.fit` alone: 50,000 rows of 512 features, ten classes.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, make_moons
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm

from benchmarks.table import Page, Table, machine, seconds
from viper.nn import BayesianLinear, BayesianNetwork, GaussianProcessHead, LogitHead, MomentReLU

WIDTH, BATCH, RATE, EPOCHS = 64, 128, 1e-2, 100
MEMBERS, FREQUENCIES = 5, 256
SEEDS = {"Two moons": 20, "Digits": 5, "Breast cancer": 20}
COLUMNS = ["method", "accuracy", "log loss", "std err", "calibration error", "OOD AUROC", "seconds"]
POST_HOC = "Post hoc fit of 50,000 x 512 features, ten classes"
Predict = Callable[[Tensor], Tensor]


class Data:
    """A split and its out-of-distribution rows, standardised by the training rows."""

    def __init__(self, name: str, seed: int) -> None:
        generator = np.random.default_rng(seed)
        if name == "Two moons":
            X, y = make_moons(400, noise=0.15, random_state=seed)
            angle = generator.uniform(0.0, 2.0 * math.pi, 200)
            other = np.stack([np.cos(angle), np.sin(angle)], 1) * generator.uniform(4.0, 8.0, (200, 1)) + X.mean(0)
        elif name == "Digits":
            X, y = load_digits(return_X_y=True)
        else:
            X, y = load_breast_cancer(return_X_y=True)
        a, b, ya, yb = train_test_split(X, y, test_size=0.25, random_state=seed, stratify=y)
        if name == "Digits":
            a, b = a / 16.0, b / 16.0
            other = np.rot90(b.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64)
        else:
            centre, scale = a.mean(0), a.std(0)
            a, b = (a - centre) / scale, (b - centre) / scale
            other = (other - centre) / scale if name == "Two moons" else 5.0 * b
        self.x, self.test, self.other = (
            torch.tensor(np.ascontiguousarray(x), dtype=torch.float32) for x in (a, b, other)
        )
        self.y, self.test_y = torch.tensor(ya), torch.tensor(yb)
        self.n, self.columns, self.classes = len(a), a.shape[1], int(y.max()) + 1


# --- bodies ---


def plain_body(columns: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(columns, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()
    )


class SmoothBody(torch.nn.Module):
    """A fixed embedding and two residual layers of spectral norm at most one, which preserve distances."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(columns, WIDTH)
        for parameter in self.first.parameters():
            parameter.requires_grad_(False)
        self.layers = torch.nn.ModuleList(spectral_norm(torch.nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def train(
    data: Data,
    loss: Callable[[Tensor, Tensor], Tensor],
    body: torch.nn.Module,
    head: torch.nn.Module | None = None,
    *,
    epochs: int = EPOCHS,
    prior: bool = False,
) -> None:
    """Adam with a cosine schedule; with `prior`, all weights of the body have the prior N(0, 1)."""
    groups: list[Any] = [{"params": [*body.parameters()], "weight_decay": prior / data.n}]
    optimiser = torch.optim.Adam(groups if head is None else [*groups, {"params": [*head.parameters()]}], lr=RATE)
    steps = epochs * math.ceil(data.n / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(epochs):
        for some in torch.randperm(data.n).split(BATCH):
            optimiser.zero_grad()
            loss(data.x[some], data.y[some]).backward()
            optimiser.step()
            schedule.step()


# --- methods: each trains and returns a function from rows to probabilities ---


def point_network(data: Data, epochs: int = EPOCHS, prior: bool = False) -> torch.nn.Sequential:
    network = torch.nn.Sequential(plain_body(data.columns), torch.nn.Linear(WIDTH, data.classes))
    train(data, lambda x, y: cross_entropy(network(x), y), network, epochs=epochs, prior=prior)
    return network.eval()


def point(data: Data, prior: bool = False) -> Predict:
    network = point_network(data, prior=prior)
    return lambda x: network(x).softmax(1)


def ensemble(data: Data, prior: bool = False) -> Predict:
    members = [point(data, prior) for _ in range(MEMBERS)]
    return lambda x: torch.stack([member(x) for member in members]).mean(0)


def with_both(p: Tensor) -> Tensor:
    """Probabilities of both classes, from that of the second."""
    return torch.cat([1.0 - p, p], 1) if p.shape[1] == 1 else p


def outputs(data: Data) -> int:
    return 1 if data.classes == 2 else data.classes


def joint_head(data: Data, prior: bool = False) -> Predict:
    body, head = plain_body(data.columns), LogitHead(WIDTH, outputs(data), covariance="diagonal")
    train(data, lambda x, y: head.loss(body(x), y, data.n), body, head, prior=prior)
    return lambda x: with_both(head.predict_proba(body(x)))


def post_hoc_head(data: Data, prior: bool = False) -> Predict:
    body = point_network(data, EPOCHS // 2, prior)[0]
    head = LogitHead(WIDTH, outputs(data)).fit(data.x, data.y, body=body)
    return lambda x: with_both(head.predict_proba(body(x)))


def process_head(data: Data) -> Predict:
    covariance = "full" if data.classes == 2 else "diagonal"  # K d² parameters
    body, head = SmoothBody(data.columns), GaussianProcessHead(WIDTH, outputs(data), covariance=covariance)
    head.place(body(data.x))
    train(data, lambda x, y: head.loss(body(x), y, data.n), body, head)
    body.eval()
    return lambda x: with_both(head.predict_proba(body(x)))


def bayesian_network(data: Data) -> Predict:
    network = BayesianNetwork(
        BayesianLinear(data.columns, WIDTH),
        MomentReLU(),
        BayesianLinear(WIDTH, WIDTH),
        MomentReLU(),
        BayesianLinear(WIDTH, outputs(data)),
    )
    train(data, lambda x, y: network.loss(x, y, data.n), network)
    return lambda x: with_both(network.predict_proba(x))


def laplace_last_layer(data: Data) -> Predict:
    from laplace import Laplace

    network = point_network(data)
    found = Laplace(network, "classification", subset_of_weights="last_layer", hessian_structure="full")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data.x, data.y), batch_size=BATCH)
    found.fit(loader)
    found.optimize_prior_precision(method="marglik")
    return lambda x: found(x, link_approx="probit")


def vbll_head(data: Data, prior: bool = False) -> Predict:
    import vbll

    body = plain_body(data.columns)
    head = vbll.DiscClassification(WIDTH, data.classes, regularization_weight=1.0 / data.n, parameterization="diagonal")
    train(data, lambda x, y: head(body(x)).train_loss_fn(y), body, head, prior=prior)
    return lambda x: head(body(x)).predictive.probs


def sngp_like(data: Data) -> Predict:
    """Random Fourier features on a smooth body, Laplace for their weights, and the mean-field logit adjustment."""
    body, out = SmoothBody(data.columns), torch.nn.Linear(FREQUENCIES, data.classes)
    W, b = torch.randn(WIDTH, FREQUENCIES) / math.sqrt(WIDTH), 2.0 * math.pi * torch.rand(FREQUENCIES)

    def features(x: Tensor) -> Tensor:
        return math.sqrt(2.0 / FREQUENCIES) * torch.cos(body(x) @ W + b)

    train(data, lambda x, y: cross_entropy(out(features(x)), y), body, out)
    body.eval()
    phi = features(data.x)
    p = out(phi).softmax(1).amax(1)
    covariance = torch.linalg.inv(torch.eye(FREQUENCIES) + phi.T @ ((p * (1.0 - p))[:, None] * phi))

    def predict(x: Tensor) -> Tensor:
        phi = features(x)
        variance = (phi @ covariance * phi).sum(1, keepdim=True)
        return (out(phi) / torch.sqrt(1.0 + math.pi / 8.0 * variance)).softmax(1)

    return predict


OURS: dict[str, Callable[..., Predict]] = {
    "viper, LogitHead, joint": joint_head,
    "viper, LogitHead, post hoc, half the epochs": post_hoc_head,
    "viper, GaussianProcessHead": process_head,
    "viper, BayesianNetwork": bayesian_network,
}
ENSEMBLE, LAPLACE_LAST, VBLL = f"ensemble of {MEMBERS}", "laplace-torch, last layer", "VBLL"
OTHERS: dict[str, Callable[..., Predict]] = {
    "MAP": point,
    ENSEMBLE: ensemble,
    LAPLACE_LAST: laplace_last_layer,
    VBLL: vbll_head,
    "SNGP-like": sngp_like,
}
WITH_PRIOR = {
    f"{name}, with a prior of the body": partial(method, prior=True)
    for name, method in {**OURS, **OTHERS}.items()
    if method in (joint_head, post_hoc_head, point, ensemble, vbll_head)
}
METHODS: dict[str, Callable[[Data], Predict]] = {**OURS, **OTHERS, **WITH_PRIOR}
MODULES = {LAPLACE_LAST: "laplace", VBLL: "vbll"}


# --- scores ---


def scores(data: Data, predict: Predict) -> list[float]:
    with torch.no_grad():
        p, far = predict(data.test).double(), predict(data.other).double()
    top, found = p.max(1)
    right = (found == data.test_y).double()
    bins = (10 * top).long().clamp(max=9)
    gaps = [float((right[bins == i] - top[bins == i]).sum().abs()) for i in range(10)]
    entropy = [torch.special.entr(x.clamp(0.0, 1.0)).sum(1) for x in (p, far)]
    auroc = roc_auc_score([0] * len(p) + [1] * len(far), torch.cat(entropy).numpy())
    loss = -p.gather(1, data.test_y[:, None]).clamp(min=1e-12).log().mean()
    return [float(right.mean()), float(loss), sum(gaps) / len(p), float(auroc)]


def measured(name: str, seed: int, method: Callable[[Data], Predict]) -> list[float]:
    """Scores and seconds of one method on one split."""
    data = Data(name, seed)
    torch.manual_seed(seed)
    began = time.process_time()
    predict = method(data)
    duration = time.process_time() - began
    return [*scores(data, predict), duration]


def table_of(name: str, quick: bool, device: str) -> Table:
    """All methods on one data set."""
    absent = [peer for peer, module in MODULES.items() if not find_spec(module)]
    present = {name: method for name, method in METHODS.items() if not name.startswith(tuple(absent))}
    missing = [f"{peer}: skipped, {MODULES[peer]} is not installed." for peer in absent]
    seeds, rows = range(1 if quick else SEEDS[name]), []
    for method, work in present.items():
        found = np.array([measured(name, seed, work) for seed in seeds])
        error = found[:, 1].std(ddof=1) / math.sqrt(len(seeds)) if len(seeds) > 1 else math.nan
        accuracy, loss, *others = found.mean(0)
        rows.append([method, accuracy, loss, error, *others])
    return Table(name, COLUMNS, rows, [machine(device), f"Means over {len(seeds)} seed(s).", *missing])


def features_of(kind: str, rows: int, columns: int, classes: int) -> tuple[Tensor, Tensor]:
    """Normal features with labels from a linear model, or ReLU features of clusters, which are nearly separable."""
    generator = torch.Generator().manual_seed(0)
    if kind == "normal":
        x = torch.randn(rows, columns, generator=generator)
        logits = x @ torch.randn(columns, classes, generator=generator) * (2.0 / columns**0.5)
        return x, (logits - torch.rand(rows, classes, generator=generator).log().neg().log()).argmax(1)
    y = torch.randint(classes, (rows,), generator=generator)
    z = 0.6 * torch.randn(classes, 64, generator=generator)[y] + torch.randn(rows, 64, generator=generator)
    return torch.relu(z @ torch.randn(64, columns, generator=generator) / 8.0), y


def post_hoc_table(quick: bool, device: str) -> Table:
    """`LogitHead.fit` on features alone."""
    rows: list[list[str | float]] = []
    for kind in ("normal", "ReLU"):
        x, y = features_of(kind, *((2000, 300, 4) if quick else (50_000, 512, 10)))
        for covariance in ("full", "diagonal"):
            head = LogitHead(x.shape[1], int(y.max()) + 1, covariance=covariance)
            rows.append([kind, covariance, seconds(partial(head.fit, x, y, verbose=False), device)])
    return Table(POST_HOC, ["features", "covariance", "processor seconds"], rows, [machine(device)])


def run(quick: bool, device: str, tables: str | None = None) -> Page:
    """A table for each data set, and one for the post hoc fit."""
    torch.set_num_threads(1)
    wanted = tables.split(";") if tables else [*SEEDS, POST_HOC]
    made = [table_of(name, quick, device) for name in SEEDS if name in wanted]
    if POST_HOC in wanted:
        made.append(post_hoc_table(quick, device))
    return Page("Neural networks", made, [*SEEDS, POST_HOC])
