"""The trainer of a replay: it stops after the step, and one of its halves may come from the record.

Halves: the sampler makes tokens and log-probs from weights, the trainer makes an update from samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.base.files.checkpoints import Checkpoint
from nemorl.errors import UsageError
from nemorl.types import Row
from nemorl_rl.models.exporting import export_model
from nemorl_rl.rollouts.engine import rollout_metrics
from nemorl_rl.trainer import RolloutTrainer

from nemorl_insight.diff.recorded import (
    RecordedRollouts,
    RecordedStep,
    require_scores,
    require_weights,
    with_recorded_reference,
)
from nemorl_insight.diff.replaying import Replay, is_asynchronous
from nemorl_insight.diff.run_files import RunFiles

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
    if replay.half is None:
        return trainer
    if not isinstance(trainer, RolloutTrainer):
        raise UsageError(f"{config.algorithm} does not sample: it has no halves", fix="leave out --only")
    base: Any = type(trainer)
    if replay.half == "sampler":

        class SamplerAlone(base):  # type: ignore[misc]
            """Does not learn."""

            def train_step(self, rows: Sequence[Row]) -> Metrics:
                return rollout_metrics(self.collect(rows))

        if not replay.scores:
            return SamplerAlone(config)  # type: ignore[no-any-return]
        require_scores(trainer)
        recorded = RecordedStep.read(replay.run, replay.step, trainer)
        require_weights(replay, recorded)
        return learning_from(SamplerAlone, config, {replay.step: recorded}, scores=True)
    recorded = RecordedStep.read(replay.run, replay.step, trainer)

    class TrainerAlone(base):  # type: ignore[misc]
        """Takes what the reference says from the record, where its own is another model."""

        def with_reference_logprobs(self, batch: TokenBatch) -> TokenBatch:
            # The weights of a replay under another backend are those of the step, and its reference has them too.
            if replay.is_foreign:
                return with_recorded_reference(batch, recorded.references, replay)
            found: TokenBatch = super().with_reference_logprobs(batch)
            return found

    return learning_from(TrainerAlone, config, {replay.step: recorded})


def trainer_before(config: RunConfig, replay: Replay) -> BaseTrainer[Any]:
    """The trainer of the steps between the checkpoint and the step: as the run made them.

    Where only the trainer's half is made again, they learn from the record, if it has them whole.

    Raises:
        UsageError: it has not, and they cannot be sampled again, as rollouts ran ahead of training.
    """
    trainer: BaseTrainer[Any] = config.build()
    if not isinstance(trainer, RolloutTrainer) or (replay.half != "trainer" and not is_asynchronous(replay.run)):
        return trainer
    try:
        steps = {step: RecordedStep.read(replay.run, step, trainer) for step in replay.steps_before}
    except UsageError:
        if is_asynchronous(replay.run):
            raise
        return trainer
    return learning_from(type(trainer), config, steps)


def learning_from(
    base: Any, config: RunConfig, steps: Mapping[int, RecordedStep], *, scores: bool = False
) -> BaseTrainer[Any]:
    """A trainer whose samples come from a record."""

    class Recorded(base):  # type: ignore[misc]
        """Has the record in the place of a buffer."""

        def new_buffer(self) -> Any:
            return RecordedRollouts(self, steps, scores=scores)

    return Recorded(config)  # type: ignore[no-any-return]


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

        if config.needs_reference and replay.half is None:
            raise UsageError(
                "the reference is the run's first model, and a replay under another backend starts from the "
                "checkpoint's weights",
                fix="give --only trainer, which takes the reference's log-probs from the record, or --step 1",
            )
        folder = Path(f"{replay.folder}-weights")
        origin = RunFiles.of(replay.folder_before) if replay.steps_before else replay.run
        export_model(origin.path, folder, step=replay.step - 1)
        data = config.model_dump(mode="json")
        data["policy"] |= {"model_name": str(folder), "init": "pretrained", "lora": None}
        checkpoint = Checkpoint.read(origin.checkpoints[replay.step - 1])
        return cls(load_config(data), checkpoint.read_state())

    def on_fit_begin(self, trainer: BaseTrainer[Any]) -> None:
        trainer.load_state_dict(self.state)
