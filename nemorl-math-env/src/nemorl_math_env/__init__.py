"""Math environment and generated arithmetic datasets for nemorl."""

from nemorl_math_env.config import ArithmeticConfig, MathConfig, WordProblemsConfig

__all__ = ["ArithmeticConfig", "MathConfig", "WordProblemsConfig"]
