"""Ranks that share a long sequence need the memory of their part of it: context parallelism.

A rank with all of the sequence runs the same code beside one that has none. Measured on two cores, layers of width
1,024 between 32 numbers: see ``docs/backends/dtensor.md``.
"""

from __future__ import annotations

from functools import cache

import pytest
import spawned
from long_runs import PATIENCE_S, Long, step
from nemorl_testing.models import tiny_model
from spawned import run_ranks
from spread_cases import gap

pytestmark = pytest.mark.slow

SIZES = {
    **{"architecture": "qwen3", "hidden_size": 32, "intermediate_size": 1024, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
}
"""Nearly all that it keeps is of its MLP, nearly all that it computes is attention."""


@cache
def steps(tokens: int, context_parallel: int, method: str = "auto") -> list[Long]:
    found: list[Long] = run_ranks(step, 2, str(tiny_model(**SIZES)), tokens, context_parallel, method)
    taken = [(round(rank.taken_mib), round(rank.seconds)) for rank in found]
    print(tokens, context_parallel, method, taken)  # pytest -rP
    return found


@pytest.mark.parametrize(
    ("tokens", "method"),
    [
        (16_384, "ulysses"),
        (16_384, "ring"),
        pytest.param(131_072, "ulysses", marks=pytest.mark.full),
        pytest.param(65_536, "ring", marks=pytest.mark.full),
    ],
)
def test_two_ranks_take_half_of_the_memory_each(tokens: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawned, "DEADLINE_S", PATIENCE_S)
    shared, alone, half = steps(tokens, 2, method), steps(tokens, 1)[0], steps(tokens // 2, 1)[0]
    for rank in shared:
        assert gap(rank.logprobs, alone.logprobs) < 2e-5
        assert rank.loss == pytest.approx(alone.loss, rel=1e-6)
        assert rank.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
        # 4 tensors of the MLP's width are kept of each token, and two more pass: 24 KiB of float32.
        assert rank.taken_mib > 0.5 * tokens / 2 * 24 / 1024
        assert 0.45 < rank.taken_mib / alone.taken_mib < 0.58
        assert rank.taken_mib == pytest.approx(half.taken_mib, rel=0.12)
