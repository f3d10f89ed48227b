"""Logistic regression with effects of groups."""
