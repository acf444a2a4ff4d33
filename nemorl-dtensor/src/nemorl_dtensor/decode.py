"""From token ids to next-token logits, for a batch of rows that changes while it decodes.

Two decoders: ``decode_llama`` is written by hand for the Llama family, ``decode_hf`` runs the forward pass of any
other causal language model. Both read the model's own tensors; neither knows about sampling or stopping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemorl.tensors.decoding import Decoder
    from transformers import PreTrainedModel


def build_decoder(model: PreTrainedModel, max_tokens: int) -> Decoder:
    """The fastest decoder that serves ``model`` for sequences up to ``max_tokens``."""
    from nemorl_dtensor.decode_hf import HFDecoder
    from nemorl_dtensor.decode_llama import LlamaDecoder, is_llama_like

    return LlamaDecoder(model, max_tokens) if is_llama_like(model, max_tokens) else HFDecoder(model)
