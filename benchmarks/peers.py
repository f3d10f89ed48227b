"""Posteriors of logistic regression by several libraries: seconds, and errors of means and sds against long NUTS.

All contenders get the same rows, no intercept, the prior N(0, 1) on every coefficient, and the computer to themselves.
A contender is a function that returns posterior means and sds; any compilation happens in its first call.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

import viper
from benchmarks.table import Table, machine
from viper.models.reference import MCMCResult, sample_posterior

Summary = tuple[np.ndarray, np.ndarray]
OURS, CORRECTED = "viper", "viper, corrected()"
ADVI, NUTS, LAPLACE = "NumPyro ADVI, full rank", "NumPyro NUTS, 4 × 1,000 draws", "laplace-torch, full"
NEEDS = {ADVI: "numpyro", NUTS: "numpyro", LAPLACE: "laplace"}
ADVI_STEPS = 20_000
ROUNDS = 3
PEER_COLUMNS = [
    "method",
    "n",
    "seconds",
    "first call",
    "times ours",
    "mean, rms",
    "mean, worst",
    "sd, rms",
    "sd, worst",
]


def peer_table(quick: bool, device: str = "cpu") -> Table:
    """Seconds and errors of every contender, by number of rows."""
    sizes = {200: 500} if quick else {1_000: 20_000, 10_000: 6_000}  # draws of each chain of the truth, by rows
    rows: list[list[str | float]] = []
    notes = [
        "Seconds: the shortest of several calls taken in turn, ours and laplace-torch on one thread, NumPyro on all; "
        "compilation, in the first call, is not counted. Errors: of posterior means, in posterior sds; of posterior "
        "sds, relative; root mean square and worst over 25 coefficients.",
        f"ADVI: AutoMultivariateNormal, {ADVI_STEPS:,} steps of Adam, its rate falling from 0.01 to 0.0001.",
        *(f"{name}: skipped, {module} is not installed." for name, module in NEEDS.items() if not find_spec(module)),
    ]
    if not find_spec("numpyro"):
        return Table("Peers", PEER_COLUMNS, rows, [*notes, "No errors without NumPyro, whose NUTS is the truth."])
    for n, draws in sizes.items():
        X, y = normal_rows(n, 25)
        truth = sample_posterior(X, y, fit_intercept=False, draws=draws, random_state=1)
        rows += compare_with(truth, X, y)
        notes.append(describe_truth(truth, n))
    return Table("Peers", PEER_COLUMNS, rows, [machine(device), *notes])


def normal_rows(n: int, p: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Standard normal features, coefficients ±U(0.2, 2), labels from the model."""
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((n, p))
    coefficients = generator.uniform(0.2, 2.0, p) * generator.choice([-1.0, 1.0], p)
    return X, (generator.random(n) < 1.0 / (1.0 + np.exp(-X @ coefficients))).astype(np.int64)


def compare_with(truth: MCMCResult, X: np.ndarray, y: np.ndarray) -> list[list[str | float]]:
    contenders: dict[str, Callable[[], Summary]] = {
        OURS: lambda: ours(X, y),
        CORRECTED: lambda: corrected(X, y),
        LAPLACE: lambda: laplace(X, y),
        ADVI: advi(X, y),
        NUTS: nuts(X, y),
    }
    present = {name: work for name, work in contenders.items() if name not in NEEDS or find_spec(NEEDS[name])}
    durations: dict[str, list[float]] = {name: [] for name in present}
    summaries: dict[str, Summary] = {}
    with limited_threads(1):
        for name in list(present) * ROUNDS:
            for _ in range(10 if name == OURS else 1):
                start = time.perf_counter()
                summaries[name] = present[name]()
                durations[name].append(time.perf_counter() - start)
    rows: list[list[str | float]] = []
    for name in contenders:
        if name not in present:
            rows.append([name, f"{len(y):,}", "not installed", *["-"] * (len(PEER_COLUMNS) - 3)])
            continue
        best = min(durations[name])
        times = [best, durations[name][0], best / min(durations[OURS])]
        rows.append([name, f"{len(y):,}", *times, *summary_errors(*summaries[name], truth)])
    return rows


