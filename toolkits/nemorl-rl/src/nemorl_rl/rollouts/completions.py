"""Responses in the terminal while a run samples (``records.print_completions``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemorl.types import Prompt, Samples

if TYPE_CHECKING:
    from nemorl.trainer import BaseTrainer

SHOWN_CHARACTERS = 300
"""Of a prompt, and of a response: the beginning and the end."""


class Completions:
    """A hook object that shows some responses of each training step, of different groups where possible."""

    def __init__(self, count: int) -> None:
        """
        Args:
            count: Responses per step.
        """
        self._count = count

    def on_rollout_end(self, trainer: BaseTrainer[Any], step: int, samples: Samples) -> None:
        count = min(self._count, len(samples))
        for place in range(count):
            sample = samples[place * len(samples) // count]
            trainer.run.console.message(
                completion_text(
                    step,
                    shown_prompt(sample.prompt),
                    sample.response,
                    reward=sample.reward,
                    tokens=sample.response_tokens,
                    truncated=sample.truncated,
                )
            )


def shown_prompt(prompt: Prompt) -> str:
    """The text of a prompt, after its images and sounds in brackets."""
    if not prompt.media:
        return prompt.text
    from nemorl_media.labels import label_of

    return " ".join([*map(label_of, prompt.media), prompt.text])


def completion_text(
    step: int, prompt: str, response: str, *, reward: float, tokens: int, truncated: bool = False
) -> str:
    """A response and what became of it, in three lines.

    Example:
        >>> print(completion_text(3, "1+1=", "two", reward=0.5, tokens=1))
        step 3: reward 0.5, 1 tokens
          prompt    1+1=
          response  two
    """
    cut = ", cut off" if truncated else ""
    return (
        f"step {step}: reward {reward:.3g}, {tokens} tokens{cut}\n"
        f"  prompt    {_in_a_line(prompt)}\n  response  {_in_a_line(response)}"
    )


def _in_a_line(text: str) -> str:
    """The beginning and the end of a text, in one line: ``⏎`` stands for line ends."""
    line = " ".join(text.replace("\n", " ⏎ ").split())
    more, half = len(line) - SHOWN_CHARACTERS, SHOWN_CHARACTERS // 2
    return line if more <= 0 else f"{line[:half]} … {more} more characters … {line[-half:]}"
