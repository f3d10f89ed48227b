"""Gaussian processes of items that are compared in pairs."""
