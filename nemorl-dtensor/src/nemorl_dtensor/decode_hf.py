"""Decoding through the forward pass and cache of a transformers model, of attention or of a recurrent state.

Prompts are left-padded into one batch, computed once each, and their cache rows are then repeated per sample.
"""

# U = distinct prompts, P = prompt tokens, R = rows, t = tokens so far, V = vocabulary

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nemorl.media import Media
from nemorl_tensors.engines.decoding import WithoutTurns
from nemorl_tensors.engines.responses import Routes
from torch import Tensor

from nemorl_dtensor.routing import Routers

ATTENTION, STATE = "past_key_values", "cache_params"
CACHE_NAMES = (ATTENTION, STATE)
"""Under which forward passes take and return a cache: attention's, and that of state-space models (Mamba)."""


def cache_name(model: Any) -> str:
    """The name that ``model.forward`` has for its cache; empty where there is none of transformers' ``Cache`` kind."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in accepted), "")


class HFDecoder(WithoutTurns):
    """Rows of one batch, decoded by ``model.forward``. Rows join only once all others have left."""

    joins = False

    def __init__(self, model: Any, routers: Routers | None = None) -> None:
        """
        Args:
            model: Whose forward pass it is.
            routers: Of a mixture.
        """
        self._model, self._routers = model, routers
        self._routes: list[Routes] = []
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._cache_name = cache_name(model)
        self._mask_grows = self._cache_name == ATTENTION
        """Attention asks at every step which cached columns are padding; a recurrent state has none in it."""
        self._head_options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._cache: Any = None
        self._mask: Tensor | None = None
        """[R, t] bool, False on padding; ``None`` where no row has any."""
        self._lengths = torch.empty(0)
        """[R] tokens of each row so far"""

    def admit(self, prompts: Sequence[tuple[int, ...]], reserve_tokens: int, media: Mapping[int, Media]) -> Tensor:
        device = self._model.device
        unique = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        width = max(map(len, unique))
        ids = torch.tensor([[*[0] * (width - len(prompt)), *prompt] for prompt in unique], device=device)
        lengths = torch.tensor([len(prompt) for prompt in unique], device=device)
        pads = (width - lengths).unsqueeze(1)
        columns = torch.arange(width, device=device)
        self._mask = None if not pads.any() else columns >= pads
        logits_UV = self._pass(ids, (columns - pads).clamp(min=0))
        self._lengths = lengths
        row_prompts = [unique[prompt] for prompt in prompts]
        if self.notes_routes:
            kept = [routes[pad:] for routes, pad in zip(self._routes, pads.squeeze(1).tolist(), strict=True)]
            self._routes = [kept[prompt] for prompt in row_prompts]
        self._select(row_prompts)
        return logits_UV[row_prompts]

    def step(self, tokens: Tensor) -> Tensor:
        if not self._mask_grows:
            self._mask = None
        elif self._mask is not None:
            self._mask = torch.cat((self._mask, self._mask.new_ones(len(tokens), 1)), 1)
        logits = self._pass(tokens.unsqueeze(1), self._lengths.unsqueeze(1))
        self._lengths = self._lengths + 1
        return logits

    def keep(self, order: Sequence[int]) -> None:
        if order:
            self._select(order)
        else:
            self._cache = self._mask = None

    def take_routes(self) -> Sequence[Routes]:
        return self._routes

    def _pass(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[R, V] logits after the last column of ``ids``; routes are noted where they are wanted."""
        if not self.notes_routes:
            return self._forward(ids, positions)
        assert self._routers is not None, "routes are asked of mixtures alone"
        with self._routers.noting() as noted:
            logits = self._forward(ids, positions)
        self._routes = [*noted.routes.view(*ids.shape, *noted.routes.shape[1:]).cpu().numpy()]
        return logits

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        options: dict[str, Any] = dict(self._head_options)
        if self._takes_positions:
            options["position_ids"] = positions
        if self._mask is not None:
            options["attention_mask"] = self._mask.long()
        output = self._model(input_ids=ids, use_cache=True, **{self._cache_name: self._cache}, **options)
        self._cache = output[self._cache_name]
        logits: Tensor = output.logits[:, -1]
        return logits

    def _select(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self._model.device)
        self._cache.reorder_cache(index)
        self._lengths = self._lengths[index]
        self._mask = None if self._mask is None else self._mask[index]
