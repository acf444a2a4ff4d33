"""From token ids to next-token logits, for a batch of rows that changes while it decodes.

Four decoders: ``decode_llama`` is written by hand for the Llama family, ``decode_hf`` runs the forward pass and cache
of other causal language models, ``decode_seeing`` that of models that see or hear, ``RecomputingDecoder`` serves those
whose cache is their own affair (RWKV). All read the model's own tensors; none knows about sampling or stopping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from nemorl.media import Media
from nemorl_tensors.engines.decoding import WithoutTurns
from torch import Tensor

if TYPE_CHECKING:
    from nemorl_media.sight import Sight
    from nemorl_tensors.engines.decoding import Decoder
    from transformers import PreTrainedModel

    from nemorl_dtensor.routing import Routers


def build_decoder(
    model: PreTrainedModel,
    max_tokens: int,
    turn_tokens: int = 0,
    sight: Sight | None = None,
    routers: Routers | None = None,
) -> Decoder:
    """The fastest decoder that serves ``model`` for sequences up to ``max_tokens``.

    Between the turns of conversations it may keep up to ``turn_tokens`` tokens of them. A model with ``sight`` sees or
    hears. ``routers``: of a mixture.
    """
    if sight is not None:
        from nemorl_dtensor.decode_seeing import SeeingDecoder

        return SeeingDecoder(sight, routers)
    from nemorl_dtensor.decode_hf import HFDecoder, cache_name
    from nemorl_dtensor.decode_llama import LlamaDecoder, is_llama_like

    if is_llama_like(model, max_tokens):
        return LlamaDecoder(model, max_tokens, turn_tokens)
    return HFDecoder(model, routers) if cache_name(model) else RecomputingDecoder(model)


# R = rows, T = tokens of the longest row, V = vocabulary


class RecomputingDecoder(WithoutTurns):
    """Rows of one batch, padded on the right, where a causal model's earlier positions do not see it."""

    joins = True

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rows: list[list[int]] = []
        """Tokens so far"""

    def admit(self, prompts: Sequence[tuple[int, ...]], reserve_tokens: int, media: Mapping[int, Media]) -> Tensor:
        unique = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
        self._rows += map(list, prompts)
        return self._next_logits(list(unique))[[unique[prompt] for prompt in prompts]]

    def step(self, tokens: Tensor) -> Tensor:
        for row, token in zip(self._rows, tokens.tolist(), strict=True):
            row.append(token)
        return self._next_logits(self._rows)

    def keep(self, order: Sequence[int]) -> None:
        self._rows = [list(self._rows[place]) for place in order]

    def _next_logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[R, V] after the last token of each row."""
        device = self._model.device
        lengths = torch.tensor([len(row) for row in rows], device=device)
        padded = [torch.tensor(row, device=device) for row in rows]
        ids_RT = torch.nn.utils.rnn.pad_sequence(padded, batch_first=True)
        logits_RTV: Tensor = self._model(input_ids=ids_RT, use_cache=False).logits
        return logits_RTV[torch.arange(len(rows), device=device), lengths - 1]
