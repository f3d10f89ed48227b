"""viper.nn: heads that equal the estimator, exact divergences, moments against quadrature, and how heads are used."""

import copy
import io
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from memory import PEAK
from scipy.integrate import quad
from scipy.stats import norm
from tolerances import TOLERANCE
from torch.utils.data import DataLoader, TensorDataset

import viper
from viper.nn import (
    BayesianLinear,
    BayesianNetwork,
    GaussianProcessHead,
    LatentMoments,
    LogitHead,
    MomentGELU,
    MomentReLU,
    MomentTanh,
    feature_rows,
)

ROWS, WIDTH, CLASSES = 90, 4, 3
FAMILIES = ("full", "diagonal", "low-rank")


@pytest.fixture(scope="module")
def data():
    """Features, two classes, three classes, three labels."""
    generator = np.random.default_rng(0)
    X = generator.standard_normal((ROWS, WIDTH))
    y = (X @ generator.standard_normal((WIDTH, CLASSES)) + generator.gumbel(size=(ROWS, CLASSES))).argmax(1)
    labels = (X @ generator.standard_normal((WIDTH, CLASSES)) + generator.logistic(size=(ROWS, CLASSES)) > 0).astype(
        int
    )
    return [torch.from_numpy(x) for x in (X, (y == 0).astype(int), y, labels)]


def number(x):
    return float(x.detach())


def targets_of(data, kind):
    return {"binary": data[1], "classes": data[2], "labels": data[3]}[kind]


def head_of(kind, **options):
    outputs = {"binary": 1, "classes": CLASSES, "labels": CLASSES}[kind]
    torch.manual_seed(0)
    return LogitHead(WIDTH, outputs, targets="labels" if kind == "labels" else "classes", **options).double()


def scrambled(module, seed=1, size=0.3):
    """The same module with every parameter moved at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter))
    return module


def dense_covariances(q):
    """S_k, from what x'S_k x is for unit vectors and their sums."""
    d = q.mean.shape[1]
    eye = torch.eye(d, dtype=torch.float64)
    pairs = (eye[:, None] + eye[None]).reshape(-1, d)
    own = q.latent_variance(eye).T
    both = q.latent_variance(pairs).T.reshape(-1, d, d)
    return (0.5 * (both - own[:, :, None] - own[:, None])).detach()


# --- a head on raw features is the estimator ---


@pytest.mark.parametrize(("kind", "covariance"), [*itertools.product(("binary", "labels"), FAMILIES)])
def test_a_head_on_raw_features_is_the_estimator(data, kind, covariance):
    X, y = data[0].numpy(), targets_of(data, kind)
    model = viper.VariationalLogisticRegression(covariance=covariance, rank=2, prior_scale=2.0).fit(X, y.numpy())
    head = head_of(kind, covariance=covariance, rank=2, prior_scale=2.0).fit(data[0], y)
    expected = model.predict_proba(X)[:, 1:] if kind == "binary" else model.predict_proba(X)
    close = 1e-5 if covariance == "low-rank" else TOLERANCE["autograd"]  # whose search ends by what a step gains
    assert np.allclose(head.predict_proba(data[0]), expected, rtol=0, atol=close)
    spread = model.predict_std(X).reshape(ROWS, -1)
    assert np.allclose(head.predict_std(data[0]), spread, rtol=0, atol=close)
    assert -ROWS * number(head.loss(data[0], y, ROWS)) == pytest.approx(model.elbo_, abs=TOLERANCE["converged"])


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_a_softmax_head_on_raw_features_is_the_estimator(data, covariance):
    X, y = data[0].numpy(), data[2]
    model = viper.VariationalLogisticRegression(covariance=covariance, prior_scale=2.0).fit(X, y.numpy())
    head = head_of("classes", covariance=covariance, prior_scale=2.0).fit(data[0], y)
    assert np.allclose(head.predict_proba(data[0]), model.predict_proba(X), rtol=0, atol=TOLERANCE["autograd"])
    assert np.allclose(head.predict_std(data[0]), model.predict_std(X), rtol=0, atol=TOLERANCE["differences"])
    assert -ROWS * number(head.loss(data[0], y, ROWS)) == pytest.approx(model.elbo_, abs=TOLERANCE["converged"])


