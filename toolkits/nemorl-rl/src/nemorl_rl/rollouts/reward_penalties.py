"""Episodes whose reward becomes 0 for how they are written: NeMo RL's ``reward_penalties``.

Judged once, where an episode ends, so that advantages, dynamic sampling, validation and records see the same reward.
``message_penalties`` of an algorithm are another thing: they lower the advantage of single messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nemorl.config import Config
from nemorl.errors import ConfigIssue, UsageError
from nemorl.types import Sample

from nemorl_rl.rollouts.messages import parts, turns
from nemorl_rl.rollouts.outcomes import rescored

if TYPE_CHECKING:
    from nemorl_rl.data.tokenizer import Tokenizer

Fault = Literal["duplicated_reasoning", "empty_final_answer", "unwanted_token", "malformed_think_tag"]


class RewardPenalties(Config):
    """Faults for which an episode earns 0, whatever its environment says, as ``reward_penalties`` of NeMo RL.

    Example:
        >>> RewardPenalties(empty_final_answer=True, unwanted_tokens=[2]).thinking_tags
        ('<think>', '</think>')
    """

    duplicated_reasoning: bool = False
    """A message says as its answer what it said as its reasoning, word for word."""
    empty_final_answer: bool = False
    """The last message has no answer and calls no tool."""
    malformed_think_tag: bool = False
    """A message opens reasoning, or closes it twice. Where the tags are tokens: also one that does not close what its
    prompt opened, be it for the token limit, or closes what nobody opened."""
    unwanted_tokens: tuple[int, ...] = ()
    """Token ids that the policy must not write."""
    think_open_id: int | None = None
    """The token that opens reasoning. Unset: that of ``thinking_tags``, if it is a single one."""
    think_close_id: int | None = None
    """The token that closes it. Unset: likewise."""
    thinking_tags: tuple[str, str] = ("<think>", "</think>")
    """Tags that open and close reasoning."""
    tool_call_tags: tuple[str, ...] = ("tool_call", "function_call")
    """Elements that tool calls are written in."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        faults = (self.duplicated_reasoning, self.empty_final_answer, self.malformed_think_tag, self.unwanted_tokens)
        if not any(faults):
            fix = "set one of the faults, e.g. empty_final_answer: true"
            yield ConfigIssue("empty_final_answer", "no episode is penalised", fix)


@dataclass(frozen=True)
class PenaliseEpisodes:
    """Gives faulty episodes the reward 0; ``metrics`` of their scores name the faults.

    Example:
        >>> from nemorl.types import Prompt, Score
        >>> texts = {1: "2+2?<think>", 2: "4", 3: "</think>", 4: "<eos>"}
        >>> penalise = PenaliseEpisodes(RewardPenalties(duplicated_reasoning=True, empty_final_answer=True),
        ...                             lambda ids: "".join(texts[i] for i in ids), frozenset({4}))
        >>> tokens, mask = (1, 2, 3, 2, 4), (False, True, True, True, True)
        >>> sample = Sample(Prompt(0, "?", (1,)), tokens, mask, (0.0,) * 5, Score(1.0), "", "stop")
        >>> penalise(sample).score.metrics, penalise(sample).reward
        ({'duplicated_reasoning': 1.0}, 0.0)
    """

    penalties: RewardPenalties
    decode: Callable[[Sequence[int]], str]
    """Tokens to text, special tokens included."""
    special_ids: frozenset[int] = frozenset()
    """Tokens that are no text; they end messages."""
    think_ids: tuple[int, int] | None = None
    """The tokens that open and close reasoning, where each is one."""

    @classmethod
    def of(cls, penalties: RewardPenalties, tokenizer: Tokenizer) -> PenaliseEpisodes:
        """
        Raises:
            UsageError: one of the two think tags is a token and the other is not.
        """
        given = (penalties.think_open_id, penalties.think_close_id)
        ids = [
            _single(tokenizer, tag) if each is None else each
            for each, tag in zip(given, penalties.thinking_tags, strict=True)
        ]
        if None in ids and given != (None, None):
            raise UsageError(
                f"reward_penalties knows one think token only: {penalties.thinking_tags} are {ids}",
                fix="set both think_open_id and think_close_id, or neither",
            )
        known = None if ids[0] is None or ids[1] is None else (ids[0], ids[1])
        return cls(penalties, tokenizer.inner.decode, frozenset(tokenizer.inner.all_special_ids), known)

    def __call__(self, sample: Sample) -> Sample:
        faults = sorted(set(self.faults(sample))) if sample.score.valid else []
        if not faults:
            return sample
        metrics = {**sample.score.metrics, **{str(fault): 1.0 for fault in faults}}
        return rescored(sample, 0.0, components=dict.fromkeys(sample.score.components, 0.0), metrics=metrics)

    def faults(self, sample: Sample) -> Iterator[Fault]:
        """Those that are looked for, of each message."""
        asked, found = self.penalties, None
        for sequence in sample.sequences:
            for turn in turns(sequence):
                context, ids = (
                    sequence.token_ids[a:b] for a, b in ((turn.context, turn.begin), (turn.begin, turn.end))
                )
                if not set(asked.unwanted_tokens).isdisjoint(ids):
                    yield "unwanted_token"
                if asked.malformed_think_tag and self._is_malformed(context, ids):
                    yield "malformed_think_tag"
                if asked.duplicated_reasoning or asked.empty_final_answer:
                    found = self._parts(context, ids)
                    if asked.duplicated_reasoning and found[1].strip() and found[0].strip() == found[1].strip():
                        yield "duplicated_reasoning"
        if asked.empty_final_answer and found is not None and not found[1].strip() and not found[2]:
            yield "empty_final_answer"

    def _parts(self, context: Sequence[int], ids: Sequence[int]) -> tuple[str, str, bool]:
        end = len(ids)
        while end and ids[end - 1] in self.special_ids and ids[end - 1] not in (self.think_ids or ()):
            end -= 1
        tags = self.penalties.thinking_tags
        before = self.decode(context)
        is_open = before.count(tags[0]) > before.count(tags[1])
        return parts(self.decode(ids[:end]), tags, self.penalties.tool_call_tags, is_open=is_open)

    def _is_malformed(self, context: Sequence[int], ids: Sequence[int]) -> bool:
        opening, closing = self.penalties.thinking_tags
        text = self.decode(ids)
        if opening in text or text.count(closing) > 1:
            return True
        if self.think_ids is None:
            return False
        opened, closed = map(list(context).count, self.think_ids)
        written = tuple(map(list(ids).count, self.think_ids))
        return opened - closed not in (0, 1) or written != (0, opened - closed)


def _single(tokenizer: Tokenizer, tag: str) -> int | None:
    ids = tokenizer.encode_observation(tag)
    return ids[0] if len(ids) == 1 else None
