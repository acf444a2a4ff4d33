"""Prompts in, scored samples out: the engine of rollouts, its schedule and its buffer."""
