"""The solver, from sums over rows to steps to the posterior; its compiled kernels; and importance weights."""
