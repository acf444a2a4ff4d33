"""The auxiliary loss, the moving bias and the counts of routers are those of a formula worked by hand, however a model
is spread: on transformers' model, a sequence at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from layouts import CP, EP, LOW, MIXTURE, PADDED, PP, RECOMPUTED, SHARED, TP, VPP
from megatron_routers import BATCHES, RATE, Case, Found, by_hand, mostly_measured, spoiled, step
from nemorl_rl.models.tiny import write_tiny_model
from spread_cases import run_spread
from tiers import in_full
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**SIZES, **MIXTURE, "mlp_only_layers": [1]},
    "glm4_moe": {
        **SIZES,
        "architecture": "glm4_moe",
        "head_dim": 8,
        "use_qk_norm": True,
        "attention_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
    },
}
PACKED = {"layout": "packed"}
CASES = (
    Case("one glm, padded", "glm4_moe", 1, {}, PADDED),
    Case("one glm, shared", "glm4_moe", 1, {}, SHARED),
    Case("one glm, recomputed", "glm4_moe", 1, RECOMPUTED, PACKED),
    Case("one qwen, ragged", "qwen3_moe", 1, {}, PADDED, "ragged"),
    Case("one qwen, one microbatch", "qwen3_moe", 1, {"microbatch_tokens": 4096}, PACKED),
    Case("dp2 glm", "glm4_moe", 2),
    Case("ep2 glm, recomputed", "glm4_moe", 2, RECOMPUTED, EP, "ragged", saves="ep2"),
    Case("tp2 ep2 glm", "glm4_moe", 2, TP, EP),
    Case("pp2 glm, recomputed", "glm4_moe", 2, RECOMPUTED, PP | PADDED),
    Case("cp2 qwen", "qwen3_moe", 2, {}, CP),
    Case("pp2 ep2 glm", "glm4_moe", 4, {}, PP | EP, saves="pp2 ep2"),
    *in_full(
        [
            Case("one glm, ragged", "glm4_moe", 1, {}, PADDED, "ragged"),
            Case("tp2 glm, shared, recomputed", "glm4_moe", 2, TP | RECOMPUTED, SHARED),
            Case("pp2 vpp2 glm", "glm4_moe", 2, RECOMPUTED, VPP, "ragged"),
            Case("cp2 glm, recomputed", "glm4_moe", 2, RECOMPUTED, CP | PADDED, "ragged"),
            Case("tp2 qwen", "qwen3_moe", 2, TP, PADDED, "ragged"),
            Case("dp2 tp2 ep4 glm", "glm4_moe", 4, TP, {"expert_parallel_size": 4}),
        ]
    ),
)
RESUMED = (
    Case("ep2 -> one", "glm4_moe", resumes="ep2"),
    Case("ep2 -> pp2", "glm4_moe", 2, {}, PP, resumes="ep2"),
    Case("pp2 ep2 -> one", "glm4_moe", resumes="pp2 ep2"),
)


def write_model(folder: Path, sizes: dict[str, Any]) -> Path:
    """A tiny mixture whose routers are sure of something, and whose biases are not zero."""
    write_tiny_model(folder, **sizes)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return folder


class Steps:
    """Of all cases, and by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        models = {name: write_model(folder / name, sizes) for name, sizes in MODELS.items()}
        self.expected: dict[tuple[str, str], Found] = {
            key: by_hand(models[key[0]], BATCHES[key[1]](temperature=0.9))
            for key in sorted({(case.model, case.batch) for case in CASES})
        }
        self.ranks: dict[str, list[Found]] = {}
        for cases in (CASES, RESUMED):
            for case in cases:
                (folder / case.saves).mkdir(exist_ok=True)
            self.ranks |= run_spread(step, {case.name: self.placed(case) for case in cases})

    def placed(self, case: Case) -> Case:
        saves, resumes = (str(self.folder / name) if name else "" for name in (case.saves, case.resumes))
        return replace(case, model=str(self.folder / case.model), saves=saves, resumes=resumes)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return Steps(tmp_path_factory.mktemp("balance"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_step_is_that_of_the_formulas(case: Case, steps: Steps) -> None:
    expected, ranks = steps.expected[case.model, case.batch], steps.ranks[case.name]
    shards = {shard: found.loss for shard, found in zip(case.shards, ranks, strict=True)}
    assert sum(shards.values()) == pytest.approx(expected.loss, abs=1e-6 * max(1, abs(expected.loss)))
    for found in ranks:
        assert found.balance == pytest.approx(expected.balance, abs=1e-6)
        assert (found.busiest, found.dead) == (pytest.approx(expected.busiest, abs=1e-12), expected.dead)
    found = ranks[0].gradients
    assert found.keys() == {name for name in expected.gradients if "e_score" not in name}
    whole = torch.cat([expected.gradients[name].flatten() for name in found])
    difference = torch.cat([(found[name] - expected.gradients[name]).flatten() for name in found])
    assert float(difference.norm() / whole.norm()) < 5e-6
    routers = [name for name in found if name.endswith("mlp.gate.weight")]
    assert routers
    for name in routers:
        assert float((found[name] - expected.gradients[name]).norm() / expected.gradients[name].norm()) < 2e-5
    assert ranks[0].biases.keys() == expected.biases.keys()
    assert all(torch.equal(ranks[0].biases[name], bias) for name, bias in expected.biases.items())


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.name)
def test_biases_are_in_checkpoints_of_any_layout(case: Case, steps: Steps) -> None:
    (written,) = (other for other in CASES if other.saves == case.resumes)
    found = steps.ranks[case.name][0].biases
    assert found
    assert all(torch.equal(found[name], bias) for name, bias in steps.ranks[written.name][0].biases.items())


def test_biases_stay_where_nothing_is_learnt(steps: Steps) -> None:
    case = steps.placed(Case("one", "glm4_moe"))
    ((start, *after),) = run_spread(spoiled, {"one": case})["one"]
    moved = steps.expected["glm4_moe", "branching"].biases
    assert start.keys() == moved.keys()
    assert not any(torch.equal(start[name], moved[name]) for name in start)
    for found in after:
        assert all(torch.equal(found[name], bias) for name, bias in start.items())


@pytest.mark.parametrize("policy", [{}, RECOMPUTED], ids=["kept", "recomputed"])
def test_sequences_without_a_backward_pass_count_once(policy: dict[str, Any], steps: Steps) -> None:
    options = PADDED | {"router": {"bias_update_rate": RATE}}
    case = steps.placed(Case("one", "glm4_moe", policy=policy, options=options))
    ((skipped, found),) = run_spread(mostly_measured, {"one": case})["one"]
    expected = steps.expected["glm4_moe", "branching"]
    assert skipped > 0.5
    assert (found.busiest, found.dead) == (pytest.approx(expected.busiest, abs=1e-12), expected.dead)
    assert all(torch.equal(found.biases[name], bias) for name, bias in expected.biases.items())


def test_balanced_sequences_all_have_a_backward_pass(steps: Steps) -> None:
    case = steps.placed(Case("one", "glm4_moe", options=PADDED))
    ((skipped, found),) = run_spread(mostly_measured, {"one": case})["one"]
    assert skipped == 0
    assert found.balance == pytest.approx(steps.expected["glm4_moe", "branching"].balance, abs=1e-6)


def test_biases_are_float32_in_a_model_of_bfloat16(steps: Steps) -> None:
    (found,) = run_spread(step, {"low": steps.placed(Case("low", "glm4_moe", policy=LOW))})["low"]
    assert {bias.dtype for bias in found.biases.values()} == {torch.float32}
    # bfloat16 would round 0.1 + 0.01 by up to 4e-4 of it.
    start = steps.expected["glm4_moe", "branching"].biases
    for name, bias in found.biases.items():
        moved = (bias - start[name]).abs()
        assert bool(((moved < 1e-7) | ((moved - RATE).abs() < 1e-7) | ((moved - 2 * RATE).abs() < 1e-7)).all())
