"""The planner: hand-worked numbers, monotony, every shipped config, and what the command says and writes."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from nemorl.config import LoraConfig, PolicyConfig
from nemorl.config.load import load_config
from nemorl.errors import UsageError
from nemorl_insight.plan.candidates import candidates, judged
from nemorl_insight.plan.command import app
from nemorl_insight.plan.launch_check import memory_plan, memory_problems
from nemorl_insight.plan.seconds import step_time
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.placement.tenant_resources import TenantResources
from nemorl_rl.placement.tenants import ROLLOUT, TRAIN
from nemorl_rl.planning.devices import TABLE, Speed, device_named, named_by_driver, parse_fleet
from nemorl_rl.planning.memory import reading
from nemorl_rl.planning.memory.budgets import budgets, fullest
from nemorl_rl.planning.memory.layouts import applied, as_fix, overrides, present, smallest_change
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.parts import GIB, total
from nemorl_rl.planning.memory.reading import Lengths, Sizes, scene_of
from nemorl_rl.planning.memory.scene import Scene
from recorded_messages import Raises
from tiers import only
from typer.testing import CliRunner

ROOT = Path(__file__).parents[3]
SHIPPED = sorted([*ROOT.glob("examples/**/*.yaml"), *ROOT.glob("plugins/*/src/*/templates/*.yaml")])
LLAMA_8B = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False},
}
GRPO = {"algorithm": "grpo", "model": "org/llama-8b", "data": "arithmetic", "environment": "math"}


def held(backend: str = "dtensor", policy: dict[str, Any] | None = None, **changes: Any) -> HeldModel:
    options = {"precision": "bfloat16", "max_sequence_tokens": 4096, **(policy or {})}
    config = PolicyConfig(backend={"name": backend, **options.pop("backend", {})}, **options)  # type: ignore[arg-type]
    base = HeldModel("policy", config, Geometry.from_config(LLAMA_8B), ranks=8, microbatch_tokens=4096)
    return replace(base, **changes)


def with_policy(model: HeldModel, **changes: Any) -> HeldModel:
    return replace(model, policy=model.policy.model_copy(update=changes))


def scene(gpus: str = "8xH100", nodes: int = 1, **changes: Any) -> Any:
    policy = {"precision": "bfloat16", **changes.pop("policy", {})}
    config = load_config({**GRPO, "policy": policy, **changes}, for_cluster=True)
    return scene_of(config, parse_fleet(nodes, gpus), Sizes(LLAMA_8B))


def test_sharded_states_are_eighteen_bytes_a_parameter() -> None:
    # bfloat16 weights 2, float32 masters 4, moments 8, gradient sums 4; over 8 ranks.
    assert total(held().moments.lasting) == pytest.approx(18 * 8_030_261_248 / 8)


def test_megatrons_states_are_those_of_its_own_formula() -> None:
    # megatron/training/theoretical_memory_usage.py: 18 B a parameter, 6 + 12 / data-parallel with the distributed
    # optimizer.
    whole = total(held("megatron", {"backend": {"distributed_optimizer": False}}, ranks=4).moments.lasting)
    divided = total(held("megatron", ranks=4).moments.lasting)
    assert whole == pytest.approx(18 * 8_030_261_248)
    assert divided == pytest.approx((6 + 12 / 4) * 8_030_261_248)


def test_a_first_pipeline_stage_keeps_the_microbatches_in_flight() -> None:
    # arXiv:2104.04473, section 2.2: p microbatches of L / p layers, so as much as one of all layers.
    one = held("megatron", ranks=1)
    four = held("megatron", {"backend": {"pipeline_parallel_size": 4}}, ranks=4)
    sizes = []
    for model in (one, four):
        (activations, *_) = model.moments.training["backward"]
        sizes.append(activations.size)
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


def test_a_stage_holds_the_layers_that_it_was_given() -> None:
    # Llama 3.1 8B: a layer has 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096 weights, the embedding
    # 128256 * 4096. With 14 of 32 layers the first of two stages has the embedding, the last 18 layers and the head.
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    split = {"pipeline_parallel_size": 2, "layers_in_first_stage": 14}
    found = held("megatron", {"backend": split}, ranks=2)
    assert total(found.moments.lasting) == pytest.approx(18 * (18 * layer + 128256 * 4096), rel=1e-4)
    plan = found.plan.layouts(replace(found, ranks=8), 8)
    firsts = {(spread["backend.pipeline_parallel_size"], spread["backend.layers_in_first_stage"]) for spread in plan}
    assert firsts == {(1, None), (2, 14), (4, None), (8, None)}


def test_adapters_take_two_bytes_a_weight_and_sixteen_of_their_own() -> None:
    model = held("dtensor", {"lora": {"rank": 16}}, ranks=1)
    # Per layer: q, o 16 * 2 * (4096 + 4096), k, v 16 * 2 * (4096 + 1024), MLP 16 * 3 * (4096 + 14336).
    adapters = 32 * 16 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    assert model.adapter_parameters == adapters
    assert total(model.moments.lasting) == pytest.approx(2 * 8_030_261_248 + 16 * adapters)  # they are float32


def test_a_base_in_four_bits_takes_half_a_byte_a_weight() -> None:
    model = held("dtensor", {"lora": {"rank": 16, "base": "nf4"}}, ranks=1)
    # arXiv:2305.14314, section 3: 4 bits, and 8 bits for 64 with 32 bits for 256 of these: 4.127 bits a weight.
    linear = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    outside = 8_030_261_248 - linear
    weights = 4.127 / 8 * linear + 2 * outside
    assert total(model.moments.lasting) == pytest.approx(weights + 16 * model.adapter_parameters, rel=1e-4)


def test_megatrons_adapters_take_states_of_their_own_alone() -> None:
    model = held("megatron", {"lora": {"rank": 16}}, ranks=4, has_reference=True)
    # Of 4 data-parallel ranks: weights whole, masters and moments divided, float32 gradients whole; no frozen copy.
    states = (4 + 4 + 8 / 4) * model.adapter_parameters
    assert total(model.moments.lasting) == pytest.approx(2 * 8_030_261_248 + states)


LARGER: dict[str, Callable[[HeldModel], HeldModel]] = {
    "microbatch tokens": lambda model: replace(model, microbatch_tokens=model.microbatch_tokens * 2),
    "reference": lambda model: replace(model, has_reference=True),
    "accumulates": lambda model: replace(model, accumulates=True),
}
SMALLER: dict[str, Callable[[HeldModel], HeldModel]] = {
    "checkpointing": lambda model: with_policy(model, activation_checkpointing=True),
    "ranks": lambda model: replace(model, ranks=model.ranks * 2),
    "adapters": lambda model: with_policy(model, lora=LoraConfig(rank=8) if model.tensor == 1 else None),
}


@pytest.mark.parametrize("seed", range(40))
def test_memory_is_monotone_in_every_argument_but_precision(seed: int) -> None:
    # float32 weights are their own masters: 16 bytes a parameter where bfloat16 takes 18.
    draw = random.Random(seed)
    backend = draw.choice(["dtensor", "megatron"])
    tensor = draw.choice([1, 2, 4])
    options = {"tensor_parallel_size": tensor, "activation_checkpointing": draw.random() < 0.5}
    model = held(
        backend,
        options,
        ranks=tensor * draw.choice([2, 4, 16]),
        microbatch_tokens=draw.choice([256, 1024, 8192]),
        has_reference=draw.random() < 0.5,
        accumulates=draw.random() < 0.5,
    )
    now = total(model.moments.peak)
    for name, change in LARGER.items():
        assert total(change(model).moments.peak) >= now - 1, name
    for name, change in SMALLER.items():
        assert total(change(model).moments.peak) <= now + 1, name
    for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"):
        grown = Geometry.from_config({**LLAMA_8B, key: 2 * int(str(LLAMA_8B[key]))})
        assert total(replace(model, geometry=grown).moments.peak) >= now, key


LINKS = ("memory_gb_s", "link_gb_s", "network_gb_s")


@pytest.mark.parametrize("seed", range(10))
def test_a_step_takes_longer_with_more_work_and_less_on_faster_devices(seed: int) -> None:
    draw = random.Random(seed)
    found = scene(policy={"activation_checkpointing": draw.random() < 0.5})
    now = step_time(found).seconds
    for name in ("sequences", "prompt_tokens", "response_tokens", "longest_response", "passes"):
        more = replace(found.work, **{name: getattr(found.work, name) * draw.choice([2, 3])})
        assert step_time(replace(found, work=more)).seconds >= now, name
    now_on = found.fleet.device
    faster = Speed(*(2 * value for value in astuple(now_on.speed)))
    changes: list[dict[str, Any]] = [{name: 2 * getattr(now_on, name)} for name in LINKS]
    for change in ({"speed": faster}, *changes):
        device = replace(now_on, **change)
        assert step_time(replace(found, fleet=replace(found.fleet, device=device))).seconds <= now, name


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_plans(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = shipped(path, tmp_path, monkeypatch)
    assert judged(found, present(found)).time.seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("path", only(*SHIPPED[::5], of=SHIPPED), ids=lambda path: path.stem)
def test_every_shipped_config_has_a_layout_that_fits(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert candidates(shipped(path, tmp_path, monkeypatch))[0].fits  # among some 600 layouts


def shipped(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """The run of a shipped config with a model of 8B parameters, on nodes of eight H200."""
    reward_model = tmp_path / "runs/my-reward-model/model"  # of a run before, for the template that continues from it
    reward_model.mkdir(parents=True)
    (reward_model / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.chdir(tmp_path)
    config = load_config(path, for_cluster=True)
    names = {config.policy.model_name, *(held.policy.model_name for held in config.auxiliary_models.values())}
    sizes = Sizes(LLAMA_8B, dict.fromkeys(names, LLAMA_8B))
    fleet = parse_fleet(max(2, config.cluster.num_nodes), "8xH200")
    return scene_of(config, fleet, sizes)


@pytest.mark.slow
def test_a_smaller_device_fits_after_the_smallest_change() -> None:
    # 16,384 tokens a microbatch keep 105 GB of activations.
    generation = {"backend": {"name": "vllm"}, "max_new_tokens": 1024}
    found = scene("8xH100", generation=generation, policy={"microbatch_tokens": 16384})
    now = judged(found, present(found))
    assert not now.fits
    best = min((one for one in candidates(found) if one.fits), key=lambda one: one.changes)
    assert best.changes == 1
    assert set(overrides(found, best.choice)) <= {"policy.activation_checkpointing", "policy.microbatch_tokens"}


@pytest.mark.parametrize("gpus", ["8xL40S", "8xA100-40GB", "8xH100", "8xB300"])
def test_microbatches_that_the_config_leaves_open_are_the_largest_that_fit(gpus: str) -> None:
    generation = {"backend": {"name": "vllm"}, "max_new_tokens": 1024}
    found = scene(gpus, generation=generation)
    budget = found.policy.budget
    assert fullest(found).fits
    assert budget == {"8xB300": 16384}.get(gpus, budget)
    named = scene(gpus, generation=generation, policy={"microbatch_tokens": budget})
    larger = scene(gpus, generation=generation, policy={"microbatch_tokens": 2 * budget})
    assert fullest(named).needed == fullest(found).needed
    assert budget == 16384 or not fullest(larger).fits


def test_a_run_gets_the_microbatches_that_its_plan_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setattr(reading, "this_gpu", lambda: device_named("H100"))
    data = {"algorithm": "dpo", "model": str(tmp_path), "data": "arithmetic", "cluster": {"gpus_per_node": 1}}

    def resources_of(**policy: Any) -> TenantResources:
        config = load_config({**data, "policy": {"precision": "bfloat16", **policy}}, for_cluster=True)
        return TenantResources(config, tmp_path / "run")

    with closing(resources_of()) as resources:
        # The update does not fit one device in any case, and training with these takes no more.
        assert resources.config.policy.microbatch_tokens == 4096
        assert resources._fitting(PolicyConfig(microbatch_tokens=777)).microbatch_tokens == 777
    with closing(resources_of(microbatch_tokens=777)) as resources:
        assert resources.config.policy.microbatch_tokens == 777


def test_an_engine_larger_than_its_share_does_not_fit() -> None:
    # 16 GB of weights in 0.15 of 79.6 GiB.
    found = scene(generation={"backend": {"name": "vllm", "gpu_memory_utilization": 0.15}})
    memory = budgets(found)[ROLLOUT]
    assert memory.lacks / GIB == pytest.approx(14.96 + 4096 * 131072 / GIB - 0.15 * 79.6, abs=0.01)
    assert not memory.fits


def test_those_who_take_turns_need_no_more_than_the_largest_of_them() -> None:
    generation = {"backend": {"name": "vllm", "gpu_memory_utilization": 0.6}, "max_new_tokens": 1024}
    both = scene(generation=generation, policy={"activation_checkpointing": True}, cluster={"take_turns": False})
    turns = scene(generation=generation, policy={"activation_checkpointing": True})
    assert turns.takes_turns
    together, alone = fullest(both), fullest(turns)
    assert total(budgets(both)[TRAIN].held["engine"]) == pytest.approx(0.6 * 79.6 * GIB)
    assert total(budgets(turns)[TRAIN].held["engine"]) == 0
    # The engine's turn is the fullest: its share of the device, and two processes of 0.7 GiB.
    assert alone.phase == ROLLOUT
    assert alone.needed == pytest.approx((0.6 * 79.6 + 2 * 0.7) * GIB)
    assert together.needed > alone.needed + 20 * GIB
    assert alone.fits
    assert not together.fits


def test_decoding_is_bound_by_reading_weights_and_cache() -> None:
    found = scene(
        generation={"backend": {"name": "vllm"}, "max_new_tokens": 1024},
        num_prompts_per_step=8,
        num_generations_per_prompt=16,
    )
    (decoding,) = (phase for phase in step_time(found).phases if phase.name == "decoding")
    # 128 responses on 8 engines: 16 rows of 512 tokens on average within 1,024 steps, so 8 rows at a time; the prompt
    # is 512 (half of what 4,096 leaves is more), so a row has 512 + 256 tokens of 131,072 B.
    read = 2 * (6_979_321_856 + 525_336_576) + 8 * 768 * 131072
    assert decoding.bound == "memory"
    assert decoding.seconds == pytest.approx(1024 * (read / (3350e9 * 0.6) + 5e-3 + 8 * 4e-5))


def test_devices_are_found_by_several_spellings(raises: Raises) -> None:
    assert parse_fleet(2, "8xh100").size == 16
    assert device_named("a100-80gb") is device_named("A100")
    assert named_by_driver("NVIDIA A100-SXM4-40GB") == device_named("A100-40GB")
    assert named_by_driver("NVIDIA H100 80GB HBM3") == device_named("H100")
    assert named_by_driver("NVIDIA GeForce RTX 4090") == device_named("rtx4090")
    assert named_by_driver("Radeon") is None
    assert all(device.source and device.memory_gib > 0 for device in TABLE)
    with raises(UsageError, "H10", "H100"):
        device_named("H10")
    with raises(UsageError, "eight"):
        parse_fleet(1, "eight of them")


def test_a_model_that_is_not_here_is_named(raises: Raises) -> None:
    config = load_config(GRPO, for_cluster=True)
    with raises(UsageError, "org/llama-8b", "--model-config"):
        scene_of(config, parse_fleet(1, "H100"), Sizes(), Lengths())


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({**GRPO, "policy": {"precision": "bfloat16"}}))
    return path


def called(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_writes_a_config_that_loads_and_fits(config_file: Path, tmp_path: Path) -> None:
    sizes, target = ("--model-config", tmp_path / "config.json"), tmp_path / "planned.yaml"
    done = called(config_file, "--gpus", "8xA100", *sizes, "--json", "--write", target)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.output)
    assert answer["present"]["memory"]
    assert answer["candidates"][0]["fits"]
    again = json.loads(called(target, "--gpus", "8xA100", *sizes, "--json").output)
    assert again["present"]["fits"]
    assert again["present"]["seconds_per_step"] == answer["candidates"][0]["seconds_per_step"]
    assert load_config(target, for_cluster=True).cluster.gpus_per_node == 8


@pytest.mark.parametrize("mode", only("async", of=("sync", "async")))
def test_what_is_written_never_changes_what_is_learnt_unless_that_is_allowed(
    mode: str, config_file: Path, tmp_path: Path
) -> None:
    sizes, target = ("--model-config", tmp_path / "config.json", "--json"), tmp_path / "planned.yaml"
    apart = ("cluster.colocated=false", "cluster.generation_workers=4", "rollouts.max_staleness=2")
    changes = ("generation.backend=vllm", *(("rollouts.mode=async", *apart) if mode == "async" else ()))
    written = {}
    for allow in ((), ("--allow", "rollouts.mode")):
        done = called(config_file, "--gpus", "8xH100", *sizes, "--write", target, *allow, *changes)
        assert done.exit_code == 0, done.output
        written[allow] = load_config(target, for_cluster=True)
        assert json.loads(done.output)["smallest_change"] is not None
    strict, free = written[()], written["--allow", "rollouts.mode"]
    assert strict.rollouts.mode == mode
    assert strict.rollouts.max_staleness == free.rollouts.max_staleness == (2 if mode == "async" else 1)
    assert free.rollouts.mode == "async", "sampling beside training is faster here"
    done = called(config_file, "--gpus", "8xH100", *sizes, "--allow", "rollouts.max_staleness")
    assert "--allow rollouts.mode" in str(done.exception.fix)


def test_a_config_is_judged_for_the_devices_that_are_asked_for(config_file: Path, tmp_path: Path) -> None:
    sizes = ("--model-config", tmp_path / "config.json", "--json")
    spread, apart = "policy.tensor_parallel_size=2", ("cluster.colocated=false", "cluster.generation_workers=4")
    for changes in ((spread,), (spread, "--nodes", 2, *apart)):
        done = called(config_file, "--gpus", "8xH100", *sizes, *changes)
        assert done.exit_code == 0, done.output
    layouts = ("policy.tensor_parallel_size=8", "cluster.gpus_per_node=8"), ("policy.tensor_parallel_size=3",)
    for gpus, changes in zip(("4xH100", "8xH100"), layouts, strict=True):
        done = called(config_file, "--gpus", gpus, *sizes, *changes)
        assert done.exit_code != 0
        assert "that leaves a rest" in str(done.exception)


def test_devices_of_training_that_are_lent_sample_and_take_turns_for_it(config_file: Path, tmp_path: Path) -> None:
    sizes = ("--model-config", tmp_path / "config.json", "--json")
    apart = ("generation.backend=vllm", "cluster.colocated=false", "cluster.generation_workers=4")

    def planned(*changes: str) -> dict[str, Any]:
        done = called(config_file, "--gpus", "8xH100", *sizes, *apart, *changes)
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.output)["present"]
        return found

    alone, lent = planned(), planned("cluster.lend_training_devices=true")
    before, after = ({part["name"]: part["seconds"] for part in plan["phases"]} for plan in (alone, lent))
    assert after["decoding"] < before["decoding"]
    assert after["prefill"] == pytest.approx(before["prefill"] / 2, rel=0.01)  # 8 engines in place of 4
    assert after.keys() - before.keys() == {"taking turns"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--response-tokens", 1000, "--longest-response", 50), "the longest 50"),
        (("--longest-response", 5000), "exceeds generation.max_new_tokens = 1024"),
        (("--prompt-tokens", 100_000), "exceeds policy.max_sequence_tokens = 4096"),
        (("--write", "run.json"), "what is written is YAML"),
        (("--write", "run.yaml"), "would replace the config"),
    ],
)
def test_what_cannot_be_planned_or_written_is_refused(
    flags: tuple[Any, ...], words: str, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = config_file.read_text()
    limit = "generation.max_new_tokens=1024"
    done = called(config_file, "--gpus", "8xH100", "--model-config", tmp_path / "config.json", limit, *flags)
    assert isinstance(done.exception, UsageError)
    assert words in str(done.exception)
    assert config_file.read_text() == before


def test_a_critic_inherits_what_a_layout_changes() -> None:
    crowded = scene(algorithm="ppo", generation={"backend": "vllm"}, policy={"microbatch_tokens": 65536})
    change = smallest_change(crowded)
    assert change is not None
    chosen = applied(crowded, change)
    (critic,) = chosen.others
    assert critic.budget == chosen.policy.budget < 65536
    own = scene(algorithm="ppo", generation={"backend": "vllm"}, critic={"microbatch_tokens": 2048})
    (critic,) = applied(own, replace(present(own), training=(("microbatch_tokens", 4096),))).others
    assert critic.budget == 2048


def test_a_row_of_a_cache_is_as_long_as_prompt_and_response_may_be() -> None:
    # 64 rows of at most 2 * 100 + 16 tokens, 32 layers x 2 x 8 heads x 128 elements of 2 bytes: 1.69 GiB, where rows of
    # max_sequence_tokens = 4096 would take 32.
    config = load_config({**GRPO, "policy": {"precision": "bfloat16"}, "generation": {"max_new_tokens": 16}})
    found = scene_of(config, parse_fleet(1, "H100"), Sizes(LLAMA_8B), Lengths(prompt=100))
    assert found.engines is not None
    cache = found.engines.plan.memory(found.engines, found.capacity, 64).passing[0]
    assert cache.size == 64 * 216 * 32 * 2 * 8 * 128 * 2


def test_an_engine_over_several_nodes_keeps_each_layer_on_one() -> None:
    backend = {"name": "vllm", "tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    config = load_config(
        {**GRPO, "policy": {"precision": "bfloat16"}, "generation": {"backend": backend}},
        ["cluster.gpus_per_node=4", "cluster.num_nodes=2", "cluster.address=auto"],
        for_cluster=True,
    )
    found = scene_of(config, parse_fleet(2, "4xH100"), Sizes(LLAMA_8B))
    assert found.engines is not None
    options = [*found.engines.plan.options(found.engines, apart=False, per_node=4)]
    # Two stages of 1, 2 and 4 devices: half a node, a node, two nodes. Of 8 a layer would cross.
    assert {option["tensor_parallel_size"] for option in options} == {1, 2, 4}


def test_ranks_beyond_the_heads_of_a_cache_hold_copies() -> None:
    # Qwen2 1.5B: 28 layers x 2 x 2 heads x 128 elements of 2 bytes, 28,672 B a token; four ranks hold one head each.
    sizes = {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
    backend = {"name": "vllm", "tensor_parallel_size": 4}
    config = load_config(
        {**GRPO, "policy": {"precision": "bfloat16"}, "generation": {"backend": backend}},
        ["cluster.gpus_per_node=4"],
        for_cluster=True,
    )
    found = scene_of(config, parse_fleet(1, "4xH100"), Sizes({**LLAMA_8B, **sizes, "model_type": "qwen2"}))
    assert found.engines is not None
    memory = found.engines.plan.memory(found.engines, found.capacity, 64)
    (cache,) = (part for part in memory.lasting if part.name == "KV cache")
    assert found.engines.plan.cached_tokens(found.engines, found.capacity) == pytest.approx(cache.size / (28_672 / 2))


@pytest.mark.full
def test_a_cache_that_is_too_large_is_what_should_be_smaller() -> None:
    # 8 G parameters on 8 H100s take 16.9 GiB each beside vLLM's copy of 15 and the cache of 60.
    crowded = scene(generation={"backend": {"name": "vllm", "kv_cache_gib": 60}}, policy={"microbatch_tokens": 4096})
    assert not fullest(crowded).fits
    change = smallest_change(crowded)
    assert change is not None
    assert [*overrides(crowded, change)] == ["generation.backend.kv_cache_gib"]


def test_what_fits_nowhere_here_is_told_how_many_devices_it_takes() -> None:
    # 8.03 G parameters x 18 B are 134.6 GiB of states. Each of two A100 of 79.3 would hold 67.3 and the engine's own
    # 15.0, each of four 33.7 and 15.0.
    crowded = scene(gpus="1xA100")
    assert smallest_change(crowded) is None
    assert "or 1 x 4 A100 (" in as_fix(crowded, None)


def test_adapters_are_counted_for_the_layers_that_have_them() -> None:
    queries = held("dtensor", {"lora": {"rank": 16, "target_modules": ["q_proj"]}})
    assert queries.adapter_parameters == 32 * 16 * (4096 + 4096)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "model_type": "qwen3_moe"}
    mixture = replace(held("dtensor", {"lora": {"rank": 16}}), geometry=Geometry.from_config({**LLAMA_8B, **experts}))
    assert mixture.adapter_parameters == 32 * 16 * (2 * 8192 + 2 * 5120)  # no linear layer but attention's
    named = mixture.policy.model_copy(
        update={"lora": LoraConfig(rank=16, target_modules=("experts.gate_up_proj", "experts.down_proj"))}
    )
    # Each of 8 experts has rank * (4096 + 2 * 1024) for gate and up together, and rank * (1024 + 4096) down.
    assert replace(mixture, policy=named).adapter_parameters == 32 * 8 * 16 * (6144 + 5120)


def test_the_first_minibatch_tells_the_old_policy_by_itself() -> None:
    for changes, share in (({}, 0.0), ({"num_minibatches": 4}, 0.75), ({"num_epochs_per_rollout": 2}, 1.0)):
        assert scene(**changes).work.old_frac == share


def test_the_command_explains_in_a_terminal(config_file: Path, tmp_path: Path) -> None:
    done = called(config_file, "--gpus", "2xL40S", "--model-config", tmp_path / "config.json", "--explain")
    assert done.exit_code == 0, done.output
    for words in ("weights", "2 B x 8.03 G / 2", "decoding", "does not fit", "layouts judged"):
        assert words in done.output


@pytest.mark.slow
def test_planning_imports_no_torch(config_file: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom nemorl_insight.plan.command import app\n"
        f"app([{str(config_file)!r}, '--gpus', '8xH100', '--model-config', {str(tmp_path / 'config.json')!r}],"
        " standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


def test_a_run_that_cannot_fit_this_machine_is_refused_with_a_change(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "hidden_size": 65536, "num_hidden_layers": 200}))
    config = load_config({**GRPO, "model": str(tmp_path)}, for_cluster=True)
    (problem,) = memory_problems(config, tmp_path, print)
    assert problem.here
    assert "cannot fit" in problem.message
    assert problem.fix
    held = re.findall(r"(policy|engine) ([\d.]+) \((.*?)\)", problem.message)
    assert [name for name, *_ in held] == ["policy", "engine"]
    for _, whole, parts in held:  # each tenant with the sum of its parts
        assert sum(map(float, re.findall(r"[\d.]+$", parts.replace(", ", "\n"), re.M))) == pytest.approx(
            float(whole), rel=1e-4
        )


def test_a_run_that_fits_is_let_through(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, **sizes}))
    config = load_config({**GRPO, "model": str(tmp_path)}, for_cluster=True)
    assert list(memory_problems(config, tmp_path, print)) == []


def test_a_dry_run_is_told_the_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, **sizes}))
    found = memory_plan(load_config({**GRPO, "model": str(tmp_path)}, for_cluster=True))
    assert found is not None
    assert found["capacity_gib"] - sum(found["gib"].values()) == pytest.approx(found["free_gib"], abs=0.01)
    assert memory_plan(load_config(GRPO, for_cluster=True)) is None  # no sizes, no plan, and no refusal
