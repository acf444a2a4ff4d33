"""Training and generation over megatron-core: tensor, pipeline and expert parallelism for Hugging Face models."""

from nemorl_megatron.config import MegatronConfig, MegatronGenerationConfig

__all__ = ["MegatronConfig", "MegatronGenerationConfig"]
