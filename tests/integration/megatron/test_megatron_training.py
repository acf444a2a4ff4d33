"""However megatron-core spreads a model, it learns what the training backend dtensor learns in one process.

Each case trains four AdamW steps on the same ragged batch. All cases of one number of ranks share their processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

import spread_cases
from layouts import CP, EP, LOW, MIXTURE, PLAIN, PP, RECOMPUTED, TP, VPP, WHOLE
from megatron_runs import LOSSES, SAVED_AFTER, Case, Found, train, train_with_dtensor
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_testing.batches import ragged_batch
from safetensors.torch import load_file
from spread_cases import gap, run_spread
from tiers import in_full
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

TOLERANCE = 1e-4
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"architecture": "llama", "tie_word_embeddings": False},
    "qwen3": {"architecture": "qwen3", "head_dim": 8},
    "windows": {"architecture": "mistral", "sliding_window": 6},
    "gemma2": {
        "architecture": "gemma2",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
        "sliding_window": 6,
    },
    "moe": {**MIXTURE, "mlp_only_layers": [1]},
}
PP3 = {"pipeline_parallel_size": 3}
ENDS_COUNTED = {"embedding_counts_as_layer": True, "head_counts_as_layer": True}
FIXED = {"freeze_moe_router": True}
FEW: dict[str, tuple[str, ...]] = {"dpo": ("dp2", "pp2"), "sft": ("pp2",), "some zero": ("pp2",)}
"""Of the other losses, layouts in which each runs everywhere."""
ONE_LAYOUT_EACH = [("one", 1, {}, {}), ("dp2", 2, {}, {}), ("tp2", 2, TP, {}), ("pp2", 2, {}, PP)]

CASES = (
    *(
        Case(f"{layout} {loss}", "qwen2", ranks, policy, options, loss, saves=f"{layout} grpo" * (loss == "grpo"))
        for loss in LOSSES
        for layout, ranks, policy, options in ONE_LAYOUT_EACH
        if loss == "grpo" or layout in (*FEW[loss], *in_full(("one", "dp2", "tp2", "pp2")))
    ),
    Case("one moe", "moe"),
    Case("one bfloat16", "qwen2", 1, LOW, saves="one bfloat16"),
    Case("dp2, plain optimizer", "qwen2", 2, {}, PLAIN),
    Case("dp2, one rank without data", "qwen2", 2, all_on_first=True),
    Case("dp2 halved", "qwen2", 2, halved=True),
    Case("dp2 halved, plain optimizer", "qwen2", 2, {}, PLAIN, all_on_first=True, halved=True),
    Case("tp2 halved", "qwen3", 2, TP, halved=True),
    Case("cp2 halved", "qwen2", 2, {}, CP, halved=True),
    Case("pp2 vpp2 halved", "qwen2", 2, {}, VPP, halved=True),
    Case("ep2 halved", "moe", 2, {}, EP, halved=True),
    Case("dp2 bfloat16", "qwen2", 2, LOW, saves="dp2 bfloat16"),
    Case("tp2, whole sequences", "qwen3", 2, TP, WHOLE),
    Case("cp2", "qwen2", 2, {}, CP, saves="cp2"),
    Case("one capped", "gemma2"),
    Case("pp2 qwen3, recomputed", "qwen3", 2, RECOMPUTED, PP),
    Case("pp2 vpp2", "qwen2", 2, {}, VPP, saves="pp2 vpp2"),
    Case("ep2", "moe", 2, {}, EP, saves="ep2"),
    Case("dp2 tp2", "qwen2", 4, TP, saves="dp2 tp2"),
    *in_full(
        [
            Case("tp2 llama", "llama", 2, TP, saves="tp2 llama"),
            Case("cp2 sliding windows", "windows", 2, {}, CP),
            Case("pp2 ep2", "moe", 4, {}, PP | EP, saves="pp2 ep2"),
            Case("cp2 some zero", "qwen2", 2, {}, CP, "some zero"),
            Case("ep2 some zero", "moe", 2, {}, EP, "some zero"),
            Case("pp2 vpp2 some zero", "qwen2", 2, {}, VPP, "some zero"),
            Case("one, plain optimizer", "qwen2", 1, {}, PLAIN),
            Case("one, recomputed", "qwen2", 1, RECOMPUTED),
            Case("one llama", "llama"),
            Case("dp2 bfloat16, plain optimizer", "qwen2", 2, LOW, PLAIN),
            Case("dp2 moe", "moe", 2),
            Case("tp2, plain optimizer", "qwen2", 2, TP, PLAIN),
            Case("tp2, recomputed", "qwen2", 2, {**TP, **RECOMPUTED}),
            Case("tp2 bfloat16", "qwen2", 2, {**TP, **LOW}),
            Case("tp2 moe", "moe", 2, TP),
            Case("cp2 dpo, plain optimizer", "llama", 2, {}, CP | PLAIN, "dpo"),
            Case("cp2 capped", "gemma2", 2, {}, CP),
            Case("cp2 moe", "moe", 2, {}, CP),
            Case("one sliding windows", "windows"),
            Case("pp2 llama dpo", "llama", 2, {}, PP, "dpo"),
            Case(
                "pp2, three layers first",
                "qwen2",
                2,
                {},
                PP | {"layers_in_first_stage": 3},
                saves="pp2, three layers first",
            ),
            Case("pp3 vpp2, ends counted", "qwen2", 3, {}, PP3 | ENDS_COUNTED | {"virtual_pipeline_parallel_size": 2}),
            Case("pp2 vpp2 dpo", "llama", 2, {}, VPP, "dpo"),
            Case("ep2, plain optimizer", "moe", 2, {}, EP | PLAIN),
            Case("ep2, one rank without data", "moe", 2, {}, EP, all_on_first=True),
            Case("tp2 ep2", "moe", 2, TP, EP),
            Case("tp2 pp2", "qwen2", 4, TP, PP),
            Case("tp2 cp2", "qwen3", 4, TP, CP),
            Case("pp2 vpp2 cp2", "qwen2", 4, {}, VPP | CP),
            Case("dp2 cp2", "qwen2", 4, {}, CP, saves="dp2 cp2"),
            Case("cp4", "qwen2", 4, {}, {"context_parallel_size": 4}),
            Case("dp2 pp2", "qwen2", 4, {}, PP, saves="dp2 pp2"),
            Case("dp2 pp2, plain optimizer", "qwen2", 4, {}, PP | PLAIN),
            Case("dp2 pp2 vpp2 dpo", "qwen2", 4, {}, VPP, "dpo"),
            Case("dp2 tp2 ep4", "moe", 4, TP, {"expert_parallel_size": 4}),
        ]
    ),
)
FROZEN = (
    Case("one moe, router frozen", "moe", 1, {}, FIXED, saves="one moe, router frozen"),
    Case("ep2, router frozen", "moe", 2, {}, EP | FIXED),
    *in_full([Case("pp2, router frozen", "moe", 2, {}, PP | FIXED)]),
)
_RESUMED = (
    *(
        Case(f"{layout} grpo, resumed", "qwen2", ranks, policy, options, resumes=f"{layout} grpo")
        for layout, ranks, policy, options in ONE_LAYOUT_EACH
        if layout in ("one", "pp2", *in_full(("dp2", "tp2")))
    ),
    *(Case(f"{layout} -> one", "qwen2", resumes=f"{layout} grpo") for layout in ("dp2", "tp2", "pp2")),
    *(Case(f"{name} -> one", "qwen2", resumes=name) for name in ("pp2 vpp2", "dp2 tp2", "dp2 pp2", "dp2 cp2")),
    Case(
        "pp2, three layers first -> pp3, ends counted",
        "qwen2",
        3,
        {},
        PP3 | ENDS_COUNTED,
        resumes="pp2, three layers first",
    ),
    Case("one -> tp2", "qwen2", 2, TP, resumes="one grpo"),
    Case("tp2 -> pp2, plain optimizer", "qwen2", 2, {}, PP | PLAIN, resumes="tp2 grpo"),
    Case("tp2 -> one llama", "llama", resumes="tp2 llama"),
    Case("pp2 -> dp2 tp2", "qwen2", 4, TP, resumes="pp2 grpo"),
    Case("ep2 -> one", "moe", resumes="ep2"),
    Case("pp2 ep2 -> one", "moe", resumes="pp2 ep2"),
    Case("one moe, router frozen, resumed", "moe", 1, {}, FIXED, resumes="one moe, router frozen"),
    Case("dp2 bfloat16 -> one", "qwen2", 1, LOW, resumes="dp2 bfloat16"),
    Case("one bfloat16 -> dp2", "qwen2", 2, LOW, resumes="one bfloat16"),
    *in_full(
        [
            Case("one -> dp2", "qwen2", 2, resumes="one grpo"),
            Case("one -> pp2", "qwen2", 2, {}, PP, resumes="one grpo"),
            Case("ep2 -> tp2", "moe", 2, TP, resumes="ep2"),
        ]
    ),
)
SAVED = {case.saves for case in (*CASES, *FROZEN)}
RESUMED = [case for case in _RESUMED if case.resumes in SAVED]
"""Each of a checkpoint that a case of no more ranks wrote, or in one process at the end."""


class Runs:
    """Results of all cases, and of each with dtensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models = {name: str(write_model(folder / name, sizes)) for name, sizes in MODELS.items()}
        self._dtensor: dict[str, Found] = {}
        self.ranks: dict[str, list[Found]] = {}
        many = [case for case in RESUMED if case.world_size > 1]
        for cases in ((*CASES, *FROZEN, *many), [case for case in RESUMED if case.world_size == 1]):
            self.ranks |= run_spread(train, {case.name: self.placed(case) for case in cases})

    def saved(self, name: str) -> Path:
        return self._folder / f"saved {name}"

    def placed(self, case: Case) -> Case:
        """With its folders, which exist."""
        if case.saves:
            self.saved(case.saves).mkdir(exist_ok=True)
        saves, resumes = (str(self.saved(name)) if name else "" for name in (case.saves, case.resumes))
        return replace(case, model=self._models[case.model], saves=saves, resumes=resumes)

    def dtensor(self, case: Case) -> Found:
        """What one process finds without megatron-core."""
        key = f"{case.model} {case.loss} {case.policy.get('precision')}"
        if key not in self._dtensor:
            self._dtensor[key] = train_with_dtensor(self.placed(case))
        return self._dtensor[key]


