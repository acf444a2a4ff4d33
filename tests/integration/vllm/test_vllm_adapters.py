"""LoRA adapters apart from the model: vLLM applies them, and every update replaces them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError, ForeignError
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_dtensor import DTensorConfig
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.planning.memory.engines import Engines
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.serving.snapshots import VersionNotHeldError
from nemorl_testing.models import load_reference, tiny_model
from peft import PeftModel
from recorded_messages import Raises
from vllm_engines import gaps, handle_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LORA = {"lora": {"rank": 3, "alpha": 12.0}}
SAMPLED = SamplingParams(max_new_tokens=24)
# The last one is longer than a block of the prefix cache (128 tokens on the CPU).
REQUESTS = [GenerationRequest(ids, SAMPLED, (1, 2)) for ids in ((9, 18, 10), (11, 12, 13, 14), tuple(range(8, 88)) * 2)]
TOLERANCE = 1e-4


class Trainer:
    """A policy with adapters that tests change, and what peft makes of them."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch = folder, scratch
        policy = PolicyConfig.model_validate({"model_name": str(folder), **LORA})
        self.backend: Any = DTensorConfig().build(policy, WorkerContext(), reference=False)

    @torch.no_grad()
    def change(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.backend._trainable.items():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.05 if "lora_B" in name else 0.2))

    def handle(self, version: int) -> WeightHandle:
        carrier = in_process_handle(None, 0).transport
        return WeightHandle(carrier, version, self.backend.export_adapters, "adapters")

    def saved(self, name: str) -> Path:
        self.backend.save_adapters(self.scratch / name)
        return self.scratch / name

    def as_peft(self, name: str = "now") -> Any:
        return PeftModel.from_pretrained(load_reference(self.folder), str(self.saved(name))).eval()


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    found = Trainer(tiny_model(num_key_value_heads=2), tmp_path)
    found.change(seed=1)
    return found


def test_every_update_leaves_exactly_the_new_adapters(trainer: Trainer, build: Any) -> None:
    engine = build(trainer.folder, trainer.handle(1), policy=LORA)
    assert max(gaps(trainer.as_peft(), REQUESTS, engine.generate(REQUESTS))) < TOLERANCE
    before = trainer.as_peft("before")
    for version in (2, 3):
        trainer.change(seed=version)
        # Two linear layers' factors have R * (inputs + outputs) numbers each, of four bytes.
        read = engine.update_weights(trainer.handle(version), version)
        assert read == sum(parameter.numel() for parameter in trainer.backend._trainable.values()) * 4
        groups = engine.generate(REQUESTS)
        assert max(gaps(trainer.as_peft(), REQUESTS, groups)) < TOLERANCE
        assert max(gaps(before, REQUESTS, groups)) > 0.1, "the change is too small to prove anything"
        assert {c.weight_versions for group in groups for c in group} == {(version,)}


@pytest.mark.full
def test_vllm_loads_an_exported_adapter(trainer: Trainer, build: Any) -> None:
    from vllm.lora.request import LoRARequest

    engine = build(trainer.folder, trainer.handle(1), policy=LORA)
    trainer.change(seed=5)
    request = LoRARequest("policy", 1, str(trainer.saved("exported")), load_inplace=True)
    assert engine._call(lambda vllm: vllm.add_lora(request))
    engine._call(lambda vllm: vllm.reset_prefix_cache())
    assert max(gaps(trainer.as_peft(), REQUESTS, engine.generate(REQUESTS))) < TOLERANCE


def test_sequences_in_progress_go_on_with_the_new_adapters(trainer: Trainer, build: Any) -> None:
    engine = build(trainer.folder, trainer.handle(1), policy={**LORA, "max_sequence_tokens": 1000})
    long = GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=800), tuple(range(24)))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, [long])
        engine.generate([GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=8))])
        trainer.change(seed=2)
        engine.update_weights(trainer.handle(2), 2)
        (completions,) = running.result()
    new = trainer.as_peft()
    spanning = [completion for completion in completions if completion.weight_versions == (1, 2)]
    assert spanning, "no completion was still running when the update came"
    for completion in spanning:
        (last,) = gaps(new, [long], [[completion]])[-1:]
        assert last < TOLERANCE


