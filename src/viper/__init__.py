"""viper: Bayesian classification with honest uncertainty."""

from viper.softplus import (
    ExpectedSigmoid,
    ExpectedSoftplus,
    expected_sigmoid,
    expected_softplus,
    terms_needed,
)

__all__ = ["ExpectedSigmoid", "ExpectedSoftplus", "expected_sigmoid", "expected_softplus", "terms_needed"]