def write_model(folder: Path, sizes: Mapping[str, Any]) -> Path:
    """A folder with weights, spread out so that log-probs are far from uniform."""
    write_tiny_model(folder, **{**SIZES, **sizes})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    return Runs(tmp_path_factory.mktemp("runs"))


def firsts(case: Case, found: list[Found]) -> list[Found]:
    """The rank of each shard that answers for it."""
    return [found[case.shards.index(shard)] for shard in range(max(case.shards) + 1)]


def together(parts: list[Found], name: str) -> Tensor:
    """[N] per-token values of the whole batch, from those of its shards."""
    lengths = ragged_batch().lengths
    if sum(len(part.sequences) for part in parts) == 8:  # pairs: without the sequence that trains nothing
        lengths = lengths[[0, 1, 2, 3, 4, 5, 6, 8]]
    return spread_cases.together(parts, name, lengths)


def case_of(name: str) -> Case:
    return next(case for case in (*CASES, *FROZEN, *RESUMED) if case.name == name)


def mean_gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().mean())


FULL = [case.name for case in CASES if "precision" not in case.policy]
EXACT = [case.name for case in RESUMED if "precision" not in case.policy]


@pytest.mark.parametrize("name", FULL)
def test_losses_and_gradient_norms_are_those_of_dtensor(name: str, runs: Runs) -> None:
    case, found = case_of(name), runs.ranks[name]
    expected = runs.dtensor(case)
    losses = torch.tensor([part.losses for part in firsts(case, found)]).sum(0)
    assert gap(losses, torch.tensor(expected.losses)) < TOLERANCE
    for part in found:
        torch.testing.assert_close(part.grad_norms, expected.grad_norms, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", FULL)
def test_log_probs_before_and_after_training_are_those_of_dtensor(name: str, runs: Runs) -> None:
    case = case_of(name)
    expected, parts = runs.dtensor(case), firsts(case, runs.ranks[name])
    for what in ("before", "after", "reference", "topk_logprobs"):
        assert gap(together(parts, what), together([expected], what)) < TOLERANCE, what
    assert torch.equal(together(parts, "topk_ids"), expected.topk_ids)
    assert gap(expected.after, expected.before) > 1e-2, "four steps changed nothing: this proves nothing"


@pytest.mark.parametrize("name", FULL)
def test_the_export_is_that_of_dtensor_and_only_rank_0_has_it(name: str, runs: Runs) -> None:
    expected, (first, *others) = runs.dtensor(case_of(name)).weights, runs.ranks[name]
    if case_of(name).model != "moe":  # transformers keeps all experts of a layer in one tensor
        assert first.weights.keys() == expected.keys()
        worst = max((gap(first.weights[key], expected[key]), key) for key in expected)
        assert worst[0] < TOLERANCE, worst
    assert not any(part.weights for part in others)


@pytest.mark.parametrize("name", [case.name for case in CASES if "precision" in case.policy])
def test_bfloat16_is_as_close_to_float32_as_that_of_dtensor(name: str, runs: Runs) -> None:
    case = case_of(name)
    exact, rounded = runs.dtensor(replace(case, policy={})), runs.dtensor(case)
    after = together(firsts(case, runs.ranks[name]), "after")
    assert mean_gap(after, exact.after) < 1.5 * mean_gap(rounded.after, exact.after)
    assert all(part.grad_norms[:2] == pytest.approx(exact.grad_norms[:2], rel=0.03) for part in runs.ranks[name])
    assert mean_gap(exact.after, exact.before) > 0.05


@pytest.mark.parametrize("name", [case.name for case in RESUMED if case.name.endswith("resumed")])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name: str, runs: Runs) -> None:
    for straight, resumed in zip(runs.ranks[case_of(name).resumes], runs.ranks[name], strict=True):
        assert resumed.losses == straight.losses[SAVED_AFTER:]
        assert resumed.grad_norms == straight.grad_norms[SAVED_AFTER:]
        assert torch.equal(resumed.after, straight.after)
        assert all(torch.equal(tensor, straight.weights[key]) for key, tensor in resumed.weights.items())


