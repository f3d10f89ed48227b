"""Draws the pictures of these pages: python docs/site/figures.py. Grey on nothing, for light pages and dark."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import viper

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


if __name__ == "__main__":
    with plt.rc_context(STYLE):
        places, unsafe, model = wells()
        probability, sd = surface(model)
        hero(places, unsafe, probability, sd)
        map_picture(places, unsafe, probability, sd)
        risk()
        bandits()
