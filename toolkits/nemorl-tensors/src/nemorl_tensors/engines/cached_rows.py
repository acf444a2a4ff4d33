"""What decoders over a cache of keys and values have in common: rows that join, leave, and go on after a turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from nemorl_tensors.engines.kv_cache import KVCache, Prompt, Recent
from nemorl_tensors.engines.turns import Turns


class CachedRows(ABC):
    """A ``decoding.Decoder`` but for the model's passes."""

    joins = True

    def __init__(self, cache: KVCache, turns: Turns) -> None:
        self._cache, self._turns = cache, turns

    @abstractmethod
    def _prefill(self, prompts: list[Prompt]) -> tuple[Tensor, Tensor, Tensor]:
        """As ``kv_cache.Prefill``."""

    @abstractmethod
    def _go_on(self, ids: Tensor, recent: Recent) -> Tensor:
        """As ``kv_cache.GoOn``."""

    def admit(self, prompts: Sequence[Prompt], reserve_tokens: int) -> Tensor:
        return self._cache.admit(prompts, reserve_tokens, self._prefill, self._go_on, self._turns)

    def keep(self, order: Sequence[int]) -> None:
        if order:
            self._cache.keep(order)
        else:
            self._cache.clear()

    def save_turns(self, rows: Mapping[int, Prompt]) -> None:
        for row, tokens in rows.items():
            self._turns.put(self._cache.turn(row, tokens))

    def drop_turns(self) -> None:
        self._turns.clear()

    @property
    def turn_bytes(self) -> int:
        return self._turns.nbytes
