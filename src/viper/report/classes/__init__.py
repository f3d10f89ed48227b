"""Scores and the page of models with more than two classes."""
