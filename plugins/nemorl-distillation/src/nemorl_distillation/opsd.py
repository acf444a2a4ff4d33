"""OPSD: the teacher is the initial policy with a correct solution before its eyes (arXiv:2601.18734).

Differs from the paper: of the vocabulary the teacher's likeliest tokens are told apart, the rest is one more outcome.
"""

from __future__ import annotations

from nemorl_distillation.self_config import OPSDConfig
from nemorl_distillation.self_trainer import ColumnContextTrainer


class OPSDTrainer(ColumnContextTrainer[OPSDConfig]):
    """On-policy self-distillation (arXiv:2601.18734)."""

    config_class = OPSDConfig
