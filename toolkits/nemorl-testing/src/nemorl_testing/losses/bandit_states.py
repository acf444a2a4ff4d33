"""Where the bandit's policy stands, and the batches that say to a loss which action is better.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from nemorl_tensors import TokenBatch
from torch import Tensor

from nemorl_testing.losses.bandit import (
    a_clip_lets_come_back,
    a_step_brings_values_nearer,
    a_step_raises_the_better_action,
    a_step_raises_the_better_value,
)
from nemorl_testing.losses.drawing import PAIRED, Shape

NEVER = -30.0
"""Logit of the prompt's token, which is no action."""
LOGITS = ((NEVER, 0.0, 0.0), (NEVER, -3.0, 0.0), (NEVER, 2.0, 0.0))
"""Of the prompt's token, the better action and the worse one: p(better) is 0.50, 0.05 and 0.88."""
TEACHER = (-4.0, -0.02, -4.0)
"""Log-probs of a teacher that prefers the better action."""
SIGNALS = frozenset({"advantages", "teacher_logprobs"})
"""Fields that say how good an action is."""


@dataclass(frozen=True)
class BanditState:
    """One call of a clause."""

    clause: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    why_not: str = ""
    """Why the clause says nothing of this loss."""


def bandit_states(loss: Any, shape: Shape) -> Iterator[BanditState]:
    """Calls of the clauses on signs, the simplest first."""
    if "returns" in shape.requires:
        for values in ((0.0, 0.0, 0.0), (0.0, 0.5, -0.5)):
            said = torch.tensor(values)
            yield BanditState(a_step_brings_values_nearer, (said, _batch(shape, said)))
        return
    if shape.is_value and shape.group == 2:
        for values in ((0.0, 0.0, 0.0), (0.0, -1.0, 1.0), (0.0, 1.0, -1.0)):
            said = torch.tensor(values)
            yield BanditState(a_step_raises_the_better_value, (said, _batch(shape, said)))
        return
    why_not = _unknown(shape)
    if why_not:
        yield BanditState(a_step_raises_the_better_action, why_not=why_not)
        return
    for logits in map(torch.tensor, LOGITS):
        yield BanditState(a_step_raises_the_better_action, (logits, _batch(shape, torch.log_softmax(logits, 0))))
    if {"advantages", "old_logprobs"} <= shape.requires:
        # The old policy is indifferent. Ratios of the better action: 1.76 and 0.24, and of the worse one the reverse.
        old = torch.log_softmax(torch.tensor([NEVER, 0.0, 0.0]), 0)
        right, wrong = torch.tensor([NEVER, 1.0, -1.0]), torch.tensor([NEVER, -1.0, 1.0])
        yield BanditState(a_clip_lets_come_back, (right, wrong, _batch(shape, old)))


def _unknown(shape: Shape) -> str:
    """Why it cannot be said to this loss what is better; empty where it can."""
    if shape.group > 2:
        return f"it compares {shape.group} rows, and which of them is better is not known"
    others = shape.requires.intersection(shape.of_example)
    is_told = shape.group == 2 or shape.requires & SIGNALS
    if others and not is_told:
        return f"which rows are better is said by {', '.join(sorted(others))}, whose meaning is not known"
    return ""


def _batch(shape: Shape, logprobs_V: Tensor) -> TokenBatch:
    """The better action and the worse one, as a policy with these log-probs sampled them; of imitation, the better."""
    is_compared = shape.group == 2 or shape.requires & (SIGNALS | {"returns"})
    actions = (1, 2) if is_compared else (1,)
    batch = TokenBatch.from_sequences(
        [[0, action] for action in actions],
        [[False, True]] * len(actions),
        loss_aggregation=shape.aggregations[0],
        sequences_per_group=shape.group,
    )
    fields = {name: value for name, value in _fields(logprobs_V, len(actions)).items() if name in shape.requires}
    if "candidate_ids" in shape.requires:
        fields["candidate_ids"] = torch.tensor([[1, 2]] * batch.num_tokens)
        fields["teacher_logprobs"] = torch.tensor([TEACHER[1:]] * batch.num_tokens)
        if "student_uncommon" in shape.requires:
            fields["candidate_ids"] = fields["candidate_ids"].repeat(1, 2)
    for name in set(shape.of_example) - fields.keys():
        assert shape.example is not None
        found = shape.example[name]
        if name in shape.example.token_fields:
            fields[name] = torch.cat([_like_the_example(shape, found, row) for row in range(len(actions))])
        else:
            fields[name] = found[: len(actions)]
    of_rows = {name: value for name, value in fields.items() if name in PAIRED or len(value) == len(actions)}
    of_tokens = {name: value for name, value in fields.items() if name not in of_rows}
    return batch.with_tokens(**of_tokens).with_sequences(**of_rows)


def _like_the_example(shape: Shape, found: Tensor, row: int) -> Tensor:
    """Prompt and action of a row with what the example says of a trained token of a row in the same place of its group:
    a loss may learn from one of a pair alone."""
    assert shape.example is not None
    mask, place = shape.example.mask, shape.example.sequence_ids % max(shape.group, 1)
    alike = found[mask & (place == row % max(shape.group, 1))]
    return (alike if len(alike) else found[mask])[:1].expand(2, *found.shape[1:])


def _fields(logprobs_V: Tensor, rows: int) -> Mapping[str, Tensor]:
    """Fields by name, of prompts and actions in turn."""
    of_actions = {
        **dict.fromkeys(("old_logprobs", "generation_logprobs", "reference_logprobs"), logprobs_V[1:].tolist()),
        "old_values": logprobs_V[1:].tolist(),
        "advantages": [1.0, -1.0],
        "returns": [1.0, -1.0],
        "teacher_logprobs": list(TEACHER[1:]),
        "teacher_weights": [1.0, 1.0],
        "positive_weights": [0.5, 0.0],
    }
    laid = {
        name: torch.tensor([value for one in told[:rows] for value in (0.0, one)]) for name, told in of_actions.items()
    }
    tokens = 2 * rows
    return {
        **laid,
        "reference_response_logprobs": logprobs_V[1 : 1 + rows].clone(),
        "margins": torch.zeros(rows),
        "teacher_ids": torch.zeros(tokens, 1, dtype=torch.int64),
        "student_uncommon": torch.zeros(tokens, 2, dtype=torch.bool),
        "teacher_uncommon": torch.full((tokens, 2), -math.inf),
    }
