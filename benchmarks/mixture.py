"""Mixtures of Gaussians on small, skewed posteriors: divergence, k̂, and marginal quantiles beside NUTS.

KL is the log evidence (importance weights of 200,000 draws from four components) less the ELBO of the mixture itself
(20,000 draws), in nats. Errors of quantiles are the largest distance from NUTS over the 2.5 and 97.5 % quantiles of all
coefficients, in posterior standard deviations. Sds are relative to NUTS; the one furthest off is shown.
"""

import time
from typing import Any

import numpy as np
import torch

import viper
from benchmarks.table import Table, machine

MIXTURE_COLUMNS = ["posterior", "rows", "outcome", "KL", "k̂", "quantiles, error", "sd, ratio", "ms"]
PROBLEMS = {  # rows, columns, slope of the first, intercept, prior sd
    "ordinary": (25, 2, 2.0, -1.0, 3.0),
    "rare": (60, 2, 1.0, -3.0, 3.0),
    "rare, more rows": (100, 3, 1.5, -3.5, 3.0),
    "separable": (20, 2, 20.0, 0.0, 3.0),
}


def simulated(n: int, p: int, slope: float, intercept: float) -> tuple[np.ndarray, np.ndarray]:
    """Standard normal columns, only the first of which matters, and labels."""
    generator = np.random.default_rng(0)
    X = generator.standard_normal((n, p))
    y = generator.random(n) < 1.0 / (1.0 + np.exp(-slope * X[:, 0] - intercept))
    y[X[:, 0].argmax()] = True
    return X, y.astype(int)


def run(quick: bool, device: str = "cpu") -> Table:
    torch.set_num_threads(1)
    rows: list[list[str | float]] = []
    for name, (n, p, slope, intercept, scale) in PROBLEMS.items():
        X, y = simulated(n, p, slope, intercept)
        model = viper.VariationalLogisticRegression(prior_scale=scale).fit(X, y)
        exact = viper.reference.sample_posterior(model, draws=200 if quick else 5000)
        ends = np.quantile(exact.flat, [0.025, 0.975], axis=0)
        evidence = model.refined(4).diagnose(draws=2_000 if quick else 200_000).log_evidence
        what = f"{name}, {int(y.sum())} of {n}"

        def compared(title: str, found: Any, sds: Any, kl: float | str, k_hat: float, took: float) -> None:
            interval = found.coefficient_interval().T
            quantiles = float(np.abs((interval - ends) / exact.sd()).max())  # noqa: B023
            ratios = sds / exact.sd()  # noqa: B023
            ratio = float(ratios[np.abs(ratios - 1.0).argmax()])
            rows.append([title, n, what, kl, k_hat, quantiles, ratio, 1e3 * took])  # noqa: B023

        for components in (1, 2, 4):
            began = time.process_time()
            found = model.refined(components)
            took = time.process_time() - began
            gap = 0.0 if components == 1 else found.posterior_.entropy_gap()[0]
            sds, k_hat = found.posterior_.variance.sqrt().numpy(), found.diagnose().k_hat
            title = f"{components} Gaussian{'s' * (components > 1)}"
            compared(title, found, sds, evidence - found.elbo_ - gap, k_hat, took)
        began = time.process_time()
        corrected = model.corrected()
        compared("corrected()", corrected, corrected.sd_, "–", corrected.diagnosis.k_hat, time.process_time() - began)
    notes = [
        machine(device),
        "NUTS: four chains of 5,000 draws. Times are processor time, after the fit itself, which takes a millisecond.",
    ]
    return Table("Mixtures of Gaussians on small, skewed posteriors", MIXTURE_COLUMNS, rows, notes)
