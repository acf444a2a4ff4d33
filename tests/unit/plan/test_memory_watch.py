"""Tenants beside their plan: what they are planned to hold, remarks, errors, and whether models take turns at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.config.load import load_config
from nemorl.contracts.memory import DeviceMemoryError, MemoryPart
from nemorl_cli.console import Console
from nemorl_insight.plan.launch_check import memory_problems
from nemorl_rl.placement.engines import RolloutResources
from nemorl_rl.placement.tenants import ROLLOUT, SYNC, TRAIN, Holdings, Phase, account
from nemorl_rl.planning.devices import device_named
from nemorl_rl.planning.memory import reading
from nemorl_rl.planning.memory.budgets import budgets
from nemorl_rl.planning.memory.watch import MemoryWatch
from recorded_messages import Raises
from tiers import only

pytestmark = pytest.mark.slow

GIB = 2**30
REFERENCE = Phase("policy", "reference")
QWEN_7B = {
    **{"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28},
    **{"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
}
QWEN_HALF_B = {
    **{"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14},
    **{"num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
}


@pytest.fixture
def on_h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The config of a GRPO run on H100s that this machine is told to have."""
    monkeypatch.setattr(reading, "this_gpu", lambda: device_named("H100"))

    def make(sizes: Mapping[str, object] = QWEN_7B, gpus: int = 8, **more: Any) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(sizes))
        policy = {"precision": "bfloat16", "microbatch_tokens": 4096, **more.pop("policy", {})}
        cluster = {"gpus_per_node": gpus, **more.pop("cluster", {})}
        run = {"algorithm": "grpo", "model": str(tmp_path), "data": "arithmetic", "environment": "math"}
        return load_config(
            {**run, "policy": policy, "generation": {"backend": "vllm"}, "cluster": cluster, **more}, for_cluster=True
        )

    return make