def test_classes_of_low_rank_lie_between_the_diagonal_and_the_full_family(data):
    X, y = data[0][:40], data[2][:40]

    def elbo(**options):
        return -40 * number(head_of("classes", **options).fit(X, y).loss(X, y, 40))

    diagonal, low, full = elbo(covariance="diagonal"), elbo(covariance="low-rank", rank=2), elbo(covariance="full")
    assert diagonal + 0.01 < low < full - 0.001
    # with as many columns as coefficients but one, the families are the same; L-BFGS stops at 1e-8 nats per row
    assert elbo(covariance="low-rank", rank=WIDTH) == pytest.approx(full, abs=1e-3)


@pytest.mark.parametrize("kind", ["binary", "classes", "labels"])
def test_the_best_prior_scale_is_that_of_the_loss(data, kind):
    head = head_of(kind, prior_scale="auto").fit(data[0], targets_of(data, kind))
    head.loss(data[0], targets_of(data, kind), ROWS).backward()
    assert abs(number(head.log_prior_scale.grad)) < 1e-6  # L-BFGS-B stops there
    assert 0.05 < number(head.log_prior_scale.exp()) < 20.0


# --- training given the body ends where the solver does ---


@pytest.mark.parametrize(("kind", "covariance"), [*itertools.product(("binary", "labels", "classes"), FAMILIES[:2])])
def test_the_loss_of_a_frozen_body_is_smallest_where_fit_ends(data, kind, covariance):
    y = targets_of(data, kind)
    body = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double()
    head = head_of(kind, covariance=covariance).fit(data[0], y, body=body)
    head.loss(body(data[0]).detach(), y, ROWS).backward()
    for name, parameter in head.q.named_parameters():
        assert number(parameter.grad.abs().max()) < 1e-6, name  # 1e-8 nats from the optimum


@pytest.mark.parametrize(("kind", "covariance"), [*itertools.product(("binary", "classes"), FAMILIES[:2])])
def test_natural_steps_on_all_rows_end_where_fit_does(data, kind, covariance):
    y = targets_of(data, kind)
    fitted, stepped = (head_of(kind, covariance=covariance) for _ in range(2))
    fitted.fit(data[0], y)
    for _ in range(30 if covariance == "full" else 120):
        stepped.natural_step(data[0], y, ROWS, rate=1.0 if covariance == "full" else 0.5)
    gap = stepped.loss(data[0], y, ROWS) - fitted.loss(data[0], y, ROWS)
    assert 0.0 <= ROWS * number(gap) + TOLERANCE["converged"] < 1e-6  # steps without Anderson's mixture


def test_natural_steps_on_batches_come_close(data):
    head, best = (head_of("classes", covariance="full") for _ in range(2))
    best.fit(data[0], data[2])
    order = torch.Generator().manual_seed(0)
    for _ in range(30):
        for some in torch.randperm(ROWS, generator=order).split(30):
            head.natural_step(data[0][some], data[2][some], ROWS, rate=0.1)
    gap = head.loss(data[0], data[2], ROWS) - best.loss(data[0], data[2], ROWS)
    assert 0.0 < ROWS * number(gap) < 0.5  # nats; batches are a third of the rows


# --- two classes are one label ---


def test_softmax_with_two_classes_is_binary(data):
    two = scrambled(LogitHead(WIDTH, 2, prior_scale=2.0, intercept_scale=3.0, covariance="diagonal").double())
    root = 2.0**0.5
    one = LogitHead(WIDTH, prior_scale=2.0 * root, intercept_scale=3.0 * root, covariance="diagonal").double()
    variance = (2.0 * two.q.log_scale.detach()).exp().sum(0)
    one.q.assign(0, two.q.mean.detach()[1] - two.q.mean.detach()[0], variance)
    X, y = data[0], data[1]
    expected = two.expected_log_likelihood(X, y)
    assert torch.allclose(one.expected_log_likelihood(X, y), expected, atol=1e-9)  # of the log-sum-exp
    assert torch.allclose(one.predict_proba(X)[:, 0], two.predict_proba(X)[:, 1], atol=1e-9)
    assert torch.allclose(one.information(X), two.information(X), atol=1e-9)
    both = [head.fit(X, y) for head in (one.double(), two)]
    assert number(both[0].loss(X, y, ROWS)) == pytest.approx(
        number(both[1].loss(X, y, ROWS)), abs=1e-2
    )  # other families
    full = [LogitHead(WIDTH, k, prior_scale=s, intercept_scale=s).double().fit(X, y) for k, s in ((1, root), (2, 1.0))]
    losses = [number(head.loss(X, y, ROWS)) for head in full]
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE["differences"])


