"""Gaussian-process classification: the estimator, its search, and the GPyTorch likelihood."""
