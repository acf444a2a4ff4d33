"""The ragged batch that every algorithm trains on.

# N = tokens of all sequences concatenated, B = sequences

Invariants (DESIGN section 7): nothing is padded; index t describes token t; masks are bool and True counts; a
sequence's first token is never scored; ``loss_weights`` sum to 1 over one optimizer step, so a loss is
``(per_token * loss_weights).sum()`` and microbatching or sharding cannot change the gradient.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any, Literal

import numpy
import torch
from nemorl.contracts.workers import Composed, References, ReferringGroup
from nemorl.errors import DataError, UsageError
from nemorl.media import FIRST_ID, PLACE_BITS, Media, media_by_name
from nemorl.types import Sample, Samples
from torch import Tensor

from nemorl_tensors.devices import moved, on_device
from nemorl_tensors.filtering import TokenFilter
from nemorl_tensors.functional import segment_ids, segment_sum
from nemorl_tensors.numbers import laid_out, spread
from nemorl_tensors.placing import HeldTokens, Placed, placed
from nemorl_tensors.sharding import Shards, cutter, in_order
from nemorl_tensors.travelling import packed, unpacked

LossAggregation = Literal["token", "sequence", "sequence_sum"]
"""``token``: every trained token weighs the same. ``sequence``: every sequence does, shared among its tokens.
``sequence_sum``: every token weighs one over the number of sequences; the one level whose weights do not sum to 1.

Example:
    >>> per_response: LossAggregation = "sequence"