# What tenants are planned to hold


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", only("grpo", of=("grpo", "ppo")))
def test_tenants_hold_what_was_planned(
    precision: str, algorithm: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed form beside ``held_bytes`` of real backends in each phase, with a reference and with a critic."""
    held: dict[Phase, Holdings] = {}
    planned: dict[Phase, Any] = {}

    def entered(self: MemoryWatch, phase: Phase, holdings: Callable[[], Holdings]) -> None:
        held[phase] = holdings()
        planned.update(self.budgets)

    monkeypatch.setattr(MemoryWatch, "entered", entered)
    run: dict[str, Any] = {"num_prompts_per_step": 8, "max_steps": 2, "kl_penalty": 0.1}
    policy = {"precision": precision, "init": "random", "microbatch_tokens": 64, "max_sequence_tokens": 48}
    config = nemorl.load_config(
        {
            **{"algorithm": algorithm, "model": str(tiny_model), "run_dir": str(tmp_path / "run"), **run},
            **{"policy": policy, "generation": {"max_new_tokens": 8}, "cluster": {"take_turns": True}},
        }
    )
    rows = [{"prompt": f"{number} plus {number} is what?"} for number in range(8)]
    config.build().fit(rows, lambda prompt, response: float(len(response) % 3), console=Console(quiet=True))
    assert {ROLLOUT, SYNC, TRAIN, REFERENCE} <= held.keys()
    compared = [phase for phase in held if phase in planned and phase != ROLLOUT]
    assert (Phase("critic", "train") in compared) == (algorithm == "ppo")
    for phase in compared:
        for tenant in ("policy", "critic") if algorithm == "ppo" else ("policy",):
            counted = planned[phase].held_bytes(tenant)
            for part in ("weights", "optimizer", "reference"):
                # Buffers, and a counter of steps for each parameter, are not planned.
                wanted = pytest.approx(held[phase][tenant][part], rel=0.01, abs=2000)
                assert counted.get(part, 0) == wanted, f"{phase}: {tenant}'s {part}"


# Remarks and errors


def holding(**tenants: Mapping[MemoryPart, float]) -> Callable[[], Holdings]:
    return lambda: {name: {part: int(size * GIB) for part, size in parts.items()} for name, parts in tenants.items()}


def test_more_than_planned_is_remarked_upon_once(on_h100: Callable[..., Any]) -> None:
    watch = MemoryWatch(on_h100(cluster={"take_turns": True}))
    # 7.62 B parameters on 8 ranks: 1.77 GiB of weights, 12 B a parameter of masters and moments: 10.6 GiB.
    plan = watch.budgets[TRAIN].held_bytes("policy")
    assert plan["weights"] / GIB == pytest.approx(2 * 7_615_616_512 / 8 / GIB)
    assert plan["optimizer"] / GIB == pytest.approx(12 * 7_615_616_512 / 8 / GIB)
    watch.entered(TRAIN, holding(policy={"weights": 1.8, "optimizer": 10.6}))
    assert watch.new_remarks() == []
    watch = MemoryWatch(on_h100(cluster={"take_turns": True}))
    for _ in range(2):
        watch.entered(TRAIN, holding(policy={"weights": 1.8, "optimizer": 19.0}, engine={"weights": 0.0}))
    (remark,) = watch.new_remarks()
    assert "policy holds" in remark
    assert "optimizer 19.00 GiB" in remark
    assert "optimizer 10.64 GiB" in remark
    assert watch.new_remarks() == []


def test_work_that_cannot_fit_names_who_holds_what(on_h100: Callable[..., Any], raises: Raises) -> None:
    watch = MemoryWatch(on_h100(cluster={"take_turns": True}))
    held = holding(policy={"weights": 1.8, "optimizer": 10.6}, engine={"weights": 15.0, "cache": 50.0})
    with raises(DeviceMemoryError, "train", "cache", "50.00", "planned", "activations"):
        watch.entered(TRAIN, held)


def test_running_out_of_memory_is_explained(on_h100: Callable[..., Any], raises: Raises) -> None:
    watch = MemoryWatch(on_h100(cluster={"take_turns": True}))
    error = DeviceMemoryError("out of memory on cuda:0", fix="lower something")
    told = watch.explained(TRAIN, error, holding(policy={"weights": 1.8, "optimizer": 10.6}))
    with raises(DeviceMemoryError, "train", "cuda:0", "optimizer", "10.60"):
        raise told
    assert "policy." in str(told.fix)
    with raises(DeviceMemoryError, "planned"):
        raise watch.explained(TRAIN, error)


def test_what_cannot_be_planned_is_told_without_a_plan(tmp_path: Path) -> None:
    run = {"algorithm": "grpo", "model": "org/model", "data": "arithmetic", "environment": "math"}
    watch = MemoryWatch(load_config(run, for_cluster=True))  # the model's sizes are not on this machine
    error = DeviceMemoryError("out of memory", fix="use less")
    told = watch.explained(ROLLOUT, error, holding(engine={"cache": 2.0}))
    assert told.message == "in rollout, out of memory (in memory: engine's cache 2.00 GiB)"
    assert told.fix == "use less"
    watch.entered(ROLLOUT, holding(engine={"cache": 999.0}))
    assert watch.new_remarks() == []


# Whether models take turns


def take_turns(config: Any, folder: Path) -> bool:
    """Whether the models of a run do, once it has decided."""
    with closing(RolloutResources(config, folder / "run")) as resources:
        return bool(resources.placement.takes_turns)


def test_models_that_fit_together_stay(on_h100: Callable[..., Any], tmp_path: Path) -> None:
    assert not take_turns(on_h100(QWEN_HALF_B, gpus=1, cluster={"launcher": "local"}), tmp_path)
    assert on_h100(QWEN_HALF_B, gpus=1, cluster={"take_turns": True}).place().takes_turns


def test_models_that_do_not_fit_together_take_turns(on_h100: Callable[..., Any], tmp_path: Path) -> None:
    # vLLM's half of the device and 18 B / 8 x 7.6 B parameters leave 22 GiB; activations of 4,096 tokens take more.
    assert on_h100().place().takes_turns is None  # its plan says
    assert reading.known_scene(on_h100()).takes_turns  # type: ignore[union-attr]
    assert take_turns(on_h100(gpus=1), tmp_path)
    assert on_h100(cluster={"take_turns": False}).place().takes_turns is False
    assert on_h100(generation={"backend": "hf"}, cluster={"colocated": False}).place().takes_turns is False


def test_a_run_that_does_not_fit_even_in_turns_is_refused(on_h100: Callable[..., Any], tmp_path: Path) -> None:
    config = on_h100(gpus=1)  # 18 B x 7.6 B parameters = 128 GiB
    (problem,) = memory_problems(config, tmp_path, print)
    assert "even taking turns" in problem.message
    assert "policy train" in problem.message
    # Of 7.616 B parameters, in GiB: 8 bytes of moments, 4 of masters and of gradients, 2 of bfloat16.
    for part in ("moments 56.7", "masters 28.4", "gradient sums 28.4", "weights 14.2"):
        assert part in problem.message
    assert "nemorl plan" in str(problem.fix)


def test_phases_show_who_is_asleep(on_h100: Callable[..., Any]) -> None:
    config = on_h100(kl_penalty=0.1)
    scene = reading.known_scene(config)
    assert scene is not None
    found = budgets(scene)
    names = {phase: {name for name, parts in budget.held.items() if parts} for phase, budget in found.items()}
    assert names[ROLLOUT] == {"engine"}
    assert names[REFERENCE] == {"policy"}
    assert names[TRAIN] == {"policy"}
    assert names[SYNC] == {"policy", "engine"}
    assert set(found[REFERENCE].held_bytes("policy")) == {"reference"}
    assert "reference" not in found[TRAIN].held_bytes("policy")
    assert account({"policy": found[REFERENCE].held_bytes("policy")}) == ("in memory: policy's reference 1.77 GiB")


def test_critics_and_teachers_are_tenants(on_h100: Callable[..., Any]) -> None:
    scene = reading.known_scene(on_h100(algorithm="ppo"))
    assert scene is not None
    found = budgets(scene)
    assert {Phase("critic", "train"), Phase("critic", "measure")} <= found.keys()
    assert found[Phase("critic", "train")].held["policy"] == ()
    assert found[TRAIN].held["critic"] == ()
    assert any(part.name == "critic moments" for part in found[Phase("critic", "train")].parts)


def test_weights_on_their_way_take_what_their_transport_does(on_h100: Callable[..., Any]) -> None:
    def in_sync(**changes: Any) -> float:
        scene = reading.known_scene(on_h100(**changes))
        assert scene is not None
        return next(part.size for part in budgets(scene)[SYNC].work if part.name == "sync buffers")

    parameters, embedding = 7_615_616_512, 152064 * 3584
    # cuda_ipc copies a rank's eighth within its GPU; the engine reads through one bucket. One rank has all.
    assert in_sync() == pytest.approx(2 * parameters / 8 + 2 * embedding)
    assert in_sync(gpus=1, cluster={"launcher": "ray"}) == 2 * parameters + 2 * embedding
    # Shared memory is the host's: a bucket on either side.
    assert in_sync(cluster={"weight_transport": "shared_memory"}) == 2 * 2 * embedding
    lora = {"lora": {"rank": 8}}
    adapters = 28 * 8 * (4 * 3584 + 2 * (3584 + 512) + 3 * (3584 + 18944))
    sent = in_sync(policy=lora, rollouts={"adapters": "separate"}, cluster={"weight_transport": "shared_memory"})
    assert sent == 2 * 2 * adapters


def test_dpos_reference_and_policy_take_turns_where_asked(on_h100: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    run = {"algorithm": "dpo", "model": str(tmp_path), "data": "arithmetic", "reference": "model"}
    config = load_config({**run, "cluster": {"gpus_per_node": 8, "take_turns": True}}, for_cluster=True)
    scene = reading.known_scene(config)
    assert scene is not None
    found = budgets(scene)
    assert set(found[REFERENCE].held_bytes("policy")) == {"reference"}
    assert "reference" not in found[TRAIN].held_bytes("policy")


def test_an_engine_in_eight_bits_holds_half_of_its_layers(on_h100: Callable[..., Any]) -> None:
    def weights(precision: str | None) -> float:
        config = on_h100(generation={"backend": {"name": "vllm", "precision": precision}})
        scene = reading.known_scene(config)
        assert scene is not None
        return budgets(scene)[ROLLOUT].held_bytes("engine")["weights"]

    outside = 2 * 152064 * 3584
    layers = 7_615_616_512 - outside
    assert weights(None) == 2 * (layers + outside)
    assert weights("fp8") == pytest.approx((1 + 4 / 128**2) * layers + 2 * outside)


def test_what_an_engine_cannot_give_back_is_planned_while_it_sleeps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_HALF_B, "num_hidden_layers": 2}))
    run = {"algorithm": "grpo", "model": str(tmp_path), "data": "arithmetic", "environment": "math"}
    held = {}
    for backend in ("vllm", "hf"):
        turns = {"generation": {"backend": backend}, "cluster": {"take_turns": True, "gpus_per_node": 0}}
        config = load_config({**run, **turns}, for_cluster=True)
        scene = reading.known_scene(config)
        assert scene is not None
        assert scene.takes_turns
        held[backend] = budgets(scene)[REFERENCE].held_bytes("engine").get("weights", 0.0)
    assert held["vllm"] > 0  # packed by oneDNN: see nemorl_vllm.packed
    assert held["hf"] == 0