@pytest.mark.parametrize("name", [case.name for case in FROZEN])
def test_a_frozen_router_stays_and_all_else_is_trained(name: str, runs: Runs) -> None:
    before = load_file(Path(runs.placed(case_of(name)).model) / "model.safetensors")
    after = runs.ranks[name][0].weights
    same = {key for key, value in after.items() if torch.equal(value, before[key])}
    assert same == {key for key in after if key.endswith("mlp.gate.weight")}
    assert len(same) == 3  # of four layers, one is dense
    losses = [torch.tensor([part.losses for part in firsts(case_of(n), runs.ranks[n])]).sum(0) for n in (name, "ep2")]
    assert gap(losses[0][:1], losses[1][:1]) < TOLERANCE  # the first step is that of a router which learns
    alone = runs.ranks["one moe, router frozen"][0]
    assert gap(together(firsts(case_of(name), runs.ranks[name]), "after"), alone.after) < TOLERANCE


@pytest.mark.parametrize("name", EXACT)
def test_a_checkpoint_continues_in_any_layout(name: str, runs: Runs) -> None:
    case = case_of(name)
    source = case_of(case.resumes)
    straight, parts = firsts(source, runs.ranks[source.name]), firsts(case, runs.ranks[name])
    losses = [torch.tensor([part.losses for part in found]).sum(0) for found in (straight, parts)]
    assert gap(losses[0][SAVED_AFTER:], losses[1]) < 1e-5
    for part in parts:
        torch.testing.assert_close(part.grad_norms, straight[0].grad_norms[SAVED_AFTER:], rtol=1e-4, atol=1e-5)
    assert gap(together(parts, "after"), together(straight, "after")) < 1e-4


