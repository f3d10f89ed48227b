"""SoftmaxLikelihood inside GPyTorch: two classes, Monte Carlo, gradients, batches, mixing, and training."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.mlls import PredictiveLogLikelihood, VariationalELBO
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
    VariationalStrategy,
)
from linear_operator.operators import DiagLinearOperator

from viper.gp.likelihood import LogitLikelihood, SoftmaxLikelihood, independent_variances
from viper.softplus.logsumexp import expected_logsumexp

ROWS = 6


def independent(K, *batch, dtype=torch.float64):
    """f at a few points with K independent tasks."""
    generator = torch.Generator().manual_seed(K)
    mean = 2.0 * torch.randn(*batch, ROWS, K, generator=generator, dtype=dtype)
    variance = torch.rand(*batch, ROWS, K, generator=generator, dtype=dtype) * 4.0
    return MultitaskMultivariateNormal(mean, DiagLinearOperator(variance.flatten(-2)))


def likelihood_of(K, **options):
    return SoftmaxLikelihood(num_classes=K, mixing_weights=False, **options)


def numbers(K):
    return torch.arange(ROWS) % K


def mixing(K, features, seed=0):
    """A likelihood with known mixing weights."""
    made = SoftmaxLikelihood(num_features=features, num_classes=K).double()
    weights = torch.randn(K, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    made.mixing_weights.data.copy_(weights)
    return made


def test_two_classes_are_the_logistic_likelihood_of_the_difference():
    f, y = independent(2), numbers(2)
    difference = MultivariateNormal(f.mean[:, 1] - f.mean[:, 0], DiagLinearOperator(f.variance.sum(-1)))
    ours, logistic = likelihood_of(2), LogitLikelihood()
    for name in ("expected_log_prob", "log_marginal"):
        expected = getattr(logistic, name)(y.double(), difference)
        torch.testing.assert_close(getattr(ours, name)(y, f), expected, atol=1e-9, rtol=0.0)
    torch.testing.assert_close(ours(f).probs[:, 1], logistic(difference).probs, atol=1e-9, rtol=0.0)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_against_draws_for_any_batch_shape(batch):
    K = 4
    f, y, likelihood = independent(K, *batch), numbers(K).expand(*batch, ROWS), likelihood_of(K)
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(40_000, *batch, ROWS, K, generator=generator, dtype=torch.float64)
    draws = likelihood(f.mean + noise * f.stddev).log_prob(y)
    expected = {"expected_log_prob": draws, "log_marginal": draws.exp()}
    for name, values in expected.items():
        exact = getattr(likelihood, name)(y, f)
        assert exact.shape == (*batch, ROWS)
        exact = exact if name == "expected_log_prob" else exact.exp()
        assert ((exact - values.mean(0)).abs() < 5.0 * values.std(0) / 200.0).all()
    torch.testing.assert_close(likelihood(f).log_prob(y), likelihood.log_marginal(y, f))
    assert likelihood(f).batch_shape == (*batch, ROWS)


def test_as_many_rows_as_classes_are_not_transposed():
    f, y = independent(ROWS), numbers(ROWS)
    likelihood = likelihood_of(ROWS)
    torch.testing.assert_close(likelihood(f.mean).logits.softmax(-1), f.mean.softmax(-1))
    one = MultitaskMultivariateNormal(f.mean[:1], DiagLinearOperator(f.variance[0]))
    whole, single = (likelihood.expected_log_prob(*pair) for pair in ((y, f), (y[:1], one)))
    torch.testing.assert_close(whole[:1], single, atol=1e-9, rtol=0.0)


def test_gradients():
    y, likelihood = numbers(3), likelihood_of(3, tolerance=1e-12)
    f = independent(3)
    mean, variance = f.mean.clone().requires_grad_(), f.variance.clone().requires_grad_()

    def value(name):
        return lambda m, v: getattr(likelihood, name)(
            y, MultitaskMultivariateNormal(m, DiagLinearOperator(v.flatten()))
        )

    for name in ("expected_log_prob", "log_marginal"):
        assert torch.autograd.gradcheck(value(name), (mean, variance), eps=1e-5, atol=1e-6)


def test_float32():
    single, y = independent(5, dtype=torch.float32), numbers(5)
    double = MultitaskMultivariateNormal(single.mean.double(), DiagLinearOperator(single.variance.double().flatten()))
    value = likelihood_of(5).expected_log_prob(y, single)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), likelihood_of(5).expected_log_prob(y, double), rtol=1e-5, atol=1e-6)


# --- mixing weights ---


@pytest.mark.parametrize(("K", "features"), [(2, 3), (3, 3), (5, 3), (8, 4)])
def test_mixed_classes_have_a_lower_bound(K, features):
    likelihood, f, y = mixing(K, features), independent(features), numbers(K)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(100_000, ROWS, features, generator=generator, dtype=torch.float64)
    draws = likelihood(f.mean + noise * f.stddev)
    values, probabilities = draws.log_prob(y), draws.probs
    error = 5.0 * values.std(0) / 100_000**0.5
    gap = values.mean(0) - likelihood.expected_log_prob(y, f)
    assert (gap > -error).all()
    if K == 2:
        assert (gap.abs() < error).all()
    assert (likelihood(f).probs - probabilities.mean(0)).abs().max() < (0.01 if K == 2 else 0.1)


def test_variances_of_independent_classes():
    generator = torch.Generator().manual_seed(4)
    variance = torch.rand(7, 5, generator=generator, dtype=torch.float64)
    shared = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    C = torch.diag_embed(variance) + shared[:, :, None] + shared[:, None, :]
    for certain in (True, False):  # a common part changes no difference
        torch.testing.assert_close(independent_variances(C, certain), variance)
    root = torch.randn(7, 6, 3, generator=generator, dtype=torch.float64)
    C = root @ root.mT
    spread = C.diagonal(dim1=1, dim2=2)
    differences = spread[:, :, None] + spread[:, None, :] - 2.0 * C
    v = independent_variances(C, certain=True)
    missing = differences - v[:, :, None] - v[:, None, :]
    assert torch.triu(missing, diagonal=1).max() < 1e-12  # no difference varies more
    close = independent_variances(C, certain=False)
    residual = differences - close[:, :, None] - close[:, None, :]
    residual = residual - torch.diag_embed(residual.diagonal(dim1=1, dim2=2))
    assert residual.sum(-1).abs().max() < 1e-12  # the equations of least squares


# --- training ---


class Softmax(gpytorch.models.ApproximateGP):
    def __init__(self, points, tasks, latents=None):
        size = torch.Size([latents or tasks])
        distribution = CholeskyVariationalDistribution(len(points), batch_shape=size, mean_init_std=0.0)
        strategy = VariationalStrategy(self, points.expand(*size, -1, -1).clone(), distribution)
        if latents is None:
            strategy = IndependentMultitaskVariationalStrategy(strategy, num_tasks=tasks)
        else:
            strategy = LMCVariationalStrategy(strategy, num_tasks=tasks, num_latents=latents)
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=size)
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(batch_shape=size), batch_shape=size)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def thirds(n=60):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


@pytest.mark.parametrize("latents", [None, 2], ids=["independent", "lmc"])
@pytest.mark.parametrize("objective", [VariationalELBO, PredictiveLogLikelihood])
def test_a_model_can_be_trained(latents, objective):
    x, y = thirds()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        gp = Softmax(x[:10], 3, latents)
    likelihood = likelihood_of(3)
    loss = objective(likelihood, gp, num_data=len(y))
    optimiser = torch.optim.Adam(gp.parameters(), lr=0.1)
    values = []
    for _ in range(25):
        optimiser.zero_grad()
        value = -loss(gp(x), y)
        value.backward()
        optimiser.step()
        values.append(value.item())
    assert values[-1] < values[0] - 0.1
    gp.eval()
    with torch.no_grad():
        assert (likelihood(gp(x)).probs.argmax(-1) == y).float().mean() > 0.7


def test_the_exact_objective_is_that_of_many_samples():
    """GPyTorch's own likelihood estimates from samples what ours computes."""
    x, y = thirds(30)
    gp = Softmax(x[:10], 3)
    theirs = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    with torch.no_grad(), torch.random.fork_rng(), gpytorch.settings.num_likelihood_samples(20_000):
        torch.manual_seed(1)
        estimate, exact = (VariationalELBO(one, gp, len(y))(gp(x), y).item() for one in (theirs, likelihood_of(3)))
    assert exact == pytest.approx(estimate, abs=0.01)  # Monte Carlo error


