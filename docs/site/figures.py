"""Draws the pictures of these pages: python docs/site/figures.py. Grey on no background, for light and dark pages."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, make_moons
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import viper
from viper.nn import GaussianProcessHead, LogitHead

IMAGES = Path(__file__).parents[1] / "images"
GREY, GREEN, RED, BLUE = "#8a8f8d", "#2b9a72", "#d2653c", "#4a7fc1"
STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "savefig.transparent": True,
    "savefig.dpi": 150,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
    "axes.titlecolor": GREY,
}


def wells():
    """The data and the model of tutorials/map.md."""
    rng = np.random.default_rng(1)
    places = rng.uniform(0, 10, (600, 2))
    places = places[~(places > 6).all(1)]
    truth = 1 / (1 + np.exp(-5 * np.sin(places[:, 0]) * np.cos(0.8 * places[:, 1]) + 1))
    unsafe = rng.random(len(places)) < truth
    model = viper.VariationalGPClassifier(kernel="matern52", mean="constant", random_state=0).fit(places, unsafe)
    return places, unsafe, model


def surface(model):
    side = np.linspace(0, 10, 120)
    grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    shape = (120, 120)
    return model.predict_proba(grid)[:, 1].reshape(shape), model.predict_std(grid).reshape(shape)


def draw_surface(axes, values, title, colours, top):
    shown = axes.imshow(values, origin="lower", extent=(0, 10, 0, 10), cmap=colours, vmin=0, vmax=top)
    axes.set(title=title, xticks=[0, 5, 10], yticks=[0, 5, 10])
    bar = plt.colorbar(shown, ax=axes, fraction=0.046, pad=0.03)
    bar.outline.set_edgecolor(GREY)


def dots(axes, places, unsafe):
    for chosen, colour in ((unsafe, "#ffffff"), (~unsafe, "#16222b")):
        axes.scatter(*places[chosen].T, s=4, c=colour, linewidths=0, alpha=0.75)


def curve(axes):
    """The risk against one measurement, from few patients and from all."""
    data = load_breast_cancer(as_frame=True)
    radius, malignant = data.data[["mean radius"]].to_numpy(), (data.target == 0).to_numpy()
    centre, width = radius.mean(), radius.std()
    some = np.random.default_rng(3).choice(len(radius), 40, replace=False)
    model = viper.VariationalLogisticRegression(prior_scale=2.5).fit((radius[some] - centre) / width, malignant[some])
    x = np.linspace(5, 30, 300)[:, None]
    z = (x - centre) / width
    for level, alpha in ((0.95, 0.18), (0.8, 0.2), (0.5, 0.25)):
        axes.fill_between(x[:, 0], *model.predict_interval(z, level).T, color=GREEN, alpha=alpha, linewidth=0)
    axes.plot(x, model.predict_proba(z)[:, 1], color=GREEN, linewidth=2.2)
    for value, colour in ((True, RED), (False, BLUE)):
        chosen = some[malignant[some] == value]
        axes.plot(radius[chosen], np.full(len(chosen), 1.03 if value else -0.03), "|", color=colour, markersize=9)
    axes.set(
        title="40 tumours: the risk, and what is known of it", xlabel="mean radius", ylim=(-0.08, 1.08), xlim=(5, 30)
    )
    axes.set_yticks([0, 0.5, 1], ["0", "½", "1"])


def hero(places, unsafe, probability, sd):
    figure, axes = plt.subplots(1, 3, figsize=(14.5, 3.9), width_ratios=[1.5, 1, 1], layout="constrained")
    curve(axes[0])
    draw_surface(axes[1], probability, "a map of a probability", "viridis", 1)
    dots(axes[1], places, unsafe)
    draw_surface(axes[2], sd, "and where it is not known", "magma", None)
    figure.savefig(IMAGES / "hero.png")


def map_picture(places, unsafe, probability, sd):
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.3), layout="constrained")
    draw_surface(axes[0], probability, "Probability of unsafe water", "viridis", 1)
    dots(axes[0], places, unsafe)
    draw_surface(axes[1], sd, "Its standard deviation", "magma", None)
    figure.savefig(IMAGES / "map.png")


def risk():
    """The held-out patients of tutorials/risk.md."""
    data = load_breast_cancer(as_frame=True)
    X = data.data[["mean radius", "mean texture", "mean smoothness", "mean concavity"]]
    y = data.target == 0
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.4, stratify=y, random_state=0)
    scaler = StandardScaler().set_output(transform="pandas").fit(X_train)
    model = viper.VariationalLogisticRegression(random_state=0).fit(scaler.transform(X_train), y_train)
    new = scaler.transform(X_test)
    p, (low, high) = model.predict_proba(new)[:, 1], model.predict_interval(new).T
    order = np.argsort(p)
    figure, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
    axes.axhline(0.2, color=GREY, linewidth=0.8, linestyle="--")
    for value, colour, name in ((True, RED, "malignant"), (False, BLUE, "benign")):
        chosen = np.flatnonzero(y_test.to_numpy()[order] == value)
        axes.vlines(chosen, low[order][chosen], high[order][chosen], color=colour, alpha=0.45, linewidth=1.6)
        axes.plot(chosen, p[order][chosen], "o", color=colour, markersize=3, label=name)
    axes.legend(frameon=False, labelcolor=GREY)
    axes.set(xlabel="held-out tumours, in order of their risk", ylabel="risk", xticks=[])
    figure.savefig(IMAGES / "risk.png")


def bandits():
    """Regret of the policies in five of the plain worlds of benchmarks/bandits.py."""
    sys.path.insert(0, str(IMAGES.parents[1]))
    from benchmarks.bandits import SETTINGS, ours

    figure, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
    shown = {"thompson": (GREY, 1.0), "thompson, spread 0.5": (BLUE, 0.5), "ucb": (RED, 1.0), "ids": (GREEN, 1.0)}
    for name, (colour, spread) in shown.items():
        curves = []
        for seed in range(5):
            world = SETTINGS["plain"].make(seed)
            agent = ours(name.split(",")[0], spread)(SETTINGS["plain"], world.context.shape[1], seed)
            lost = []
            for context, chance, luck in zip(*world, strict=True):
                arm = agent.choose(context)
                lost.append(chance.max() - chance[arm])
                agent.learn(context, arm, float(luck < chance[arm]))
            curves.append(np.cumsum(lost))
        axes.plot(np.mean(curves, axis=0), color=colour, linewidth=2, label=name)
    axes.legend(frameon=False, labelcolor=GREY)
    axes.set(xlabel="decisions", ylabel="regret")
    figure.savefig(IMAGES / "bandits.png")


def trained(head, body, x, y, epochs, rate, batch):
    """Train a head and its body as networks.md does."""
    optimiser = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=rate)
    for _ in range(epochs):
        for some in torch.randperm(len(x)).split(batch):
            optimiser.zero_grad()
            head.loss(body(x[some]), y[some], n=len(x)).backward()
            optimiser.step()
    return head


def moons():
    """A linear head and a process on two moons, and far from them."""
    X, labels = make_moons(200, noise=0.15, random_state=0)
    X, labels = torch.tensor(X), torch.tensor(labels)
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU()).double()
    linear = trained(LogitHead(32).double(), body, X, labels, 150, 0.02, 200)
    process = GaussianProcessHead(2, inducing=20).double().place(X)
    trained(process, torch.nn.Identity(), X, labels, 150, 0.02, 200)
    across, up = np.linspace(-4.5, 5.5, 200), np.linspace(-3.7, 4.2, 160)
    grid = torch.tensor(np.stack(np.meshgrid(across, up), -1).reshape(-1, 2))
    with torch.no_grad():
        features = body(grid)
    panels = (
        ("a linear head: its probability", linear.predict_proba(features), "RdBu_r", 1.0),
        ("a process: its probability", process.predict_proba(grid), "RdBu_r", 1.0),
        ("what it does not know of it", process.predict_std(grid), "magma", None),
    )
    figure, axes = plt.subplots(1, 3, figsize=(14.5, 3.9), layout="constrained")
    for ax, (title, values, colours, top) in zip(axes, panels, strict=True):
        extent = (across[0], across[-1], up[0], up[-1])
        image = values.reshape(len(up), len(across)).numpy()
        shown = ax.imshow(image, origin="lower", extent=extent, cmap=colours, vmin=0, vmax=top)
        for label, colour in ((0, "#16222b"), (1, "#ffffff")):
            ax.scatter(*X[labels == label].T, s=5, c=colour, linewidths=0, alpha=0.8)
        ax.set(title=title, xticks=[], yticks=[])
        plt.colorbar(shown, ax=ax, fraction=0.038, pad=0.02).outline.set_edgecolor(GREY)
    figure.savefig(IMAGES / "moons.png")


def digits():
    """The held-out digits of networks.md whose labels would tell most, and one of each class that would tell least."""
    images, y = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, y, test_size=0.25, random_state=0, stratify=y)
    x, test, y, test_y = (torch.tensor(part) for part in parts)
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).double()
    head = trained(LogitHead(64, 10, covariance="diagonal").double(), body, x, y, 20, 0.01, 128)
    with torch.no_grad():
        features = body(test)
    p, sd = head.predict_proba(features), head.predict_std(features)
    told = head.information(features)
    least = [int(torch.where(test_y == k, told, torch.inf).argmin()) for k in range(10)]
    figure, axes = plt.subplots(2, 10, figsize=(14.5, 3.9), layout="constrained")
    for row, (chosen, name) in enumerate(((told.argsort(descending=True)[:10].tolist(), "rejected"), (least, "kept"))):
        for ax, i in zip(axes[row], chosen, strict=True):
            ax.imshow(test[i].reshape(8, 8), cmap="Greys", vmin=0, vmax=1)
            ax.set(xticks=[], yticks=[])
            best = [int(k) for k in p[i].argsort(descending=True)[:2]]
            said = "\n".join(f"{k}: {p[i, k]:.2f} ± {sd[i, k]:.2f}" for k in best)
            ax.set_title(f"a {int(test_y[i])}", loc="center", fontsize=10)
            ax.set_xlabel(said, fontsize=9, color=RED if best[0] != int(test_y[i]) else GREY)
            for spine in ax.spines.values():
                spine.set_visible(False)
        axes[row, 0].set_ylabel(name, fontsize=11)
    figure.savefig(IMAGES / "digits.png")


def experiment():
    """The experiment of experiments.md."""
    nature = np.random.default_rng(0)
    asked = viper.Experiment({"temperature": (20, 90), "dose": (0.1, 10, "log")}, threshold=0.75)
    for _ in range(24):
        x = asked.ask()
        log_odds = 0.12 * (x["temperature"] - 62) + 2 * np.log10(x["dose"])
        asked.tell(x, nature.random() < 1 / (1 + np.exp(-log_odds)))
    figure, axes = plt.subplots(figsize=(7, 4.6), layout="constrained")
    viper.plot.experiment(asked, ax=axes)
    axes.set_title("")
    axes.tick_params(colors=GREY, labelcolor=GREY)
    figure.savefig(IMAGES / "experiment.png")


if __name__ == "__main__":
    with plt.rc_context(STYLE):
        places, unsafe, model = wells()
        probability, sd = surface(model)
        hero(places, unsafe, probability, sd)
        map_picture(places, unsafe, probability, sd)
        risk()
        bandits()
        experiment()
        moons()
        digits()
