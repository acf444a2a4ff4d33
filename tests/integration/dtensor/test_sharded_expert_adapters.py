"""Adapters of experts spread over ranks learn what one process learns, with the experts divided and without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import spread_cases
import torch
from mixture_runs import Runs
from nemorl_testing.batches import ragged_batch
from peft import PeftModel
from sharded_runs import TEMPERATURE, Case, Found
from spread_cases import gap
from tiers import in_full
from torch import Tensor
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

TOLERANCE = 5e-6
QWEN = "qwen3_moe"
EXPERTS: dict[str, Any] = {
    "lora": {"rank": 3, "alpha": 12.0, "target_modules": ("experts.gate_up_proj", "experts.down_proj", "o_proj")}
}
RECOMPUTED: dict[str, Any] = {**EXPERTS, "activation_checkpointing": True}
EP2: dict[str, Any] = {"expert_parallel_size": 2}
EP4: dict[str, Any] = {"expert_parallel_size": 4}
CASES = (
    Case("ep2", QWEN, 2, EXPERTS, EP2, saves="ep2"),
    Case("ep2 deepseek_v3 recomputed", "deepseek_v3", 2, RECOMPUTED, EP2),
    Case("ep2, one rank's experts get no token", "one-sided", 2, EXPERTS, EP2),
    Case("one -> ep2", QWEN, 2, EXPERTS, EP2, resumes="one"),
    Case("fsdp2", QWEN, 2, EXPERTS, resumes="ep2"),
    Case("fsdp2 x ep2", QWEN, 4, EXPERTS, EP2),
    Case("ep4", QWEN, 4, EXPERTS, EP4, resumes="ep2"),
    *in_full(
        [
            Case("ep2 gpt_oss", "gpt_oss", 2, EXPERTS, EP2),
            Case("ep2, one rank without data", QWEN, 2, EXPERTS, EP2, all_on_first=True),
            Case("fsdp2 gpt_oss recomputed", "gpt_oss", 2, RECOMPUTED),
            Case("fsdp2 x ep2, three experts each", "six experts", 4, EXPERTS, EP2),
            Case("ep2 mixtral", "mixtral", 2, EXPERTS, EP2),
            Case("ep2 packed", QWEN, 2, EXPERTS, {**EP2, "layout": "packed"}),
            Case("ep2 on the host", QWEN, 2, EXPERTS, {**EP2, "offload": {"parameters": True}}),
            Case("replicas2 x ep2", QWEN, 4, EXPERTS, {**EP2, "data_parallel_replicas": 2}),
        ]
    ),
    Case("ep2 -> one", QWEN, 1, EXPERTS, resumes="ep2"),
)
"""In an order in which a checkpoint exists before it is resumed from."""
NAMES = [case.name for case in CASES]
DIVIDED = [case.name for case in CASES if not case.resumes]


def single_of(case: Case) -> Case:
    """The same in one process."""
    plain: dict[str, Any] = {"policy": EXPERTS, "options": {}, "all_on_first": False, "saves": ""}
    return replace(case, world_size=1, resumes="one" if case.resumes else "", **plain)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    return Runs(
        tmp_path_factory.mktemp("mixtures"),
        CASES,
        single_of,
        saved_alone=[Case("one", QWEN, policy=EXPERTS, saves="one")],
        with_gradients=DIVIDED,
    )


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def together(parts: list[Found], name: str) -> Tensor:
    """[N] per-token values of the whole batch, from those of its shards."""
    return spread_cases.together(parts, name, ragged_batch().lengths)


@pytest.mark.parametrize("name", NAMES)
def test_losses_log_probs_and_weights_are_those_of_one_process(name: str, runs: Runs) -> None:
    expected, found = runs.alone(case_of(name)), runs.ranks[name]
    losses = torch.tensor([part.losses for part in found]).sum(0)
    assert gap(losses, torch.tensor(expected.losses)) < 1e-6
    for part in found:
        torch.testing.assert_close(part.grad_norms, expected.grad_norms, rtol=TOLERANCE, atol=0)
    for what in ("before", "after", "reference"):
        assert gap(together(found, what), getattr(expected, what)) < TOLERANCE, what
    assert gap(expected.after, expected.reference if expected.reference is not None else expected.before) > 1e-2
    weights = found[0].weights
    assert weights.keys() == expected.weights.keys()
    worst = max((gap(weights[key], expected.weights[key]), key) for key in weights)
    assert worst[0] < TOLERANCE, worst


@pytest.mark.parametrize("name", DIVIDED)
def test_gradients_are_those_of_one_process(name: str, runs: Runs) -> None:
    expected = runs.gradients_alone(case_of(name))
    assert sum(".experts.adapters." in key for key in expected) >= 4
    largest = max(float(wanted.norm()) for wanted in expected.values())
    for part in runs.gradients[name]:
        assert part.whole.keys() == expected.keys()
        for key, wanted in expected.items():
            # A starts with the gradient 0, as B is 0.
            assert float((part.whole[key] - wanted).norm()) <= TOLERANCE * max(float(wanted.norm()), 1e-3 * largest)


@pytest.mark.parametrize(("name", "ways"), [("ep2", 2), ("fsdp2 x ep2", 4), ("ep4", 4), ("fsdp2", 2)])
def test_each_rank_holds_the_adapters_of_its_experts_only(name: str, ways: int, runs: Runs) -> None:
    whole = runs.alone(case_of(name)).local_sizes
    factors = [key for key in whole if ".experts.adapters." in key]
    assert len(factors) == 8  # two layers, two stacks, A and B
    for found in runs.ranks[name]:
        assert all(found.local_sizes[key] * ways == whole[key] for key in factors)


def test_peft_loads_what_divided_ranks_save(runs: Runs) -> None:
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(runs.models[QWEN]), str(runs.saved("ep2") / "adapter")
    ).eval()
    batch = ragged_batch(temperature=TEMPERATURE)
    after, start = together(runs.ranks["ep2"], "after"), 0
    for length in batch.lengths.tolist():
        ids = batch.token_ids[start : start + length]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].float() / TEMPERATURE
        scored = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None]).squeeze(1)
        trained = batch.mask[start + 1 : start + length]
        torch.testing.assert_close(scored[trained], after[start + 1 : start + length][trained], rtol=0, atol=1e-5)
        start += length