def test_an_engine_holds_and_counts_the_adapters_of_its_versions(trainer: Trainer, build: Any, raises: Raises) -> None:
    from nemorl_vllm.config import VLLMConfig
    from nemorl_vllm.describing import VLLMPlan

    one, two = (build(trainer.folder, trainer.handle(1), policy=LORA, snapshots=limit) for limit in (1, 2))
    before = two.generate(REQUESTS)
    for version in (2, 3):
        trainer.change(seed=version)
        two.update_weights(trainer.handle(version), version)
    old = [replace(request, version=2) for request in REQUESTS]
    assert {c.weight_versions for group in two.generate(old) for c in group} == {(2,)}
    with raises(VersionNotHeldError, 2, 3):
        two.generate([replace(REQUESTS[0], version=1)])
    assert two.generate(REQUESTS) != before
    # Three places in place of one, each with room for rank 8, the next after 3 that vLLM knows: two further ones.
    further = two.held_bytes()["weights"] - one.held_bytes()["weights"]
    geometry = Geometry.from_config(json.loads((trainer.folder / "config.json").read_text()))
    policy = PolicyConfig.model_validate({"model_name": str(trainer.folder), **LORA})
    each = 4 * HeldModel("policy", policy, geometry, ranks=1).adapter_parameters / 3
    assert further == pytest.approx(2 * 8 * each)
    config = VLLMConfig(snapshots=2, kv_cache_gib=0.1)
    planned = VLLMPlan(config).memory(Engines(config, geometry, 4, 1, 256, adapter_rank=3, rank_bytes=each), 1e12, 1)
    assert [part.size for part in planned.lasting if part.name == "engine adapters"] == [3 * 8 * each]


def test_a_version_that_did_not_load_is_not_held(trainer: Trainer, build: Any, raises: Raises) -> None:
    engine = build(trainer.folder, trainer.handle(1), policy=LORA, snapshots=2)

    def damaged() -> Any:  # of a rank beyond the room that the engine has made
        for bucket in trainer.backend.export_adapters():
            yield {name: torch.cat([t] * 6, 0 if "lora_A" in name else 1) for name, t in bucket.items()}

    with pytest.raises(ForeignError):
        engine.update_weights(replace(trainer.handle(2), payload=damaged), 2)
    engine.update_weights(trainer.handle(3), 3)
    with raises(VersionNotHeldError, 1, 3):
        engine.generate([replace(REQUESTS[0], version=2)])
    assert max(gaps(trainer.as_peft(), REQUESTS, engine.generate(REQUESTS))) < TOLERANCE


@pytest.mark.full
def test_an_engine_wakes_with_its_adapters(trainer: Trainer, build: Any) -> None:
    engine = build(trainer.folder, trainer.handle(1), policy=LORA)
    before = engine.generate(REQUESTS)
    held = engine.held_bytes()["weights"]
    for level in (1, 2):  # no update would bring the model itself: its weights are kept at either level
        engine.sleep(level)
        asleep = engine.held_bytes()
        assert asleep["cache"] == 0
        assert 0 < asleep["weights"] < held  # what oneDNN has packed stays
        engine.wake(["weights", "cache"])
        assert engine.held_bytes()["weights"] == held
        assert engine.generate(REQUESTS) == before


@pytest.mark.full
def test_two_processes_of_an_engine_take_their_parts(trainer: Trainer, build: Any) -> None:
    engine = build(trainer.folder, trainer.handle(1), policy=LORA, tensor_parallel_size=2)
    for version in (1, 2):
        trainer.change(seed=version)
        engine.update_weights(trainer.handle(version), version)
        assert max(gaps(trainer.as_peft(), REQUESTS, engine.generate(REQUESTS))) < TOLERANCE


