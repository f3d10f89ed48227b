"""`python -m viper.demo [FOLDER]`: a posterior on real data, and the bound beneath it, as tables and pictures."""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import viper
from viper import demo_bound


def main(folder: str = ".") -> None:
    """Fit, report, and draw `posterior.png` and `bound.png` into `folder`."""
    torch.set_num_threads(1)  # so little work is slower when shared
    data = Data()
    began = time.perf_counter()
    model = viper.VariationalLogisticRegression(prior_scale="auto", random_state=0).fit(data.train, data.train_label)
    seconds = time.perf_counter() - began
    print(story(data, model, seconds))
    draw(data, model, Path(folder) / "posterior.png")
    print("\n" + demo_bound.table())
    demo_bound.picture(Path(folder) / "bound.png")
    print(f"\nThe pictures are {Path(folder) / 'posterior.png'} and {Path(folder) / 'bound.png'}.")


class Data:
    """Wisconsin breast cancer (569 tumours, 30 measurements), standardised; a third is held out."""

    def __init__(self) -> None:
        from sklearn.datasets import load_breast_cancer
        from sklearn.model_selection import train_test_split
        from sklearn.preprocessing import StandardScaler

        frame, benign = load_breast_cancer(return_X_y=True, as_frame=True)
        label = np.where(benign, "benign", "malignant")
        train, test, self.train_label, self.test_label = train_test_split(
            frame, label, test_size=0.33, random_state=0, stratify=label
        )
        scaler = StandardScaler().set_output(transform="pandas").fit(train)
        self.train, self.test = scaler.transform(train), scaler.transform(test)


def story(data: Data, model: Any, seconds: float) -> str:
    """What was fitted, what it says, how sure it is, and whether to believe it."""
    from sklearn.metrics import log_loss, roc_auc_score

    table = model.summary().drop(index="intercept")
    strongest = table.reindex(table["mean"].abs().sort_values(ascending=False).index[:8])
    probability, interval = model.predict_proba(data.test)[:, 1], model.predict_interval(data.test)
    malignant = data.test_label == "malignant"
    unsure = np.argsort(interval[:, 0] - interval[:, 1])[:4]
    lines = [
        f"Breast cancer: {len(data.train)} tumours, {data.train.shape[1]} measurements, in {1e3 * seconds:.0f} ms",
        f"ELBO {model.elbo_:.4f}, prior scale {model.prior_scale_[0]:.2f} chosen by it",
        "",
        "Strongest coefficients (per standard deviation; odds of malignancy)",
        strongest[["mean", "sd", "odds_ratio", "odds_lower", "odds_upper", "p_direction"]].round(2).to_string(),
        "",
        f"Held out ({len(malignant)} tumours): AUC {roc_auc_score(malignant, probability):.4f}, "
        f"log score {-log_loss(malignant, probability):.4f}",
        "Least certain of them: probability of malignancy with its 95 % credible interval",
        *[
            f"  tumour {data.test.index[i]:>3}  {probability[i]:.2f}  [{interval[i, 0]:.2f}, {interval[i, 1]:.2f}]  "
            f"({data.test_label[i]})"
            for i in unsure
        ],
        "",
        f"Is the approximation good?  {model.diagnose()}",
    ]
    return "\n".join(lines)


def draw(data: Data, model: Any, path: Path) -> None:
    """Left: odds ratios with intervals. Right: every held-out tumour's probability with its interval."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    table = model.summary().drop(index="intercept").sort_values("mean")
    order = np.argsort(model.predict_latent(data.test)[0])
    probability, interval = model.predict_proba(data.test)[order, 1], model.predict_interval(data.test)[order]
    malignant = (data.test_label == "malignant")[order]
    style: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}
    with plt.rc_context(style):
        figure, (forest, people) = plt.subplots(1, 2, figsize=(14, 6), layout="constrained")
        sure = table["p_direction"] > 0.95
        for at, (name, row) in enumerate(table.iterrows()):
            colour = "#c44e52" if sure[name] else "#999999"
            forest.plot([row["odds_lower"], row["odds_upper"]], [at, at], color=colour, lw=2)
            forest.plot(row["odds_ratio"], at, "o", color=colour, ms=4)
        forest.axvline(1.0, color="black", lw=0.8)
        forest.set_yticks(range(len(table)), table.index, fontsize=8)
        forest.set(title="Odds ratio of malignancy per standard deviation, 95 % interval", xscale="log")
        x = np.arange(len(order))
        for group, colour, label in ((malignant, "#c44e52", "malignant"), (~malignant, "#4c72b0", "benign")):
            people.vlines(x[group], *interval[group].T, color=colour, alpha=0.45, lw=1.5)
            people.plot(x[group], probability[group], ".", color=colour, label=label)
        people.set(title="Held-out tumours: probability of malignancy, 95 % credible interval", xticks=[])
        people.set_xlabel("tumours, in order of their predicted log-odds")
        people.legend(frameon=False)
        figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:2])
