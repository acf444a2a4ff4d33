"""A teacher with a tokenizer of its own: the student's text is written again in the teacher's tokens, and the two are
compared where a token of each begins at the same place of the text. There both continue the same text.

Of what they may continue it with, tokens of the same text are compared as themselves, and all others by rank (GOLD,
Patiño et al., "Unlocking On-Policy Distillation for Any Model Family", 2025; universal logit distillation,
arXiv:2402.12030). Differs from GOLD: where a stretch of text is one token here and several there, or several otherwise
cut, its first tokens are compared; GOLD compares one of its tokens, times the probabilities of the others.

# N = tokens of the student's batch, P = places that are compared, K = likeliest tokens of the teacher
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from nemorl.config import PolicyConfig
from nemorl.metrics import Mean
from nemorl.resources.policies import TrainingPolicy
from nemorl.types import Sample, Samples
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_tensors import KL_ESTIMATORS, TokenBatch
from torch import Tensor

from nemorl_distillation.teachers import Candidates, prompt_of
from nemorl_distillation.vocabulary import model_ids

UNKNOWN = -1
BROKEN = "\N{REPLACEMENT CHARACTER}"
"""The decoded text of part of a character."""


@dataclass(frozen=True)
class Side:
    """The text that both have read, in the tokens of one of them."""

    batch: TokenBatch
    places: Tensor
    """[P] tokens that begin where one of the other side begins, rising"""
    is_read: Tensor
    """[tokens of the batch] bool, True for those of responses whose text is in the other side's tokens, too"""

    def stretches(self, logprobs: Tensor) -> Tensor:
        """[P] log-probs of the text from each place up to the next, given those of tokens."""
        stretch = torch.searchsorted(self.places, torch.arange(len(logprobs)), right=True) - 1
        read = self.is_read & (stretch >= 0)
        return torch.zeros(len(self.places)).index_add_(0, stretch[read], logprobs[read])


@dataclass(frozen=True)
class OtherTokens:
    """A teacher with another tokenizer than the student's."""

    student: Tokenizer
    teacher: Tokenizer
    to_student: Tensor
    """[ids of the teacher] int64: the student's id of the same text, or ``UNKNOWN``"""
    lacks: Tensor
    """[ids of the student] bool: tokens that the teacher does not have"""

    @classmethod
    def between(cls, student: PolicyConfig, teacher: str) -> OtherTokens:
        """The reader for a student and a teacher, which is a name or folder."""
        own, other = Tokenizer.of(student), Tokenizer.load(teacher)
        lacks = torch.ones(model_ids(student.model_name), dtype=torch.bool)
        to_student = torch.full((model_ids(teacher),), UNKNOWN, dtype=torch.int64)
        known = token_texts(own, len(lacks))
        for text, token in token_texts(other, len(to_student)).items():
            to_student[token] = known.get(text, UNKNOWN)
        lacks[to_student[to_student != UNKNOWN]] = False
        return cls(own, other, to_student, lacks)

    def candidates(self, model: TrainingPolicy, samples: Samples, batch: TokenBatch, k: int) -> Candidates:
        own, theirs = self.meet(samples, batch)
        their_ids, their_logprobs = (found[theirs.places] for found in model.get_topk_logprobs(theirs.batch, k))
        own_ids_PK = self.to_student[their_ids]
        is_known = own_ids_PK != UNKNOWN
        ids = torch.zeros(batch.num_tokens, k, dtype=torch.int64)
        logprobs, uncommon = (torch.full(ids.shape, -torch.inf) for _ in range(2))
        ids[own.places] = torch.where(is_known, own_ids_PK, 0)
        logprobs[own.places] = torch.where(is_known, their_logprobs, -torch.inf)
        uncommon[own.places] = torch.where(is_known, -torch.inf, their_logprobs)
        compared = torch.zeros(batch.num_tokens, dtype=torch.bool)
        compared[own.places] = True
        return Candidates(ids, logprobs, uncommon, compared)

    def reverse_kl(self, model: TrainingPolicy, samples: Samples, batch: TokenBatch, student: Tensor) -> Mean:
        """That of the stretches of text between places, per token of the student."""
        own, theirs = self.meet(samples, batch)
        gaps = own.stretches(student), theirs.stretches(model.get_logprobs(theirs.batch))
        return Mean(float(KL_ESTIMATORS["k3"](*gaps).sum()), float(own.is_read.sum()))

    def meet(self, samples: Samples, batch: TokenBatch) -> tuple[Side, Side]:
        """The samples, of one response each, in the tokens of the student (as in ``batch``) and of the teacher."""
        written, masks, ours, theirs = [], [], _Places(), _Places()
        for sample, length in zip(samples, batch.lengths.tolist(), strict=True):
            prompt = prompt_of(sample.prompt.row, 0, self.teacher).token_ids
            response, places = self._response(sample)
            said = sum(sample.response_mask)
            # A model says nothing of a sequence's first token.
            asked = range(0 if prompt else 1, len(response))
            compared = [(own, other) for own, other in places if own < said and other in asked]
            begins = sample.response_mask.index(True) if said else length
            ours.add([own for own, _ in compared], places[-1][0], begins, length)
            theirs.add([other for _, other in compared], places[-1][1], len(prompt), len(prompt) + len(response))
            written.append([*prompt, *response])
            masks.append([False] * len(prompt) + [True] * len(response))
        rewritten = TokenBatch.from_sequences(written, masks, temperature=batch.temperature)
        return ours.side(batch), theirs.side(rewritten)

    def _response(self, sample: Sample) -> tuple[list[int], list[tuple[int, int]]]:
        """A response in the teacher's tokens, and where tokens of both begin: (the student's, the teacher's).

        The last place is the end of what both have read. A special token within a response has no text: what follows
        it is not written again, and the teacher's response ends there.
        """
        said = [token for token, own in zip(sample.token_ids, sample.response_mask, strict=True) if own]
        special = set(self.student.inner.all_special_ids)
        spoken = list(takewhile(lambda token: token not in special, said))
        text, own_places = beginnings(self.student, spoken)
        response = self.teacher.encode_observation(text)
        read, their_places = beginnings(self.teacher, response)
        same = _common_length(text, read)  # a tokenizer may not know a character, or write it in another way
        places = [(own_places[at], their_places[at]) for at in own_places if at <= same and at in their_places]
        end = sorted(self.teacher.stop_token_ids)[:1]  # always: where the student goes wrong, the teacher is asked, too
        is_ended = len(said) == len(spoken) + 1 and said[-1] in self.student.stop_token_ids
        if is_ended and end and places[-1] == (len(spoken), len(response)):
            places.append((len(said), len(response) + 1))
        return [*response, *end], places