# --- divergences and variances against dense matrices ---


@pytest.mark.parametrize(("kind", "covariance"), [*itertools.product(("labels", "classes"), FAMILIES)])
def test_divergence_is_that_of_dense_gaussians(kind, covariance):
    head = scrambled(head_of(kind, covariance=covariance, rank=2, prior_scale=0.7))
    q, sd = head.q, head.prior_sd()
    K, d = q.mean.shape
    S = torch.block_diag(*dense_covariances(q))
    prior = torch.block_diag(*[torch.diag(sd.square())] * K)
    T = torch.eye(K, dtype=torch.float64)
    if kind == "classes":  # contrasts with the last class
        T = torch.cat([torch.eye(K - 1), -torch.ones(K - 1, 1)], 1).double()
    T = torch.kron(T, torch.eye(d, dtype=torch.float64))
    made = [
        torch.distributions.MultivariateNormal(T @ mean, T @ cov @ T.T)
        for mean, cov in ((q.mean.detach().reshape(-1), S), (torch.zeros(K * d, dtype=torch.float64), prior))
    ]
    expected = torch.distributions.kl_divergence(*made)
    assert number(head.divergence()) == pytest.approx(number(expected), rel=TOLERANCE["autograd"])


@pytest.mark.parametrize("covariance", FAMILIES)
def test_variances_of_entries_are_those_of_unit_vectors(covariance):
    q = scrambled(head_of("classes", covariance=covariance, rank=2)).q
    unit = q.latent_variance(torch.eye(q.mean.shape[1], dtype=torch.float64)).T
    assert torch.allclose(q.entry_variances(), unit, rtol=TOLERANCE["special"])


# --- probabilities and information against quadrature ---


def normal_grid(moments, nodes):
    """Weights and values of independent Gaussians on a product grid."""
    z, w = np.polynomial.hermite_e.hermegauss(nodes)
    axes = [m + np.sqrt(v) * z for m, v in zip(*moments, strict=True)]
    f = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
    weight = np.stack(np.meshgrid(*[w / w.sum()] * len(axes), indexing="ij"), -1).reshape(-1, len(axes)).prod(1)
    return torch.from_numpy(weight), torch.from_numpy(f)


def bernoulli_entropy(p):
    return torch.special.entr(p) + torch.special.entr(1.0 - p)


@pytest.mark.parametrize("kind", ["classes", "labels"])
def test_information_and_spread_equal_quadrature(data, kind):
    head = scrambled(head_of(kind, covariance="full"), size=0.2)
    x = data[0][:3]
    moments = [part.detach().numpy() for part in head(x)]
    for i in range(3):
        weight, f = normal_grid([part[i] for part in moments], 60)
        p = torch.softmax(f, 1) if kind == "classes" else torch.sigmoid(f)
        entropy = (
            torch.special.entr if kind == "classes" else lambda p: torch.special.entr(p) + torch.special.entr(1 - p)
        )
        mean = weight @ p
        expected = entropy(mean).sum() - weight @ entropy(p).sum(1)
        spread = (weight @ (p - mean).square()).sqrt()
        # sixty nodes, and the tolerance of the log-sum-exp
        assert number(head.information(x)[i]) == pytest.approx(number(expected), abs=1e-9)
        assert torch.allclose(head.predict_std(x)[i], spread, atol=1e-8)


# --- the Gaussian process ---


