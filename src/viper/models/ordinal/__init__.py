"""Ordinal regression: outcomes in ordered levels."""
