"""However a model is spread over ranks, it learns what one process learns: same losses, gradients, weights.

Each case trains three AdamW steps on the same ragged batch. All cases of one number of ranks share their processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import spread_cases
import torch
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor.model import load_model
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors.engines.model_folder import save_tokenizer
from nemorl_testing.batches import ragged_batch
from peft import PeftModel
from safetensors import safe_open
from sharded_runs import Case, Found, build, train
from spawned import run_calls
from spread_cases import gap
from tiers import in_full
from torch import Tensor
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"architecture": "llama", "tie_word_embeddings": False},
    "qwen3": {"architecture": "qwen3", "head_dim": 8},
    "mistral": {"architecture": "mistral", "sliding_window": 6},
    "gpt2": {"architecture": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
    "mixtral": {"architecture": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
}
TP: dict[str, Any] = {"tensor_parallel_size": 2}
LORA: dict[str, Any] = {"lora": {"rank": 4}}
SOME: dict[str, Any] = {"lora": {"rank": 3, "target_modules": ["v_proj", "o_proj", "up_proj"]}}
LOW: dict[str, Any] = {"precision": "bfloat16"}


CASES = (
    Case("dp2", "qwen2", 2, saves="dp2"),
    Case("dp2, one rank without data", "qwen2", 2, all_on_first=True),
    Case("tp2 without gradient", "qwen2", 2, {**TP, "microbatch_tokens": 20}, some_zero=True),
    Case("dp2 halved", "qwen2", 2, {"microbatch_tokens": 20}, some_zero=True, halved=True),
    Case("tp2 lora halved", "qwen2", 2, {**TP, **LORA}, halved=True),
    Case("dp2 lora", "qwen2", 2, LORA, saves="dp2 lora"),
    Case("dp2 bfloat16", "qwen2", 2, LOW, saves="dp2 bfloat16"),
    Case("tp2", "qwen2", 2, TP, saves="tp2"),
    Case("tp2 lora", "qwen2", 2, {**TP, **LORA}, saves="tp2 lora"),
    Case("tp2 bfloat16 lora", "qwen2", 2, {**TP, **LOW, **LORA}),
    Case("one -> dp2", "qwen2", 2, resumes="one"),
    Case("one -> tp2", "qwen2", 2, TP, resumes="one"),
    Case("tp2 -> dp2", "qwen2", 2, resumes="tp2"),
    Case("dp2 without a step -> dp2", "qwen2", 2, resumes="untrained"),
    Case("fsdp2 x tp2", "qwen2", 4, TP, saves="fsdp2 x tp2"),
    Case("replicas2 x shards2", "qwen2", 4, options={"data_parallel_replicas": 2}, saves="replicas2"),
    Case("dp2 mixtral", "mixtral", 2, saves="dp2 mixtral"),
    *in_full(
        [
            Case("dp2 without gradient", "qwen2", 2, {"microbatch_tokens": 20}, some_zero=True),
            Case("dp2 packed", "qwen2", 2, options={"layout": "packed"}),
            Case("dp2 random", "random", 2, {"init": "random"}),
            Case("tp2 whole sequences", "qwen2", 2, TP, {"sequence_parallel": False}),
            Case("tp2 llama", "llama", 2, TP),
            Case("dp2 bfloat16 lora", "qwen2", 2, {**LOW, **LORA}),
            Case("dp2 halved, one rank without data", "qwen2", 2, all_on_first=True, halved=True),
            Case("dp2 recomputed", "qwen2", 2, {"activation_checkpointing": True}),
            Case("dp2 gpt2", "gpt2", 2),
            Case("tp2 recomputed", "qwen2", 2, {**TP, "activation_checkpointing": True}),
            Case("tp2 packed", "qwen2", 2, TP, {"layout": "packed"}),
            Case("tp2 random", "random", 2, {**TP, "init": "random"}),
            Case("tp2 bfloat16", "qwen2", 2, {**TP, **LOW}),
            Case("tp2 lora whole sequences", "qwen2", 2, {**TP, **LORA}, {"sequence_parallel": False}),
            Case("tp2 lora recomputed", "qwen2", 2, {**TP, **LORA, "activation_checkpointing": True}),
            Case("tp2 qwen3 whole sequences", "qwen3", 2, TP, {"sequence_parallel": False}),
            Case("tp2 mistral", "mistral", 2, TP, {"attn_implementation": "eager"}),
            Case("fsdp2 x tp2 qwen3", "qwen3", 4, TP),
            Case("replicas2 x tp2", "qwen2", 4, TP, {"data_parallel_replicas": 2}),
            Case("tp2 lora shared", "qwen2", 2, {**TP, **LORA}, {"layout": "shared"}),
            Case("tp2 lora of some layers", "llama", 2, {**TP, **SOME}),
            Case("tp2 qwen3", "qwen3", 2, TP),
            Case("fsdp2 x tp2 lora", "qwen2", 4, {**TP, **LORA}, saves="fsdp2 x tp2 lora"),
            Case("tp2 -> fsdp2 x tp2", "qwen2", 4, TP, resumes="tp2"),
            Case("fsdp2 x tp2 lora -> one", "qwen2", 1, LORA, resumes="fsdp2 x tp2 lora"),
        ]
    ),
    *(Case(f"{name} -> one", "qwen2", resumes=name) for name in ("dp2", "tp2", "fsdp2 x tp2", "replicas2")),
    *(Case(f"{name} -> one", "qwen2", 1, LORA, resumes=name) for name in ("dp2 lora", "tp2 lora")),
    Case("dp2 bfloat16 -> one", "qwen2", 1, LOW, resumes="dp2 bfloat16"),
)
"""In an order in which a checkpoint exists before it is resumed from."""
FULL_PRECISION = [case.name for case in CASES if "precision" not in case.policy]


def alone(case: Case) -> Case:
    """The same in one process, resumed from the checkpoint of one process."""
    policy = {name: value for name, value in case.policy.items() if name != "tensor_parallel_size"}
    options = {name: case.options[name] for name in case.options if name == "attn_implementation"}
    kind = "one" + " lora" * ("lora" in policy) + " bfloat16" * ("precision" in policy)
    resumes = case.resumes and (case.resumes if case.resumes == "untrained" else kind)
    saves = kind if case.name == "one" else ""  # no other: what it wrote would be read by those that resume
    return replace(
        case, name=kind, world_size=1, policy=policy, options=options, saves=saves, resumes=resumes, halved=False
    )


class Runs:
    """Results of all cases, and of each in one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models = {name: str(write_model(folder / name, sizes)) for name, sizes in MODELS.items()}
        self._models["random"] = str(write_tiny_model(folder / "random", hidden_size=32, intermediate_size=64))
        self._alone: dict[str, Found] = {}
        untrained = build(WorkerContext(), self.placed(Case("untrained", "qwen2")))
        self.saved("untrained").mkdir()
        untrained.save_checkpoint(self.saved("untrained"))
        for case in (Case("one", "qwen2"), Case("one", "qwen2", 1, LORA), Case("one", "qwen2", 1, LOW)):
            self.alone(case)
        self.ranks: dict[str, list[Found]] = {}
        for size in (2, 4, 1):
            chosen = [case for case in CASES if case.world_size == size]
            results = run_calls([(train, (self.placed(case),)) for case in chosen], size)
            self.ranks |= {case.name: found for case, found in zip(chosen, results, strict=True)}

    def saved(self, name: str) -> Path:
        return self._folder / f"saved {name}"

    def placed(self, case: Case) -> Case:
        """With its folders, which exist."""
        if case.saves:
            self.saved(case.saves).mkdir(exist_ok=True)
        saves, resumes = (str(self.saved(name)) if name else "" for name in (case.saves, case.resumes))
        return replace(case, model=self._models[case.model], saves=saves, resumes=resumes)

    def alone(self, case: Case) -> Found:
        """What one process finds."""
        single = alone(case)
        key = repr(replace(single, all_on_first=False))
        if key not in self._alone:
            self._alone[key] = train(WorkerContext(), self.placed(single))
        return self._alone[key]


