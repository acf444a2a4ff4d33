"""Log-probs or values from a model that is spread over ranks: what ``model_head`` and ``value_head`` do in one process.

# R = rows, W = row width, M = scored tokens, D = hidden size
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from nemorl_tensors import linear_topk_logprobs, vocab_parallel_logprobs, vocab_parallel_topk_logprobs
from nemorl_tensors.engines.rows import PAD_ID, Rows
from nemorl_tensors.filtering import TokenFilter, filtered
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from nemorl_dtensor.context_parallel import OwnPart, Sharing, own_part
from nemorl_dtensor.model_head import Scorer, decoder_states, predicting_states
from nemorl_dtensor.ranks import local
from nemorl_dtensor.sharding import SCORE, reshard, shard
from nemorl_dtensor.ulysses import Ulysses
from nemorl_dtensor.value_head import ValueScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nemorl_dtensor.ranks import Ranks


Read = Callable[[Tensor, Rows], Any]
"""([M, D] states that predict the scored tokens, the rows) -> what is wanted of them"""


@dataclass(frozen=True)
class ShardedScorer:
    """A sharded model seen as a function from rows to what its head says of scored tokens. Calls are collective."""

    model: PreTrainedModel
    scorer: Scorer | ValueScorer
    """The model's parts"""
    ranks: Ranks
    width_multiple: int
    """Context and sequence parallelism cut rows into equal parts, so their width must be a multiple of this."""
    sharing: Sharing | None = None
    """How rows are shared with other ranks; ``None``: this one has whole rows"""

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        scorer: Scorer | ValueScorer,
        ranks: Ranks,
        *,
        sequence_parallel: bool,
        sharing: Sharing | None = None,
    ) -> ShardedScorer:
        """Shard ``model``, whose decoder and head ``scorer`` has found."""
        parts = ranks.tensor_parallel_size if sequence_parallel else 1

        def run(_model: PreTrainedModel, rows: Rows, factor: float, read: Read) -> Any:
            own = None if sharing is None else OwnPart.of(rows, sharing, model.dtype)
            rows = rows if own is None else own.rows
            states_MD = predicting_states(_states(scorer, rows, ranks, parts, own), rows)
            sight = scorer.sight if isinstance(scorer, Scorer) else None
            if sight is not None and torch.is_grad_enabled():
                # Other ranks may see something else: gradients are reduced for all parameters or for none.
                states_MD = states_MD + sight.idle(rows.media)
            found = read(states_MD if factor == 1.0 else states_MD * factor, rows)
            found = found if own is None else own.together(found)
            # What leaves a sharded module must be no view: FSDP2's hook on it would be lost to an in-place operation.
            return found.clone() if isinstance(found, Tensor) else found

        setattr(model, SCORE, MethodType(run, model))
        shard(model, ranks, sequence_parallel=sequence_parallel)
        multiple = 1 if sharing is None else sharing.width_multiple
        return cls(model, scorer, ranks, parts * multiple, sharing)

    @property
    def decoder(self) -> nn.Module:
        """The part of the model below its head."""
        return self.scorer.decoder

    def own(self, rows: Rows) -> Rows:
        """The tokens of rows that this rank computes."""
        if self.sharing is not None:
            return own_part(rows, self.sharing)[0]
        cut = self.ranks.routing  # layers of mixtures cut sequences over tensor-parallel ranks, slice by slice
        return rows if cut is None else own_part(rows, Ulysses(cut))[0]

    def states(self, rows: Rows) -> Tensor:
        """[M, D] states that predict the scored tokens."""
        found: Tensor = self._run(rows, 1.0, lambda states_MD, _: states_MD)
        return found

    def score(self, rows: Rows, temperature: float, factor: float = 1.0, keep: TokenFilter | None = None) -> Tensor:
        """float32 log-probs or values of the scored tokens, differentiable (see ``score`` of either scorer)."""
        found: Tensor = self._run(rows, factor, partial(_head_output, self.scorer, self.ranks, temperature, keep))
        return found

    def topk(self, rows: Rows, temperature: float, k: int) -> tuple[Tensor, Tensor]:
        """[M, K] token ids and log-probs of the k likeliest tokens where a token is scored (``Scorer.topk``)."""
        assert isinstance(self.scorer, Scorer), "a value head has no tokens"
        found: tuple[Tensor, Tensor] = self._run(rows, 1.0, partial(_topk, self.scorer, self.ranks, temperature, k))
        return found

    def idle(self, device: str) -> Tensor:
        """Take part in one forward pass with nothing to score: a zero that leads back to every parameter."""
        index = torch.zeros(1, dtype=torch.int64, device=device)
        ids = torch.full((1, max(2, self.width_multiple)), PAD_ID, dtype=torch.int64, device=device)
        return self.score(Rows(ids, None, index, index, index), 1.0).sum() * 0.0

    def _run(self, rows: Rows, factor: float, read: Read) -> Any:
        found = getattr(self.model, SCORE)(rows, factor, read)
        if not torch.is_grad_enabled():
            reshard(self.model)
        return found


def _states(scorer: Scorer | ValueScorer, rows: Rows, ranks: Ranks, parts: int, own: OwnPart | None = None) -> Tensor:
    """[R, W, D] last hidden states of whole rows or of this rank's part, the same in a tensor-parallel group."""
    sight = scorer.sight if isinstance(scorer, Scorer) else None
    states: Any = decoder_states(scorer.decoder, rows, sight) if own is None else own.states(scorer.decoder)
    if parts > 1:
        states = DTensor.from_local(states, ranks.mesh["tp"], [Shard(1)]).full_tensor()
    result: Tensor = states
    return result


def _head_output(
    scorer: Scorer | ValueScorer,
    ranks: Ranks,
    temperature: float,
    keep: TokenFilter | None,
    states_MD: Tensor,
    rows: Rows,
) -> Tensor:
    if isinstance(scorer, ValueScorer) or not isinstance(scorer.weight, DTensor):
        return scorer.of_states(states_MD, rows, temperature, keep)
    options = _spread_options(scorer, ranks, temperature)
    score = partial(vocab_parallel_logprobs, states_MD, local(scorer.weight), rows.target_ids, **options)
    return filtered(score, keep)


def _topk(
    scorer: Scorer, ranks: Ranks, temperature: float, k: int, states_MD: Tensor, _rows: Rows
) -> tuple[Tensor, Tensor]:
    if not isinstance(scorer.weight, DTensor):
        return linear_topk_logprobs(states_MD, scorer.weight, k, **scorer.options(temperature))
    options = _spread_options(scorer, ranks, temperature)
    return vocab_parallel_topk_logprobs(states_MD, local(scorer.weight), k, **options)


def _spread_options(scorer: Scorer, ranks: Ranks, temperature: float) -> dict[str, Any]:
    """How this rank's rows of the head become log-probs, and which rows those are."""
    mesh, rows = ranks.mesh["tp"], scorer.weight.shape[0]
    # DTensor cuts a dimension into pieces of equal size, the last ones shorter or empty.
    widest = -(-rows // mesh.size())
    first = min(mesh.get_local_rank() * widest, rows)
    bias = None if scorer.bias is None else local(scorer.bias)
    return {**scorer.options(temperature), "bias": bias, "first": first, "group": mesh.get_group(), "widest": widest}
