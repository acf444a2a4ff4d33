"""Composed environments, small graders, and two conversations (a game and a tool) for nemorl."""

from nemorl_tasks.environments.config import (
    BboxGiouConfig,
    CalculatorConfig,
    ChainConfig,
    CodeJaccardConfig,
    ExactAlnumConfig,
    ExactMatchConfig,
    FormatConfig,
    MultipleChoiceConfig,
    RepetitionConfig,
    SlidingPuzzleConfig,
    WeightedConfig,
)
from nemorl_tasks.environments.datasets import CalculationsConfig, SlidingPuzzlesConfig
from nemorl_tasks.environments.judge.config import JudgeConfig
from nemorl_tasks.environments.retriever.config import RetrieverConfig

__all__ = [
    "BboxGiouConfig",
    "CalculationsConfig",
    "CalculatorConfig",
    "ChainConfig",
    "CodeJaccardConfig",
    "ExactAlnumConfig",
    "ExactMatchConfig",
    "FormatConfig",
    "JudgeConfig",
    "MultipleChoiceConfig",
    "RepetitionConfig",
    "RetrieverConfig",
    "SlidingPuzzleConfig",
    "SlidingPuzzlesConfig",
    "WeightedConfig",
]