def write_model(folder: Path, sizes: Mapping[str, Any]) -> Path:
    """A folder with weights, spread out so that log-probs are far from uniform."""
    write_tiny_model(folder / "tiny", **{"hidden_size": 32, "intermediate_size": 64, **sizes})
    model = load_model(PolicyConfig(model_name=str(folder / "tiny"), init="random"), seed=7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    save_tokenizer(folder, str(folder / "tiny"))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Runs(tmp_path_factory.mktemp("runs"))


def heads(case: Case, found: list[Found]) -> list[Found]:
    """One rank of each tensor-parallel group."""
    return found[:: case.policy.get("tensor_parallel_size", 1)]


def together(parts: list[Found], name: str) -> Tensor:
    """[N] per-token values of the whole batch, from those of its shards."""
    return spread_cases.together(parts, name, ragged_batch().lengths)


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize("name", FULL_PRECISION)
def test_losses_and_gradient_norms_are_those_of_one_process(name: str, runs: Runs) -> None:
    case, found = case_of(name), runs.ranks[name]
    expected = runs.alone(case)
    losses = torch.tensor([part.losses for part in heads(case, found)]).sum(0)
    assert gap(losses, torch.tensor(expected.losses)) < TOLERANCE
    for part in found:
        torch.testing.assert_close(part.grad_norms, expected.grad_norms, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", FULL_PRECISION)
def test_log_probs_before_and_after_training_are_those_of_one_process(name: str, runs: Runs) -> None:
    case = case_of(name)
    expected, parts = runs.alone(case), heads(case, runs.ranks[name])
    for what in ("before", "after", "reference"):
        assert gap(together(parts, what), getattr(expected, what)) < TOLERANCE, what
    assert gap(expected.after, expected.before) > 1e-2, "three steps changed nothing: this proves nothing"


@pytest.mark.parametrize("name", FULL_PRECISION)
def test_the_export_is_that_of_one_process_and_only_rank_0_has_it(name: str, runs: Runs) -> None:
    expected, (first, *others) = runs.alone(case_of(name)).weights, runs.ranks[name]
    assert first.weights.keys() == expected.keys()
    worst = max((gap(first.weights[key], expected[key]), key) for key in expected)
    assert worst[0] < TOLERANCE, worst
    assert not any(part.weights for part in others)


@pytest.mark.parametrize("name", [case.name for case in CASES if "precision" in case.policy])
def test_bfloat16_trains_like_one_process_up_to_its_rounding(name: str, runs: Runs) -> None:
    case = case_of(name)
    expected, parts = runs.alone(case), heads(case, runs.ranks[name])
    assert float((together(parts, "after") - expected.after).abs().mean()) < 0.02
    assert all(part.grad_norms == pytest.approx(expected.grad_norms, rel=0.05) for part in parts)
    moved = float((expected.after - expected.before).abs().mean())
    assert moved > 0.05


@pytest.mark.parametrize("name", ["dp2", "tp2", "fsdp2 x tp2", "replicas2 x shards2"])
def test_each_rank_holds_its_part_only(name: str, runs: Runs) -> None:
    whole = sum(runs.alone(case_of(name)).local_sizes.values())
    parts = {"dp2": 2, "tp2": 2, "fsdp2 x tp2": 4, "replicas2 x shards2": 2}[name]
    for found in runs.ranks[name]:
        # Uneven rows, and norms that tensor parallelism keeps whole.
        assert sum(found.local_sizes.values()) < 1.05 * whole / parts


@pytest.mark.parametrize("name", ["dp2", "tp2", "fsdp2 x tp2", "dp2 lora", "tp2 lora"])
def test_a_saved_policy_is_a_plain_model_with_the_exported_weights(name: str, runs: Runs) -> None:
    case = case_of(name)
    folder = runs.saved(case.saves) / "exported"
    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = runs.ranks[name][0].weights
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(parameter, weights[key]) for key, parameter in model.named_parameters())
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.parametrize("name", ["dp2 lora", "tp2 lora", *in_full(["fsdp2 x tp2 lora"])])
def test_a_saved_adapter_makes_the_exported_weights_of_the_base(name: str, runs: Runs) -> None:
    case = runs.placed(case_of(name))
    base = AutoModelForCausalLM.from_pretrained(case.model)
    merged = PeftModel.from_pretrained(base, str(runs.saved(name) / "adapter")).merge_and_unload()
    weights = runs.ranks[name][0].weights
    assert max(gap(parameter, weights[key]) for key, parameter in merged.named_parameters()) < 1e-6


def test_a_saved_mixture_has_the_names_of_published_checkpoints(runs: Runs) -> None:
    folder = runs.saved("dp2 mixtral") / "exported"
    weights = runs.ranks["dp2 mixtral"][0].weights
    assert "model.layers.1.block_sparse_moe.experts.2.w3.weight" in weights
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == weights.keys()
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


@pytest.mark.parametrize("name", ["dp2", "tp2", "fsdp2 x tp2", "replicas2"])
def test_a_checkpoint_is_safetensors_and_json_with_one_random_state_per_rank(name: str, runs: Runs) -> None:
    files = [path for path in runs.saved(name).rglob("*") if path.is_file() and "exported" not in path.parts]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    ranks = 4 if name in ("fsdp2 x tp2", "replicas2") else 2
    assert len([path for path in files if path.name.startswith("rng-")]) == ranks
