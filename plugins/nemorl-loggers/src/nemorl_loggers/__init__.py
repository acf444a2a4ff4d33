"""Metric sinks for nemorl: TensorBoard, Weights & Biases, MLflow."""

from nemorl_loggers.config import MLflowConfig, TensorBoardConfig, WandbConfig

__all__ = ["MLflowConfig", "TensorBoardConfig", "WandbConfig"]
