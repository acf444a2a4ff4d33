"""Ranks of megatron-core that replay routes learn what one process learns from them, however the model is spread."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from layouts import CP, EP, MIXTURE, PADDED, PP, RECOMPUTED, SHARED, TP, VPP
from megatron_routes import CHOSEN, LAYERS, Case, Found, learn, sent_batch
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors.engines.rows import fed_lengths
from spread_cases import gap, run_spread, together
from tiers import in_full
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
PACKED = {"layout": "packed"}
CASES = (
    Case("one, branching", "moe", 1, {}, PADDED, "branching"),
    Case("one, shared", "moe", 1, {}, SHARED, "branching"),
    Case("dp2, packed", "moe", 2, {}, PACKED),
    Case("tp2, padded", "moe", 2, TP, PADDED),
    Case("tp2, packed, recomputed", "moe", 2, TP | RECOMPUTED, PACKED),
    Case("ep2, padded", "moe", 2, {}, EP | PADDED),
    Case("ep2, packed, recomputed", "moe", 2, RECOMPUTED, EP | PACKED),
    Case("pp2, padded, recomputed", "moe", 2, RECOMPUTED, PP | PADDED),
    Case("pp2, packed", "moe", 2, {}, PP | PACKED),
    Case("cp2", "moe", 2, {}, CP),
    Case("pp2 vpp2, recomputed", "moe", 2, RECOMPUTED, VPP),
    Case("pp2 ep2", "moe", 4, {}, PP | EP),
    *in_full(
        [
            Case("tp2 ep2", "moe", 2, TP, EP),
            Case("tp2, shared", "moe", 2, TP, SHARED, "branching"),
            Case("tp2, divided experts", "moe", 2, TP, {"expert_tensor_parallel_size": 2}),
            Case("cp2, recomputed, padded", "moe", 2, RECOMPUTED, CP | PADDED),
            Case("dp2 tp2 ep4", "moe", 4, TP, {"expert_parallel_size": 4}),
            Case("ep2, balanced", "moe", 2, {}, EP | {"router": {"balance_loss": 0.3}}),
        ]
    ),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny mixture whose second layer has no experts, and whose routers are sure of something."""
    folder = tmp_path_factory.mktemp("moe")
    write_tiny_model(folder, **SIZES, **MIXTURE, mlp_only_layers=[1])
    torch.manual_seed(7)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def found(model: str) -> dict[str, list[Found]]:
    return run_spread(learn, {case.name: replace(case, model=model) for case in CASES})


@pytest.fixture(scope="module")
def alone(model: str) -> dict[tuple[str, bool, bool], Found]:
    """What one process learns with padded rows: of each batch, with its own choice, and with a balanced load."""
    kinds = {(case.batch, own, "router" in case.options) for case in CASES for own in (False, True)}
    balanced = {"router": {"balance_loss": 0.3}}
    cases = {
        str(kind): Case("alone", model, 1, {}, PADDED | (balanced if kind[2] else {}), kind[0], kind[1])
        for kind in kinds
    }
    ran = run_spread(learn, cases)
    return {kind: ran[str(kind)][0] for kind in kinds}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_learn_what_one_process_learns_from_the_recorded_experts(
    case: Case, found: dict[str, list[Found]], alone: dict[tuple[str, bool, bool], Found]
) -> None:
    ranks, balanced, lengths = found[case.name], "router" in case.options, sent_batch(case.batch).lengths
    one, free = (alone[case.batch, own, balanced] for own in (False, True))
    parts = [ranks[case.shards.index(shard)] for shard in range(max(case.shards) + 1)]
    expected = together([one], "logprobs", lengths)
    assert gap(together([free], "logprobs", lengths), expected) > 0.02, "other experts than the routers' own"
    for rank in ranks:
        mine = torch.cat([expected.split(lengths.tolist())[each] for each in rank.sequences])
        torch.testing.assert_close(rank.logprobs, mine, atol=5e-6, rtol=0)
    assert sum(part.loss for part in parts) == pytest.approx(one.loss, rel=1e-5)
    worst = {name: gap(ranks[0].weights[name], wanted) for name, wanted in one.weights.items()}
    assert max(worst.values()) <= 2e-5, worst
    for rank in ranks:
        assert rank.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        assert rank.flipped.value == pytest.approx(one.flipped.value, abs=0.02), "but for what rounding makes equal"
    if case.batch == "ragged":
        fed = int(fed_lengths(sent_batch(case.batch)).sum())
        assert {rank.flipped.count for rank in ranks} == {fed * LAYERS * CHOSEN}, "each choice once, over all ranks"