def test_a_process_at_its_prior_has_its_variance_everywhere(data):
    head = GaussianProcessHead(WIDTH, CLASSES, inducing=12, scale=1.5).double().place(data[0])
    head.q.assign(slice(None), torch.zeros(CLASSES, 12), torch.eye(12).expand(CLASSES, 12, 12))
    mean, variance = head(data[0])
    assert number(mean.abs().max()) == 0.0
    prior = (2.0 * head.log_output_scale).exp()  # 1.5², rounded to float32
    assert torch.allclose(variance, prior.expand_as(variance), rtol=TOLERANCE["special"])
    assert number(head.divergence()) == pytest.approx(0.0, abs=1e-9)


def test_a_process_forgets_far_from_the_data(data):
    head = GaussianProcessHead(WIDTH, CLASSES, inducing=12, scale=1.5).double().place(data[0]).fit(data[0], data[2])
    assert number(head(data[0]).variance.max()) < 2.25
    far = head(100.0 * data[0])
    assert torch.allclose(far.variance, torch.full_like(far.variance, 2.25))
    assert torch.allclose(far.mean, head.constant.expand_as(far.mean))


def test_a_process_with_all_rows_as_inducing_points_is_an_exact_one():
    x = torch.linspace(-1.0, 1.0, 8, dtype=torch.float64)[:, None]
    y = torch.tensor([0, 0, 1, 0, 1, 1, 0, 1])
    head = GaussianProcessHead(1, inducing=8, lengthscale=0.5, scale=1.0).double()
    with torch.no_grad():
        head.inducing_points.copy_(x)
    head.fit(x, y)
    # the same model in the coordinates f = Lw, by the estimator with a prior covariance and no features but rows
    K = torch.exp(-0.5 * torch.cdist(x, x).square() / 0.25) + 1e-6 * torch.eye(8, dtype=torch.float64)
    model = viper.VariationalLogisticRegression(prior_scale=K.numpy(), fit_intercept=False)
    model.fit(np.eye(8), y.numpy())
    mean = head(x).mean[:, 0].detach().numpy()
    assert np.allclose(mean, model.posterior_.mean, atol=1e-4)  # the jitter, which is noise in one of the two


def test_the_loss_of_a_process_reaches_every_parameter(data):
    head = GaussianProcessHead(WIDTH, CLASSES, inducing=6).double().place(data[0])
    head.loss(data[0], data[2], ROWS).backward()
    assert all(number(parameter.grad.abs().max()) > 0.0 for parameter in head.parameters())


# --- where rows come from ---


def test_a_loader_gives_the_posterior_of_its_rows(data, monkeypatch):
    X, y = data[0], data[2]
    body = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.5)).double()
    whole = head_of("classes").fit(body.eval()(X).detach(), y)
    body.train()
    loader = DataLoader(TensorDataset(X, y), batch_size=32)
    kept = head_of("classes").fit(loader, body=body)
    assert body.training
    monkeypatch.setattr(feature_rows, "available_memory", lambda: 0.0)
    streamed = head_of("classes").fit(loader, body=body)
    for head in (kept, streamed):
        assert torch.allclose(head(X).mean, whole(X).mean, atol=1e-5)  # rough integrals end at other steps
        assert number(head.loss(X, y, ROWS)) == pytest.approx(number(whole.loss(X, y, ROWS)), abs=1e-7)


def test_a_stream_reports_its_passes(data, monkeypatch, capsys):
    monkeypatch.setattr(feature_rows, "available_memory", lambda: 0.0)
    loader = DataLoader(TensorDataset(data[0], data[1]), batch_size=32)
    head_of("binary").fit(loader, verbose=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert all(f"{ROWS} rows" in line for line in lines)
    passes = [float(line.split("pass ")[1].split()[0]) for line in lines]
    assert passes == sorted(passes)
    assert passes[-1] > 1.0


@pytest.mark.parametrize("covariance", FAMILIES)
def test_frozen_heads_are_fitted_and_stay_frozen(data, covariance):
    heads = [head_of("classes", covariance=covariance) for _ in range(3)]
    heads[1].requires_grad_(False)
    y = targets_of(data, "classes")
    heads[0].fit(data[0], y)
    heads[1].fit(data[0], y)
    with torch.no_grad():
        heads[2].fit(data[0], y)
    for other in heads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(heads[0].parameters(), other.parameters(), strict=True))
    assert not any(parameter.requires_grad for parameter in heads[1].parameters())


# --- as a module among others ---


