"""Gaussian processes of more than two classes: one function per class, with the same kernel."""
