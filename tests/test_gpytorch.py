"""LogitLikelihood inside GPyTorch: closed forms, batches, and agreement with our own solver."""

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.variational import CholeskyVariationalDistribution, NaturalVariationalDistribution, VariationalStrategy
from linear_operator.operators import DiagLinearOperator
from tolerances import TOLERANCE

from viper.gp.classifier import VariationalGPClassifier
from viper.gp.likelihood import LogitLikelihood


class SVGP(gpytorch.models.ApproximateGP):
    def __init__(self, points, kernel, distribution=NaturalVariationalDistribution, batch=()):
        q = distribution(points.shape[-2], batch_shape=torch.Size(batch))
        super().__init__(VariationalStrategy(self, points, q, learn_inducing_locations=True))
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(batch_shape=torch.Size(batch)), kernel

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def ring(n=100, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return x, (x.norm(dim=1) > 1.1).double()


def gaussian(*batch, n=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(*batch, n, n, generator=generator, dtype=dtype)
    return MultivariateNormal(torch.randn(*batch, n, generator=generator, dtype=dtype), root @ root.mT)


def kernel():
    return gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_closed_forms_of_any_batch_shape(batch):
    f, likelihood = gaussian(*batch), LogitLikelihood()
    y = (torch.arange(5) % 2).double().expand(*batch, 5)
    noise = torch.randn(400_000, *batch, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    draws = likelihood(f.mean + noise * f.stddev)
    expected = {"expected_log_prob": draws.log_prob(y).mean(0), "log_marginal": draws.log_prob(y).exp().mean(0).log()}
    for name, by_draws in expected.items():
        exact = getattr(likelihood, name)(y, f)
        assert exact.shape == (*batch, 5)
        torch.testing.assert_close(exact, by_draws, rtol=0.02, atol=0.02)  # Monte Carlo error
    torch.testing.assert_close(likelihood(f).log_prob(y), likelihood.log_marginal(y, f))


@pytest.mark.parametrize("options", [{"bound": "pg"}, {"terms": 3}])
def test_other_bounds_are_below(options):
    f, y = gaussian(), torch.ones(5).double()
    assert (LogitLikelihood(**options).expected_log_prob(y, f) <= LogitLikelihood().expected_log_prob(y, f)).all()


def test_signed_targets():
    f, y = gaussian(), (torch.arange(5) % 2).double()
    signed = LogitLikelihood(signed=True).expected_log_prob(2 * y - 1, f)
    torch.testing.assert_close(signed, LogitLikelihood().expected_log_prob(y, f))
    with pytest.raises(ValueError, match=r"targets must be 0 or 1; got -1. Pass signed=True"):
        LogitLikelihood().expected_log_prob(2 * y - 1, f)
    with pytest.raises(ValueError, match="terms belongs to bound='viper'"):
        LogitLikelihood("pg", terms=3)


def test_float32_and_devices():
    likelihood = LogitLikelihood().to("cpu")
    f32, f64 = gaussian(dtype=torch.float32), None
    f64 = MultivariateNormal(f32.mean.double(), f32.covariance_matrix.double())
    y = torch.ones(5)
    single = likelihood.expected_log_prob(y, f32)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), likelihood.expected_log_prob(y, f64), rtol=1e-5, atol=1e-6)


def train(model, likelihood, x, y, steps, batch=False):
    loss = gpytorch.mlls.VariationalELBO(likelihood, model, len(y) if not batch else y.shape[-1])
    optimisers = [
        gpytorch.optim.NGD(model.variational_parameters(), num_data=y.shape[-1], lr=0.1),
        torch.optim.Adam([*model.hyperparameters(), *likelihood.parameters()], lr=0.05),
    ]
    values = []
    for _ in range(steps):
        for optimiser in optimisers:
            optimiser.zero_grad()
        value = -loss(model(x), y).sum()
        value.backward()
        for optimiser in optimisers:
            optimiser.step()
        values.append(-value.item() * y.shape[-1])
    return values


def test_svgp_with_natural_gradients_agrees_with_our_solver():
    x, y = ring()
    model, likelihood = SVGP(x[:15].clone(), kernel()).double(), LogitLikelihood()
    values = train(model, likelihood, x, y, 60)
    assert values[-1] > values[0] + 10
    # freeze hyperparameters, finish q by natural gradients, and compare with our solver at the same parameters
    optimiser = gpytorch.optim.NGD(model.variational_parameters(), num_data=len(y), lr=0.5)
    loss = gpytorch.mlls.VariationalELBO(likelihood, model, len(y))
    with gpytorch.settings.cholesky_jitter(double_value=1e-10):
        for _ in range(60):
            optimiser.zero_grad()
            value = -loss(model(x), y)
            value.backward()
            optimiser.step()
        theirs = loss(model(x), y).item() * len(y)
    fixed = model.covar_module.requires_grad_(False)
    points = model.variational_strategy.inducing_points.detach().numpy()
    ours = VariationalGPClassifier(
        kernel=fixed, mean="zero", inducing=points, learn_inducing=False, standardize=False, n_starts=1, jitter=1e-10
    ).fit(x.numpy(), y.numpy())
    assert ours.elbo_ == pytest.approx(
        theirs, rel=TOLERANCE["converged"] * 100
    )  # their jitter is absolute, ours relative
    model.eval()
    with torch.no_grad():
        probability = likelihood(model(x)).probs.numpy()
    np.testing.assert_allclose(ours.predict_proba(x.numpy())[:, 1], probability, atol=1e-4)


def test_deep_kernel_learning():
    x, y = ring()

    class Deep(SVGP):
        def __init__(self, points):
            super().__init__(points, kernel(), CholeskyVariationalDistribution)
            self.net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

        def __call__(self, inputs, **options):
            return super().__call__(self.net(inputs), **options)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Deep(torch.randn(10, 2, dtype=torch.float64)).double()
    likelihood = LogitLikelihood()
    loss = gpytorch.mlls.VariationalELBO(likelihood, model, len(y))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    values = []
    for _ in range(60):
        optimiser.zero_grad()
        value = -loss(model(x), y)
        value.backward()
        optimiser.step()
        values.append(value.item())
    assert values[-1] < values[0] - 0.1


def test_independent_outputs_as_a_batch():
    x, y = ring()
    both = torch.stack([y, 1 - y])
    batch = torch.Size([2])
    k = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(batch_shape=batch), batch_shape=batch)
    points = x[:10].expand(2, 10, 2).clone()
    values = train(SVGP(points, k, batch=(2,)).double(), LogitLikelihood(), x, both, 30, batch=True)
    assert values[-1] > values[0]


