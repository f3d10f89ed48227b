"""Effects of groups: posteriors beside the exact one, NUTS and statsmodels, coverage with few groups, and a large fit.

The exact posterior is computed by importance sampling over hundreds of values of the variance components, drawn from a
wide t distribution, with the effects of the largest factor integrated out by quadrature. Errors of means are in
posterior sds. Sds, and mean standard deviations of groups, are relative to the reference; each number is the worst over
all fixed effects or groupings. NUTS has our priors; statsmodels has its own, which are normal for coefficients (sd 3
here) and for logarithms of standard deviations.
"""

import resource
import time
import warnings
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
import torch

import viper
from benchmarks.table import Page, Table, machine
from viper.inference.groups.conditional import drawn_border, group_integrals
from viper.inference.groups.evidence import ComponentProfile
from viper.inference.groups.solver import GroupPrior
from viper.inference.groups.weighing import border_log_prior

LARGE = {"rows": 910_000, "users": 35_000, "products": 26}  # the shape of lme4's issue 425
SIMULATIONS = 100
FREEDOM = 4  # of the t distribution from which components are drawn


class Grouped(NamedTuple):
    """One data set: columns, labels, and for each factor its codes, number of groups and multiplied columns."""

    X: np.ndarray
    y: np.ndarray
    factors: list[tuple[np.ndarray, int, np.ndarray]]


def run(quick: bool, device: str = "cpu", tables: str | None = None) -> Page:
    torch.set_num_threads(1)
    makers = {
        "Posteriors beside the exact one": partial(beside_exact, quick),
        "Posteriors beside NUTS": partial(posteriors, quick),
        "Coverage": partial(coverage, 20 if quick else SIMULATIONS),
        "Many rows": partial(large, quick),
    }
    wanted = list(makers) if tables is None else [title.strip() for title in tables.split(";")]
    if unknown := set(wanted) - set(makers):
        raise ValueError(f"tables must be among {list(makers)}; got {sorted(unknown)}.")
    return Page("Effects of groups", [makers[title]() for title in makers if title in wanted], list(makers))


# --- data ---


def simulate(rng: np.random.Generator, X: np.ndarray, beta: list[float], parts: list[Any]) -> Grouped:
    """Labels for columns X, intercept first; each part of the effects is (codes, levels, columns, covariance)."""
    f = X @ np.array(beta)
    for codes, levels, Z, D in parts:
        root = np.linalg.cholesky(np.atleast_2d(D) + 1e-12 * np.eye(Z.shape[1]))
        f = f + (Z * (rng.standard_normal((levels, Z.shape[1])) @ root.T)[codes]).sum(1)
    y = (rng.random(len(f)) < 1 / (1 + np.exp(-f))).astype(float)
    return Grouped(X[:, 1:], y, [(codes, levels, Z) for codes, levels, Z, _ in parts])


