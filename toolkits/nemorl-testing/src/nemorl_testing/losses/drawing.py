"""Drawn batches that a loss can read: fields with names that algorithms share, and others as in an example of theirs.

# N = tokens of all sequences concatenated, K = outputs of a token
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nemorl.errors import UsageError
from nemorl_tensors import LossAggregation, TokenBatch

from nemorl_testing.losses.cases import Case, Row, Value

K = 2
"""Candidates of a token, a third outcome being all others."""
PAIRED = frozenset({"margins", "reference_response_logprobs"})
"""Fields that only losses on pairs read."""
AGGREGATIONS: tuple[LossAggregation, ...] = ("token", "sequence", "sequence_sum")
MAX_ROWS, MAX_TOKENS = 4, 6
SPREADS = (0.0, 0.1, 0.6)
"""Nats between the policy and the one that sampled, from draw to draw: none, within the usual clips, and beyond."""

OfToken = Callable[["Draw", Any], Value]
"""A field's value of one token, given what the model says of it."""


@dataclass
class Draw:
    """What the numbers of one row have in common."""

    random: random.Random
    spread: float
    advantage: float
    old: float = 0.0
    """Old log-prob of the token at hand"""

    def near(self, value: float, spread: float) -> float:
        return round(value + self.random.gauss(0.0, spread), 2) if spread else value


def _old(draw: Draw, said: Any) -> float:
    draw.old = min(draw.near(said, draw.spread), -0.01)
    return draw.old


def _several(draw: Draw, said: Value, drawn: Callable[[Draw], float]) -> Value:
    return tuple(drawn(draw) for _ in range(K))


OF_TOKENS: Mapping[str, OfToken] = {
    "old_logprobs": _old,
    "generation_logprobs": lambda draw, said: min(draw.near(draw.old or said, draw.spread / 4), -0.01),
    "reference_logprobs": lambda draw, said: min(draw.near(said, 0.3), -0.01),
    "advantages": lambda draw, said: draw.advantage,
    "returns": lambda draw, said: draw.near(0.0, 1.0),
    "old_values": lambda draw, said: draw.near(said, draw.spread),
    "teacher_logprobs": lambda draw, said: (
        _probabilities(draw.random) if isinstance(said, tuple) else min(draw.near(said, 0.5), -0.01)
    ),
    "candidate_ids": lambda draw, said: tuple(range(1, len(said) + 1)),
    "teacher_ids": lambda draw, said: (0,),
    "teacher_weights": lambda draw, said: draw.random.choice((0.5, 1.0, 2.0)),
    "teacher_uncommon": partial(_several, drawn=lambda draw: draw.random.choice((-1.0, -2.0, -3.0))),
    "student_uncommon": partial(_several, drawn=lambda draw: draw.random.random() < 0.5),
    "positive_weights": lambda draw, said: 0.25 if draw.advantage > 0 else 0.0,
}
"""Token fields by name."""
OF_ROWS: Mapping[str, Callable[[Draw, Sequence[Any], int], float]] = {
    "reference_response_logprobs": lambda draw, said, group: draw.near(sum(said), 0.6),
    "margins": lambda draw, said, group: (0.0, 0.5, 1.0)[group % 3],
}
"""Sequence fields by name, given what is said of trained tokens and the number of the group."""
SIMPLE: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(("outputs", "old_logprobs", "generation_logprobs", "reference_logprobs"), (-1.0, -2.0)),
    **dict.fromkeys(("teacher_logprobs", "teacher_uncommon", "reference_response_logprobs"), (-1.0, -2.0)),
    "advantages": (1.0, -1.0, 0.0),
    "returns": (0.0, 1.0),
    "old_values": (0.0, 1.0),
    "teacher_weights": (1.0,),
    "margins": (0.0,),
}
"""Numbers that are tried in place of drawn ones, simplest first. Other fields are left as they are."""


@dataclass(frozen=True)
class Shape:
    """What a loss reads, and how its rows belong together."""

    requires: frozenset[str]
    group: int
    aggregations: tuple[LossAggregation, ...]
    is_value: bool
    """The model says values, not log-probs."""
    example: TokenBatch | None

    @classmethod
    def of(
        cls, loss: Any, *, group: int | None = None, is_value: bool = False, example: TokenBatch | None = None
    ) -> Shape:
        """
        Raises:
            UsageError: it reads a field that neither has a known name nor is in the example.
        """
        requires = frozenset(loss.requires)
        known = OF_TOKENS.keys() | OF_ROWS.keys()
        unknown = sorted(name for name in requires - known if example is None or name not in example)
        if unknown:
            what = f"{type(loss).__name__} reads {', '.join(unknown)}, and no rule says which numbers these may be"
            raise UsageError(what, fix="certify_loss(loss, example=batch), with a TokenBatch that has them")
        if group is None:
            group = example.sequences_per_group if example is not None else 2 if requires & PAIRED else 1
        paired: LossAggregation = example.loss_aggregation if example is not None else "sequence"
        levels = AGGREGATIONS if group == 1 else (paired,)
        return cls(requires, group, levels, is_value or "returns" in requires, example)

    @property
    def of_example(self) -> list[str]:
        """Fields that are drawn from the example: their names are not known, or mean something else there."""
        found = []
        for name in sorted(self.requires):
            if self.example is not None and name in self.example:
                known = OF_TOKENS if name in self.example.token_fields else OF_ROWS
                if name not in known or self.example[name].ndim > 1:
                    found.append(name)
        return found

    @property
    def width(self) -> int:
        """Outputs of a token, 0 where that is one number: candidates, the student's own behind the teacher's."""
        if "candidate_ids" not in self.requires:
            return 0
        if "candidate_ids" in self.of_example and self.example is not None:
            return self.example["candidate_ids"].shape[1]
        return 2 * K if "student_uncommon" in self.requires else K


