"""A head that knows how far it is from the data: sparse Gaussian processes of the features.

Each output is a Gaussian process with the kernel k(x, x') = a² exp(-|x - x'|²/2ℓ²) and a constant mean, seen through M
inducing points Z. With K_zz = LLᵀ and whitened values w, f(Z) = Lw, it is a linear head on the rows A = K_xz L⁻ᵀ:

    ϑ = c + Aμ,      τ² = a² - |A|² + diag(A S Aᵀ),      w ~ N(0, I) a priori.

Far from all inducing points A is 0, and the logits return to their prior however large the features are.
"""

import math

import torch
from torch import Tensor

from viper.errors import shown
from viper.nn.heads import HEAD_RANK, GaussianHead, HeadRows, checked_scale
from viper.nn.logits import Targets, checked_count
from viper.nn.weights import Covariance, GaussianWeights

JITTER = 1e-6  # relative to a², on the diagonal of K_zz
SEARCHED_ROWS = 2000  # features among which inducing points are chosen


class GaussianProcessHead(GaussianHead):
    """A last layer of sparse Gaussian processes, uncertain wherever features are unlike those of training.

    Parameters
    ----------
    in_features : int
        Width of the last hidden layer.
    out_features : int, default 1
        Number of classes or labels; 1 for two classes.
    inducing : int, default 64
        Number of inducing points M, which all outputs share. A step costs about M² for each row and output.
    lengthscale : float, optional
        ℓ before training, by default √in_features. `place` sets it from the data.
    scale : float, default 2
        a before training: the standard deviation of the logits far from the data.
    targets : {"classes", "labels"}, default "classes"
        Whether several outputs are classes (each row has one) or labels (a row may have any number).
    covariance, rank
        As for `LogitHead`, of the M whitened values of one output.

    Attributes
    ----------
    inducing_points : tensor (M, in_features)
        Z, trained by the loss. Call `place` before training.
    log_lengthscale, log_output_scale : tensor
        log ℓ and log a, trained by the loss.
    constant : tensor (out_features,)
        The prior mean of each output, a parameter without uncertainty.

    Notes
    -----
    The loss is exact for these sparse processes. A body can still map unlike inputs to like features; residual
    connections and spectral normalisation keep distances.

    Examples
    --------
    >>> import torch
    >>> from viper.nn import GaussianProcessHead
    >>> x = torch.linspace(-2.0, 2.0, 40)[:, None]
    >>> head = GaussianProcessHead(1, inducing=10).place(x).fit(x, (x[:, 0] > 0.0).long())
    >>> head.predict_proba(torch.tensor([[2.0], [200.0]]))[:, 0]
    tensor([0.9303, 0.5000])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int = 1,
        *,
        inducing: int = 64,
        lengthscale: float | None = None,
        scale: float = 2.0,
        targets: Targets = "classes",
        covariance: Covariance = "full",
        rank: int = HEAD_RANK,
    ) -> None:
        super().__init__(in_features, out_features, targets, covariance, rank)
        checked_count(inducing, "inducing")
        first = math.sqrt(in_features) if lengthscale is None else checked_scale(lengthscale, "lengthscale")
        self.inducing_points = torch.nn.Parameter(torch.randn(inducing, in_features))
        self.log_lengthscale = torch.nn.Parameter(torch.tensor(math.log(first)))
        self.log_output_scale = torch.nn.Parameter(torch.tensor(math.log(checked_scale(scale, "scale"))))
        self.constant = torch.nn.Parameter(torch.zeros(out_features))
        shares_shift = self.targets == "classes"
        self.q = GaussianWeights(out_features, inducing, covariance, rank, torch.ones(inducing), shares_shift)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, targets={self.targets!r}, "
            f"inducing={len(self.inducing_points)}, covariance={self.covariance!r}"
        )

    @torch.no_grad()
    def place(self, features: Tensor) -> "GaussianProcessHead":
        """Choose inducing points among features, each as far from the others as possible, and ℓ as their median gap.

        The first is the one nearest to the mean; ℓ is the median distance between features.
        """
        x = self.checked_features(features.detach()).reshape(-1, self.in_features)
        M = len(self.inducing_points)
        if len(x) < M:
            raise ValueError(
                f"features must have at least as many rows as there are inducing points, {M}; got {len(x)}. Pass more, "
                "or create the head with fewer."
            )
        x = x[:: max(1, len(x) // max(SEARCHED_ROWS, M))].to(self.inducing_points)
        chosen = [int((x - x.mean(0)).square().sum(1).argmin())]
        gap = (x - x[chosen[0]]).square().sum(1)
        for _ in range(M - 1):
            chosen.append(int(gap.argmax()))
            gap = torch.minimum(gap, (x - x[chosen[-1]]).square().sum(1))
        self.inducing_points.copy_(x[chosen])
        middle = torch.pdist(x[: min(len(x), SEARCHED_ROWS)]).median()
        if not float(middle) > 0.0:
            raise ValueError(f"features must differ; got a median distance of {shown(float(middle))}.")
        self.log_lengthscale.copy_(middle.log())
        return self

    def prior_sd(self) -> Tensor:
        return torch.ones_like(self.inducing_points[:, 0])

    def head_rows(self, features: Tensor) -> HeadRows:
        # float64: K_zz is nearly singular where inducing points are close
        x, z = features.double(), self.inducing_points.double()
        variance, scale = (2.0 * self.log_output_scale.double()).exp(), (-self.log_lengthscale.double()).exp()
        eye = torch.eye(len(z), dtype=z.dtype, device=z.device)
        root = torch.linalg.cholesky(correlations(z, z, scale) + JITTER * eye)
        A = torch.linalg.solve_triangular(root, correlations(z, x, scale), upper=False).T
        rest = variance * (1.0 - A.square().sum(1)).clamp(min=0.0)
        rows = variance.sqrt() * A
        return HeadRows(rows.to(features), self.constant.to(features), rest.to(features))


def correlations(first: Tensor, second: Tensor, inverse_lengthscale: Tensor) -> Tensor:
    """exp(-|x - x'|²/2ℓ²) for all pairs of rows."""
    a, b = first * inverse_lengthscale, second * inverse_lengthscale
    squares = a.square().sum(1)[:, None] + b.square().sum(1) - 2.0 * a @ b.T
    return (-0.5 * squares.clamp(min=0.0)).exp()
