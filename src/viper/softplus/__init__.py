"""The expected softplus E[log(1+e^x)] of a Gaussian x: formulas, bounds and autograd."""
