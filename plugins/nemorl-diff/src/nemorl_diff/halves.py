"""The trainer of a replay: it stops after the step, and one of its halves may come from the record.

Halves: the sampler makes tokens and log-probs from weights, the trainer makes an update from samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.errors import UsageError
from nemorl.types import Row, Samples
from nemorl_base.checkpoints import Checkpoint
from nemorl_rl.exporting import export_model
from nemorl_rl.rollouts import rollout_metrics
from nemorl_rl.trainer import RolloutTrainer

from nemorl_diff.recorded import recorded_samples, require_scores, rescored, with_recorded_reference
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
    if replay.scores:
        require_scores(trainer)
    if replay.only == "sampler":

        class SamplerAlone(base):  # type: ignore[misc]
            """Samples at the step, or scores what was sampled, and does not learn."""

            def train_step(self, rows: Sequence[Row]) -> Metrics:
                if self.step != replay.step:
                    found: Metrics = super().train_step(rows)
                    return found
                return rollout_metrics(self.collect(rows))

            def collect(self, rows: Sequence[Row]) -> Samples:
                if self.step != replay.step or not replay.scores:
                    found: Samples = super().collect(rows)
                    return found
                samples = rescored(recorded_samples(replay, self)[0], self.generation)
                self.recorder.rollout(samples, "train", self.step)
                return samples

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
                return with_recorded_reference(batch, references, replay)
            found: TokenBatch = super().with_reference_logprobs(batch)
            return found

    return TrainerAlone(config)  # type: ignore[no-any-return]


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
