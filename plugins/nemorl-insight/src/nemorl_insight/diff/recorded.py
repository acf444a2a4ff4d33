"""The samples of a step as its record has them, to be learned from or scored again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nemorl.errors import UsageError
from nemorl.media import Media, shown_names
from nemorl.types import Branch, GenerationRequest, Sample, Samples, SamplingParams
from nemorl_cli.report.records.media_files import read_media
from nemorl_cli.report.records.reading import FOLDER, read_table, record_files
from nemorl_cli.report.records.samples import sample_of
from nemorl_rl.trainer import RolloutTrainer

from nemorl_insight.diff.replaying import Replay, is_asynchronous
from nemorl_insight.diff.run_files import RunFiles

if TYPE_CHECKING:
    from nemorl.metrics import Metric
    from nemorl.types import Row
    from nemorl_rl.serving.generation_policy import GenerationPolicy
    from nemorl_tensors import TokenBatch

SCORES = "prompt_logprobs"
"""The capability of engines that say log-probs of tokens which they did not sample."""


@dataclass(frozen=True)
class RecordedStep:
    """Training data of one step of a run."""

    rows: Sequence[Mapping[str, Any]]
    """Its records, in the order of the batch, without those of rejected groups."""
    media: Mapping[str, Media] = field(default_factory=dict)
    """Images and sounds that they show, by digest."""

    @classmethod
    def read(cls, run: RunFiles, step: int, trainer: RolloutTrainer[Any]) -> RecordedStep:
        """
        Raises:
            UsageError: some samples were not recorded, and says which setting keeps them; or a file is damaged, or an
                image gone.
        """
        files = record_files(run.path / FOLDER, split="train", step=step)
        try:
            rows = [row for file in files for row in read_table(file).to_pylist()]
        except (ValueError, OSError) as error:  # pyarrow's errors are both
            why = " ".join(str(error).split())
            raise UsageError(
                f"the records of step {step} of {run.path} cannot be read: {why}",
                fix="choose another step; `nemorl runs verify` looks at all of them",
            ) from error
        kept = [row for row in rows if not row["group_id"].endswith("r")]
        groups, size = trainer.batch_size, trainer.rollout_plan.samples_per_prompt
        if len(kept) < groups * size:
            otherwise = "" if is_asynchronous(run) else "; without --only the step is sampled again"
            raise UsageError(
                f"{run.path} recorded {len(kept)} of the {groups * size} samples of step {step}",
                fix=f"`records: {{every: 1, groups: {groups}}}` keeps all of them in the next run{otherwise}",
            )
        kept.sort(key=lambda row: (row["group"], int(row["sample_id"].rpartition("-")[2])))
        return cls(kept, read_media(run.path, (item for row in kept for item in row["media"] or ())))

    @property
    def samples(self) -> Samples:
        return Samples([sample_of(row, self.media) for row in self.rows])

    @property
    def references(self) -> list[Sequence[float] | None]:
        """The reference's log-probs of each token sequence."""
        return [sequence["reference_logprobs"] for row in self.rows for sequence in row["sequences"]]

    @property
    def versions(self) -> set[int]:
        """The steps whose weights sampled them."""
        return {version for row in self.rows for version in row["weight_versions"]}


class RecordedRollouts:
    """In the place of a trainer's buffer: its steps learn from what was recorded, and nothing is drawn from the data.

    The data's place, or the buffer's, stays that of the checkpoint: what follows these steps comes from a record too.
    """

    epoch = 0

    def __init__(self, trainer: RolloutTrainer[Any], steps: Mapping[int, RecordedStep], *, scores: bool) -> None:
        """
        Args:
            trainer: Whose steps these are.
            steps: By number.
            scores: The engine says the log-probs of the recorded tokens anew.
        """
        self._trainer, self._steps, self._scores = trainer, steps, scores
        self._state: Mapping[str, Any] = {}

    def next_batch(self) -> list[Row]:
        """Rows that nobody reads, as many as there are."""
        return [{} for _ in range(self._trainer.batch_size)]

    def collect(self) -> Samples:
        samples = self._steps[self._trainer.step].samples
        return rescored(samples, self._trainer.generation) if self._scores else samples

    def publish(self, version: int) -> None:
        """Nobody samples."""

    def metrics(self) -> dict[str, Metric]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = state


def with_recorded_reference(
    batch: TokenBatch, references: Sequence[Sequence[float] | None], replay: Replay
) -> TokenBatch:
    """The batch with the log-probs that the run's reference gave.

    Raises:
        UsageError: they were not recorded.
    """
    import torch

    values = [value for one in references if one is not None for value in one]
    if len(values) != batch.num_tokens:
        raise UsageError(
            f"{replay.run.path} recorded no log-probs of the reference at step {replay.step}, and the weights of a "
            "replay under another backend are not those of the reference",
            fix="replay step 1, or a run whose algorithm has no KL term",
        )
    return batch.with_tokens(reference_logprobs=torch.tensor(values, dtype=torch.float32))


def require_scores(trainer: RolloutTrainer[Any]) -> None:
    """
    Raises:
        UsageError: the engine cannot say log-probs of recorded tokens, or they are of another quantity.
    """
    generation = trainer.config.generation
    fix = "leave out --only: the engine then samples the step anew"
    if SCORES not in generation.backend.supports:
        raise UsageError("this engine gives no log-probs of tokens that it did not sample", fix=fix)
    if generation.temperature not in (0.0, 1.0):
        raise UsageError(
            f"the recorded log-probs are at temperature {generation.temperature}, an engine's of a prompt at 1", fix=fix
        )


def require_weights(replay: Replay, recorded: RecordedStep) -> None:
    """
    Raises:
        UsageError: other weights sampled the step than those that learned from it.
    """
    if others := recorded.versions - {replay.step - 1}:
        raise UsageError(
            f"step {replay.step} learned from samples of the weights of steps {', '.join(map(str, sorted(others)))}, "
            f"and an engine has those of step {replay.step - 1}",
            fix="give --only trainer",
        )


def rescored(samples: Samples, engine: GenerationPolicy) -> Samples:
    """The same tokens with the log-probs that an engine gives them."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=1, prompt_logprobs=True)
    requests = [
        GenerationRequest(part.token_ids, sampling, (0,), media=_shown(part.token_ids, part.media))
        for part in samples.sequences
    ]
    scores = (completions[0].prompt_logprobs for completions in engine.generate(requests))
    return Samples([_with_scores(sample, scores) for sample in samples])


def _shown(token_ids: Sequence[int], media: Sequence[Media]) -> tuple[Media, ...]:
    names = shown_names(token_ids) if media else ()
    return tuple(item for item in media if item.name in names)


def _with_scores(sample: Sample, scores: Iterator[tuple[float, ...]]) -> Sample:
    def of_policy(part: Sample | Branch) -> tuple[float, ...]:
        pairs = zip(next(scores), part.response_mask, strict=True)
        return tuple(value if is_own else 0.0 for value, is_own in pairs)

    scored = replace(sample, generation_logprobs=of_policy(sample))
    return replace(
        scored, branches=tuple(replace(part, generation_logprobs=of_policy(part)) for part in sample.branches)
    )
