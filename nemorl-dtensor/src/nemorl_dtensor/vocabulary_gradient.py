"""The gradient of a matrix with a row per token id: the embedding's, the output head's, or of both where they are one.

# N = tokens, V = vocabulary, D = hidden size

It is the largest gradient of a small model, and autograd makes it anew in every microbatch: zeros, the head's product,
the embedding's rows, their sum, each of V x D and in the precision of the weights. Here head and embedding add straight
into the float32 tensor that the optimizer reads. On a CPU in one process; where a model is sharded, the gradient
belongs to FSDP2 or DTensor, which reduce what autograd gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class VocabularyGradient:
    """Float32 gradient of one [V, D] parameter, zero where nothing was added since :meth:`clear`."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self._total: Tensor | None = None

    def __call__(self) -> Tensor:
        """[V, D], to be added to in place."""
        if self._total is None:
            self._total = torch.zeros_like(self.parameter, dtype=torch.float32, requires_grad=False)
        return self._total

    def clear(self) -> None:
        """Forget what was added."""
        self._total = None

    def join(self, master: nn.Parameter) -> None:
        """Make ``master.grad`` the sum of this and of what else was added to it; from then on they are one tensor."""
        if self._total is None or master.grad is self._total:
            return
        if master.grad is not None:
            self._total = master.grad.add_(self._total)
        master.grad = self._total


def vocabulary_gradients(model: PreTrainedModel) -> dict[str, VocabularyGradient]:
    """By parameter name: gradients that the model's embedding, and whoever asks, adds to directly from now on.

    None of frozen parameters, elsewhere than on a CPU, or of embeddings that do more than look up rows.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    matrices = [part.weight for part in (embedding, head) if part is not None]
    found = {
        name: VocabularyGradient(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_cpu and any(parameter is matrix for matrix in matrices)
    }
    own = gradient_of(embedding.weight, found)
    if own is not None and type(embedding) is nn.Embedding and _looks_up(embedding):
        _redirect(embedding, own)
    return found


def gradient_of(weight: Tensor, gradients: Mapping[str, VocabularyGradient]) -> VocabularyGradient | None:
    """The one of this parameter."""
    return next((gradient for gradient in gradients.values() if gradient.parameter is weight), None)


def _looks_up(embedding: nn.Embedding) -> bool:
    return embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


def _redirect(embedding: nn.Embedding, gradient: VocabularyGradient) -> None:
    def forward(module: nn.Embedding, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return functional.embedding(input, module.weight)
        rows: Tensor = _Rows.apply(input, module.weight, gradient, module.padding_idx)  # type: ignore[no-untyped-call]
        return rows

    embedding.forward = MethodType(forward, embedding)  # type: ignore[method-assign]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VD: Tensor, gradient: VocabularyGradient, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.gradient, ctx.padding = gradient, padding
        return functional.embedding(ids, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        ids_N = ids.flatten()
        rows_ND = grads[0].reshape(ids_N.numel(), -1).float()
        if ctx.padding is not None:
            # As in torch: the row of the padding token has no gradient as an input.
            rows_ND = torch.where((ids_N == ctx.padding)[:, None], 0.0, rows_ND)
        ctx.gradient().index_add_(0, ids_N, rows_ND)
        return None, None, None, None