def draw_cases(shape: Shape, count: int, seed: int = 0) -> Iterator[Case]:
    """Batches of a few rows, one of which now and then trains nothing."""
    for number in range(count):
        draw = random.Random(1000 * seed + number)
        groups = 2 + number % (MAX_ROWS - 1)
        rows: list[Row] = []
        for group in range(groups):
            is_trained = group == 0 or draw.random() < 0.85
            shared = draw.sample(range(3), 2)
            for member in range(shape.group):
                rows.append(_row(shape, draw, number, group, member, shared, is_trained))
        yield Case(tuple(rows), shape.group, shape.aggregations[number % len(shape.aggregations)])


def _row(
    shape: Shape, source: random.Random, number: int, group: int, member: int, prompt: list[int], is_trained: bool
) -> Row:
    length = source.randint(2, MAX_TOKENS)
    prompt_tokens = source.randint(1, min(2, length - 1))
    ids = [*prompt[:prompt_tokens], *(source.randrange(4) for _ in range(length - prompt_tokens))]
    mask = [False] * prompt_tokens + [is_trained] * (length - prompt_tokens)
    if is_trained and length - prompt_tokens > 2 and source.random() < 0.3:
        mask[prompt_tokens + 1] = False  # what a tool said
    advantage = source.choice((1.0, -1.0, 0.5, -2.0, 0.0) if number % 3 else (1.0, -1.0, 0.5))
    draw = Draw(source, SPREADS[number % len(SPREADS)], advantage)
    said = tuple(_said(shape, source, draw) if keep else _nothing(_said(shape, source, draw)) for keep in mask)
    tokens, sequence = _fields(shape, draw, mask, said, group, member)
    return Row(tuple(ids), tuple(mask), said, tokens, sequence)


def _said(shape: Shape, source: random.Random, draw: Draw) -> Value:
    if shape.width:
        return _probabilities(source, shape.width)
    return draw.near(0.0, 1.0) if shape.is_value else round(source.uniform(-3.0, -0.05), 2)


def _probabilities(source: random.Random, width: int = K) -> tuple[float, ...]:
    """Log-probs of some outcomes, one being left."""
    logits = [source.gauss(0.0, 1.0) for _ in range(width + 1)]
    total = math.log(sum(map(math.exp, logits)))
    return tuple(round(logit - total, 2) for logit in logits[:width])


def _nothing(value: Any) -> Any:
    """Of the same form, zeros: what masked slots hold."""
    return tuple(map(_nothing, value)) if isinstance(value, tuple) else type(value)(0)


def _fields(
    shape: Shape, draw: Draw, mask: Sequence[bool], said: Sequence[Any], group: int, member: int
) -> tuple[dict[str, tuple[Value, ...]], dict[str, float]]:
    tokens: dict[str, list[Value]] = {}
    own = shape.requires.difference(shape.of_example)
    for keep, value in zip(mask, said, strict=True):
        draw.old = 0.0
        for name in filter(own.__contains__, OF_TOKENS):  # in this order: the sampler is near the old policy
            drawn = OF_TOKENS[name](draw, value)
            tokens.setdefault(name, []).append(drawn if keep else _nothing(drawn))
    trained = [value for keep, value in zip(mask, said, strict=True) if keep]
    sequence = {name: OF_ROWS[name](draw, trained, group) for name in OF_ROWS if name in own}
    if shape.of_example:
        more, of_row = _of_example(shape, draw.random, mask, group, member)
        tokens |= more
        sequence |= of_row
    return {name: tuple(values) for name, values in tokens.items()}, sequence


def _of_example(
    shape: Shape, source: random.Random, mask: Sequence[bool], group: int, member: int
) -> tuple[dict[str, list[Value]], dict[str, float]]:
    """Fields of one of the example's rows, of one group for all rows of a group; of its trained tokens in any order."""
    example = shape.example
    assert example is not None
    count = len(example) // shape.group
    taken = (group % count) * shape.group + member
    start = int(example.lengths[:taken].sum())
    places = [start + i for i in range(int(example.lengths[taken])) if example.mask[start + i]]
    places = places or example.mask.nonzero().flatten().tolist()
    picked = [source.choice(places) for _ in mask]
    tokens, sequence = {}, {}
    for name in shape.of_example:
        if name in example.sequence_fields:
            sequence[name] = example[name][taken].item()
            continue
        values = [tuple(one) if isinstance(one, list) else one for one in example[name][picked].tolist()]
        tokens[name] = [value if keep else _nothing(value) for keep, value in zip(mask, values, strict=True)]
    return tokens, sequence
