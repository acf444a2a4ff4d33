"""Distillation for nemorl: from other models, and from the policy itself."""

from nemorl_distillation.config import DistillationConfig, OPDConfig, TeacherConfig
from nemorl_distillation.mopd import MOPDConfig
from nemorl_distillation.self_config import OPSDConfig, SDFTConfig, SDPOConfig

__all__ = ["DistillationConfig", "MOPDConfig", "OPDConfig", "OPSDConfig", "SDFTConfig", "SDPOConfig", "TeacherConfig"]
