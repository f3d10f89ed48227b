"""The page of models with more than two classes."""