class _Places:
    """The places of one side, sequence by sequence."""

    def __init__(self) -> None:
        self.tokens = 0
        self.places: list[int] = []
        self.is_read: list[bool] = []

    def add(self, places: Sequence[int], end: int, begins: int, length: int) -> None:
        """A sequence of ``length`` tokens whose response begins at ``begins`` and is read up to ``end``."""
        self.places += [self.tokens + begins + place for place in places]
        self.is_read += [begins <= at < begins + end for at in range(length)]
        self.tokens += length

    def side(self, batch: TokenBatch) -> Side:
        return Side(batch, torch.tensor(self.places, dtype=torch.int64), torch.tensor(self.is_read, dtype=torch.bool))


def beginnings(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[str, dict[int, int]]:
    """The text of tokens, and at which of its characters which token begins; at its end the one that would come next.

    A token that begins within a character, of which it is some bytes, is left out.
    """
    from tokenizers.decoders import DecodeStream

    stream, tokens = DecodeStream(skip_special_tokens=True), tokenizer.inner.backend_tokenizer
    text, found = "", {0: 0}
    for count, token in enumerate(token_ids, 1):
        piece = stream.step(tokens, token)
        if piece is not None:
            text += piece
            found[len(text)] = count
    return text, found


def token_texts(tokenizer: Tokenizer, count: int) -> dict[tuple[str, str], int]:
    """The first ``count`` ids of a tokenizer by what they stand for within a text: (kind, text).

    The token that ends a response is of a kind of its own, whatever it is called. Pieces of characters are told apart
    by their names in the vocabulary.
    """
    vocabulary = {name: token for name, token in tokenizer.inner.get_vocab().items() if token < count}
    special = set(tokenizer.inner.all_special_ids)
    before = tokenizer.encode_observation("1")[-1:]
    tokens = tokenizer.inner.backend_tokenizer
    ids = list(vocabulary.values())
    start = len(tokens.decode(before, skip_special_tokens=False))
    texts = tokens.decode_batch([[*before, token] for token in ids], skip_special_tokens=False)
    found: dict[tuple[str, str], int] = {}
    for name, token, text in zip(vocabulary, ids, texts, strict=True):
        if token in tokenizer.stop_token_ids:
            found["end", ""] = token
        elif token in special:
            found["special", name] = token
        elif BROKEN in text:
            found["bytes", name] = token
        else:
            found.setdefault(("text", text[start:]), token)
    return found


def _common_length(one: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