@pytest.mark.parametrize("name", ["dp2 bfloat16 -> one", "one bfloat16 -> dp2"])
def test_float32_masters_travel_between_layouts(name: str, runs: Runs) -> None:
    case = case_of(name)
    source = case_of(case.resumes)
    straight, parts = firsts(source, runs.ranks[source.name]), firsts(case, runs.ranks[name])
    for one, other in zip(straight, parts, strict=False):
        first, *later = one.grad_norms[SAVED_AFTER:]
        assert other.grad_norms[0] == pytest.approx(first, rel=0.02)
        # An update later, Adam has made steps of full size from gradients whose signs are those of their rounding:
        # 0.1 to 3 % apart, depending on the processor's bfloat16 kernels.
        assert other.grad_norms[1:] == pytest.approx(later, rel=0.1)
    # Each is as far from float32 as bfloat16 takes it, on this processor; so they are at most twice that apart.
    exact, rounded = runs.dtensor(replace(source, policy={})), runs.dtensor(source)
    apart = mean_gap(together(parts, "after"), together(straight, "after"))
    assert apart < 2 * mean_gap(rounded.after, exact.after)


@pytest.mark.parametrize("name", ["one grpo", "dp2 grpo", "pp2 vpp2", "ep2", *in_full(["tp2 llama"])])
def test_a_saved_policy_is_a_plain_model_with_the_exported_weights(name: str, runs: Runs) -> None:
    folder = runs.saved(name) / "exported"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (folder / "tokenizer.json").is_file()
    assert type(model).__name__ in model.config.architectures
    weights = runs.ranks[name][0].weights
    if name != "ep2":
        assert weights.keys() == dict(model.named_parameters()).keys()
        assert all(torch.equal(parameter, weights[key]) for key, parameter in model.named_parameters())


@pytest.mark.parametrize("name", ["one grpo", "dp2 grpo", "tp2 grpo", "pp2 grpo", "dp2 tp2", *in_full(["pp2 ep2"])])
def test_a_checkpoint_is_safetensors_and_json_and_holds_each_piece_once(name: str, runs: Runs) -> None:
    files = [path for path in runs.saved(name).iterdir() if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    ranks = case_of(name).world_size
    assert len([path for path in files if path.name.startswith("rng-")]) == ranks
    alone = "ep2" if case_of(name).model == "moe" else "one grpo"
    # A vocabulary that is padded to divide is a little larger.
    assert stored_elements(runs.saved(name)) == pytest.approx(stored_elements(runs.saved(alone)), rel=0.02)


def stored_elements(checkpoint: Path) -> int:
    return sum(tensor.numel() for file in checkpoint.glob("state-*") for tensor in load_file(file).values())