"""

EPISODES = "episodes"
"""The sequence field of batches in which an episode may have several sequences: the episode of each, not falling."""
ROUTES = "routes"
"""The token field of batches whose sampler told the experts of each token: [N, L, K] int16, ``Completion.routes``."""
NO_ROUTE = -1
"""In place of an expert where none was recorded."""


@dataclass(frozen=True)
class TokenBatch:
    """Sequences laid end to end, with named fields per token and per sequence.

    Tensors of a batch are not to be written to: they may be those of another batch, or memory shared between ranks.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6, 7], [5, 8]], [[False, True, True], [False, True]])
        >>> batch.lengths.tolist(), batch.num_tokens
        ([3, 2], 5)
        >>> float(batch.loss_weights.sum())
        1.0
    """

    token_ids: Tensor
    """[N] int64; images and sounds stand as ids of their own (``nemorl.media``)"""
    lengths: Tensor
    """[B] int64, sums to N"""
    mask: Tensor
    """[N] bool, True where the token is trained on; False at every sequence's first token"""
    loss_weights: Tensor
    """[N] float32, 0.0 where mask is False"""
    loss_aggregation: LossAggregation = "token"
    """How ``loss_weights`` were normalised, so that minibatches normalise alike"""
    temperature: float = 1.0
    """The sampling temperature: log-probs of this batch are those of ``softmax(logits / temperature)``"""
    keep: TokenFilter | None = None
    """The part of the vocabulary that the sampler kept, where log-probs of the policy are those of the truncated
    distribution; a token outside then has -inf"""
    token_fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Named [N] tensors, e.g. ``advantages``, ``old_logprobs``; [N, K] or [N, L, K] where each token has several
    values"""
    sequence_fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Named [B] tensors"""
    sequences_per_group: int = 1
    """Neighbouring sequences that a loss compares, e.g. 2 for preference pairs. However a batch is cut (minibatches,
    microbatches, shards), they stay together and in order."""
    media: Mapping[int, Media] = field(default_factory=dict)
    """The images and sounds in ``token_ids``, each once, by name"""
    held: Mapping[str, HeldTokens] = field(default_factory=dict, compare=False)
    """Token fields that lie with ranks until somebody reads them"""
    places: list[Placed] = field(default_factory=list, repr=False, compare=False)
    """Where ranks find it; shared with batches that have other fields of the same sequences"""

    @classmethod
    def from_sequences(
        cls,
        token_ids: Sequence[Sequence[int]],
        masks: Sequence[Sequence[bool]],
        *,
        loss_aggregation: LossAggregation = "token",
        temperature: float = 1.0,
        sequences_per_group: int = 1,
        episodes: Tensor | None = None,
        media: Iterable[Media] = (),
    ) -> TokenBatch:
        """Lay B token lists end to end. ``masks[b][t]`` says whether token t of sequence b is trained on; of an image
        or a sound none is.

        ``episodes`` [B] int64, not falling: sequences with the same number weigh as one in the loss. Unset: each alone.
        ``media``: the items that the token lists show, in any order.

        Raises:
            DataError: Lists of unequal lengths, an item that is shown and not given, or one that is to be learnt.
        """
        if len(token_ids) % sequences_per_group:
            raise DataError(f"{len(token_ids)} sequences do not divide into groups of {sequences_per_group}")
        if [len(ids) for ids in token_ids] != [len(mask) for mask in masks]:
            raise DataError("token_ids and masks must have equal lengths, sequence by sequence")
        lengths = torch.tensor([len(ids) for ids in token_ids], dtype=torch.int64)
        flat_ids = torch.from_numpy(laid_out(token_ids, numpy.int64))
        mask = torch.from_numpy(laid_out(masks, numpy.bool_))
        mask[(torch.cumsum(lengths, 0) - lengths)[lengths > 0]] = False
        shown = _shown(flat_ids, media_by_name(media))
        if shown and bool((mask & (flat_ids >= FIRST_ID)).any()):
            raise DataError(
                "a token of an image or a sound is to be trained on", fix="mask what the policy did not say"
            )
        weights = loss_weights(mask, lengths, loss_aggregation, episodes)
        return cls(
            flat_ids,
            lengths,
            mask,
            weights,
            loss_aggregation,
            temperature,
            sequence_fields={} if episodes is None else {EPISODES: episodes},
            sequences_per_group=sequences_per_group,
            media=shown,
        )

    @classmethod
    def from_samples(
        cls,
        samples: Samples,
        advantages: Sequence[float] | None = None,
        *,
        loss_aggregation: LossAggregation = "token",
        temperature: float = 1.0,
        drop: Sequence[bool] | None = None,
    ) -> TokenBatch:
        """Rollouts as a batch with ``generation_logprobs``, and each episode's advantage on its response tokens.

        Args:
            samples: Scored episodes. Each of their token sequences, in the order of ``samples.sequences``, is one of B.
            advantages: One per episode. Unset: the batch has none yet.
            loss_aggregation: What the loss averages over.
            temperature: The sampling temperature of the rollout.
            drop: Episodes that keep their place but train nothing (overlong filtering), one bool each.
        """
        dropped = drop or [False] * len(samples)
        episodes = [sample.sequences for sample in samples]
        parts = [(part, out) for episode, out in zip(episodes, dropped, strict=True) for part in episode]
        counts = torch.tensor([len(episode) for episode in episodes], dtype=torch.int64)
        is_split = len(parts) > len(samples)
        batch = cls.from_sequences(
            [part.token_ids for part, _ in parts],
            [(False,) * len(part.response_mask) if out else part.response_mask for part, out in parts],
            loss_aggregation=loss_aggregation,
            temperature=temperature,
            episodes=torch.repeat_interleave(torch.arange(len(samples)), counts) if is_split else None,
            media=itertools.chain.from_iterable(sample.media for sample in samples),
        )
        sampled = torch.from_numpy(laid_out([part.generation_logprobs for part, _ in parts], numpy.float32))
        batch = batch.with_tokens(generation_logprobs=sampled, **_routes_of([part for part, _ in parts]))
        if advantages is None:
            return batch
        per_sequence = torch.tensor(list(advantages), dtype=torch.float32)[batch.episodes]
        return batch.with_tokens(advantages=torch.from_numpy(spread(per_sequence.numpy(), batch.lengths.tolist())))

    def __getitem__(self, name: str) -> Tensor:
        for fields in (self.token_fields, self.sequence_fields):
            if name in fields:
                return fields[name]
        if name in self.held:
            return self.held[name].values
        known = ", ".join([*self.token_fields, *self.sequence_fields]) or "none"
        raise UsageError(
            f"this batch has no field {name!r} (fields: {known})",
            fix="compute it before train_step, e.g. trainer.with_old_logprobs(batch), or add it with with_tokens()",
        )

    def __contains__(self, name: str) -> bool:
        return name in self.token_fields or name in self.sequence_fields or name in self.held

    def __len__(self) -> int:
        return self.lengths.numel()

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()

    @property
    def episodes(self) -> Tensor:
        """[B] number of the episode of each sequence, not falling; without episodes of several sequences their own."""
        found = self.sequence_fields.get(EPISODES)
        return torch.arange(len(self), device=self.lengths.device) if found is None else found

    @property
    def sequence_ids(self) -> Tensor:
        """[N] index of each token's sequence."""
        return segment_ids(self.lengths, self.num_tokens)

    def with_tokens(self, **fields: Tensor) -> TokenBatch:
        """This batch with more [N, …] fields."""
        for name, values in fields.items():
            if values.shape[:1] != self.token_ids.shape:
                raise UsageError(f"token field {name!r} has shape {tuple(values.shape)}, expected ({self.num_tokens},)")
        held = {name: one for name, one in self.held.items() if name not in fields}
        return replace(self, token_fields={**self.token_fields, **fields}, held=held)

    def with_held(
        self,
        name: str,
        shards: Sequence[Sequence[int]],
        references: References,
        read: Callable[[References], Sequence[Tensor]],
    ) -> TokenBatch:
        """This batch with an [N, …] field that lies with ranks (:class:`HeldTokens`)."""
        kept = {known: values for known, values in self.token_fields.items() if known != name}
        one = HeldTokens(self.lengths, shards, references, read)
        return replace(self, token_fields=kept, held={**self.held, name: one})

    def at_hand(self) -> TokenBatch:
        """This batch, its fields read that lie with ranks."""
        return self.with_tokens(**{name: one.values for name, one in self.held.items()}) if self.held else self

    def placed(self, group: ReferringGroup, shards: Sequence[Sequence[int]], seen: TokenBatch) -> Composed[TokenBatch]:
        """For each rank its part of ``seen``, which is less of this batch (:func:`nemorl_tensors.placing.placed`)."""
        return placed(self, group, shards, seen)

    def with_sequences(self, **fields: Tensor) -> TokenBatch:
        """This batch with more [B] fields."""
        for name, values in fields.items():
            if values.shape != self.lengths.shape:
                raise UsageError(f"sequence field {name!r} has shape {tuple(values.shape)}, expected ({len(self)},)")
        return replace(self, sequence_fields={**self.sequence_fields, **fields})

    def select(self, sequences: Sequence[int]) -> TokenBatch:
        """The given sequences, in the given order, with their loss weights unchanged."""
        picked = torch.as_tensor(list(sequences), dtype=torch.int64, device=self.lengths.device)
        lengths = self.lengths[picked]
        found = self.cut_by(picked, cutter(torch.cumsum(self.lengths, 0)[picked] - lengths, lengths))
        return found.with_tokens(**{name: one.of(sequences) for name, one in self.held.items()})

    def cut_by(self, picked: Tensor, cut: Callable[[Tensor], Tensor]) -> TokenBatch:
        """The sequences ``picked`` [B'], whose values ``cut`` takes out of an [N, …] field at hand."""
        token_ids = cut(self.token_ids)
        return replace(
            self,
            token_ids=token_ids,
            lengths=self.lengths[picked],
            mask=cut(self.mask),
            loss_weights=cut(self.loss_weights),
            token_fields={name: cut(values) for name, values in self.token_fields.items()},
            sequence_fields={name: values[picked] for name, values in self.sequence_fields.items()},
            media=_shown(token_ids, self.media) if self.media else self.media,
            held={},
            places=[],
        )

    def minibatches(self, count: int) -> list[TokenBatch]:
        """Split by order into ``count`` optimizer steps, each with loss weights that sum to 1."""
        starts = self._unit_starts()
        units = len(starts) - 1
        if not 1 <= count <= units:
            what = "sequences" if self.sequences_per_group == 1 else f"groups of {self.sequences_per_group} sequences"
            raise UsageError(f"cannot split {units} {what} into {count} minibatches")
        if count == 1:
            return [self]
        bounds, whole = [starts[units * i // count] for i in range(count + 1)], self.at_hand()
        return [whole.select(range(low, high)).with_new_weights() for low, high in itertools.pairwise(bounds)]

    def with_new_weights(self) -> TokenBatch:
        """This batch with loss weights of its own, whatever it was cut from."""
        weights = loss_weights(self.mask, self.lengths, self.loss_aggregation, self.sequence_fields.get(EPISODES))
        return replace(self, loss_weights=weights)

    def _unit_starts(self) -> list[int]:
        """Where what an optimizer step takes whole begins, an episode or a group of sequences; and the end of all."""
        if EPISODES not in self:
            return list(range(0, len(self) + 1, self.sequences_per_group))
        return [0, *(torch.diff(self.episodes).nonzero().squeeze(1) + 1).tolist(), len(self)]

    def shards(self, count: int, *, by_trees: bool = False) -> list[list[int]]:
        """Sequence indices for each of ``count`` ranks, balanced by tokens: longest first, to the emptiest rank.

        With ``by_trees``, for backends that compute what sequences have in common once: where that saves tokens,
        sequences that share them are on one rank, and what balances is what is computed.
        """
        if by_trees:
            from nemorl_tensors.engines.prefix_forest import shard_trees  # which reads batches

            shards = shard_trees(self, count)
            if shards is not None:
                return shards
        loads = [(0, rank) for rank in range(count)]  # a heap: the emptiest rank first, the lowest of equals
        groups: list[list[int]] = [[] for _ in range(count)]
        sizes_G = self.lengths.view(-1, self.sequences_per_group).sum(1)
        sizes = sizes_G.tolist()
        for group in torch.argsort(sizes_G, descending=True, stable=True).tolist():
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + sizes[group], rank))
            groups[rank].append(group)
        return [
            [group * self.sequences_per_group + i for group in sorted(shard) for i in range(self.sequences_per_group)]
            for shard in groups
        ]

    def parts(self, shards: Sequence[Sequence[int]]) -> Sequence[TokenBatch]:
        """The part of each rank, of sequence indices as ``shards`` gives them; each is cut when it is asked for."""
        return [self] if len(shards) == 1 else Shards(self, shards)

    def in_order(self, shards: Sequence[Sequence[int]], columns: Sequence[Tensor]) -> Tensor:
        """[N, …] what each shard says of its tokens, in the order of this batch."""
        return in_order(self.lengths, shards, columns)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        here = replace(self.at_hand(), places=[])
        return _unpacked, (type(self), [packed(getattr(here, item.name), protocol) for item in dataclass_fields(here)])

    def to(self, device: torch.device | str) -> TokenBatch:
        """This batch on another device."""
        here = self.at_hand()
        return replace(
            on_device(here, device),
            token_fields={name: moved(values, device) for name, values in here.token_fields.items()},
            sequence_fields={name: moved(values, device) for name, values in here.sequence_fields.items()},
            places=[],
        )


