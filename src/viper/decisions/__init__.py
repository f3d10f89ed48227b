"""Decisions: bandits and what another policy would have earned; rows to label and pairs to compare next."""

from viper.decisions.bandit import Bandit, Choice, Log
from viper.decisions.evaluation import Evaluation, evaluate
from viper.decisions.pool import Suggested, suggest
from viper.decisions.preferences import ExpectedBest, PairInformation

__all__ = [
    "Bandit",
    "Choice",
    "Evaluation",
    "ExpectedBest",
    "Log",
    "PairInformation",
    "Suggested",
    "evaluate",
    "suggest",
]
