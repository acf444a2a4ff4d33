"""Experts divided over ranks learn what one process learns: same log-probs, losses, gradients, weights, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import spread_cases
import torch
from mixture_runs import Runs
from nemorl_testing.batches import ragged_batch
from sharded_runs import Case, Found, refuse
from spawned import run_calls
from spread_cases import gap
from tiers import in_full
from torch import Tensor

pytestmark = pytest.mark.slow

TOLERANCE = 5e-6
EP2: dict[str, Any] = {"expert_parallel_size": 2}
EP4: dict[str, Any] = {"expert_parallel_size": 4}
RECOMPUTED: dict[str, Any] = {"activation_checkpointing": True}
LORA: dict[str, Any] = {"lora": {"rank": 4}}
BALANCED: dict[str, Any] = {"router": {"balance_loss": 0.5}}
BIASED: dict[str, Any] = {"router": {"bias_update_rate": 0.01}}

CASES = (
    Case("ep2", "qwen3_moe", 2, options=EP2, saves="ep2"),
    Case("ep2, one rank's experts get no token", "one-sided", 2, options=EP2),
    Case("ep2, one rank without data", "qwen3_moe", 2, options=EP2, all_on_first=True),
    Case("ep2 halved", "qwen3_moe", 2, {"microbatch_tokens": 20}, EP2, some_zero=True, halved=True),
    Case("ep2 shared", "qwen3_moe", 2, options={**EP2, "layout": "shared"}),
    Case("ep2 lora", "qwen3_moe", 2, LORA, EP2),
    Case("ep2 balanced, recomputed", "gpt_oss", 2, {**RECOMPUTED, "microbatch_tokens": 20}, {**EP2, **BALANCED}),
    Case("ep2 biased", "deepseek_v3", 2, RECOMPUTED, {**EP2, **BIASED}, saves="ep2 biased"),
    Case("one -> ep2", "qwen3_moe", 2, options=EP2, resumes="one"),
    Case("ep2 -> dp2", "qwen3_moe", 2, resumes="ep2"),
    Case("fsdp2 x ep2", "qwen3_moe", 4, options=EP2, saves="fsdp2 x ep2"),
    Case("ep4", "qwen3_moe", 4, options=EP4, saves="ep4"),
    Case("replicas2 x ep2", "qwen3_moe", 4, options={**EP2, "data_parallel_replicas": 2}, saves="replicas2"),
    Case("fsdp2 x ep2 -> ep4", "qwen3_moe", 4, options=EP4, resumes="fsdp2 x ep2"),
    Case("ep2 gpt_oss", "gpt_oss", 2, options=EP2),
    Case("ep2 deepseek_v3", "deepseek_v3", 2, options=EP2),
    Case("ep2 recomputed", "qwen3_moe", 2, RECOMPUTED, EP2),
    *in_full(
        [
            Case("ep2 mixtral", "mixtral", 2, options=EP2),
            Case("ep2 without gradient", "qwen3_moe", 2, {"microbatch_tokens": 20}, EP2, some_zero=True),
            Case("ep2 packed", "qwen3_moe", 2, options={**EP2, "layout": "packed"}),
            Case("ep2 random", "qwen3_moe", 2, {"init": "random"}, EP2),
            Case("fsdp2 x ep2, three experts each", "six experts", 4, options=EP2),
            Case(
                "ep2 balanced, one rank without data", "deepseek_v3", 2, options={**EP2, **BALANCED}, all_on_first=True
            ),
            Case("fsdp2 x ep2 deepseek_v3 recomputed", "deepseek_v3", 4, RECOMPUTED, EP2),
            Case("fsdp2 x ep2 gpt_oss", "gpt_oss", 4, options=EP2),
            Case("ep2 qwen3_5_moe", "qwen3_5_moe", 2, options=EP2),
            Case("ep2 nemotron_h", "nemotron_h", 2, options=EP2),
        ]
    ),
    Case("ep2 biased -> one", "deepseek_v3", options=BIASED, resumes="ep2 biased"),
    *(Case(f"{name} -> one", "qwen3_moe", resumes=name) for name in ("ep2", "fsdp2 x ep2", "ep4", "replicas2")),
)
"""In an order in which a checkpoint exists before it is resumed from."""
NAMES = [case.name for case in CASES]
GRADIENTS = (
    *("ep2", "ep2 gpt_oss", "ep2 deepseek_v3", "ep2 recomputed", "ep2 balanced, recomputed"),
    *("fsdp2 x ep2", "replicas2 x ep2"),
)


def single_of(case: Case) -> Case:
    """The same in one process, all of it kept and in rows of its own."""
    policy = {name: value for name, value in case.policy.items() if name != "activation_checkpointing"}
    resumes = ("one biased" if case.options.get("router") == BIASED["router"] else "one") if case.resumes else ""
    options = {key: case.options[key] for key in case.options if key == "router"}
    plain: dict[str, Any] = {"policy": policy, "options": options, "saves": "", "resumes": resumes}
    return replace(case, world_size=1, halved=False, all_on_first=False, **plain)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    return Runs(
        tmp_path_factory.mktemp("mixtures"),
        CASES,
        single_of,
        saved_alone=(
            Case("one", "qwen3_moe", saves="one"),
            Case("one", "deepseek_v3", options=BIASED, saves="one biased"),
        ),
        with_gradients=GRADIENTS,
    )


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def together(parts: list[Found], name: str) -> Tensor:
    """[N] per-token values of the whole batch, from those of its shards."""
    return spread_cases.together(parts, name, ragged_batch().lengths)


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradient_norms_are_those_of_one_process(name: str, runs: Runs) -> None:
    expected, found = runs.alone(case_of(name)), runs.ranks[name]
    losses = torch.tensor([part.losses for part in found]).sum(0)
    assert gap(losses, torch.tensor(expected.losses)) < 1e-6
    for part in found:
        torch.testing.assert_close(part.grad_norms, expected.grad_norms, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_before_and_after_training_are_those_of_one_process(name: str, runs: Runs) -> None:
    expected, parts = runs.alone(case_of(name)), runs.ranks[name]
    for what in ("before", "after", "reference"):
        assert gap(together(parts, what), getattr(expected, what)) < TOLERANCE, what
    assert gap(expected.after, expected.before) > 1e-2, "three steps changed nothing: this proves nothing"


@pytest.mark.parametrize("name", NAMES)
def test_the_export_is_that_of_one_process_and_only_rank_0_has_it(name: str, runs: Runs) -> None:
    expected, (first, *others) = runs.alone(case_of(name)).weights, runs.ranks[name]
    assert first.weights.keys() == expected.keys()
    assert any(".experts.0." in key or key.endswith("_blocks") or "experts" in key for key in expected)
    worst = max((gap(first.weights[key], expected[key]), key) for key in expected)
    assert worst[0] < TOLERANCE, worst
    assert not any(part.weights for part in others)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_one_process(name: str, runs: Runs) -> None:
    expected = runs.gradients_alone(case_of(name))
    for part in runs.gradients[name]:
        assert part.whole.keys() == expected.keys()
        assert any("experts" in key for key in expected)
        for key, wanted in expected.items():
            assert float((part.whole[key] - wanted).norm()) <= TOLERANCE * float(wanted.norm()), key


@pytest.mark.parametrize(("name", "ways"), [("ep2", 2), ("fsdp2 x ep2", 4), ("ep4", 4), ("replicas2 x ep2", 2)])
def test_each_rank_holds_its_part_of_the_experts_only(name: str, ways: int, runs: Runs) -> None:
    whole = runs.alone(case_of(name)).local_sizes
    stacks = [key for key in whole if ".experts." in key]
    assert len(stacks) == 4  # two layers, two stacks each
    for found in runs.ranks[name]:
        assert all(found.local_sizes[key] * ways == whole[key] for key in stacks)


def test_biases_of_routers_are_saved_and_move_on_from_there(runs: Runs) -> None:
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    first, second = (runs.ranks[name][0].weights[key] for name in ("ep2 biased", "ep2 biased -> one"))
    # Three updates of 0.01 up, down or, at the mean, nowhere; then three more.
    for moved in (first / 0.01, (second - first) / 0.01):
        assert moved.abs().max() > 0.5
        assert torch.allclose(moved, moved.round().clamp(-3, 3), atol=1e-3)
    assert torch.equal(second, runs.alone(case_of("ep2 biased -> one")).weights[key])


def test_ranks_that_experts_cannot_be_divided_over_are_refused(runs: Runs) -> None:
    case = replace(runs.placed(Case("", "qwen3_moe", 2)), options={"expert_parallel_size": 3})
    ((first, second),) = run_calls([(refuse, (case,))], 2)
    assert "3 ways" in first
    assert "3 ways" in second
