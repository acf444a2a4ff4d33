"""Ranks that split the attention of a mixture and divide its experts learn what one process learns; each token is
dispatched, and counted, once."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from context_runs import Learnt, Way, batch_of, learn, refused
from mixture_runs import write_mixture
from nemorl.metrics import Mean
from spawned import Call, run_calls
from spread_cases import gap, together
from tiers import in_full

pytestmark = pytest.mark.slow

TP2: dict[str, Any] = {"tensor_parallel_size": 2}
RECOMPUTED: dict[str, Any] = {**TP2, "activation_checkpointing": True}
ADAPTERS: dict[str, Any] = {
    "lora": {"rank": 3, "target_modules": ("q_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj")}
}
LORA: dict[str, Any] = {**TP2, **ADAPTERS}
LATENT_LORA: dict[str, Any] = {
    **TP2,
    "lora": {"rank": 3, "target_modules": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "experts.down_proj")},
}
EP2: dict[str, Any] = {"expert_parallel_size": 2}
EP4: dict[str, Any] = {"expert_parallel_size": 4}
BALANCED: dict[str, Any] = {"router": {"balance_loss": 0.5}}
BIASED: dict[str, Any] = {"router": {"bias_update_rate": 0.01}}
REPLAYED: dict[str, Any] = {"router": {"replay": True, "balance_loss": 0.5}}
QWEN, MIXTRAL, GLM, GPT_OSS, DEEPSEEK = "qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "deepseek_v3"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"

WAYS = (
    # Two ranks: those that split the attention are those that divide the experts.
    Way("tp2, ep2", 2, model=QWEN, policy=TP2, options=EP2, saves="tp2, ep2"),
    Way("tp2, ep2 balanced, recomputed", 2, model=GPT_OSS, policy=RECOMPUTED, options={**EP2, **BALANCED}),
    Way("tp2, ep2 biased, packed", 2, 1, "packed", GLM, policy=RECOMPUTED, options={**EP2, **BIASED}),
    Way("tp2, ep2 replayed, shared", 2, 1, "shared", QWEN, "routed branching", TP2, {**EP2, **REPLAYED}),
    Way("tp2, ep2 latent, balanced", 2, model=DEEPSEEK, policy=RECOMPUTED, options={**EP2, **BALANCED}),
    Way("tp2, ep2 latent keys", 2, 1, "packed", "latent keys", policy=TP2, options=EP2),
    Way("tp2, ep2 adapters", 2, model=GPT_OSS, policy=LORA, options={**EP2, **BALANCED}),
    # Four ranks: experts over two of the same tokens, over all, or twice over all.
    Way("dp2 x tp2, ep2 balanced", 4, model=MIXTRAL, policy=TP2, options={**EP2, **BALANCED}),
    Way("dp2 x tp2, ep2 replayed", 4, 1, "padded", GLM, "routed", RECOMPUTED, {**EP2, **REPLAYED}),
    Way("one -> dp2 x tp2, ep4", 4, 1, "shared", QWEN, policy=TP2, options=EP4, resumes="one"),
    Way("dp2 x tp2, ep4 biased", 4, model=GLM, policy=TP2, options={**EP4, **BIASED}),
    Way("dp2 x tp2, ep4 short", 4, model=QWEN, batch="short", policy=TP2, options=EP4),
    Way("tp4, ep2", 4, model="four heads", policy={"tensor_parallel_size": 4}, options=EP2),
    *in_full(
        [
            Way("dp2 x tp2, ep4 latent, adapters", 4, model=DEEPSEEK, policy=LATENT_LORA, options={**EP4, **BALANCED}),
            Way("tp2, ep2 on the host", 2, model=QWEN, policy=TP2, options={**EP2, "offload": {"parameters": True}}),
            Way("dp2 x tp2, ep4 adapters", 4, model=MIXTRAL, policy=LORA, options=EP4),
            Way(
                "replicas2 x tp2, ep2",
                4,
                model=QWEN,
                policy=TP2,
                options={**EP2, **BALANCED, "data_parallel_replicas": 2},
            ),
        ]
    ),
    Way("tp2, ep2 -> one", model=QWEN, resumes="tp2, ep2"),
)
"""In an order in which a checkpoint exists before it is resumed from."""
REFUSED = (
    (Way("", 2, model=QWEN, policy=TP2, options={**EP2, "sequence_parallel": False}), "sequence_parallel"),
    (Way("", 2, model=QWEN, policy=TP2), "expert_parallel_size"),
    (Way("", 2, model="qwen3_5_moe", policy=TP2, options=EP2), "tensor_parallel_size"),
)


def alone(way: Way) -> Way:
    """The same in one process, padded, resumed from the checkpoint of one process."""
    options = {key: value for key, value in way.options.items() if key == "router"}
    policy = {key: value for key, value in way.policy.items() if key == "lora"}
    resumes = way.resumes and "one"
    name = f"one {way.model} {way.batch} {policy} {options} {resumes}"
    return Way(name, model=way.model, batch=way.batch, policy=policy, options=options, resumes=resumes)


PLAIN = alone(Way("", model=QWEN))


def _mesh(way: Way) -> tuple[int, ...]:
    """Ways of one mesh share processes: torch takes meshes of equal shape for the same, also of dead groups."""
    replicas, experts = (way.options.get(name, 1) for name in ("data_parallel_replicas", "expert_parallel_size"))
    return way.world_size, way.together, replicas, experts


class Runs:
    """What the ranks of all ways found, and what one process does in their place."""

    def __init__(self, folder: Path) -> None:
        models = {way.model for way in (*WAYS, *(way for way, _ in REFUSED))}
        self.folders = {name: write_mixture(folder / name, name) for name in models}
        for name in ("one", "tp2, ep2"):
            (folder / f"saved {name}").mkdir()
            self.folders[name] = str(folder / f"saved {name}")
        self._found: dict[str, list[Learnt]] = {}
        self._run([replace(PLAIN, saves="one")])
        self._run([way for way in map(alone, WAYS) if way.name != PLAIN.name])
        for mesh in dict.fromkeys(map(_mesh, WAYS)):
            self._run([way for way in WAYS if _mesh(way) == mesh])

    def _run(self, ways: list[Way]) -> None:
        named = {way.name: way for way in ways}
        calls: list[Call] = [(learn, (way, self.folders)) for way in named.values()]
        found = run_calls(calls, ways[0].world_size)
        self._found |= dict(zip(named, found, strict=True))

    def __getitem__(self, way: Way) -> list[Learnt]:
        return self._found[way.name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    return Runs(tmp_path_factory.mktemp("mixtures"))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_log_probs_losses_and_weights_are_those_of_one_process(way: Way, runs: Runs) -> None:
    found, (one,) = runs[way], runs[alone(way)]
    heads, lengths = found[:: way.together], batch_of(way).lengths
    for name in ("before", "reference", "given", "after"):
        assert gap(together(heads, name, lengths), together([one], name, lengths)) < 1e-5, name
    assert gap(one.after, one.before) > 1e-2, "the steps changed nothing: this proves nothing"
    for step, expected in enumerate(one.metrics):
        losses = sum(rank.metrics[step]["loss"] for rank in heads)
        assert losses == pytest.approx(expected["loss"], rel=1e-6, abs=1e-6)
        for rank in found:
            assert rank.metrics[step]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-6)
    assert found[0].weights.keys() == one.weights.keys()
    worst = max((gap(found[0].weights[key], wanted), key) for key, wanted in one.weights.items())
    assert worst[0] < 1e-5, worst


# Those of two or three tokens are near nothing, and their rounding is not.
@pytest.mark.parametrize("way", [way for way in WAYS if way.batch != "short"], ids=lambda way: way.name)
def test_each_gradient_is_that_of_one_process_on_every_rank(way: Way, runs: Runs) -> None:
    (one,) = runs[alone(way)]
    largest = max(float(wanted.norm()) for wanted in one.gradients.values())
    for rank in runs[way]:
        assert rank.gradients.keys() == one.gradients.keys()
        for key, wanted in one.gradients.items():
            distance = float((rank.gradients[key] - wanted).norm())
            assert distance <= 5e-6 * max(float(wanted.norm()), 1e-3 * largest), key


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_experts_are_counted_once_for_each_token(way: Way, runs: Runs) -> None:
    found, (one,) = runs[way], runs[alone(way)]
    for step, expected in enumerate(one.metrics):
        assert expected["expert_load_max"] > 1
        for rank in found:
            counted = {name: rank.metrics[step].get(name) for name in ("expert_load_max", "dead_experts")}
            assert counted == {name: expected[name] for name in counted}
            assert ("balance_loss" in rank.metrics[step]) == ("balance_loss" in expected)
            if "balance_loss" in expected:
                assert rank.metrics[step]["balance_loss"] == pytest.approx(expected["balance_loss"], rel=1e-5)


BIASES = [way for way in WAYS if "bias_update_rate" in way.options.get("router", {})]


@pytest.mark.parametrize("way", BIASES, ids=lambda way: way.name)
def test_the_bias_that_chooses_experts_is_that_of_one_process(way: Way, runs: Runs) -> None:
    wanted = runs[alone(way)][0].weights[BIAS]
    assert float(wanted.abs().max()) > 0.015, "two updates of 0.01 and more"
    assert torch.equal(runs[way][0].weights[BIAS], wanted)


@pytest.mark.parametrize("way", [way for way in WAYS if way.batch == "routed"], ids=lambda way: way.name)
def test_flipped_routes_are_counted_once_for_each_token(way: Way, runs: Runs) -> None:
    heads, (one,) = runs[way][:: way.together], runs[alone(way)]
    found = reduce(Mean.merge, [rank.flipped for rank in heads])
    assert found.count == one.flipped.count
    assert abs(found.total - one.flipped.total) <= 2, "but for scores that rounding makes equal"
    assert found.value > 0.3


def test_what_is_not_served_is_refused(runs: Runs) -> None:
    outcomes = run_calls([(refused, (way, runs.folders)) for way, _ in REFUSED], 2)
    for (_, names), ranks in zip(REFUSED, outcomes, strict=True):
        assert all(names in message for message in ranks)
