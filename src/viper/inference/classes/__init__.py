"""More than two classes: the expected log-sum-exp over rows, and the star, its Gaussian family, with its solver."""
