"""From token ids to next-token logits, for a batch of rows that changes while it decodes.

Two decoders: ``decode_llama`` is written by hand for the Llama family, ``decode_hf`` runs the forward pass of any
other causal language model. Both read the model's own tensors; neither knows about sampling or stopping.
"""

# R = live rows, V = vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Decoder(Protocol):
    """Rows in a fixed order, each a prompt and the tokens fed since."""

    joins: bool
    """Whether rows may be admitted while others decode."""

    def admit(self, prompts: Sequence[tuple[int, ...]], reserve_tokens: int) -> Tensor:
        """Append rows that begin with ``prompts``; equal prompts are computed once.

        Args:
            prompts: Token ids, not empty.
            reserve_tokens: Steps to make room for, over all rows, the present ones included.

        Returns:
            [len(prompts), V] logits of the token after each prompt.
        """
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """[R] one token per row -> [R, V] logits of the next."""
        ...

    def keep(self, order: Sequence[int]) -> None:
        """Row i becomes what row ``order[i]`` was; the rest are dropped. Empty: all are."""
        ...


def build_decoder(model: PreTrainedModel, max_tokens: int) -> Decoder:
    """The fastest decoder that serves ``model`` for sequences up to ``max_tokens``."""
    from nemorl_dtensor.decode_hf import HFDecoder
    from nemorl_dtensor.decode_llama import LlamaDecoder, is_llama_like

    return LlamaDecoder(model, max_tokens) if is_llama_like(model, max_tokens) else HFDecoder(model)
