"""The trainer's requests to teachers: whose turn a response is, and what each says of it.

# N = tokens of the student's batch, S = teachers per token, K = likeliest tokens of one
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import DataError
from nemorl.metrics import Mean
from nemorl.resources.policies import TrainingPolicy
from nemorl.types import Prompt, Row, Sample, Samples, Score
from nemorl_rl.data.encoding import encode_row
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.rollouts.prompts import to_prompt
from nemorl_tensors import KL_ESTIMATORS, TokenBatch, masked_mean
from torch import Tensor

from nemorl_distillation.loss import FLOOR


@dataclass(frozen=True)
class Candidates:
    """The likeliest tokens of a teacher at each place, as the student numbers them."""

    ids: Tensor
    """[N, K] int64"""
    logprobs: Tensor
    """[N, K] float32 nats; -inf for a token that the student does not have, whose id means nothing"""
    uncommon: Tensor
    """[N, K] float32 nats of the tokens that the student does not have; -inf in all other slots"""
    compared: Tensor
    """[N] bool, places where the teacher was asked"""


class Reader(Protocol):
    """How a teacher reads what the student wrote."""

    @property
    def lacks(self) -> Tensor:
        """[ids of the student] bool: tokens that the teacher does not have."""

    def candidates(self, model: TrainingPolicy, samples: Samples, batch: TokenBatch, k: int) -> Candidates:
        """The teacher's ``k`` likeliest tokens at each place of ``batch``, which holds ``samples``."""

    def reverse_kl(self, model: TrainingPolicy, samples: Samples, batch: TokenBatch, student: Tensor) -> Mean:
        """k3 estimate of KL(student || teacher) in nats per token, from the student's log-probs [N]."""


@dataclass(frozen=True)
class SameTokens:
    """A teacher with the student's tokenizer: token ids are compared as they are."""

    student_ids: int
    """Token ids that the student has; a teacher of the same family may have more, as padding."""

    @property
    def lacks(self) -> Tensor:
        """[ids of the student] bool: none that matters."""
        return torch.zeros(self.student_ids, dtype=torch.bool)

    def candidates(self, model: TrainingPolicy, samples: Samples, batch: TokenBatch, k: int) -> Candidates:
        ids, logprobs = model.get_topk_logprobs(batch, k)
        is_known = ids < self.student_ids
        known = torch.where(is_known, ids, 0), torch.where(is_known, logprobs, -torch.inf)
        return Candidates(*known, torch.full(ids.shape, -torch.inf), torch.ones_like(batch.mask))

    def reverse_kl(self, model: TrainingPolicy, samples: Samples, batch: TokenBatch, student: Tensor) -> Mean:
        return masked_mean(KL_ESTIMATORS["k3"](student, model.get_logprobs(batch)), batch.mask)


@dataclass(frozen=True)
class Teacher:
    """One teacher of a run."""

    name: str
    weight: float
    role: str
    """Under which the run has its model."""
    reader: Reader


@dataclass(frozen=True)
class Turn:
    """The part of a batch that one teacher reads."""

    number: int
    """Of the teacher."""
    teacher: Teacher
    samples: Samples
    batch: TokenBatch
    tokens: Tensor
    """[N] bool, True for the tokens of the whole batch that are in this one"""


def turns(teachers: Sequence[Teacher], samples: Samples, batch: TokenBatch, column: str | None) -> Iterator[Turn]:
    """Which teacher reads which samples: all of them all, or each those whose row names it in ``column``.

    Raises:
        DataError: a row names none of the teachers.
    """
    if column is None:
        for number, teacher in enumerate(teachers):
            yield Turn(number, teacher, samples, batch, torch.ones_like(batch.mask))
        return
    asked = [_number_of(sample.prompt.row, column, teachers) for sample in samples]
    for number, teacher in enumerate(teachers):
        picked = [index for index, wanted in enumerate(asked) if wanted == number]
        if picked:
            tokens = torch.tensor([wanted == number for wanted in asked])[batch.sequence_ids]
            yield Turn(number, teacher, Samples([samples[index] for index in picked]), batch.select(picked), tokens)


def _number_of(row: Mapping[str, object], column: str, teachers: Sequence[Teacher]) -> int:
    names = [teacher.name for teacher in teachers]
    named = row.get(column)
    if named not in names:
        what = f"the row names {named!r}" if column in row else "the row has no such column"
        raise DataError(
            f"teacher_column {column!r}: {what}, the teachers are {', '.join(names)}",
            fix=(did_you_mean(str(named), names) if column in row else "")
            or "name one of the teachers in every row, of validation too, or leave teacher_column out",
        )
    return names.index(str(named))


def sampled_logprobs(asked: Iterable[tuple[Turn, TrainingPolicy]], num_tokens: int) -> tuple[Tensor, Tensor]:
    """[N] float32 nats of each token, the mean over the teachers that read it by their weights, and [N] their sum.

    Nobody reads a token of weight 0, whose log-prob is 0.
    """
    total, weights = torch.zeros(num_tokens), torch.zeros(num_tokens)
    for turn, model in asked:
        total[turn.tokens] += turn.teacher.weight * model.get_logprobs(turn.batch).clamp(min=FLOOR)
        weights[turn.tokens] += turn.teacher.weight
    return torch.where(weights > 0, total / weights, 0.0), weights


def given_count(fraction: float, batch_size: int, step: int) -> int:
    """How many of the rows of step ``step`` (1 is the first) use the dataset's response.

    Exact over many steps, whatever the batch size: 0.3 of batches of 2 is 0, 1, 0, 1, 1, …
    """
    return math.floor(fraction * batch_size * step) - math.floor(fraction * batch_size * (step - 1))


def prompt_of(row: Row, index: int, tokenizer: Tokenizer) -> Prompt:
    """A row as a task; unlike elsewhere its prompt may be empty text, where the response is all there is."""
    if row.get("prompt") == "":
        return Prompt(index, "", tuple(tokenizer.encode("")), row=row)
    return to_prompt(row, index, tokenizer)


def given_sample(row: Row, index: int, tokenizer: Tokenizer, limit: int) -> Sample:
    """A row's own response as a sample, cut after ``limit`` tokens. The token that ends it is learnt too.

    Raises:
        DataError: the row has no response, or its prompt alone fills the limit.
    """
    whole = encode_row(row, tokenizer, only_last_turn=True)
    ids, mask, media = whole.cut(limit)
    if not any(mask):
        raise DataError(
            f"the prompt of row {index} leaves no room for its response within {limit} tokens",
            fix="raise policy.max_sequence_tokens, or filter long prompts from the dataset",
        )
    return Sample(
        prompt=prompt_of(row, index, tokenizer),
        token_ids=tuple(ids),
        response_mask=tuple(mask),
        generation_logprobs=(0.0,) * len(ids),
        score=Score(0.0),
        response=tokenizer.decode([token for token, is_said in zip(ids, mask, strict=True) if is_said]),
        finish_reason="stop" if len(ids) == len(whole.ids) else "length",
        media=media,
    )