# --- BoTorch ---


@pytest.mark.filterwarnings("ignore:Data .outcome observations. is not standardized")  # they are labels
def test_botorch_fits_a_variational_model():
    pytest.importorskip("botorch")
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskVariationalGP

    x, y = ring(60)
    x = (x - x.amin(0)) / (x.amax(0) - x.amin(0))  # BoTorch asks for the unit cube
    model = SingleTaskVariationalGP(x, y[:, None], likelihood=LogitLikelihood(), inducing_points=x[:15].clone())
    loss = gpytorch.mlls.VariationalELBO(model.likelihood, model.model, num_data=len(y))
    with torch.no_grad():
        before = loss(model.model(x), y).item()
    fit_gpytorch_mll(loss, optimizer_kwargs={"options": {"maxiter": 60}})
    model.train()
    with torch.no_grad():
        assert loss(model.model(x), y).item() > before + 0.1
    f = model.posterior(x).distribution  # of the log-odds, as acquisition functions see it
    assert ((f.mean > 0) == (y > 0.5)).double().mean() > 0.85
    torch.testing.assert_close(model.likelihood(f).probs > 0.5, f.mean > 0)


def test_preferences_in_a_loop_like_that_of_pairwise_gp():
    """y = 1 if a is preferred to b: f(a) - f(b) is Gaussian too, so the likelihood applies unchanged."""
    pytest.importorskip("botorch")
    from botorch.models import PairwiseGP

    generator = torch.Generator().manual_seed(3)
    x = torch.rand(30, 1, generator=generator, dtype=torch.float64)
    utility = -((x[:, 0] - 0.6) ** 2)
    pairs = torch.randint(30, (150, 2), generator=generator)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    won = (utility[pairs[:, 0]] > utility[pairs[:, 1]]).double()
    model = SVGP(x[:12].clone(), kernel(), CholeskyVariationalDistribution).double()
    likelihood = LogitLikelihood()
    eye = torch.eye(30, dtype=torch.float64)
    difference = eye[pairs[:, 0]] - eye[pairs[:, 1]]
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(100):
        optimiser.zero_grad()
        f = model(x)
        spread = ((difference @ f.covariance_matrix) * difference).sum(1).clamp(min=1e-9)
        gap = MultivariateNormal(difference @ f.mean, DiagLinearOperator(spread))  # only its marginals matter
        loss = -likelihood.expected_log_prob(won, gap).sum() + model.variational_strategy.kl_divergence().sum()
        loss.backward()
        optimiser.step()
    order = torch.where(won[:, None] > 0.5, pairs, pairs.flip(1))
    theirs = PairwiseGP(x, order).posterior(x).mean.detach()[:, 0]
    ours = model.eval()(x).mean.detach()
    assert torch.corrcoef(torch.stack([ours, theirs]))[0, 1] > 0.9
    assert torch.corrcoef(torch.stack([ours, utility]))[0, 1] > 0.9