def _routes_of(parts: Sequence[Sample]) -> dict[str, Tensor]:
    """The field ``ROUTES`` of token sequences, some of which have routes; nothing where none has."""
    known = next((part.routes for part in parts if part.routes is not None), None)
    if known is None:
        return {}
    none = numpy.full(known.shape[1:], NO_ROUTE, numpy.int16)
    pieces = [
        numpy.broadcast_to(none, (len(part.token_ids), *none.shape)) if part.routes is None else part.routes
        for part in parts
    ]
    return {ROUTES: torch.from_numpy(numpy.concatenate(pieces))}


def _shown(token_ids: Tensor, known: Mapping[int, Media]) -> dict[int, Media]:
    """Of these items those that the ids show, in the order of their names.

    Raises:
        DataError: One that is shown is not among them.
    """
    if not token_ids.numel() or int(token_ids.max()) < FIRST_ID:  # of text alone, at no temporary of its size
        return {}
    names = torch.unique(token_ids[token_ids >= FIRST_ID] >> PLACE_BITS).tolist()
    missing = sum(name not in known for name in names)
    if missing:
        raise DataError(
            f"token ids show {missing} images or sounds that are not there",
            fix="pass the items along with the ids: media= of Prompt, GenerationRequest, Sample and from_sequences",
        )
    return {name: known[name] for name in names}


