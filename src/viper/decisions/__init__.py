"""Decisions: bandits that log what they did, and what another policy would have earned."""

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
