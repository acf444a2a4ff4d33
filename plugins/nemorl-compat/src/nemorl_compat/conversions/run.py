"""Where a run executes, what it keeps and where it logs."""

from __future__ import annotations

from typing import Any

from nemorl.config import RunConfig
from nemorl.plugins import registry

from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.old_config import OldConfig

OWN_METRICS = {
    "grpo": ("accuracy", "val_reward", "total_reward/mean", "reward"),
    "ppo": ("accuracy", "val_reward", "total_reward/mean", "reward"),
    "sft": ("val_loss", "loss"),
    "dpo": ("validation-default_loss", "val_loss", "loss"),
    "rm": ("validation-default_loss", "val_loss", "loss"),
}
"""Names of what validation measures that are the algorithm's own metric here."""
VALIDATION_NAMES = {
    "distillation": {"accuracy": "validation/accuracy", "val_reward": "validation/accuracy"},
    "dpo": {"validation-default_accuracy": "validation/accuracy"},
    "rm": {"validation-default_accuracy": "validation/accuracy"},
}
LOGGERS: dict[str, dict[str, str]] = {
    "wandb": {"project": "project", "name": "run_name", "entity": "entity"},
    "mlflow": {"experiment_name": "experiment", "run_name": "run_name", "tracking_uri": "tracking_uri"},
    "tensorboard": {},
    "swanlab": {"project": "project", "name": "run_name"},
}


def checkpoints(old: OldConfig, new: Pieces) -> None:
    """When to save, which to keep, and the metric that ranks them under the name it is logged by."""
    is_on = old.get("checkpointing.enabled", True)
    period = old.get("checkpointing.save_period")
    new.put_given("checkpoint.every", period if is_on else 0)
    if not is_on:
        new.differ("checkpointing.enabled", "one checkpoint is written, at the end")
    metric, best = old.get("checkpointing.metric_name"), old.get("checkpointing.keep_top_k")
    if old.has("checkpointing.keep_top_k") and best is None and isinstance(period, int) and period > 0:
        new.put("checkpoint.keep_every", period)
    if old.has("checkpointing.metric_name") and metric is None:
        # Without a metric the newest are the best.
        new.put("checkpoint.keep_best", 0)
        new.put_given("checkpoint.keep_last", best)
        return
    new.put_given("checkpoint.keep_best", best)
    if metric is not None:
        _metric(old, new, str(metric))


def _metric(old: OldConfig, new: Pieces, metric: str) -> None:
    source, _, name = metric.rpartition(":")
    if source != "train" and name in OWN_METRICS.get(old.family, ()):
        own: type[RunConfig] = registry().load("algorithms", str(new.values["algorithm"]))
        if old.get("checkpointing.higher_is_better") == (not own.best_is_highest):
            new.put("checkpoint.metric", own.best_metric)
            new.put("checkpoint.higher_is_better", not own.best_is_highest)
        return
    known = VALIDATION_NAMES.get(old.family, {})
    new.put("checkpoint.metric", f"train/{name}" if source == "train" else known.get(name, f"validation/{name}"))
    new.put_given("checkpoint.higher_is_better", old.get("checkpointing.higher_is_better"))


def cluster(old: OldConfig, new: Pieces) -> None:
    """One GPU is what a run takes anyway; several nodes need a Ray cluster that spans them."""
    devices, nodes = old.get("cluster.gpus_per_node", 1), old.get("cluster.num_nodes", 1)
    if devices != 1 or nodes != 1:
        new.put("cluster.gpus_per_node", devices)
        new.put("cluster.num_nodes", nodes)
    if isinstance(nodes, int) and nodes > 1:
        new.put("cluster.address", "auto")


def loggers(old: OldConfig, new: Pieces) -> None:
    """The loggers that are on, with their options."""
    made: list[dict[str, Any]] = []
    for name, options in LOGGERS.items():
        if old.get(f"logger.{name}_enabled"):
            given = {new_name: old.get(f"logger.{name}.{theirs}") for theirs, new_name in options.items()}
            made.append({"name": name, **{key: value for key, value in given.items() if value is not None}})
    new.put("loggers", made)
