"""What a step learned from, and how far it came: metrics and records, from its requests and their answers.

# n = positions of one datum, N = tokens of all sequences
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import torch
from nemorl.metrics import Last, Mean, Metric, Sum
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_tensors import TokenBatch
from nemorl_tensors.mismatch import mismatch_metrics
from torch import Tensor

from nemorl_agents.tinker.flight.operations import Operation
from nemorl_agents.tinker.models import Datum
from nemorl_agents.tinker.wire.bodies import OptimStep, body_of
from nemorl_agents.tinker.wire.data import pass_body
from nemorl_agents.tinker.wire.messages import messages
from nemorl_agents.tinker.wire.outputs import decoded_pass

Decode = Callable[[Sequence[int]], str]
CHECKSUM_BYTES = 6
"""A number of so many bytes is exact as a float"""


@dataclass(frozen=True)
class Learned:
    """A step."""

    samples: Samples
    """Its data as episodes. Clients send advantages and no rewards: the reward of one is its mean advantage, or where
    there are none the mean log-prob of its tokens in nats."""
    batch: TokenBatch
    """The same as sequences, with ``old_logprobs``, ``loss_weights`` and, where they were sent, ``advantages``."""
    metrics: dict[str, Metric]


@dataclass(frozen=True)
class _Sequence:
    """A datum, with the token that its last position predicts."""

    token_ids: tuple[int, ...]
    """[n + 1]"""
    mask: Tensor
    """[n + 1] bool: tokens that are learnt from; with K targets at a position, from any of them"""
    logprobs: Tensor
    """[n + 1] the trainer's, in the pass that learned from it"""
    weights: Tensor
    """[n + 1] float32: of ``cross_entropy``, of the first of K targets; 1 at learnt tokens of other losses"""
    advantages: Tensor | None
    sampler: Tensor | None
    """[n + 1] log-probs that the client sent"""

    @property
    def start(self) -> int:
        """The first token that is learnt from."""
        return int(self.mask.int().argmax()) if bool(self.mask.any()) else len(self.token_ids)

    @property
    def reward(self) -> float:
        values = self.logprobs if self.advantages is None else self.advantages
        return float(values[self.mask].mean()) if bool(self.mask.any()) else 0.0


def learned(operations: Sequence[Operation], step: int, decode: Decode) -> Learned:
    """
    Args:
        operations: Of the step, the optimizer's last.
        step: Its number.
        decode: Token ids to text.
    """
    sequences, losses = _passes(operations)
    adam = body_of(OptimStep, operations[-1].body).adam()
    stepped: dict[str, float] = json.loads(operations[-1].answer)["metrics"]
    samples, order = _episodes(sequences, step, decode)
    batch = _batch([sequences[number] for number in order])
    count = len(sequences)
    metrics: dict[str, Metric] = {
        **{name: Last(value) for name, value in stepped.items()},
        "loss": Sum.of(losses),
        "lr": Last(adam.lr),
        "passes": Sum(len(losses)),
        "num_samples": Sum(count),
        "total_num_tokens": Sum(batch.num_tokens),
        "mean_total_tokens_per_sample": Mean(batch.num_tokens, count),
        "mean_gen_tokens_per_sample": Mean(int(batch.mask.sum()), count),
        **sampled_metrics(operations),
    }
    if "advantages" in batch and "generation_logprobs" in batch:
        metrics["advantages/mean"] = Mean(float(batch["advantages"][batch.mask].double().sum()), int(batch.mask.sum()))
        metrics |= mismatch_metrics(batch["old_logprobs"], batch["generation_logprobs"], batch.mask)
    return Learned(samples, batch, metrics)


def sampled_metrics(operations: Sequence[Operation]) -> dict[str, Metric]:
    """How much was sampled, and a checksum of the answers in the order in which they were made."""
    answers = [each.answer for each in operations if each.kind == "sample"]
    digest, sequences = blake2b(digest_size=CHECKSUM_BYTES), 0
    for answer in answers:
        digest.update(answer)
        sequences += len(messages().SampleResponse.FromString(answer).sequences)
    checksum = int.from_bytes(digest.digest()) if answers else 0
    return {"sampled_sequences": Sum(sequences), "sampled_checksum": Last(float(checksum))}


