"""Hugging Face and local file datasets for nemorl."""

from nemorl_datasets.config import FileConfig, HuggingFaceConfig

__all__ = ["FileConfig", "HuggingFaceConfig"]
