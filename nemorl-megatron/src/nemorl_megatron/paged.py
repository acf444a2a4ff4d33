"""Decoding over the paged cache and the flash-attention kernels of megatron-core's inference engine, on CUDA.

The engine's ``DynamicInferenceContext`` keeps keys and values in blocks, so a row takes what it needs and joining or
leaving copies nothing; each pass is one sequence of all rows' tokens. The engine's scheduler and samplers are not used:
they draw by one random state for all rows, and a response here depends on its own seed alone.
"""

# R = rows, S = tokens of all rows in a pass, g = key-value heads of this rank, D = head size, V = vocabulary

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams
from nemorl.errors import BackendError
from nemorl.media import Media
from nemorl_tensors.engines.decoding import WithoutTurns
from nemorl_tensors.engines.kv_cache import PREFILL_TOKENS
from torch import Tensor

from nemorl_megatron.config import has_flash_attention

if TYPE_CHECKING:
    from nemorl_tensors.engines.decoding import BatchLimits

    from nemorl_megatron.inference_ranks import Stages

BLOCK_TOKENS = 256
"""Tokens of a block, the least that flash-attention takes."""


class PagedCache(DynamicInferenceContext):  # type: ignore[misc]
    """A paged cache as ``layers.LayerAttention`` meets it: given rotated keys, of all rows' tokens in one sequence."""

    mask = None

    def __init__(self, stages: Stages, *, rows: int, tokens: int, longest: int) -> None:
        """
        Args:
            stages: What decodes.
            rows: Most at once.
            tokens: Most of all rows together.
            longest: Most of one row.
        """
        layers = [layer for piece in stages.pieces for layer in piece.decoder.layers]
        config = stages.pieces[0].config
        heads = layers[0].self_attention.num_query_groups_per_partition
        self._places = {layer.layer_number: place for place, layer in enumerate(layers, 1)}
        # A row may leave most of its last block empty; one block more is where padding is written.
        blocks = -(-tokens // BLOCK_TOKENS) + rows + 1
        block_bytes = 2 * len(layers) * BLOCK_TOKENS * heads * config.kv_channels * config.params_dtype.itemsize
        rows = self.round_up_requests(rows)
        super().__init__(
            params_dtype=config.params_dtype,
            num_layers=len(layers),
            kv_channels=config.kv_channels,
            num_attention_heads=heads,
            tensor_model_parallel_size=1,  # heads are this rank's
            max_sequence_length=longest,
            buffer_size_gb=(blocks + 0.5) * block_bytes / 1024**3,
            block_size_tokens=BLOCK_TOKENS,
            max_requests=rows,
            max_tokens=self.round_up_tokens(max(PREFILL_TOKENS["cuda"], longest, rows)),
            materialize_only_last_token_logits=False,
        )

    @property
    def positions(self) -> Tensor:
        """[S, 1] of the tokens within their rows."""
        return self.token_to_pos_ids[: self.padded_active_token_count, None]  # type: ignore[no-any-return]

    def seen(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """[S, 1, g, D] of a layer's new tokens to its [blocks, BLOCK_TOKENS, g, D], and which blocks are whose."""
        place = self._places[layer_number]
        self.append_key_value_cache(place, key, value)
        return self.key_value_cache(place)  # type: ignore[no-any-return]


class PagedDecoder(WithoutTurns):
    """The kernel's ``Decoder`` over a :class:`PagedCache`. All ranks of a copy make the same calls."""

    joins = True

    def __init__(self, stages: Stages, limits: BatchLimits, longest: int) -> None:
        """
        Args:
            stages: What decodes.
            limits: Of rows and of their tokens.
            longest: Most tokens of one row, its response included.
        """
        self._stages = stages
        self._device = torch.device(stages.parallel.device)
        tokens = min(limits.cache_tokens, limits.rows * longest)
        self._cache = PagedCache(stages, rows=limits.rows, tokens=max(tokens, longest), longest=longest)
        self._rows: list[int] = []
        """Numbers that the cache knows rows by, in the caller's order."""
        self._order: list[int] = []
        """The same in the cache's own order, with rows that have been dropped since the last step."""
        self._next = 0

    def admit(self, prompts: Sequence[tuple[int, ...]], reserve_tokens: int, media: Mapping[int, Media]) -> Tensor:
        """[len(prompts), V] as ``Stages.logits`` has them. ``reserve_tokens`` is for caches that are not paged."""
        first, logits = self._prefill([*dict.fromkeys(prompts)])
        unused = dict(first)
        copies: list[tuple[int, int]] = []
        for prompt in prompts:
            if prompt in unused:
                place = unused.pop(prompt)
            else:
                self._cache.active_token_count = 0  # it makes no pass
                place = self._add(prompt)
                copies.append((first[prompt], place))
            self._rows.append(self._order[place])
        self._copy(copies)
        self._cache.paused_request_count = 0
        number_of = {prompt: number for number, prompt in enumerate(first)}
        return logits[[number_of[prompt] for prompt in prompts]]

    def step(self, tokens: Tensor) -> Tensor:
        """[R, V] likewise."""
        cache = self._cache
        row_of = {number: row for row, number in enumerate(self._rows)}
        going = torch.tensor([int(number in row_of) for number in self._order], device=self._device)
        cache.update_requests(going, tokens[[row_of.get(number, 0) for number in self._order]])
        # It fills the holes of rows that left, and moves those that take a new block to the front.
        self._order = cache.request_ids[: cache.total_request_count].tolist()
        place_of = {number: place for place, number in enumerate(self._order)}
        return self._logits()[[place_of[number] for number in self._rows]]

    def keep(self, order: Sequence[int]) -> None:
        """The blocks of the others are given back with the next step."""
        self._rows = [self._rows[row] for row in order]
        if not order:
            self._cache.reset()
            self._order = []

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> tuple[dict[tuple[int, ...], int], Tensor]:
        """Places in the cache of prompts that are all different, and the logits after each."""
        cache = self._cache
        places: dict[tuple[int, ...], int] = {}
        logits: list[Tensor] = []
        for group in _passes(prompts, cache.max_tokens):
            # Rows that are there already wait: their next tokens are not known yet.
            cache.paused_request_count = cache.total_request_count
            cache.active_token_count = cache.num_prefill_requests = 0
            places |= {prompt: self._add(prompt) for prompt in group}
            logits.append(self._logits())
        return places, torch.cat(logits)

    def _add(self, prompt: tuple[int, ...]) -> int:
        """A row more, and its place in the cache."""
        request = DynamicInferenceRequest(
            request_id=self._next,
            prompt_tokens=torch.tensor(prompt, device=self._device),
            sampling_params=SamplingParams(num_tokens_to_generate=1, termination_id=-1),
        )
        self._cache.add_request(request)
        self._order.append(self._next)
        self._next += 1
        return len(self._order) - 1

    def _copy(self, places: Sequence[tuple[int, int]]) -> None:
        """Keys and values of a whole prompt, from one place to another."""
        if not places:
            return
        blocks, counts = self._cache.request_to_kv_block_ids, self._cache.request_kv_block_counts
        pairs = [[blocks[place, : counts[place]].long() for place in pair] for pair in places]
        source, target = (torch.cat(found) for found in zip(*pairs, strict=True))
        self._cache.memory_buffer[:, :, target] = self._cache.memory_buffer[:, :, source]

    def _logits(self) -> Tensor:
        """One pass over the rows that do not wait, in the cache's order."""
        cache = self._cache
        cache.initialize_attention_state()
        token_ids, _ = cache.current_input_and_position_ids()
        states = self._stages.forward(token_ids, cache)
        last = cache.request_query_lengths[cache.paused_request_count : cache.total_request_count].cumsum(0) - 1
        return self._stages.logits(states[last, 0])


def require_paged(stages: Stages) -> None:
    """Refuse models and devices that megatron-core's kernels do not serve.

    Raises:
        BackendError: Says which, and why.
    """
    attention = [layer.self_attention.core_attention for piece in stages.pieces for layer in piece.decoder.layers]
    reason = None
    if not has_flash_attention(stages.parallel.device):
        reason = "runs flash-attention (2.7.3 or newer) on CUDA, and here there is none"
    elif not all(kernel.is_plain for kernel in attention):
        reason = "computes plain attention, and this model has sliding windows, capped scores or a scale of its own"
    if reason is not None:
        raise BackendError(f"megatron-core's paged cache {reason}", fix="set generation.backend.engine: rows")


def _passes(prompts: Sequence[tuple[int, ...]], tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """Prompts in runs of at most so many tokens; each fits by itself."""
    group: list[tuple[int, ...]] = []
    size = 0
    for prompt in prompts:
        if group and size + len(prompt) > tokens:
            yield group
            group, size = [], 0
        group.append(prompt)
        size += len(prompt)
    if group:
        yield group
