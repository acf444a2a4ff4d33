"""Runs the policy's Python code against tests, in a sandbox, for nemorl."""

from nemorl_tasks.code.config import CodeConfig

__all__ = ["CodeConfig"]
