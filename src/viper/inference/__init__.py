"""Rows to sums to steps to the posterior: the solver, its kernels, and importance weights."""
