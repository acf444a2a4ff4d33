"""Published datasets by name, Hugging Face and local file datasets, and mixtures of them, for nemorl."""

from nemorl_tasks.datasets.config import FileConfig, HuggingFaceConfig
from nemorl_tasks.datasets.mixture import MixtureConfig, SetsConfig
from nemorl_tasks.datasets.preset import PresetConfig

__all__ = ["FileConfig", "HuggingFaceConfig", "MixtureConfig", "PresetConfig", "SetsConfig"]
