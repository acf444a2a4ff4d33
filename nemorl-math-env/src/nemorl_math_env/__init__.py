"""Math environments and generated arithmetic datasets for nemorl."""

from nemorl_math_env.config import (
    ArithmeticConfig,
    DapoMathConfig,
    Geo3kConfig,
    MathConfig,
    MathExpressionConfig,
    MultiRewardMathConfig,
    WordProblemsConfig,
)

__all__ = [
    "ArithmeticConfig",
    "DapoMathConfig",
    "Geo3kConfig",
    "MathConfig",
    "MathExpressionConfig",
    "MultiRewardMathConfig",
    "WordProblemsConfig",
]
