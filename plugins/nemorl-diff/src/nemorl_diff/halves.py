"""The trainer of a replay: it stops after the step, and one of its halves may come from the record.

Halves: the sampler makes tokens and log-probs from weights, the trainer makes an update from samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.errors import UsageError
from nemorl.types import Branch, Prompt, Row, Sample, Samples, Score
from nemorl_base.checkpoints import Checkpoint
from nemorl_report.records.reading import FOLDER, read_table, record_files
from nemorl_rl.exporting import export_model
from nemorl_rl.rollouts import rollout_metrics
from nemorl_rl.trainer import RolloutTrainer

from nemorl_diff.replaying import Replay

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig
    from nemorl.metrics import Metrics
    from nemorl.trainer import BaseTrainer
    from nemorl_tensors import TokenBatch


class StopAfter:
    """A callback: the run ends after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer: BaseTrainer[Any], step: int, metrics: Mapping[str, float]) -> None:
        if step >= self._step:
            trainer.stop("replayed")


def trainer_for(config: RunConfig, replay: Replay) -> BaseTrainer[Any]:
    """The algorithm's trainer, which makes only the half of the step that is wanted.

    Raises:
        UsageError: it does not sample, or the other half was not recorded whole.
    """
    trainer: BaseTrainer[Any] = config.build()
    if replay.only is None:
        return trainer
    if not isinstance(trainer, RolloutTrainer):
        raise UsageError(f"{config.algorithm} does not sample: it has no halves", fix="leave out --only")
    base: Any = type(trainer)
    if replay.only == "sampler":

        class SamplerAlone(base):  # type: ignore[misc]
            """Samples at the step, and does not learn."""

            def train_step(self, rows: Sequence[Row]) -> Metrics:
                found: Metrics = (
                    rollout_metrics(self.collect(rows)) if self.step == replay.step else super().train_step(rows)
                )
                return found

        return SamplerAlone(config)  # type: ignore[no-any-return]
    samples, references = recorded_samples(replay, trainer)

    class TrainerAlone(base):  # type: ignore[misc]
        """Learns at the step from the samples of the record."""

        def collect(self, rows: Sequence[Row]) -> Samples:
            if self.step != replay.step:
                found: Samples = super().collect(rows)
                return found
            self.run.hooks.fire("on_rollout_end", trainer=self, step=self.step, samples=samples)
            self.recorder.rollout(samples, "train", self.step)
            return samples

        def with_reference_logprobs(self, batch: TokenBatch) -> TokenBatch:
            # The weights of a replay under another backend are those of the step, and its reference has them too.
            if self.step == replay.step and replay.is_foreign:
                return _with_recorded_reference(batch, references, replay)
            found: TokenBatch = super().with_reference_logprobs(batch)
            return found

    return TrainerAlone(config)  # type: ignore[no-any-return]


def recorded_samples(replay: Replay, trainer: RolloutTrainer[Any]) -> tuple[Samples, list[Sequence[float] | None]]:
    """The samples that the step learned from, and the reference's log-probs of each token sequence.

    Raises:
        UsageError: some were not recorded; says which setting keeps them.
    """
    files = record_files(replay.run.path / FOLDER, split="train", step=replay.step)
    rows = [row for file in files for row in read_table(file).to_pylist()]
    kept = [row for row in rows if not row["group_id"].endswith("r")]
    kept.sort(key=lambda row: (row["group"], int(row["sample_id"].rpartition("-")[2])))
    groups, size = trainer.batch_size, trainer.rollout_plan.samples_per_prompt
    if len(kept) < groups * size:
        raise UsageError(
            f"{replay.run.path} recorded {len(kept)} of the {groups * size} samples of step {replay.step}",
            fix=f"`records: {{every: 1, groups: {groups}}}` keeps all of them in the next run; "
            "without --only the step is sampled again",
        )
    references = [sequence["reference_logprobs"] for row in kept for sequence in row["sequences"]]
    return Samples([_sample(row) for row in kept]), references


def _sample(row: Mapping[str, Any]) -> Sample:
    first, *others = row["sequences"]
    prompt = Prompt(row["group"], row["prompt"], tuple(first["token_ids"][: row["prompt_tokens"]]), (), row["answer"])
    named = {
        column: {pair["name"]: pair["value"] for pair in row[column] or ()} for column in ("components", "metrics")
    }
    score = Score(row["reward"], named["components"], named["metrics"], row["correct"], row["given"], row["valid"])
    earned: dict[int, list[tuple[int, float]]] = {}
    for turn in row["turns"] or ():
        if turn["reward"] is not None:
            earned.setdefault(turn["sequence"], []).append((turn["stop"] - 1, turn["reward"]))
    branches = tuple(
        Branch(
            tuple(one["token_ids"]),
            tuple(one["mask"]),
            tuple(one["generation_logprobs"]),
            tuple(earned.get(number, ())),
        )
        for number, one in enumerate(others, start=1)
    )
    return Sample(
        prompt,
        tuple(first["token_ids"]),
        tuple(first["mask"]),
        tuple(first["generation_logprobs"]),
        score,
        row["response"],
        row["finish_reason"],
        row["num_turns"],
        tuple(row["weight_versions"]),
        tuple(earned.get(0, ())),
        branches,
    )


def _with_recorded_reference(
    batch: TokenBatch, references: Sequence[Sequence[float] | None], replay: Replay
) -> TokenBatch:
    import torch

    values = [value for one in references if one is not None for value in one]
    if len(values) != batch.num_tokens:
        raise UsageError(
            f"{replay.run.path} recorded no log-probs of the reference at step {replay.step}, and the weights of a "
            "replay under another backend are not those of the reference",
            fix="replay step 1, or a run whose algorithm has no KL term",
        )
    return batch.with_tokens(reference_logprobs=torch.tensor(values, dtype=torch.float32))


@dataclass(frozen=True)
class Foreign:
    """A callback that takes the run to where the replay begins, in a backend that did not write its checkpoint.

    The weights come as a Hugging Face folder, the counters and the place in the data from the checkpoint.
    """

    config: RunConfig
    state: Mapping[str, Any]

    @classmethod
    def prepare(cls, replay: Replay, config: RunConfig) -> Foreign:
        """Export the weights of the checkpoint.

        Raises:
            UsageError: the step needs more than them.
        """
        from nemorl.config.load import load_config

        begins = replay.begins_after
        if replay.step - begins > 1:
            raise UsageError(
                f"the checkpoint before step {replay.step} is that of step {begins}: the steps between need the "
                "optimizer's state, which another backend cannot read",
                fix=f"give --step {begins + 1}",
            )
        if config.needs_reference and replay.only is None:
            raise UsageError(
                "the reference is the run's first model, and a replay under another backend starts from the "
                "checkpoint's weights",
                fix="give --only trainer, which takes the reference's log-probs from the record, or --step 1",
            )
        folder = Path(f"{replay.folder}-weights")
        export_model(replay.run.path, folder, step=begins)
        data = replay.config().model_dump(mode="json")
        data["policy"] |= {"model_name": str(folder), "init": "pretrained", "lora": None}
        checkpoint = Checkpoint.read(replay.run.checkpoints[begins])
        return cls(load_config(data), checkpoint.read_state())

    def on_fit_begin(self, trainer: BaseTrainer[Any]) -> None:
        trainer.load_state_dict(self.state)
