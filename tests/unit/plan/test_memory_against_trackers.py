"""The closed form against what PyTorch's memory trackers count of the real training step."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from nemorl_rl.planning.memory.parts import GIB, total
from tiers import in_full
from tracked_training import Case, tracked_peak

KINDS = ("llama", "qwen2", "qwen3", "gemma", "mixtral", "qwen3_moe")


Tracked = Callable[..., float]
"""``tracked_peak`` in a process of its own"""


@pytest.fixture(scope="module")
def tracked() -> Iterator[Tracked]:
    """Fake ranks are a process group, and other tests leave one of their own in this process."""
    with multiprocessing.get_context("spawn").Pool(1) as elsewhere:
        yield partial(_apply, elsewhere)


def _apply(elsewhere: Any, case: Case, **options: bool) -> float:
    found: float = elsewhere.apply(tracked_peak, (case,), options)
    return found


def deviation(case: Case, peak: Tracked) -> float:
    planned, tracked = total(case.moments().peak), peak(case)
    print(
        f"{case}: tracked {tracked / GIB:.3f} GiB, planned {planned / GIB:.3f}, {planned / tracked - 1:+.2%}"
    )  # pytest -rP
    return planned / tracked - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("llama"),
        *in_full(
            [
                Case("mixtral", ranks=8),
                Case("qwen3", ranks=8, checkpointing=True),
                Case("gemma", dtype="float32", tied=True),
            ]
        ),
    ],
    ids=lambda case: f"{case.kind}-{case.ranks}",
)
def test_the_closed_form_is_within_five_percent_of_the_tracked_step(case: Case, tracked: Tracked) -> None:
    assert abs(deviation(case, tracked)) < 0.05


GRID = [
    Case(kind, ranks, dtype=dtype, checkpointing=checkpointing)
    for kind, ranks, (dtype, checkpointing) in itertools.product(
        KINDS, (1, 4, 64), (("bfloat16", False), ("bfloat16", True), ("float32", False))
    )
    if not (dtype == "float32" and kind in ("mixtral", "qwen3_moe"))  # torch has no fake product of float32 experts
] + [
    Case("qwen2", tied=True, sizes={"vocab_size": 65536}),  # several chunks of logits
    Case("llama", microbatches=1, rows=1),  # the update takes most
    Case("llama", 64, rows=2, checkpointing=True, sizes={"hidden_size": 2048, "intermediate_size": 8192}),  # layers do
    Case("llama", 4, rows=8, width=256, sizes={"hidden_size": 2048, "intermediate_size": 8192}),
    Case("llama", 16, tensor=2),
    Case("qwen3", 8, tensor=4, checkpointing=True),
    Case("llama", 4, context=2),  # 8 heads are traded for tokens
    Case("llama", 6, context=3, width=192),  # and on 3 ranks keys go round
    Case("llama", 3, context=3, rows=1, width=6144),
]


@pytest.mark.full
@pytest.mark.parametrize("case", GRID, ids=str)
def test_the_closed_form_on_one_to_sixty_four_ranks(case: Case, tracked: Tracked) -> None:
    assert abs(deviation(case, tracked)) < 0.05


@pytest.mark.slow
@pytest.mark.full
def test_fake_tensors_take_what_real_ones_do(tracked: Tracked) -> None:
    case = Case("llama", dtype="float32", sizes={"num_hidden_layers": 2}, rows=3)
    assert tracked(case) == pytest.approx(tracked(case, fake=False), rel=0.1)