def _passes(operations: Sequence[Operation]) -> tuple[list[_Sequence], list[float]]:
    """The sequences of all passes with a gradient, and the loss of each pass."""
    sequences: list[_Sequence] = []
    losses: list[float] = []
    for operation in operations:
        if operation.kind != "forward_backward":
            continue
        body = pass_body(operation.body)
        if body.forward_only:
            continue
        passed = decoded_pass(operation.answer)
        losses.append(passed.metrics["loss:sum"])
        sequences += [_sequence(*pair) for pair in zip(body.data(), passed.logprobs, strict=True)]
    return sequences, losses


def _sequence(datum: Datum, logprobs: Tensor) -> _Sequence:
    def behind(name: str) -> Tensor | None:
        """A field at the tokens that it is about: one further than the positions that predict them."""
        return _first(datum.fields[name].float()) if name in datum.fields else None

    targets = _first(datum.fields["target_tokens"])
    advantages, sampler = behind("advantages"), behind("logprobs")
    if advantages is None:
        given = datum.fields.get("weights", torch.ones_like(logprobs))
        kept = _first(given.float())
        mask = torch.nn.functional.pad((given.reshape(len(given), -1) != 0).any(1), (1, 0))
    else:
        mask = (advantages != 0) | (sampler != 0 if sampler is not None else False)
        kept = mask.float()
    return _Sequence((*datum.token_ids, int(targets[-1])), mask, _first(logprobs.float()), kept, advantages, sampler)


def _first(values: Tensor) -> Tensor:
    """[n + 1] of [n] or [n, K] values: of the first target at each position, 0 at the first token."""
    return torch.nn.functional.pad(values.reshape(len(values), -1)[:, 0], (1, 0))


def _episodes(sequences: Sequence[_Sequence], step: int, decode: Decode) -> tuple[Samples, list[int]]:
    """Those with one prompt together, in the order of their first; and their places."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, sequence in enumerate(sequences):
        groups.setdefault(sequence.token_ids[: sequence.start], []).append(number)
    samples: list[Sample] = []
    for index, (ids, numbers) in enumerate(groups.items()):
        prompt = Prompt(index, decode(ids), ids)
        samples += [_episode(sequences[number], prompt, step, decode) for number in numbers]
    return Samples(samples), [number for numbers in groups.values() for number in numbers]


def _episode(sequence: _Sequence, prompt: Prompt, step: int, decode: Decode) -> Sample:
    sampler = torch.zeros(len(sequence.token_ids)) if sequence.sampler is None else sequence.sampler
    return Sample(
        prompt,
        sequence.token_ids,
        tuple(sequence.mask.tolist()),
        tuple(torch.where(sequence.mask, sampler, 0.0).tolist()),
        Score(sequence.reward),
        decode(sequence.token_ids[sequence.start :]),
        "stop",
        weight_versions=(step - 1,),
    )


def _all_known(parts: Sequence[Tensor | None]) -> list[Tensor]:
    """Those parts, if none is lacking."""
    known = [part for part in parts if part is not None]
    return known if len(known) == len(parts) else []


def _batch(sequences: Sequence[_Sequence]) -> TokenBatch:
    masks: list[list[bool]] = [each.mask.tolist() for each in sequences]
    batch = TokenBatch.from_sequences([each.token_ids for each in sequences], masks)
    fields: dict[str, list[Tensor] | list[Tensor | None]] = {
        "old_logprobs": [each.logprobs for each in sequences],
        "loss_weights": [each.weights for each in sequences],
        "generation_logprobs": [each.sampler for each in sequences],
        "advantages": [each.advantages for each in sequences],
    }
    whole = {name: torch.cat([*known]) for name, parts in fields.items() if (known := _all_known(parts))}
    if not sequences:
        return batch
    return replace(batch, loss_weights=whole.pop("loss_weights")).with_tokens(**whole)
