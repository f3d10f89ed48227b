"""Logistic regression, and what all estimators share: prediction, storage, diagnosis and export."""