def _unpacked(kind: type[TokenBatch], values: Sequence[Any]) -> TokenBatch:
    return kind(*map(unpacked, values))


def loss_weights(
    mask: Tensor, lengths: Tensor, loss_aggregation: LossAggregation, episodes: Tensor | None = None
) -> Tensor:
    """[N] float32 weights that sum to 1 over the masked-in tokens (all zeros when there are none).

    ``token``: 1 / T for each of T trained tokens. ``sequence``: 1 / (S * t_b) for each of the t_b trained tokens of
    sequence b, where S sequences have any. ``sequence_sum``: 1 / S for each, so that they sum to T / S
    (``seq-mean-token-sum`` in verl).

    Args:
        mask: [N] bool.
        lengths: [B], sums to N.
        loss_aggregation: What the loss averages over.
        episodes: [B] sequences with the same number count as one sequence. Unset: each by itself.

    Example:
        >>> mask = torch.tensor([False, True, True, False, True])
        >>> loss_weights(mask, torch.tensor([3, 2]), "sequence").tolist()  # two sequences, 1/2 each
        [0.0, 0.25, 0.25, 0.0, 0.5]
    """
    ones = mask.float()
    if loss_aggregation == "token":
        return ones.div_(ones.sum().clamp(min=1))
    trained = segment_sum(ones, mask, lengths)
    if episodes is not None:
        _, numbers = torch.unique(episodes, return_inverse=True)
        of_episodes = torch.zeros_like(trained).index_add_(0, numbers, trained)
        count, trained = (of_episodes > 0).sum().clamp(min=1), of_episodes[numbers]
    else:
        count = (trained > 0).sum().clamp(min=1)
    if loss_aggregation == "sequence_sum":
        return ones / count
    return ones * torch.repeat_interleave(1.0 / (trained.clamp(min=1) * count), lengths)
