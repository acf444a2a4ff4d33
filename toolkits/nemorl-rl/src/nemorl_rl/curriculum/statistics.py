"""What became of each prompt of a run: how often it was asked, what it earned, and how well it goes at present."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from nemorl.types import Sample


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the valid responses of one group earned together."""

    attempts: int
    passes: float
    """Sum of :func:`passed`."""
    rewards: float
    tokens: int
    """Prompt and responses, all that was trained on or could have been."""

    @classmethod
    def of(cls, group: Sequence[Sample]) -> Outcome | None:
        """Of a scored group; ``None`` where nobody could score any of its responses."""
        valid = [sample for sample in group if sample.score.valid]
        if not valid:
            return None
        passes, tokens = sum(map(passed, valid)), sum(sample.total_tokens for sample in valid)
        return cls(len(valid), passes, float(sum(sample.reward for sample in valid)), tokens)


def passed(sample: Sample) -> float:
    """1 or 0 where the environment says right or wrong; else the reward, clamped to 0 … 1."""
    correct = sample.score.correct
    return min(1.0, max(0.0, sample.reward if correct is None else float(correct)))


@dataclass(slots=True)
class PromptRecord:
    """One prompt that was asked. Sums are over its valid responses."""

    visits: int = 0
    """Groups."""
    attempts: int = 0
    passes: float = 0.0
    rewards: float = 0.0
    tokens: int = 0
    last_step: int = 0
    """The training step for which it was last asked."""
    first_pass_rate: float = 0.0
    """Of its first group: how hard it was for the policy that met it."""
    recent_attempts: float = 0.0
    """Attempts as of ``last_step``, older ones counting less."""
    recent_passes: float = 0.0

    @property
    def pass_rate(self) -> float:
        """Of recent attempts."""
        return self.recent_passes / self.recent_attempts


COLUMNS = tuple(field.name for field in fields(PromptRecord))


class PromptStatistics:
    """The records of the prompts that were asked, by row number of the data.

    Evidence fades as the policy changes: after ``half_life_steps`` training steps an attempt counts half, as in
    discounted Thompson sampling (arXiv:1707.09727), where all counts are multiplied by a factor in each round.

    Example:
        >>> statistics = PromptStatistics(half_life_steps=2)
        >>> statistics.add(7, Outcome(attempts=8, passes=6, rewards=6.0, tokens=80), step=1)
        >>> statistics.now = 3
        >>> statistics.evidence(7)  # 6 passes and 2 failures, two steps ago
        (3.0, 1.0)
    """

    def __init__(self, half_life_steps: float) -> None:
        self._half_life = half_life_steps
        self._records: dict[int, PromptRecord] = {}
        self.now = 0
        """The newest training step of which something is known."""
        self._attempts = self._tokens = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[tuple[int, PromptRecord]]:
        """(row, record), by row."""
        return iter(sorted(self._records.items()))

    def get(self, row: int) -> PromptRecord | None:
        """The record of a row; ``None`` where nothing is known of it."""
        return self._records.get(row)

    @property
    def mean_tokens(self) -> float:
        """Tokens of an attempt, over all prompts; 1 where there was none."""
        return self._tokens / self._attempts if self._attempts else 1.0

    def add(self, row: int, outcome: Outcome, step: int) -> None:
        """A group of this row was scored. ``step`` is the training step for which it was asked."""
        self.now = max(self.now, step)
        record = self._records.setdefault(row, PromptRecord(first_pass_rate=outcome.passes / outcome.attempts))
        kept = self._kept(step - record.last_step)
        record.visits += 1
        record.attempts += outcome.attempts
        record.passes += outcome.passes
        record.rewards += outcome.rewards
        record.tokens += outcome.tokens
        record.recent_attempts = kept * record.recent_attempts + outcome.attempts
        record.recent_passes = kept * record.recent_passes + outcome.passes
        record.last_step = max(record.last_step, step)
        self._attempts += outcome.attempts
        self._tokens += outcome.tokens

    def evidence(self, row: int) -> tuple[float, float]:
        """(passes, failures) of a row that count at present; zeros where nothing is known."""
        record = self._records.get(row)
        if record is None:
            return 0.0, 0.0
        kept = self._kept(self.now - record.last_step)
        return kept * record.recent_passes, kept * (record.recent_attempts - record.recent_passes)

    def _kept(self, steps: int) -> float:
        """The part of a count that is left after some steps."""
        return float(0.5 ** (max(0, steps) / self._half_life))

    def columns(self) -> dict[str, list[Any]]:
        """The records by row, column by column; ``row`` is the first."""
        records = [asdict(record) for _, record in self]
        return {"row": [row for row, _ in self], **{name: [record[name] for record in records] for name in COLUMNS}}

    def state_dict(self) -> dict[str, Any]:
        return {"now": self.now, **self.columns()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        values = zip(*(state[name] for name in COLUMNS), strict=True)
        self._records = {row: PromptRecord(*value) for row, value in zip(state["row"], values, strict=True)}
        self.now = int(state["now"])
        self._attempts = sum(record.attempts for record in self._records.values())
        self._tokens = sum(record.tokens for record in self._records.values())
