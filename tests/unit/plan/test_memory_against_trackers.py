"""The closed form against what PyTorch's memory trackers count of the real training step."""

from __future__ import annotations

import itertools

import pytest
from nemorl_plan.dtensor_memory import dtensor_memory
from nemorl_plan.parts import GIB, total
from tracked_training import Case, tracked_peak

KINDS = ("llama", "qwen2", "qwen3", "gemma", "mixtral", "qwen3_moe")


def deviation(case: Case) -> float:
    planned, tracked = total(dtensor_memory(case.held()).peak), tracked_peak(case)
    print(
        f"{case}: tracked {tracked / GIB:.3f} GiB, planned {planned / GIB:.3f}, {planned / tracked - 1:+.2%}"
    )  # pytest -rP
    return planned / tracked - 1


@pytest.mark.parametrize(
    "case",
    [
        Case("llama"),
        Case("qwen3", ranks=8, checkpointing=True),
        Case("gemma", dtype="float32", tied=True),
        Case("mixtral", ranks=8),
    ],
    ids=lambda case: f"{case.kind}-{case.ranks}",
)
def test_the_closed_form_is_within_five_percent_of_the_tracked_step(case: Case) -> None:
    assert abs(deviation(case)) < 0.05


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
]


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=str)
def test_the_closed_form_on_one_to_sixty_four_ranks(case: Case) -> None:
    assert abs(deviation(case)) < 0.05


def test_fake_tensors_take_what_real_ones_do() -> None:
    case = Case("llama", dtype="float32", sizes={"num_hidden_layers": 2}, rows=3)
    assert tracked_peak(case) == pytest.approx(tracked_peak(case, fake=False), rel=0.1)