def test_an_engine_takes_the_form_that_it_was_built_for(trainer: Trainer, build: Any, raises: Raises) -> None:
    model = load_reference(trainer.folder)
    engine = build(trainer.folder, handle_of(model, 1), policy=LORA)
    with raises(BackendError, "adapters"):
        engine.update_weights(trainer.handle(2), 2)
    assert max(gaps(model, REQUESTS, engine.generate(REQUESTS))) < TOLERANCE


def measured(model: Path, run_dir: Path, adapters: str, steps: int = 4, resume: Any = False, **cluster: Any) -> Any:
    """Metrics of a GRPO run, by step."""
    from nemorl_cli.console import Console
    from nemorl_grpo.config import GRPOConfig

    config = GRPOConfig(
        model=str(model),
        policy={"optimizer": {"lr": 1e-2}, "max_sequence_tokens": 64, "lora": {"rank": 4}},
        generation={"backend": {"name": "vllm", "kv_cache_gib": 0.1}, "max_new_tokens": 12},
        rollouts={"adapters": adapters},
        cluster=cluster,
        num_prompts_per_step=4,
        num_generations_per_prompt=4,
        kl_penalty=0.0,
        max_steps=steps,
        validation={"every": 0, "at_end": False},
        checkpoint={"every": 2, "export": False},
        run_dir=run_dir,
    )
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(4)]

    def digits(prompt: str, response: str) -> float:
        return sum(character.isdigit() for character in response) / max(1, len(response))

    config.build().fit(dataset=rows, reward_fn=digits, console=Console(quiet=True), resume=resume)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "train/reward" in line}


@pytest.mark.full
def test_a_run_with_adapters_apart_is_the_run_with_merged_ones(tmp_path: Path) -> None:
    model = tiny_model()
    merged = measured(model, tmp_path / "merged", "auto")  # on one machine: merged
    apart = measured(model, tmp_path / "apart", "separate")
    turns = measured(model, tmp_path / "turns", "separate", take_turns=True)
    assert [line["train/reward"] for line in apart.values()] == [line["train/reward"] for line in merged.values()]
    for line in (*merged.values(), *apart.values()):
        assert line["train/token_mult_prob_error"] < 1.001
    for step, line in merged.items():
        assert apart[step]["train/grad_norm"] == pytest.approx(line["train/grad_norm"], rel=1e-3)
        assert turns[step]["train/grad_norm"] == apart[step]["train/grad_norm"]
        assert apart[step]["train/weight_sync_bytes"] < line["train/weight_sync_bytes"] / 2


@pytest.mark.full
def test_a_run_with_adapters_apart_continues_where_it_was(tmp_path: Path) -> None:
    straight = measured(tiny_model(), tmp_path / "straight", "separate")
    measured(tiny_model(), tmp_path / "resumed", "separate", steps=2)
    resumed = measured(tiny_model(), tmp_path / "resumed", "separate", resume=True)
    for step in (3, 4):
        for name in ("reward", "grad_norm", "token_mult_prob_error"):
            assert resumed[step][f"train/{name}"] == straight[step][f"train/{name}"]


@pytest.mark.full
@pytest.mark.ray
def test_adapters_cross_from_process_to_process(tmp_path: Path) -> None:
    here = measured(tiny_model(), tmp_path / "here", "separate", steps=2)
    apart = {"launcher": "ray", "workers_per_node": 2, "colocated": False, "cpus_per_worker": 0.5}
    there = measured(tiny_model(), tmp_path / "there", "separate", steps=2, **apart)
    for step, line in here.items():
        for name in ("reward", "grad_norm", "weight_sync_bytes"):
            assert there[step][f"train/{name}"] == line[f"train/{name}"]