@pytest.mark.parametrize("covariance", FAMILIES)
def test_a_head_survives_its_state_dict(data, covariance):
    head = scrambled(head_of("classes", covariance=covariance, prior_scale=0.3))
    stored = io.BytesIO()
    torch.save(head.state_dict(), stored)
    stored.seek(0)
    other = head_of("classes", covariance=covariance)
    other.load_state_dict(torch.load(stored, weights_only=True))
    assert torch.equal(other.loss(data[0], data[2], ROWS), head.loss(data[0], data[2], ROWS))
    assert torch.equal(copy.deepcopy(head)(data[0]).variance, head(data[0]).variance)


def test_training_repeats_bit_for_bit(data):
    def trained():
        torch.manual_seed(7)
        body, head = torch.nn.Linear(WIDTH, 6), LogitHead(6, CLASSES)
        optimiser = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=0.01)
        for _ in range(5):
            optimiser.zero_grad()
            head.loss(body(data[0].float()), data[2], ROWS).backward()
            optimiser.step()
        head.natural_step(body(data[0].float()), data[2], ROWS)
        return head(body(data[0].float()))

    assert all(map(torch.equal, trained(), trained()))


@pytest.mark.parametrize("kind", ["binary", "classes"])
def test_autocast_changes_nothing_in_the_head(data, kind):
    head, y = head_of(kind).float(), targets_of(data, kind)
    features = data[0].to(torch.bfloat16)
    expected = head.loss(features.float(), y, ROWS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head.loss(features, y, ROWS), expected)


def process_of(data):
    torch.manual_seed(0)
    return scrambled(GaussianProcessHead(WIDTH, inducing=6).double().place(data[0]), size=0.1)


def test_autocast_changes_nothing_in_a_process(data):
    head, features = process_of(data).float(), data[0].to(torch.bfloat16)
    expected = head.loss(features.float(), data[1], ROWS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head.loss(features, data[1], ROWS), expected)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces
@pytest.mark.parametrize("kind", ["binary", "classes", "labels", "process"])
def test_compiled_loss_is_the_loss(data, kind):
    head = process_of(data) if kind == "process" else head_of(kind, covariance="diagonal")
    y = targets_of(data, "binary" if kind == "process" else kind)
    loss = torch.compile(head.loss, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(head.loss(data[0], y, ROWS), head.q.mean)[0]
    found = torch.autograd.grad(loss(data[0], y, ROWS), head.q.mean)[0]
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)  # more nodes where values cannot be inspected


def test_thousands_of_classes_fit_in_a_gigabyte():
    """Where each row keeps something for each pair of classes, a batch of 128 rows alone needs 9.8 GB."""
    program = """
import torch
from viper.nn import LogitHead
torch.set_num_threads(1)
head = LogitHead(512, 3100, covariance="diagonal")
head.loss(torch.randn(128, 512), torch.randint(0, 3100, (128,)), 10_000).backward()
print(peak())
"""
    done = subprocess.run([sys.executable, "-c", PEAK + program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1e9


RANKS = """
import sys, torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from viper.nn import LogitHead

rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
generator = torch.Generator().manual_seed(0)
x, y = torch.randn(40, 3, generator=generator).double(), torch.randint(0, 3, (40,), generator=generator)

def made():
    torch.manual_seed(0)
    return LogitHead(3, 3).double()

class Trained(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = made()

    def forward(self, x, y):
        return self.head.loss(x, y, 40)

mine = slice(20 * rank, 20 * rank + 20)
together = DistributedDataParallel(Trained())
together(x[mine], y[mine]).backward()
alone = made()
alone.loss(x, y, 40).backward()
assert torch.allclose(together.module.head.q.mean.grad, alone.q.mean.grad, atol=1e-10)
split = made()
for _ in range(3):
    split.natural_step(x[mine], y[mine], 40, rate=0.5)
distributed.destroy_process_group()
for _ in range(3):
    alone.natural_step(x, y, 40, rate=0.5)
assert torch.allclose(split.q.mean, alone.q.mean, atol=1e-10)
assert torch.allclose(split.q.log_scale, alone.q.log_scale, atol=1e-10)
"""


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    running = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path / "meeting")], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for one in running:
        _, error = one.communicate()
        assert one.returncode == 0, error.decode()


