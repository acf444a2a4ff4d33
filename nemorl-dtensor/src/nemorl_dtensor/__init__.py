"""PyTorch training backend ``dtensor`` and embedded generation backend ``hf`` over Hugging Face models."""

from nemorl_dtensor.config import DTensorConfig, HFGenerationConfig

__all__ = ["DTensorConfig", "HFGenerationConfig"]
