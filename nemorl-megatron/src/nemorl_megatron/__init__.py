"""Training over megatron-core: tensor, pipeline, context and expert parallelism for Hugging Face models."""

from nemorl_megatron.config import MegatronConfig

__all__ = ["MegatronConfig"]
