"""Memory that a forward pass keeps for its backward pass, as a backend counts it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PerToken:
    """Bytes per token of one rank's part of a row."""

    layer: float
    """Of one layer, all kept"""
    entry: float
    """Of one layer whose activations are computed again: its input"""
    outside: float
    """After the last layer: its norm, and the states that predict scored tokens"""
    passing: float
    """Gradients within a layer, at the fullest moment of its backward pass"""
    ending: float
    """The same at its end, in the first norm"""
