"""SDFT: the teacher is the initial policy with a demonstration before its eyes (arXiv:2601.19897).

The policy learns what the demonstration shows on responses of its own, and keeps to its own words where it can.
Differs from the paper: the teacher has the initial weights, or those of now, where the paper's are a moving average;
of the vocabulary the teacher's likeliest tokens are told apart, the rest is one more outcome.
"""

from __future__ import annotations

from nemorl_distillation.self_config import SDFTConfig
from nemorl_distillation.self_trainer import ColumnContextTrainer


class SDFTTrainer(ColumnContextTrainer[SDFTConfig]):
    """Self-distillation fine-tuning on demonstrations (arXiv:2601.19897)."""

    config_class = SDFTConfig
