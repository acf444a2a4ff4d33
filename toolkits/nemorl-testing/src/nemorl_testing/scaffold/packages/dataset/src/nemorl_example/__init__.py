"""A dataset for nemorl."""

from nemorl_example.config import ExampleConfig

__all__ = ["ExampleConfig"]
