"""From token ids to next-token logits, for a batch of rows that changes while it decodes.

Three decoders: ``decode_llama`` is written by hand for the Llama family, ``decode_hf`` runs the forward pass and cache
of other causal language models, ``decode_again`` serves those whose cache is their own affair (RWKV). All read the
model's own tensors; none knows about sampling or stopping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemorl_tensors.engines.decoding import Decoder
    from transformers import PreTrainedModel


def build_decoder(model: PreTrainedModel, max_tokens: int, turn_tokens: int = 0) -> Decoder:
    """The fastest decoder that serves ``model`` for sequences up to ``max_tokens``.

    Between the turns of conversations it may keep up to ``turn_tokens`` tokens of them.
    """
    from nemorl_dtensor.decode_again import RecomputingDecoder
    from nemorl_dtensor.decode_hf import HFDecoder, cache_name
    from nemorl_dtensor.decode_llama import LlamaDecoder, is_llama_like

    if is_llama_like(model, max_tokens):
        return LlamaDecoder(model, max_tokens, turn_tokens)
    return HFDecoder(model) if cache_name(model) else RecomputingDecoder(model)
