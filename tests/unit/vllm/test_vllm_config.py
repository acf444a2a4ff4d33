"""What the vLLM backend says about itself and accepts, where vLLM need not be installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nemorl.config import PolicyConfig, load_config
from nemorl.contracts.memory import MemoryPart
from nemorl.errors import BackendError, ConfigError
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_rl.planning.memory.engines import Engines
from nemorl_rl.serving.snapshots import takes_versions
from pydantic import ValidationError
from recorded_messages import Raises
from watched_run import WatchedRun

config = pytest.importorskip("nemorl_vllm.config", reason="nemorl-vllm is not installed")

ROOT = Path(__file__).parents[3]
METRIC = "token_mult_prob_error"


def test_a_replica_takes_as_many_devices_as_share_a_layer() -> None:
    assert config.VLLMConfig().devices_per_replica == 1
    assert config.VLLMConfig(tensor_parallel_size=4).devices_per_replica == 4
    assert config.VLLMConfig(data_parallel_size=8).devices_per_replica == 8


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"data_parallel_size": 2}, ""),
        ({"data_parallel_size": 2, "expert_parallel": True}, ""),
        ({"data_parallel_size": 5}, "expert_parallel: true"),  # a width of 24 is no five parts, and 10 experts are
        ({"data_parallel_size": 5, "expert_parallel": True}, ""),
        ({"data_parallel_size": 4}, ""),
        ({"data_parallel_size": 4, "expert_parallel": True}, "remove expert_parallel"),
    ],
)
def test_ranks_of_an_engine_share_the_experts_of_a_mixture_evenly(
    options: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    sizes = {"num_experts": 10, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    policy = PolicyConfig(model_name=str(write_tiny_model(tmp_path, architecture="qwen3_moe", **sizes)))
    found = [*config.VLLMConfig(**options).policy_problems(policy, device="cpu", is_attached=False)]
    assert len(found) == (refused != "")
    assert all(one.path == "generation.backend.data_parallel_size" and refused in one.fix for one in found)


def test_a_model_without_experts_takes_several_engines_in_place_of_ranks(tiny_model: Path) -> None:
    policy, several = PolicyConfig(model_name=str(tiny_model)), config.VLLMConfig(data_parallel_size=2)
    (problem,) = several.policy_problems(policy, device="cuda:0", is_attached=False)
    assert problem.path == "generation.backend.data_parallel_size"
    assert "cluster.generation_workers" in problem.fix


@pytest.mark.parametrize(
    "beside",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"snapshots": 2},
        {"speculative": {"method": "ngram", "num_speculative_tokens": 2}},
    ],
)
def test_what_was_not_seen_to_work_with_ranks_is_refused_by_name(beside: dict[str, Any], raises: Raises) -> None:
    config.VLLMConfig(**beside)
    with raises(ValidationError, "data_parallel_size", path=[*beside]):
        config.VLLMConfig(data_parallel_size=2, **beside)


def test_a_plan_counts_what_ranks_hold_twice_and_the_experts_that_they_share(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = write_tiny_model(tmp_path, architecture="qwen3_moe", **sizes)
    geometry = Geometry.from_config(json.loads((folder / "config.json").read_text()))

    def planned(ranks: int) -> float:
        engine = config.VLLMConfig(data_parallel_size=ranks)
        memory = engine.engine_plan().memory(Engines(engine, geometry, 2, 1, 256), 80 * 2**30, 1)
        return sum(part.size for part in memory.lasting if part.held == "weights")

    experts = 2 * 4 * 3 * 64 * 32  # layers x experts x matrices x hidden x width
    assert planned(1) - planned(2) == pytest.approx(2 * experts / 2)  # two bytes each, half of them on each rank


def test_it_offers_every_transport_of_the_kernel_and_updates_in_flight() -> None:
    assert config.VLLMConfig.weight_transports == ("in_process", "nccl", "cuda_ipc", "shared_memory", "object_store")
    assert "in_flight_updates" in config.VLLMConfig.supports


@pytest.mark.parametrize("name", sorted(config.SET_ELSEWHERE))
def test_engine_args_cannot_contradict_the_run(name: str, raises: Raises) -> None:
    with raises(ValidationError, path=f"engine_args.{name}"):
        config.VLLMConfig(engine_args={name: 1})


def test_other_engine_args_pass() -> None:
    assert config.VLLMConfig(engine_args={"block_size": 32}).engine_args == {"block_size": 32}


@pytest.mark.parametrize(
    "options", [{"kv_cache_gib": 0}, {"gpu_memory_utilization": 1.1}, {"tensor_parallel_size": 0}, {"kv_cache": 1}]
)
def test_options_out_of_range_and_unknown_ones_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        config.VLLMConfig(**options)


@pytest.mark.parametrize(
    "stored",
    [
        {"model_type": "deepseek_v3", "kv_lora_rank": 512},
        *({"model_type": kind} for kind in ("mamba2", "qwen3_next", "qwen3_5_text")),
    ],
)
def test_models_that_vllm_cannot_serve_on_the_cpu_are_refused_by_name(stored: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(stored))
    policy = PolicyConfig(model_name=str(tmp_path))
    (problem,) = config.VLLMConfig().policy_problems(policy, device="cpu", is_attached=False)
    assert problem.path == "generation.backend"
    assert stored["model_type"] in problem.message
    assert not [*config.VLLMConfig().policy_problems(policy, device="cuda:0", is_attached=False)]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not [*config.VLLMConfig().policy_problems(policy, device="cpu", is_attached=False)]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("kind", ["bloom", "cohere2", "mpt", "minimax_m2", "paligemma"])
def test_models_that_vllm_gets_wrong_are_refused_on_every_device(kind: str, device: str, tmp_path: Path) -> None:
    for stored in ({"model_type": kind}, {"model_type": "of_images", "text_config": {"model_type": kind}}):
        (tmp_path / "config.json").write_text(json.dumps(stored))
        policy = PolicyConfig(model_name=str(tmp_path))
        (problem,) = config.VLLMConfig().policy_problems(policy, device=device, is_attached=False)
        assert (problem.path, problem.fix) == ("generation.backend", "set generation.backend: hf")
        assert kind in problem.message


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_gemma_3_is_refused_where_a_run_says_that_it_has_images(device: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}')
    policies = [
        PolicyConfig.model_validate({"model_name": str(tmp_path), **media})
        for media in ({}, {"media": {"train": ["connector", "tower"]}})
    ]
    text, images = ([*config.VLLMConfig().policy_problems(p, device=device, is_attached=False)] for p in policies)
    assert text == []
    assert [(one.path, one.fix) for one in images] == [("generation.backend", "set generation.backend: hf")]
    assert "gemma3" in images[0].message


def test_what_the_page_of_architectures_calls_wrong_is_refused() -> None:
    from nemorl_vllm.architectures import obstacles

    rows = [row.split(" | ") for row in (ROOT / "docs/backends/architectures.md").read_text().splitlines()]
    refused = {row[0].removeprefix("| ") for row in rows if len(row) == 7 and row[5].startswith(("**", "no ("))}
    known = {
        kind for kind in refused if any(obstacles({"model_type": kind, "kv_lora_rank": kind[:8] == "deepseek"}, "cpu"))
    }
    assert known == refused
    assert {"bloom", "cohere2", "phimoe"} <= refused


def test_the_config_imports_neither_torch_nor_vllm() -> None:
    check = (
        "import sys, nemorl_vllm.config; print(sorted({'torch', 'vllm', 'transformers', 'ray'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_option_is_documented_with_its_default() -> None:
    page = (ROOT / "docs/backends/vllm.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE))
    for name, field in config.VLLMConfig.model_fields.items():
        default = field.get_default(call_default_factory=True)
        assert rows.get(name) == ("unset" if default is None else f"`{json.dumps(default)}`")


def run(tiny_model: Path, *, lora: bool = True, **changes: Any) -> Any:
    policy = {"lora": {"rank": 4}} if lora else {"init": "random"}
    return load_config(
        {
            "algorithm": "grpo",
            "model": str(tiny_model),
            "max_steps": 1,
            "generation": {"backend": "vllm", "max_new_tokens": 4},
            **changes,
            "policy": {"max_sequence_tokens": 32, **policy, **changes.get("policy", {})},
        }
    )


FAR = {"num_nodes": 2, "gpus_per_node": 1, "address": "auto", "colocated": False}
FAR_CPUS = {"num_nodes": 2, "workers_per_node": 1, "address": "auto", "colocated": False}


def test_adapters_travel_merged_unless_asked_for_or_far(tiny_model: Path) -> None:
    assert run(tiny_model).place().form == "model"
    assert run(tiny_model, rollouts={"adapters": "separate"}).place().form == "adapters"
    assert run(tiny_model, rollouts={"adapters": "merged"}).place().form == "model"
    assert run(tiny_model, lora=False).place().form == "model"
    assert run(tiny_model, cluster=FAR).place().form == "adapters"
    assert run(tiny_model, cluster=FAR_CPUS).place().form == "model"  # there vLLM's adapters cost more than they save
    assert run(tiny_model, cluster=FAR, rollouts={"adapters": "merged"}).place().form == "model"


def test_adapters_apart_need_some_and_an_engine_for_them(tiny_model: Path, raises: Raises) -> None:
    apart = {"adapters": "separate"}
    with raises(ConfigError, "policy.lora", path="rollouts.adapters"):
        run(tiny_model, lora=False, rollouts=apart)
    with raises(ConfigError, "hf", path="rollouts.adapters"):
        run(tiny_model, rollouts=apart, generation={"max_new_tokens": 4})


def test_adapters_of_experts_travel_merged(tmp_path: Path, raises: Raises) -> None:
    sizes = {"hidden_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    mixture = write_tiny_model(tmp_path, architecture="qwen3_moe", **sizes)
    experts = {"lora": {"rank": 4, "target_modules": ["q_proj", "experts.down_proj"]}}
    assert run(mixture, policy=experts, cluster=FAR).place().form == "model"
    with raises(ConfigError, "experts", path="rollouts.adapters"):
        run(mixture, policy=experts, rollouts={"adapters": "separate"})


def test_several_versions_are_held_of_adapters_apart_alone(tiny_model: Path, raises: Raises) -> None:
    engine = {"backend": {"name": "vllm", "snapshots": 2}, "max_new_tokens": 4}
    assert takes_versions(
        run(tiny_model, generation=engine, rollouts={"adapters": "separate"}).generation.backend, "adapters"
    )
    with raises(ConfigError, path="generation.backend.snapshots"):
        run(tiny_model, generation=engine)
    assert not takes_versions(run(tiny_model).generation.backend, "adapters")


def wide_run(tiny_model: Path, *, nodes: int = 4, per_node: int = 2, backend: Any = None, **changes: Any) -> Any:
    """A config whose engine asks for four CPU workers, two nodes' worth."""
    cluster = {"num_nodes": nodes, "workers_per_node": per_node, "address": "auto", **changes.pop("cluster", {})}
    backend = backend or {"name": "vllm", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    return run(tiny_model, cluster=cluster, generation={"backend": backend, "max_new_tokens": 4}, **changes)


def test_an_engine_over_several_nodes_is_sent_whole_weights_by_what_crosses_nodes(
    tiny_model: Path, raises: Raises
) -> None:
    config = wide_run(tiny_model)
    assert config.cluster.generation_replicas(config.generation.backend.devices_per_replica) == 2
    assert (config.place().transport, config.place().form) == ("nemorl-rl:object_store", "model")
    assert not config.place().spreads_weights
    for transport in ("shared_memory", "in_process"):
        with raises(ConfigError, path="cluster.weight_transport"):
            wide_run(tiny_model, cluster={"weight_transport": transport})
    with raises(ConfigError, "nodes", path="rollouts.adapters"):
        wide_run(tiny_model, rollouts={"adapters": "separate"})
    apart = {"colocated": False, "generation_workers": 1}
    assert wide_run(tiny_model, cluster=apart).cluster.training_workers(4) == 4


def test_an_engine_takes_whole_nodes_or_a_part_of_one(tiny_model: Path, raises: Raises) -> None:
    with raises(ConfigError, path="generation.backend"):
        wide_run(tiny_model, per_node=3)  # four devices of three per node
    with raises(ConfigError, path="generation.backend"):
        wide_run(tiny_model, nodes=1)  # four devices of two
    with raises(ConfigError, path="cluster.generation_workers"):
        wide_run(tiny_model, cluster={"generation_workers": 3})  # 12 devices of 8
    # Three engines of three devices: two fit the last node's eight, and one device is left on the node before.
    apart = {"colocated": False, "generation_workers": 3}
    with raises(ConfigError, path="generation.backend"):
        wide_run(tiny_model, nodes=2, per_node=8, backend={"name": "vllm", "pipeline_parallel_size": 3}, cluster=apart)


def test_layers_are_kept_by_place_and_by_name(raises: Raises) -> None:
    kept = config.KeptLayers(first=1, last=1, names=("mlp.down_proj",))
    assert kept.patterns(3) == ["*.layers.0.*", "*.layers.2.*", "*mlp.down_proj*"]
    assert config.KeptLayers(last=5).patterns(2) == ["*.layers.0.*", "*.layers.1.*"]
    for options, path in (({}, "kept_layers"), ({"names": ["*"]}, "kept_layers.names.0")):
        with raises(ValidationError, path=path):
            config.VLLMConfig(precision="fp8", kept_layers=options)
    with raises(ValidationError, path="kept_layers"):
        config.VLLMConfig(kept_layers={"first": 1})


def test_a_draft_model_speaks_of_the_policys_tokens(tmp_path: Path, raises: Raises) -> None:
    for name, size in (("policy", 100), ("draft", 100), ("other", 104)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
    policy = PolicyConfig(model_name=str(tmp_path / "policy"))

    def problems(draft: str, policy: PolicyConfig = policy) -> list[str]:
        guesses = {"method": "draft_model", "model": str(tmp_path / draft)}
        found = config.VLLMConfig(speculative=guesses).policy_problems(policy, device="cpu", is_attached=False)
        return [one.path for one in found]

    assert problems("draft") == []
    assert problems("other") == ["generation.backend.speculative.model"]
    fresh = policy.model_copy(update={"init": "random"})
    assert problems("draft", fresh) == ["generation.backend.speculative"]
    for wrong in ({"method": "draft_model"}, {"model": "some/draft"}):
        with raises(ValidationError, path="speculative.model"):
            config.VLLMConfig(speculative=wrong)
    with raises(ValidationError, path="speculative.prompt_lookup_max"):
        config.VLLMConfig(speculative={"method": "draft_model", "model": "some/draft", "prompt_lookup_max": 3})


def test_mtp_layers_guess_where_the_policys_files_have_them(tmp_path: Path, raises: Raises) -> None:
    def problems(tokens: int, **stored: int) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4_moe", "vocab_size": 9, **stored}))
        guesses = {"method": "mtp", "num_speculative_tokens": tokens}
        policy = PolicyConfig(model_name=str(tmp_path))
        found = config.VLLMConfig(speculative=guesses).policy_problems(policy, device="cpu", is_attached=False)
        return [one.path for one in found]

    assert problems(3, num_nextn_predict_layers=1) == []
    assert problems(2) == ["generation.backend.speculative.method"]
    # vLLM draws with layer 0, 1, 0, ...: 3 tokens would use the first twice.
    assert problems(3, num_nextn_predict_layers=2) == ["generation.backend.speculative.num_speculative_tokens"]
    assert problems(4, num_nextn_predict_layers=2) == []
    with raises(ValidationError, path="speculative.model"):
        config.VLLMConfig(speculative={"method": "mtp", "model": "some/head"})


def test_only_a_small_model_can_be_kept_fresh(raises: Raises) -> None:
    fresh = {"keep_fresh": {}}
    for guesses in ({"method": "ngram"}, {"method": "eagle3", "model": "some/head"}):
        with raises(ValidationError, guesses["method"], path="speculative.keep_fresh"):
            config.VLLMConfig(speculative={**guesses, **fresh})
    draft = {"method": "draft_model", "model": "some/draft"}
    found = config.VLLMConfig(speculative={**draft, **fresh}).fresh_draft
    assert found is not None
    assert found.model_name == "some/draft"
    assert config.VLLMConfig(speculative=draft).fresh_draft is None
    assert config.VLLMConfig().fresh_draft is None


@pytest.mark.parametrize("engine", [{"name": "hf"}, {"name": "server", "urls": ["http://localhost:1"]}])
def test_engines_that_do_not_guess_refuse_a_draft_by_name(engine: dict[str, Any], raises: Raises) -> None:
    from nemorl.config.load import validate
    from nemorl_grpo import GRPOConfig

    guesses = {"method": "draft_model", "model": "some/draft", "keep_fresh": {}}
    with raises(ConfigError, "speculative", path="generation.backend.speculative"):
        validate(GRPOConfig, {"model": "some/model", "generation": {"backend": {**engine, "speculative": guesses}}})


def fp8_run(**changes: Any) -> Any:
    """A GRPO config whose sampler computes in FP8, on GPUs."""
    from nemorl.config.load import validate
    from nemorl_grpo import GRPOConfig

    data = {
        "model": "some/model",
        "policy": {"precision": "bfloat16"},
        "generation": {"backend": {"name": "vllm", "precision": "fp8"}},
        "cluster": {"address": "auto", "gpus_per_node": 1},
    }
    return validate(GRPOConfig, {**data, **changes})


def test_fp8_is_refused_by_name_on_the_cpu_and_for_float32(raises: Raises) -> None:
    with raises(ConfigError, "fp8", "cpu", path="generation.backend.precision"):
        fp8_run(cluster={"gpus_per_node": 0})
    with raises(ConfigError, "float32", path="generation.backend.precision"):
        fp8_run(policy={"precision": "float32"})


def test_fp8_rollouts_are_corrected_for_unless_told_otherwise() -> None:
    # NeMo RL's FP8 recipes set use_importance_sampling_correction; here it is truncated at 2, as it is by name.
    from nemorl_rl.policy_gradient.config import ImportanceCorrection

    assert fp8_run().importance_correction == ImportanceCorrection(kind="truncated")
    assert fp8_run().importance_correction.cap == 2.0
    assert fp8_run(importance_correction=None).importance_correction is None
    assert fp8_run(importance_correction="icepop").importance_correction.kind == "icepop"
    assert fp8_run(generation={"backend": "vllm"}).importance_correction is None
    # What a run directory records reads the same again.
    assert fp8_run(**{"importance_correction": fp8_run().importance_correction.model_dump()}) == fp8_run()


def test_keys_and_values_in_8_bits_are_another_sampler_and_take_half_the_memory(raises: Raises) -> None:
    from nemorl_rl.policy_gradient.config import ImportanceCorrection

    rounded = {"generation": {"backend": {"name": "vllm", "cache_precision": "fp8"}}}
    assert fp8_run(**rounded).importance_correction == ImportanceCorrection(kind="truncated")
    with raises(ConfigError, "fp8", "cpu", path="generation.backend.cache_precision"):
        fp8_run(**rounded, cluster={"gpus_per_node": 0})
    with raises(ConfigError, "cache_precision", path="generation.backend.engine_args.kv_cache_dtype"):
        fp8_run(generation={"backend": {"name": "vllm", "engine_args": {"kv_cache_dtype": "fp8"}}})
    engines = SimpleNamespace(token_bytes=96.0, element=2, geometry=SimpleNamespace(cache_parts=8))
    plans = [config.VLLMConfig(cache_precision=given).engine_plan() for given in (None, "fp8")]
    assert [plan._token_bytes(engines) for plan in plans] == [96.0, 48.0]
    assert all(plan.layer_element is None for plan in plans)  # the layers keep the policy's precision


def test_a_warning_of_a_mismatch_names_the_precision() -> None:
    watcher = WatchedRun(fp8_run(rollouts={"mismatch_limit": None}))
    watcher.step(1, {METRIC: 1.08})
    (text,) = watcher.told
    assert "above rollouts.mismatch_warning = 1.05. The sampler computes in fp8, which is part of it. Likely" in text


def test_a_gpu_without_fp8_units_is_named(monkeypatch: pytest.MonkeyPatch, raises: Raises) -> None:
    torch = pytest.importorskip("torch")
    engine = pytest.importorskip("nemorl_vllm.engine")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    for capability, refused in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        if refused:
            with raises(BackendError, "A100", "8.0"):
                engine._check_fp8("cuda:0", "fp8")
        else:
            engine._check_fp8("cuda:0", "fp8")


def test_guesses_come_from_what_stood_before_unless_told_otherwise(raises: Raises) -> None:
    assert config.VLLMConfig(speculative={"num_speculative_tokens": 2}).speculative.method == "ngram"
    with raises(ValidationError, "medusa", path="speculative.method"):
        config.VLLMConfig(speculative={"method": "medusa"})
    with raises(ValidationError, path="speculative.prompt_lookup_min"):
        config.VLLMConfig(speculative={"prompt_lookup_min": 5})
    with raises(ValidationError, path="speculative"):
        config.VLLMConfig(speculative={}, pipeline_parallel_size=2)
    with pytest.raises(ValidationError):
        config.VLLMConfig(speculative={"num_speculative_tokens": 0})


def test_what_sleeps_is_not_held_where_tensors_keep_their_sizes() -> None:
    from nemorl_vllm.sleeping import sleep_of

    counted: dict[MemoryPart, int] = {"weights": 5, "cache": 3}
    asleep = sleep_of("cuda:0", leaves_memory=True)
    assert asleep.held(counted, {"weights", "cache"}) == {"weights": 0, "cache": 0}
    assert asleep.held(counted, {"cache"}) == {"weights": 5, "cache": 0}  # woken for new weights
    assert sleep_of("cpu", leaves_memory=True).held({"weights": 0, "cache": 0}, {"weights", "cache"}) == {
        "weights": 0,
        "cache": 0,
    }