# --- moments through layers ---

ACTIVATIONS = [
    (MomentReLU(), lambda x: max(x, 0.0)),
    (MomentGELU(), lambda x: x * norm.cdf(x)),
    (MomentTanh(), np.tanh),
]
POINTS = [(-3.0, 0.5), (-0.4, 2.0), (0.0, 1.0), (0.7, 0.01), (2.5, 4.0), (6.0, 0.3)]


@pytest.mark.parametrize(("layer", "function"), ACTIVATIONS, ids=["relu", "gelu", "tanh"])
def test_moments_through_activations_equal_quadrature(layer, function):
    mean, variance = (torch.tensor(x, dtype=torch.float64) for x in zip(*POINTS, strict=True))
    found = layer(LatentMoments(mean, variance))
    for i, (m, v) in enumerate(POINTS):
        ends = sorted({m - 12 * v**0.5, 0.0, m, m + 12 * v**0.5})

        def integral(f, m=m, v=v, ends=ends):
            density = norm(m, v**0.5).pdf
            pieces = itertools.pairwise(x for x in ends if m - 12 * v**0.5 <= x <= m + 12 * v**0.5)
            return sum(quad(lambda x: f(x) * density(x), *piece, epsabs=1e-14, epsrel=1e-13)[0] for piece in pieces)

        first = integral(function)
        second = integral(lambda x, first=first: (function(x) - first) ** 2)
        assert number(found.mean[i]) == pytest.approx(first, abs=1e-12)
        assert number(found.variance[i]) == pytest.approx(second, abs=1e-12)


@pytest.mark.parametrize("layer", [layer for layer, _ in ACTIVATIONS], ids=["relu", "gelu", "tanh"])
def test_activations_without_variance_are_the_plain_ones(layer):
    x = torch.linspace(-4.0, 4.0, 9, dtype=torch.float64)
    plain = {"MomentReLU": torch.relu, "MomentGELU": torch.nn.functional.gelu, "MomentTanh": torch.tanh}
    mean, variance = layer(x)
    assert torch.allclose(mean, plain[type(layer).__name__](x), atol=TOLERANCE["roundoff"])
    assert number(variance.abs().max()) < TOLERANCE["roundoff"]