@contextmanager
def limited_threads(threads: int | None) -> Iterator[None]:
    """Limit the threads of torch, BLAS and OpenMP (JAX has its own); None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with threadpool_limits(threads):
            yield
    finally:
        torch.set_num_threads(before)


def summary_errors(mean: np.ndarray, sd: np.ndarray, truth: MCMCResult) -> list[float]:
    """Errors of means, in sds, and relative errors of sds: root mean square and worst of each."""
    gaps = np.abs(mean - truth.mean()) / truth.sd(), np.abs(sd / truth.sd() - 1.0)
    return [float(summary) for gap in gaps for summary in (np.sqrt(np.mean(gap**2)), gap.max())]


def describe_truth(truth: MCMCResult, n: int) -> str:
    """How long the reference ran, and how accurate it is."""
    chains, draws, _ = truth.draws.shape
    return (
        f"n = {n:,}: the truth is NUTS, {chains} × {draws:,} draws in {truth.seconds:.0f} s, R-hat at most "
        f"{truth.rhat.max():.4f}; its own error is {rms(truth.mcse() / truth.sd()):.4f} sd in the means and "
        f"{rms(truth.mcse('sd') / truth.sd()):.4f} in the sds; smaller differences between rows mean nothing."
    )


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


# ---------------------------------------------------------------------------------------------------------------------
# The contenders


def ours(X: np.ndarray, y: np.ndarray) -> Summary:
    model = viper.VariationalLogisticRegression(fit_intercept=False).fit(X, y)
    return model.coef_[0], model.posterior_.variance.sqrt().numpy()


def corrected(X: np.ndarray, y: np.ndarray) -> Summary:
    exact = viper.VariationalLogisticRegression(fit_intercept=False, random_state=0).fit(X, y).corrected()
    return exact.mean_, exact.sd_


class TwoLogits(torch.nn.Module):
    """Logits (0, xᵀβ), because laplace-torch classifies by cross-entropy."""

    def __init__(self, p: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(p, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = self.linear(x)
        return torch.cat([torch.zeros_like(f), f], 1)


def laplace(X: np.ndarray, y: np.ndarray) -> Summary:
    """The mode by L-BFGS, then laplace-torch's full Laplace approximation of all weights."""
    from laplace import Laplace

    rows, label = torch.from_numpy(X), torch.from_numpy(y)
    model = TwoLogits(X.shape[1])
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_grad=1e-8, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(rows), label, reduction="sum")
        loss = loss + 0.5 * model.linear.weight.square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    approximation = Laplace(
        model, "classification", subset_of_weights="all", hessian_structure="full", prior_precision=1.0
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, label), batch_size=len(y))
    approximation.fit(loader)
    return approximation.mean.numpy(), approximation.posterior_covariance.diagonal().sqrt().numpy()


def numpyro_model(X: Any, y: Any) -> None:
    import numpyro
    from numpyro import distributions as dist

    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=X @ beta), obs=y)


def advi(X: np.ndarray, y: np.ndarray) -> Callable[[], Summary]:
    """Full-rank ADVI. The loop is compiled once and kept, which SVI.run would not do."""

    def prepare() -> Callable[[], Summary]:
        import jax
        from numpyro.infer import SVI, Trace_ELBO
        from numpyro.infer.autoguide import AutoMultivariateNormal
        from numpyro.optim import Adam

        guide = AutoMultivariateNormal(numpyro_model)
        rate = lambda step: 0.01 * 0.01 ** (step / ADVI_STEPS)  # noqa: E731
        svi = SVI(numpyro_model, guide, Adam(rate), Trace_ELBO())
        rows, label = jax.numpy.asarray(X.astype(np.float32)), jax.numpy.asarray(y.astype(np.float32))
        start = svi.init(jax.random.PRNGKey(0), rows, label)
        steps = jax.jit(lambda s: jax.lax.scan(lambda s, _: svi.update(s, rows, label), s, None, ADVI_STEPS)[0])

        def fit() -> Summary:
            posterior = guide.get_posterior(svi.get_params(steps(start)))
            return np.asarray(posterior.mean), np.sqrt(np.asarray(posterior.variance))

        return fit

    return prepared_once(prepare)


def nuts(X: np.ndarray, y: np.ndarray) -> Callable[[], Summary]:
    """NUTS with NumPyro's defaults and four vectorised chains, which are faster than sequential ones."""

    def prepare() -> Callable[[], Summary]:
        import jax
        from numpyro.infer import MCMC, NUTS

        sampler = MCMC(
            NUTS(numpyro_model),
            num_warmup=1000,
            num_samples=1000,
            num_chains=4,
            chain_method="vectorized",
            progress_bar=False,
        )
        rows, label = jax.numpy.asarray(X.astype(np.float32)), jax.numpy.asarray(y.astype(np.float32))

        def fit() -> Summary:
            sampler.run(jax.random.PRNGKey(0), rows, label)
            draws = np.asarray(sampler.get_samples()["beta"], np.float64)
            return draws.mean(0), draws.std(0, ddof=1)

        return fit

    return prepared_once(prepare)


def prepared_once(prepare: Callable[[], Callable[[], Summary]]) -> Callable[[], Summary]:
    """A function that calls `prepare` the first time, and what `prepare` returned every time."""
    made: list[Callable[[], Summary]] = []

    def work() -> Summary:
        if not made:
            made.append(prepare())
        return made[0]()

    return work
