"""The config of a client's loop, as its run directory has it. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from nemorl.config import RESUMABLE, Config, GenerationConfig, RunConfig
from nemorl.errors import ConfigIssue, DataError
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import DatasetConfig
from nemorl.types import Row
from nemorl_rl.declared_metrics import ROLLOUT_METRICS, SAMPLER_METRICS
from nemorl_rl.rollouts.recording import RecordingConfig
from pydantic import Field

OF_ROLLOUTS = (
    "train/num_samples",
    "train/mean_gen_tokens_per_sample",
    "train/mean_total_tokens_per_sample",
)
"""Metrics of a step that mean what they mean of other runs."""


class ClientRequestsConfig(DatasetConfig):
    """The requests of a client's loop that was recorded, one row per optimizer step."""

    summary: ClassVar[str] = "requests of a Tinker client's loop, as `nemorl serve --tinker` recorded them"

    path: Path
    """The folder ``requests`` of its run."""

    def build(self, split: str) -> Sequence[Row] | None:
        from nemorl_agents.tinker.flight.operations import recorded_steps, step_file

        if split != "train":
            return None
        steps = recorded_steps(self.path)
        if steps != list(range(1, len(steps) + 1)):
            missing = sorted({*range(1, max(steps) + 1)} - {*steps})
            raise DataError(f"{self.path} has no file of step {missing[0]}", fix="copy the folder whole")
        files = [step_file(self.path.parent, step) for step in steps]
        return [
            {"step": step, "file": str(file), "digest": blake2b(file.read_bytes(), digest_size=16).hexdigest()}
            for step, file in zip(steps, files, strict=True)
        ]


class ClientAdapter(Config):
    """The adapter that a client asked for."""

    rank: int = Field(32, ge=1)
    """Not above ``policy.lora.rank``."""
    seed: int = Field(0, ge=0)
    """Of its initial weights."""
    train_mlp: bool = True
    """It adapts feed-forward layers."""
    train_attn: bool = True
    """It adapts attention."""
    train_unembed: bool = True
    """It adapts the output head, where that is not the embedding."""


class ClientLoopConfig(RunConfig):
    """A loop that a client of the Tinker API drove: requests in place of data, and the client's losses."""

    summary: ClassVar[str] = "A recorded loop of a Tinker client (`nemorl serve --tinker`), made again without it"
    trainer: ClassVar[str] = "nemorl_agents.tinker.flight.trainer:ClientLoopTrainer"
    best_metric: ClassVar[str] = "train/loss"
    best_is_highest: ClassVar[bool] = False
    needs_capabilities: ClassVar[Mapping[str, frozenset[str]]] = {
        "policy": frozenset({"halved_steps", "shared_base", "adapters"})
    }
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        **RunConfig.metrics,
        "train/loss": MetricInfo(
            "Loss", meaning="sum of the client's losses over the passes of the step, as the client scaled them"
        ),
        "train/passes": MetricInfo("Passes", "passes", "calls of forward_backward before the optimizer step"),
        **{name: ROLLOUT_METRICS[name] for name in OF_ROLLOUTS},
        **SAMPLER_METRICS,
        "train/advantages/mean": MetricInfo("Advantage", meaning="mean over the tokens learnt from, as sent"),
        "train/sampled_sequences": MetricInfo(
            "Sampled", "sequences", "drawn from the loop's own weights since the step before"
        ),
        "train/sampled_checksum": MetricInfo(
            "Checksum of samples", "", "equal where all answers to samplers of the step are, bit for bit"
        ),
        "train/samples_not_repeated": MetricInfo(
            "Samples taken over",
            "samples",
            "answers that a replay took from the record, since their weights are of a time before it began",
        ),
    }

    algorithm: Literal["client_loop"] = "client_loop"
    """Name of the algorithm."""
    adapter: ClientAdapter = Field(default_factory=ClientAdapter)
    """What is trained. ``policy.lora`` is what it lies in: the largest adapter that was served."""
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    """The engine that sampled."""
    records: Annotated[RecordingConfig, RESUMABLE] = Field(default_factory=RecordingConfig)
    """How many of the client's data are kept in ``records/``."""
    shuffle: bool = False
    """Steps come in their order."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        lora = self.policy.lora
        if lora is None or lora.rank < self.adapter.rank:
            has = "no adapter" if lora is None else f"rank {lora.rank}"
            fix = "set it to the rank of the server that the client used"
            yield ConfigIssue("policy.lora.rank", f"a rank of {self.adapter.rank} does not fit into {has}", fix)
        if self.cluster.uses_ray:
            yield ConfigIssue("cluster.launcher", "a loop is made again in one process", "set it to local")
        if self.shuffle:
            yield ConfigIssue("shuffle", "the steps of a loop have an order", "leave it out")
