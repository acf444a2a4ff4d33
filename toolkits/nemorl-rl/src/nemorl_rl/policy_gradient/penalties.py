"""Penalties on single messages: a turn with a broken tool call or broken think tags gets an advantage of its own.

The rest of the episode keeps its advantage, so that a policy is not taught that the right answer was wrong. Turns are
the runs of sampled tokens of a sample; their text is decoded with its special tokens, which many models' tags are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from nemorl.config import Config
from nemorl.errors import ConfigIssue
from nemorl.metrics import Mean, Metric
from nemorl.types import Sample, Samples
from pydantic import Field

from nemorl_rl.rollouts.messages import Turn, turns, without_calls

if TYPE_CHECKING:
    from nemorl_tensors import TokenBatch

Fault = Literal["invalid_tool_call", "malformed_thinking"]


class LowEffort(Config):
    """A reward that falls with the length of the answer, for prompts that ask for little effort.

    Example:
        >>> LowEffort(phrase="{effort: low}", weight=0.5).max_tokens
        64000
    """

    phrase: str = Field(min_length=1)
    """What a user's last message holds where it asks for little effort. Other prompts are left alone."""
    weight: float = Field(gt=0)
    """The bonus of an empty answer, as a share of its reward; it falls linearly with each token, and counts up to 1."""
    max_tokens: int = Field(64_000, ge=1)
    """Tokens of the last answer at which the bonus is 0; below 0 it is a punishment."""
    penalty: float = Field(1.0, ge=0)
    """Factor of the punishment, which does not depend on the reward."""


class MessagePenalties(Config):
    """Advantages of the tokens of faulty messages, in place of their own; NeMo RL's keys of these names.

    Example:
        >>> MessagePenalties(malformed_thinking_advantage=-5.0).thinking_tags
        ('<think>', '</think>')
    """

    invalid_tool_call_advantage: float | None = Field(None, le=0, allow_inf_nan=False)
    """Of a message with a tool-call tag outside a whole call, which is a JSON object with a ``name`` between two tags.
    NeMo RL's recipes use -5. Unset: such messages keep theirs."""
    malformed_thinking_advantage: float | None = Field(None, le=0, allow_inf_nan=False)
    """Of a message whose think tags are not one pair around what it begins with, or the end of one that the prompt
    opened. Unset: such messages keep theirs."""
    tool_call_tags: tuple[str, ...] = ("tool_call", "function_call")
    """Elements that tool calls are written in."""
    thinking_tags: tuple[str, str] = ("<think>", "</think>")
    """Tags that open and close reasoning."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.invalid_tool_call_advantage is None and self.malformed_thinking_advantage is None:
            yield ConfigIssue(
                "invalid_tool_call_advantage",
                "no message is penalised",
                "set this or malformed_thinking_advantage, e.g. -5",
            )

    @property
    def advantages(self) -> dict[Fault, float]:
        """The faults that are looked for, and what their messages get."""
        asked: dict[Fault, float | None] = {
            "invalid_tool_call": self.invalid_tool_call_advantage,
            "malformed_thinking": self.malformed_thinking_advantage,
        }
        return {fault: advantage for fault, advantage in asked.items() if advantage is not None}


def has_invalid_tool_call(text: str, tags: Sequence[str]) -> bool:
    """A tag of a tool call stands in the text outside any whole call.

    Example:
        >>> call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
        >>> has_invalid_tool_call(call, ["tool_call"]), has_invalid_tool_call(call[:-1], ["tool_call"])
        (False, True)
    """
    for tag in tags:
        rest = without_calls(text, tag)
        if f"<{tag}>" in rest or f"</{tag}>" in rest:
            return True
    return False


def has_malformed_thinking(text: str, before: str, tags: tuple[str, str], *, is_cut: bool) -> bool:
    """The think tags of a message are not as they should be.

    Args:
        text: The message.
        before: What it answers; a think tag that is open at its end is the message's.
        tags: What opens and closes reasoning.
        is_cut: The message was ended by the token limit, so it need not have closed what is open.

    Example:
        >>> tags = ("<think>", "</think>")
        >>> has_malformed_thinking("<think>so</think>4", "2+2?", tags, is_cut=False)
        False
        >>> has_malformed_thinking("so</think>4</think>", "2+2?<think>", tags, is_cut=False)
        True
    """
    opening, closing = tags
    opened, closed = text.count(opening), text.count(closing)
    if before.count(opening) > before.count(closing):
        return opened > 0 or closed > 1 or (closed == 0 and not is_cut)
    if opened == closed == 0:
        return False
    in_order = text.lstrip().startswith(opening) and opened == 1
    return not in_order or closed > 1 or (closed == 0 and not is_cut)


@dataclass(frozen=True)
class PenaliseMessages:
    """The advantages of faulty messages overwritten; with ``invalid_tool_call_rate`` and ``malformed_thinking_rate``,
    the shares of all messages.

    Example:
        >>> from nemorl.types import Prompt, Sample, Samples, Score
        >>> from nemorl_tensors import TokenBatch
        >>> sample = Sample(Prompt(0, "?", (1,)), (1, 2), (False, True), (0.0, -1.0), Score(1.0), "", "stop")
        >>> batch = TokenBatch.from_samples(Samples([sample]), [1.0])
        >>> penalise = PenaliseMessages(MessagePenalties(malformed_thinking_advantage=-5.0), lambda ids: "</think>")
        >>> changed, _ = penalise(batch, Samples([sample]))
        >>> changed["advantages"].tolist()
        [1.0, -5.0]
    """

    requires: ClassVar[frozenset[str]] = frozenset({"advantages"})

    penalties: MessagePenalties
    """Which faults get which advantage. A message with both gets that of the tool call."""
    decode: Callable[[Sequence[int]], str]
    """Tokens to text, special tokens included."""

    def __call__(self, batch: TokenBatch, samples: Samples) -> tuple[TokenBatch, dict[str, Metric]]:
        advantages = batch["advantages"].clone()
        faults: list[Fault | None] = []
        start = 0
        for sample in samples.sequences:
            for turn in turns(sample):
                fault = _fault(sample, turn, self.penalties, self.decode)
                faults.append(fault)
                if fault is not None:
                    advantages[start + turn.begin : start + turn.end] = self.penalties.advantages[fault]
            start += len(sample.token_ids)
        rates: dict[str, Metric] = {
            "invalid_tool_call_rate": Mean.of(float(fault == "invalid_tool_call") for fault in faults),
            "malformed_thinking_rate": Mean.of(float(fault == "malformed_thinking") for fault in faults),
        }
        return batch.with_tokens(advantages=advantages), rates


def _fault(
    sample: Sample, turn: Turn, penalties: MessagePenalties, decode: Callable[[Sequence[int]], str]
) -> Fault | None:
    text = decode(sample.token_ids[turn.begin : turn.end])
    if "invalid_tool_call" in penalties.advantages and has_invalid_tool_call(text, penalties.tool_call_tags):
        return "invalid_tool_call"
    if "malformed_thinking" in penalties.advantages:
        before = decode(sample.token_ids[turn.context : turn.begin])
        is_cut = sample.truncated and turn.end == len(sample.token_ids)
        if has_malformed_thinking(text, before, penalties.thinking_tags, is_cut=is_cut):
            return "malformed_thinking"
    return None