def data_sets() -> dict[str, Grouped]:
    rng = np.random.default_rng(11)

    def columns(n: int, p: int) -> np.ndarray:
        return np.column_stack([np.ones(n), rng.standard_normal((n, p - 1))])

    def repeated(groups: int, each: int) -> tuple[np.ndarray, np.ndarray]:
        return np.repeat(np.arange(groups), each), np.ones((groups * each, 1))

    found: dict[str, Grouped] = {}
    for name, groups, each, beta, variance in (
        ("8 groups of 30", 8, 30, [-0.5, 0.6, -0.4], 0.6),
        ("60 groups of 10", 60, 10, [-0.5, 0.6, -0.4, 0.0], 1.0),
        ("300 sparse groups of 4", 300, 4, [-2.6, 0.6, -0.4], 0.8),
        ("30 groups of 15, no variance", 30, 15, [0.2, 0.6, -0.4], 0.0),
        ("50 groups of 12, large variance", 50, 12, [0.2, 0.6, -0.4], 6.0),
    ):
        g, one = repeated(groups, each)
        found[name] = simulate(rng, columns(len(g), len(beta)), beta, [(g, groups, one, variance)])
    g, one = repeated(40, 12)
    item = np.tile(np.arange(12), 40)
    parts = [(g, 40, one, 1.0), (item, 12, one, 0.5)]
    found["40 × 12 crossed"] = simulate(rng, columns(480, 3), [0.2, 0.6, -0.4], parts)
    g, one = repeated(60, 10)
    parts = [(g // 6, 10, one, 0.4), (g, 60, one, 0.4)]
    found["60 groups nested in 10"] = simulate(rng, columns(600, 3), [0.2, 0.6, -0.4], parts)
    g, _ = repeated(40, 25)
    X = columns(1000, 3)
    found["40 groups of 25, slopes"] = simulate(rng, X, [0.2, 0.6, -0.4], [(g, 40, X[:, :2], [[0.8, 0.3], [0.3, 0.5]])])
    _, g = np.unique(np.sort(rng.integers(0, 50, 600) ** 2 // 50), return_inverse=True)
    parts = [(g, g.max() + 1, np.ones((600, 1)), 1.0)]
    found["groups of unequal sizes"] = simulate(rng, columns(600, 3), [0.2, 0.6, -0.4], parts)
    g, one = repeated(100, 15)
    parts = [(g, 100, one, 1.0), (np.tile(np.arange(15), 100), 15, one, 1.0)]
    found["100 × 15 answers (Rasch)"] = simulate(rng, np.ones((1500, 1)), [0.3], parts)
    g, one = repeated(6, 40)
    X = columns(240, 3)
    X[:, 1] = g % 2 - 0.5
    found["6 groups, effect between them"] = simulate(rng, X, [0.2, 0.8, -0.4], [(g, 6, one, 0.5)])
    parts = [(rng.integers(0, k, 800), k, np.ones((800, 1)), v) for k, v in ((20, 0.6), (15, 0.4), (8, 0.3))]
    found["three crossed factors"] = simulate(rng, columns(800, 3), [-0.3, 0.6, -0.4], parts)
    return found


# --- methods: means and sds of fixed effects (intercept first), means of standard deviations of groups ---

Answer = tuple[np.ndarray, np.ndarray, np.ndarray]


def fitted(data: Grouped) -> Any:
    groups = {f"g{k}": codes for k, (codes, _, _) in enumerate(data.factors)}
    effects = " + ".join(f"({'1 + x0' if Z.shape[1] > 1 else '1'} | g{k})" for k, (_, _, Z) in enumerate(data.factors))
    X = data.X if data.X.shape[1] else None
    return viper.VariationalMixedRegression(effects=effects, n_jobs=1).fit(X, data.y, groups=groups)


def ours(data: Grouped) -> Answer:
    model = fitted(data)
    sd = np.sqrt(np.diag(model.covariance_))
    table = model.components()["mean"]
    sds = table[[name for name in table.index if name.startswith("sd(")]].to_numpy()
    return np.r_[model.intercept_, model.coef_[0]], np.r_[sd[-1:], sd[:-1]], sds


def by_statsmodels(data: Grouped) -> Answer:
    """The mean-field variational posterior of BinomialBayesMixedGLM, with its own priors."""
    import scipy.sparse
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

    X = np.column_stack([np.ones(len(data.y)), data.X])
    parts, ident = [], []
    for codes, levels, Z in data.factors:
        for c in range(Z.shape[1]):
            rows = np.arange(len(codes))
            parts.append(scipy.sparse.csr_matrix((Z[:, c], (rows, codes)), shape=(len(codes), levels)))
            ident += [len(parts) - 1] * levels
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = BinomialBayesMixedGLM(data.y, X, scipy.sparse.hstack(parts).tocsr(), np.array(ident), vcp_p=1, fe_p=3)
        found = model.fit_vb()
    return found.fe_mean, found.fe_sd, np.exp(found.vcp_mean)


def by_nuts(data: Grouped, draws: int, seed: int = 0) -> Answer:
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    numpyro.enable_x64()
    X = np.column_stack([np.ones(len(data.y)), data.X])

    def model() -> None:
        scale = np.r_[10.0, np.ones(X.shape[1] - 1)]
        f = X @ numpyro.sample("beta", dist.Normal(0, scale).to_event(1))
        for k, (codes, levels, Z) in enumerate(data.factors):
            r = Z.shape[1]
            sd = numpyro.sample(f"sd{k}", dist.FoldedDistribution(dist.StudentT(3, 0, 2.5)).expand([r]).to_event(1))
            z = numpyro.sample(f"z{k}", dist.Normal(0, 1).expand([levels, r]).to_event(2))
            root = jnp.diag(sd) if r == 1 else sd[:, None] * numpyro.sample(f"root{k}", dist.LKJCholesky(r, 2.0))
            f = f + (Z * (z @ root.T)[codes]).sum(1)
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=data.y)

    kernel = NUTS(model, target_accept_prob=0.95)
    chains = MCMC(
        kernel, num_warmup=1000, num_samples=draws, num_chains=2, chain_method="sequential", progress_bar=False
    )
    chains.run(jax.random.PRNGKey(seed))
    found = {name: np.asarray(x) for name, x in chains.get_samples().items()}
    sds = np.concatenate([found[f"sd{k}"].mean(0) for k in range(len(data.factors))])
    return found["beta"].mean(0), found["beta"].std(0), sds


def exactly(data: Grouped, values: int = 400, draws: int = 16) -> tuple[Answer, float]:
    """The posterior by importance sampling, and the effective number of values of the components.

    For each θ, p(y | θ) is an average over draws of everything but the main factor's effects, which are integrated out
    by quadrature; the mean and variance of fixed effects given θ are those of q, corrected by the same weights.
    """
    model = fitted(data)
    fit = model._weighed_fit(None, None, None, None, "benchmark")
    rows, k, t = fit.rows, fit.rows.fixed, fit.thetas.shape[1]
    centre = model._points["components.share"].numpy() @ model._points["components.theta"].numpy()
    root = 1.2 * np.linalg.cholesky(fit.spread)
    uniform = scipy.stats.qmc.Sobol(t + 1, seed=1).random(values)
    z = scipy.stats.norm.ppf(uniform[:, :t]) / np.sqrt(scipy.stats.chi2.ppf(uniform[:, t], FREEDOM) / FREEDOM)[:, None]
    log_density = scipy.stats.multivariate_t(np.zeros(t), np.eye(t), df=FREEDOM).logpdf(z)
    profile = ComponentProfile(rows, fit.mean, fit.precision, fit.prior, fit.quadrature)
    low, high = np.array(profile.bounds()).T
    rng, found = np.random.default_rng(0), []
    for s in np.argsort(z[:, 0]):
        theta = centre + root @ z[s]
        if not ((theta > low) & (theta < high)).all():
            continue
        profile(theta, 1e-6)
        q, prior = profile.fit.q, GroupPrior(fit.mean, fit.precision, profile.covariances(theta))
        noise = rng.standard_normal((draws // 2, rows.border))
        border, log_q = drawn_border(q, np.concatenate([noise, -noise]))
        log_joint = border_log_prior(rows, prior, border) - log_q + profile.log_prior(theta)
        for _, _, some, integrals in group_integrals(rows, q, prior.covariances[0], border):
            log_joint[some] += integrals.log_integral.sum(0)
        share = np.exp(log_joint - log_joint.max())
        log_weight = log_joint.max() + np.log(share.mean()) - log_density[s]
        share /= share.sum()
        by = border[:, :k] - q.mean.border[:k]
        variance = q.covariance.border.diagonal()[:k] + (share - 1 / draws) @ by**2 - (share @ by) ** 2
        sds = [
            np.sqrt(np.diag(D)) for D in (prior.covariances[model._order.index(f)] for f in range(len(rows.factors)))
        ]
        found.append((log_weight, q.mean.border[:k] + share @ by, variance, np.concatenate(sds)))
    logs, means, variances, sds = (np.array(x) for x in zip(*found, strict=True))
    weight = np.exp(logs - logs.max())
    weight /= weight.sum()
    mean = weight @ means
    sd = np.sqrt(weight @ (variances + (means - mean) ** 2))
    return (np.r_[mean[-1:], mean[:-1]], np.r_[sd[-1:], sd[:-1]], weight @ sds), float(1 / (weight**2).sum())


def beside_exact(quick: bool) -> Table:
    rows: list[list[str | float]] = []
    sets = data_sets()
    ours(sets["8 groups of 30"])  # what is computed once in a process
    for name, data in [*sets.items()][: 2 if quick else None]:
        (mean, sd, between), effective = exactly(data, 128 if quick else 400)
        for method, work in {"viper": ours, "statsmodels": by_statsmodels}.items():
            began = time.process_time()
            m, s, b = work(data)
            took = time.process_time() - began
            worst = [float(x[np.abs(np.log(x)).argmax()]) for x in (s / sd, b / between)]
            rows.append([name, method, float(np.abs((m - mean) / sd).max()), *worst, took, effective])
    columns = ["data", "method", "mean", "sd ratio", "group sd ratio", "seconds", "effective"]
    notes = [
        machine("cpu"),
        "Processor seconds on one thread. `effective`: the effective number of the 400 values of the components "
        "behind the exact posterior.",
    ]
    return Table("Posteriors beside the exact one", columns, rows, notes)


def posteriors(quick: bool) -> Table:
    rows: list[list[str | float]] = []
    sets = data_sets()
    ours(sets["8 groups of 30"])  # what is computed once in a process
    for name, data in [*sets.items()][: 2 if quick else None]:
        took, answers = {}, {}
        methods = {"viper": ours, "statsmodels": by_statsmodels, "NUTS": partial(by_nuts, draws=200 if quick else 5000)}
        for method, work in methods.items():
            began = time.process_time()
            answers[method] = work(data)
            took[method] = time.process_time() - began
        mean, sd, between = answers["NUTS"]
        for method in ("viper", "statsmodels"):
            m, s, b = answers[method]
            ratio, components = s / sd, b / between
            worst = [float(x[np.abs(np.log(x)).argmax()]) for x in (ratio, components)]
            rows.append([name, method, float(np.abs((m - mean) / sd).max()), *worst, took[method], took["NUTS"]])
    columns = ["data", "method", "mean", "sd ratio", "group sd ratio", "seconds", "seconds of NUTS"]
    notes = [
        machine("cpu"),
        "Processor seconds on one thread. NUTS: two chains of 5,000 draws after 1,000, whose own error is about 0.02 "
        "sds in means and 2 % in sds, more with 6 groups, whose standard deviation has a heavy tail.",
    ]
    return Table("Posteriors beside NUTS", columns, rows, notes)


# --- coverage ---


def coverage(simulations: int) -> Table:
    """Share of simulations whose 95 % intervals contain the truth."""
    rows: list[list[str | float]] = []
    for name, groups, each, intercept, sd in (
        ("6 groups of 30", 6, 30, -0.3, 0.8),
        ("15 groups of 20", 15, 20, -0.3, 0.8),
        ("400 groups of 5, 0.4 events each", 400, 5, -2.9, 0.9),
    ):
        count = simulations if groups < 100 else max(10, simulations // 3)
        inside, mean = np.zeros((2, 3)), np.zeros(2)
        for seed in range(count):
            rng = np.random.default_rng(seed)
            g = np.repeat(np.arange(groups), each)
            x = np.where(g % 2, 1.0, -1.0)
            f = intercept + 0.5 * x + rng.normal(0, sd, groups)[g]
            y = rng.random(len(g)) < 1 / (1 + np.exp(-f))
            for k, quadrature in enumerate((False, True)):
                model = viper.VariationalMixedRegression(quadrature=quadrature, n_jobs=1).fit(x[:, None], y, groups=g)
                table = model.summary().iloc[:3]
                truth = np.array([0.5, intercept, sd])
                inside[k] += (table["lower"].to_numpy() <= truth) & (truth <= table["upper"].to_numpy())
                mean[k] += table["mean"].iloc[2]
        for k, word in enumerate(("off", "on")):
            rows.append([name, word, *(inside[k] / count).tolist(), mean[k] / count, sd, count])
    columns = ["data", "quadrature", "effect between groups", "intercept", "sd", "mean sd", "true sd", "simulations"]
    notes = ["95 % intervals. The column varies between groups only, so that its effect is as uncertain as they are."]
    return Table("Coverage", columns, rows, notes)


# --- many rows ---


def large(quick: bool) -> Table:
    """Seconds and memory of a fit with two crossed factors, one of them large."""
    n, users, products = (size // (50 if quick and size > 100 else 1) for size in LARGE.values())
    rng = np.random.default_rng(0)
    share = rng.gamma(2.0, size=users)
    user, product = rng.choice(users, p=share / share.sum(), size=n), rng.integers(products, size=n)
    X = rng.standard_normal((n, 5))
    f = -1 + X @ np.array([0.5, -0.3, 0.2, 0.0, 0.1]) + rng.normal(0, 1, users)[user]
    y = rng.random(n) < 1 / (1 + np.exp(-f - rng.normal(0, 0.5, products)[product]))
    began = time.process_time()
    model = viper.VariationalMixedRegression(n_jobs=1).fit(X, y, groups={"user": user, "product": product})
    seconds = time.process_time() - began
    sds = model.components()["mean"].iloc[:2].tolist()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    row: list[str | float] = [f"{n:,} rows, {users:,} users, {products} products", seconds, peak, *sds]
    columns = ["data", "processor seconds", "GB", "sd of users", "sd of products"]
    notes = [
        machine("cpu"),
        "On one thread. GB: peak memory of the process, including Python, torch and the data. The true sds are 1 "
        "and 0.5; the latter is estimated from 26 products.",
    ]
    return Table("Many rows", columns, [row], notes)
