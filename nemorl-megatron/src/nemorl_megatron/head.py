"""The output head: hidden states to log-probs, each tensor-parallel rank with its part of the vocabulary.

# S = tokens of a row, B = rows, H = hidden size, M = chosen tokens, U = tokens in this rank's part of the vocabulary

Entries that were added to make the vocabulary divide stay out of everything: the head's weight ends before them. Two
steps, since only some tokens of a row are scored: :meth:`OutputHead.whole` once for all rows, then any tokens of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from nemorl_tensors import vocab_parallel_logprobs
from nemorl_tensors.filtering import TokenFilter, filtered
from torch import Tensor
from torch.nn.functional import linear

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from nemorl_megatron.parallel import Parallel


class _Head:
    """A head of a last stage, which scores whole sequences."""

    def __init__(self, parallel: Parallel) -> None:
        self._divided = parallel.sizes.sequence_parallel

    def whole(self, states: Tensor) -> Tensor:
        """[S, B, H] from [S / tensor, B, H] where sequences are divided; what the model gave elsewhere. Collective."""
        if not self._divided:
            return states
        # The gradient that comes back is whole on every rank, so it is only cut.
        return gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)  # type: ignore[no-any-return]


class OutputHead(_Head):
    """The head of a model whose last stage is on this rank."""

    def __init__(self, model: GPTModel, parallel: Parallel, vocabulary: int, cap: float | None = None) -> None:
        """
        Args:
            model: This rank's last piece.
            parallel: This rank's place.
            vocabulary: Token ids are below this.
            cap: Logits l become cap * tanh(l / cap).
        """
        super().__init__(parallel)
        self._model = model
        self.cap = cap
        self.group = model.pg_collection.tp
        """The ranks that share the vocabulary."""
        width = model.output_layer.output_size_per_partition
        self.first = parallel.place.tensor * width
        """Token id of the first row of ``weight``."""
        self._tokens = min(vocabulary - self.first, width)

    @property
    def weight(self) -> Tensor:
        """[U, H] rows of this rank, as a view of the parameter: the head's own, or the embedding's."""
        tied = self._model.share_embeddings_and_output_weights
        whole = self._model.shared_embedding_or_output_weight() if tied else self._model.output_layer.weight
        rows: Tensor = whole[: self._tokens]
        return rows

    def score(
        self,
        states: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        keep: TokenFilter | None = None,
        *,
        detached: bool = False,
    ) -> Tensor:
        """[M] float32 nats of ``targets`` [M] (or [M, K]) after ``states`` [M, H]. Collective, as is its gradient, of
        which the head itself gets none if it is ``detached``."""
        score = partial(
            vocab_parallel_logprobs,
            states,
            self.weight.detach() if detached else self.weight,
            targets,
            first=self.first,
            group=self.group,
            temperature=temperature,
            softcap=self.cap,
        )
        return filtered(score, keep)

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """[M, U] float32 of this rank's tokens after ``states`` [M, H], without gradient."""
        logits = linear(states, self.weight).float()
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class ValueOutput(_Head):
    """The value head of a critic or reward model whose last stage is on this rank."""

    def __init__(self, model: GPTModel, parallel: Parallel) -> None:
        """
        Args:
            model: This rank's last piece.
            parallel: This rank's place.
        """
        super().__init__(parallel)
        self._head = model.value_head

    def score(
        self, states: Tensor, _targets: Tensor, _temperature: float = 1.0, keep: TokenFilter | None = None
    ) -> Tensor:
        """[M] float32 values from ``states`` [M, H]. How tokens are sampled plays no part."""
        values: Tensor = self._head(states)
        return values.float()


AnyHead = OutputHead | ValueOutput
