"""The block of keys and values: what attention is handed."""

from __future__ import annotations

import torch
from nemorl_tensors.engines.kv_cache import KVCache


def test_a_mask_is_aligned_whichever_rows_have_left() -> None:
    """CUDA's attention fails on a bfloat16 mask that begins at no multiple of 16 bytes, and copies ragged ones."""
    for prompts in ([3, 20, 21], [21, 20, 3], [9, 17, 26], [40, 1, 12]):
        cache = KVCache(layers=1, heads=1, head_size=8, dtype=torch.bfloat16, device=torch.device("cpu"))
        cache.extend(prompts, reserve_tokens=11)
        longest = prompts.index(max(prompts))
        for order in ([0, 1, 2], [row for row in (0, 1, 2) if row != longest]):
            cache.keep(order if longest != 0 or len(order) == 3 else [2, 1])
            keys, _, mask = cache.append()
            assert mask is not None
            assert mask.data_ptr() % 16 == 0
            assert mask.stride(0) % 8 == 0
            assert mask.shape[-1] == keys.shape[3]


def test_columns_that_no_row_has_are_hidden() -> None:
    # Prompts of 3 and 20 tokens, 20 columns: row 0 has columns 17 to 19. The longest, of 30, left before.
    cache = KVCache(layers=1, heads=1, head_size=8, dtype=torch.bfloat16, device=torch.device("cpu"))
    cache.extend([3, 20, 30], reserve_tokens=4)
    cache.keep([0, 1])
    keys, _, mask = cache.append()  # 31 columns are written; they begin at 8, the multiple of 8 below 30 - 20
    assert mask is not None
    seen = torch.isfinite(mask[:, 0, 0]).sum(1).tolist()
    assert (keys.shape[3], seen) == (31 - 8, [3 + 1, 20 + 1])