# --- what goes wrong ---


def test_errors_say_what_to_do():
    f, y = independent(3), numbers(3)
    with pytest.raises(ValueError, match=r"num_classes must be at least 2; got None\."):
        SoftmaxLikelihood(mixing_weights=False)
    with pytest.raises(ValueError, match="mixing weights need num_features; got None"):
        SoftmaxLikelihood(num_classes=3)
    with pytest.raises(ValueError, match=r"targets must be whole numbers from 0 to 2; got 1 to 3\."):
        likelihood_of(3).expected_log_prob(y + 1, f)
    with pytest.raises(ValueError, match=r"from 0 to 2; got 0.5 to 2.5"):
        likelihood_of(3).log_marginal(y + 0.5, f)
    with pytest.raises(ValueError, match=r"f must have 4 tasks on its last axis; got shape \(6, 3\)"):
        likelihood_of(4)(f)
    batch = MultivariateNormal(torch.zeros(3, 6), torch.eye(6).expand(3, 6, 6))
    with pytest.raises(ValueError, match="f must be a MultitaskMultivariateNormal; got MultivariateNormal"):
        likelihood_of(3)(batch)
    with pytest.raises(ValueError, match="tolerance"):
        likelihood_of(3, tolerance=-1.0)


def test_the_tolerance_is_kept():
    f, y = independent(4), numbers(4)
    rough, fine = (likelihood_of(4, tolerance=t).expected_log_prob(y, f) for t in (1e-4, 1e-12))
    assert 0.0 < (rough - fine).abs().max() < 1e-4
    value = f.mean.gather(1, y[:, None])[:, 0] - expected_logsumexp(f.mean, f.variance).value
    torch.testing.assert_close(fine, value, atol=1e-9, rtol=0.0)
