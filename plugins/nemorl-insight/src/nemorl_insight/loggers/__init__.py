"""Metric sinks for nemorl: TensorBoard, Weights & Biases, SwanLab, MLflow."""

from nemorl_insight.loggers.config import MLflowConfig, SwanLabConfig, TensorBoardConfig, WandbConfig

__all__ = ["MLflowConfig", "SwanLabConfig", "TensorBoardConfig", "WandbConfig"]
