"""The rollouts that a run keeps: how many of them, and to whom a trainer hands them over.

How they are written is the matter of a toolkit that offers ``open_records`` (``nemorl_cli.report.records``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nemorl.config.base import Config
from nemorl.types import Sample, Samples
from pydantic import Field

if TYPE_CHECKING:
    from nemorl_tensors import TokenBatch


class RecordingConfig(Config):
    """How many rollouts a run keeps in its folder ``records/``. Those of validation are kept whole.

    Example:
        >>> RecordingConfig(every=5, groups=2).around
        1
    """

    every: int = Field(1, ge=0)
    """Training steps between two of which some groups are kept; 0: only steps around validations are kept."""
    groups: int = Field(8, ge=1)
    """Groups kept of such a step, each whole, evenly spread over the batch."""
    around: int = Field(1, ge=0)
    """Training steps before each due validation, and as many after it, of which all groups are kept."""
    max_gib: float = Field(2.0, ge=0, le=1_048_576)
    """Size of the folder. Where it would be exceeded, every second step of those kept in part is dropped, and ``every``
    doubles: what is left is spread over the whole run. Where none is left, so is every second validation with the steps
    around it. 0: no records at all."""
    trainer_logprobs: bool = False
    """Record the trainer's log-probs of each token before the update and after it, also where the step needs neither:
    up to two more forward passes over the groups that are kept. Set it to look into a mismatch or a ratio."""
    print_completions: int = Field(0, ge=0, le=1000)
    """Responses shown in the terminal at each training step, of different groups; 0: none."""


class RolloutRecorder(Protocol):
    """Where a trainer hands over its rollouts."""

    def rollout(self, samples: Samples, split: str, step: int, began_s: float | None = None) -> None:
        """The samples of a step are scored. What trains follows in ``batch``.

        Args:
            samples: Groups contiguous and in prompt order.
            split: ``train`` or ``validation``.
            step: Of the run.
            began_s: When the step began, a moment of ``time.monotonic()``; times are kept relative to it. Unset: none
                are kept.
        """

    def rejected(self, group: Sequence[Sample], reason: str) -> None:
        """A group will not be trained on. Called from any thread."""

    def batch(self, samples: Samples, minibatches: Sequence[TokenBatch]) -> None:
        """The samples that the present step trains on, and the minibatches made of ``samples.sequences``, in order."""

    def updated(self) -> None:
        """The policy has learned from the batch."""

    def prompts(self, columns: Mapping[str, Sequence[Any]], step: int, rows: int) -> None:
        """What became of each prompt up to a step, in place of what was handed over before.

        Args:
            columns: Of equal length, as :func:`nemorl_rl.curriculum.table.prompt_table` makes them.
            step: The last of the run.
            rows: Prompts in the data.
        """

    def flush(self) -> None:
        """Return when all that was handed over is on disk, or cannot be written."""

    def close(self) -> None:
        """Write what is left."""


class NoRecorder:
    """Keeps nothing."""

    def rollout(self, samples: Samples, split: str, step: int, began_s: float | None = None) -> None: ...

    def rejected(self, group: Sequence[Sample], reason: str) -> None: ...

    def batch(self, samples: Samples, minibatches: Sequence[TokenBatch]) -> None: ...

    def updated(self) -> None: ...

    def prompts(self, columns: Mapping[str, Sequence[Any]], step: int, rows: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...