@pytest.mark.parametrize("layer", [layer for layer, _ in ACTIVATIONS], ids=["relu", "gelu", "tanh"])
def test_activations_have_the_gradients_of_their_formulas(layer):
    mean = torch.tensor([-1.2, 0.3, 2.0], dtype=torch.float64, requires_grad=True)
    variance = torch.tensor([0.5, 1.5, 0.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m, v: tuple(layer(LatentMoments(m, v))), (mean, variance))


def test_a_linear_layer_has_the_moments_of_its_draws():
    layer = scrambled(BayesianLinear(3, 2).double(), size=0.5)
    generator = torch.Generator().manual_seed(0)
    given = LatentMoments(torch.tensor([1.0, -2.0, 0.5]).double(), torch.tensor([0.3, 0.0, 1.0]).double())
    draws = 200_000

    def normal(mean, sd):
        return mean + sd * torch.randn(draws, *mean.shape, generator=generator, dtype=torch.float64)

    with torch.no_grad():
        W, b = normal(layer.mean, layer.log_sd.exp()), normal(layer.bias_mean, layer.bias_log_sd.exp())
        y = (W @ normal(given.mean, given.variance.sqrt())[..., None])[..., 0] + b
        mean, variance = layer(given)
    assert torch.allclose(y.mean(0), mean, atol=5.0 * number((variance.max() / draws).sqrt()))
    assert torch.allclose(y.var(0), variance, rtol=0.03)  # five standard errors of a variance of heavier tails


def test_a_network_of_one_layer_is_a_head_of_independent_weights(data):
    network = BayesianNetwork(BayesianLinear(WIDTH, CLASSES, prior_scale=0.7), targets="labels").double()
    head = head_of("labels", covariance="diagonal", prior_scale=0.7, intercept_scale=1.0)
    layer = network.layers[0]
    with torch.no_grad():
        head.q.mean.copy_(torch.cat([layer.mean, layer.bias_mean[:, None]], 1))
        head.q.log_scale.copy_(torch.cat([layer.log_sd, layer.bias_log_sd[:, None]], 1))
    found, expected = (model.loss(data[0], data[3], ROWS) for model in (network, head))
    assert number(found) == pytest.approx(number(expected), rel=TOLERANCE["special"])


def test_a_network_learns_without_sampling(data):
    torch.manual_seed(0)
    network = BayesianNetwork(BayesianLinear(WIDTH, 16), MomentReLU(), BayesianLinear(16, CLASSES))
    optimiser = torch.optim.Adam(network.parameters(), lr=0.02)
    x, losses = data[0].float(), []
    for _ in range(60):
        optimiser.zero_grad()
        loss = network.loss(x, data[2], ROWS)
        loss.backward()
        optimiser.step()
        losses.append(number(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert torch.allclose(network.predict_proba(x).sum(1), torch.ones(ROWS), atol=1e-5)


# --- errors ---


def small(**options):
    return LogitHead(2, 3, **options)


X3, NUMBERS = torch.zeros(3, 2), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LogitHead(0), ValueError, "in_features must be a whole number, 1 or more; got 0"),
        (lambda: small(targets="class"), ValueError, "targets must be .* Did you mean 'classes'"),
        (lambda: small(covariance="ful"), ValueError, "covariance must be .* Did you mean 'full'"),
        (lambda: small(prior_scale=-1.0), ValueError, "prior_scale must be a positive number or 'auto'; got -1.0"),
        (lambda: small(intercept_scale="auto"), ValueError, "intercept_scale must be a positive number; got 'auto'"),
        (lambda: small(rank=0), ValueError, "rank must be .* Use covariance='diagonal'"),
        (lambda: small()(torch.zeros(3, 4)), ValueError, "features must have 2 columns"),
        (lambda: small()(NUMBERS), TypeError, "features must be a tensor of floating-point numbers; got torch.int64"),
        (lambda: small()(X3 / 0.0), ValueError, "features must be finite"),
        (lambda: small().loss(X3, NUMBERS, 0), ValueError, "n must be .* Pass the number of rows"),
        (lambda: small().loss(X3, NUMBERS + 1, 3), ValueError, "y must be between 0 and 2; got 3"),
        (lambda: small().loss(X3, NUMBERS.float(), 3), ValueError, "y must be whole numbers of shape"),
        (lambda: small(targets="labels").loss(X3, NUMBERS, 3), ValueError, "a column for each label"),
        (lambda: LogitHead(2).loss(X3, NUMBERS, 3), ValueError, "y must be 0 or 1, or a share between them; got 2"),
        (lambda: small().natural_step(X3, NUMBERS, 3, rate=2.0), ValueError, "rate must be above 0 and at most 1"),
        (lambda: small(covariance="low-rank").natural_step(X3, NUMBERS, 3), ValueError, "has no closed form"),
        (lambda: small().fit(X3), ValueError, "y must have one entry for each row of features; got no y"),
        (lambda: small().fit(X3, [0] * len(X3)), TypeError, "y must be a tensor; got list. Use torch.as_tensor"),
        (lambda: small().fit([(X3, NUMBERS)], NUMBERS), TypeError, "a DataLoader of pairs"),
        (
            lambda: small().fit(DataLoader(TensorDataset(X3, NUMBERS), shuffle=True)),
            ValueError,
            "got shuffle=True. Create one with shuffle=False",
        ),
        (lambda: small().fit([X3]), ValueError, "a batch must be a pair of inputs and targets"),
        (lambda: GaussianProcessHead(2, inducing=9).place(X3), ValueError, "at least as many rows as .* 9; got 3"),
        (lambda: GaussianProcessHead(2, inducing=2).place(X3), ValueError, "features must differ"),
        (lambda: BayesianNetwork(MomentReLU()), ValueError, "the last layer must be a BayesianLinear; got MomentReLU"),
        (lambda: BayesianLinear(2, 2)(torch.zeros(3, 4)), ValueError, "a tensor with 2 columns, or moments"),
    ],
)
def test_errors_say_what_to_do(call, error, message):
    with pytest.raises(error, match=message):
        call()
