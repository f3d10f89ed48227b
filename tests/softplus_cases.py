"""What the tests of the kernel share: its promises, one set of options for each bound, and points to evaluate."""

import numpy as np
import pytest
import torch

# What the limit promises, relative
PROMISED = {"value": 1e-12, "slope": 1e-11, "curvature": 1e-11}
FLOAT32 = 2e-6  # relative, promised where the result is a normal number of float32
STD = 1e-10  # relative; the variance of s(X) is a difference, which costs some digits
STD_FLOOR = 1e-150  # its square is the smallest variance that float64 holds with all its digits

OPTIONS = {
    "limit": {},
    "terms": {"terms": 3},
    "fast": {"tolerance": 1e-8},
    "pg": {"bound": "pg"},
    "mc": {"bound": "mc", "samples": 20, "random_state": 0},
    "quadrature": {"bound": "quadrature", "nodes": 9},
    "certified": {"bound": "certified"},
}
every_bound = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def box(count, seed=0, dtype=torch.float64):
    """Random (mean, variance) with |mean| <= 700 and sd <= 1e4, at all scales, with zeros of both."""
    rng = np.random.default_rng(seed)
    mean = np.where(rng.random(count) < 0.5, rng.uniform(-700, 700, count), rng.normal(0, 5, count))
    sd = np.where(rng.random(count) < 0.5, 10.0 ** rng.uniform(-8, 4, count), rng.uniform(0, 40, count))
    mean[::17], sd[::19] = 0.0, 0.0
    return torch.tensor(mean, dtype=dtype), torch.tensor(sd**2, dtype=dtype)


def sample_points(requires_grad=False):
    """A few points in every regime of every formula, away from where they meet."""
    mean = torch.tensor([-3.0, -0.5, 0.3, 2.0, 0.7, -1.0, -12.0], dtype=torch.float64)
    variance = torch.tensor([0.001, 0.05, 0.3, 4.0, 30.0, 0.159, 9.0], dtype=torch.float64)
    return mean.requires_grad_(requires_grad), variance.requires_grad_(requires_grad)
