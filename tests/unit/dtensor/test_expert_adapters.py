"""Adapters of experts: what a loop over experts written by hand computes, and what peft makes of the folder.

# E = experts, I = inputs, O = outputs, R = rank
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.contracts import AdapterShape
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor import DTensorConfig
from nemorl_dtensor.expert_adapters import delta, from_file, to_file
from nemorl_dtensor.training import DTensorBackend
from nemorl_tensors import TokenBatch
from peft import PeftModel
from recorded_messages import Raises
from routed_mixtures import MIXTURES, ROUTED, SIZES, spread_out
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

from .conftest import WeightedNll, plain_logprobs

GPT_OSS = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    **MIXTURES,
    "gpt_oss": {**GPT_OSS, "layer_types": ["full_attention"] * 2},
    "qwen2_moe": {**SIZES, **ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "olmoe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**SIZES, **ROUTED, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
    | {"n_group": 1, "topk_group": 1, "head_dim": 8, "num_hidden_layers": 3},
}
BOTH = ("experts.gate_up_proj", "experts.down_proj")
RANK, ALPHA = 3, 12.0
SCALE = ALPHA / RANK
LORA: dict[str, Any] = {"rank": RANK, "alpha": ALPHA, "target_modules": BOTH}


def built(
    folder: Path,
    architecture: str,
    lora: Mapping[str, Any] = LORA,
    sizes: Mapping[str, Any] | None = None,
    **options: Any,
) -> DTensorBackend:
    """Adapters on a mixture whose weights are written to the folder."""
    if not (folder / "model.safetensors").is_file():
        spread_out(folder, architecture, **(FAMILIES[architecture] if sizes is None else sizes))
    fields: dict[str, Any] = {"optimizer": {"lr": 0.03}, "max_grad_norm": 1e6, **options}
    policy = PolicyConfig.model_validate({"model_name": str(folder), "lora": {**lora}, **fields})
    return DTensorBackend(policy, WorkerContext(), DTensorConfig(), reference=True, head="language_model")


def trained(folder: Path, architecture: str, batch: TokenBatch, lora: Mapping[str, Any] = LORA) -> DTensorBackend:
    """Adapters that are far from zero."""
    backend = built(folder, architecture, lora)
    for _ in range(2):
        backend.train_step(batch, WeightedNll())
    return backend


def by_hand(experts: Any, factors: Mapping[str, Tensor], name: str) -> Callable[..., Tensor]:
    """A forward pass of experts, token by token: the sum of weight * down(activation(up(x))), W + scale * B A each."""
    is_gpt_oss = "GptOss" in type(experts).__name__

    def product(stack: str, expert: int, x: Tensor) -> Tensor:
        weight = getattr(experts, stack)[expert]
        weight = weight.T if is_gpt_oss else weight
        owner = f"{name}.adapters.{stack}"
        if f"{owner}.lora_A" in factors:
            weight = weight + SCALE * factors[f"{owner}.lora_B"][expert] @ factors[f"{owner}.lora_A"][expert]
        return weight @ x + (getattr(experts, f"{stack}_bias")[expert] if is_gpt_oss else 0.0)

    def activated(both: Tensor) -> Tensor:
        if not is_gpt_oss:
            gate, up = both.chunk(2)
            return silu(gate) * up
        gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = []
        for x, chosen, weights in zip(hidden_states, top_k_index.tolist(), top_k_weights, strict=True):
            made = [product("down_proj", expert, activated(product("gate_up_proj", expert, x))) for expert in chosen]
            rows.append((weights[:, None] * torch.stack(made)).sum(0))
        return torch.stack(rows)

    return forward


def loss_by_hand(model: Any, batch: TokenBatch) -> Tensor:
    """The sum over sequences of -weight * advantage * log-prob of trained tokens."""
    total, start = torch.zeros(()), 0
    for length in batch.lengths.tolist():
        place = slice(start + 1, start + length)
        ids = batch.token_ids[start : start + length]
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / batch.temperature
        scored = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None]).squeeze(1)
        slopes = torch.where(batch.mask[place], batch["advantages"][place] * batch.loss_weights[place], 0.0)
        total = total - (scored * slopes).sum()
        start += length
    return total


@pytest.mark.parametrize(
    ("architecture", "recomputed"), [*((name, False) for name in FAMILIES), ("gpt_oss", True), ("deepseek_v3", True)]
)
def test_losses_and_gradients_are_those_of_a_loop_over_experts(
    architecture: str, recomputed: bool, batch: TokenBatch, tmp_path: Path
) -> None:
    targets = (*BOTH, "o_proj")
    backend = built(tmp_path, architecture, {**LORA, "target_modules": targets}, activation_checkpointing=recomputed)
    for _ in range(2):
        backend.train_step(batch, WeightedNll())
    metrics, _ = backend.forward_backward(batch, WeightedNll())
    found = backend._optimizer.gathered()
    factors = {name: p.detach().clone().requires_grad_() for name, p in backend._trainable.items()}

    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, module in [*plain.named_modules()]:
        if name.endswith(".experts"):
            module.forward = by_hand(module, factors, name)
        elif name.endswith(".o_proj"):
            a_RI, b_OR = (factors[f"{name}.lora_{part}.default.weight"] for part in "AB")
            module.forward = lambda x, w=module.weight, b=module.bias, a_RI=a_RI, b_OR=b_OR: torch.nn.functional.linear(
                x, w + SCALE * b_OR @ a_RI, b
            )
    loss = loss_by_hand(plain, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert metrics["loss"].value == pytest.approx(float(loss.detach()), abs=1e-6, rel=1e-6)
    assert found.keys() == factors.keys()
    assert len([name for name in found if ".experts.adapters." in name]) == 8  # two layers, two stacks, A and B
    for name, factor in factors.items():
        assert factor.grad is not None
        assert float(found[name].norm()) > 0, name
        assert float((found[name] - factor.grad).norm()) <= 5e-6 * float(factor.grad.norm()), name


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        *((name, (*BOTH, "o_proj")) for name in FAMILIES),
        ("qwen3_moe", BOTH),
        ("gpt_oss", ("mlp.experts.down_proj",)),
        ("mixtral", ("experts.gate_up_proj",)),
    ],
)
def test_peft_loads_the_folder_and_scores_as_the_trainer_does(
    architecture: str, targets: tuple[str, ...], batch: TokenBatch, tmp_path: Path
) -> None:
    backend = trained(tmp_path, architecture, batch, {**LORA, "target_modules": targets})
    backend.save_adapters(tmp_path / "adapters")
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    without = plain_logprobs(base, batch)
    ours = backend.get_logprobs(batch)
    torch.testing.assert_close(backend.get_logprobs(batch, "reference"), without, rtol=0, atol=1e-5)
    adapted = plain_logprobs(PeftModel.from_pretrained(base, str(tmp_path / "adapters")).eval(), batch)
    assert (ours - without).abs().max() > 0.01, "the adapters change what the model says"
    torch.testing.assert_close(adapted, ours, rtol=0, atol=1e-5)
    told = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert {name.rpartition(".")[2] for name in told["target_parameters"]} == {
        name.rpartition(".")[2] for name in targets if "experts" in name
    }


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_merged_model_is_base_plus_scaled_products(architecture: str, batch: TokenBatch, tmp_path: Path) -> None:
    backend = trained(tmp_path, architecture, batch)
    merged = dict(backend._exported._merged())
    base = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    factors = backend._trainable
    for name, tensor in merged.items():
        owner, _, stack = name.rpartition(".")
        wanted = base[name].detach() if name in base else tensor
        if f"{owner}.adapters.{stack}.lora_A" in factors:
            a_ERI, b_EOR = (factors[f"{owner}.adapters.{stack}.lora_{part}"].detach() for part in "AB")
            change = torch.stack([SCALE * (b @ a) for a, b in zip(a_ERI, b_EOR, strict=True)])
            wanted = wanted + (change.transpose(1, 2) if architecture == "gpt_oss" else change)
            assert (tensor - base[name]).abs().max() > 1e-3
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-6)
    backend.save_pretrained(tmp_path / "merged")
    again = plain_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), batch)
    torch.testing.assert_close(again, backend.get_logprobs(batch), rtol=0, atol=1e-5)


def test_a_file_has_the_factors_of_all_experts_as_two_matrices() -> None:
    # Expert 0: A = [1 2], B = [5; 6]. Expert 1: A = [3 4], B = [7; 8]. Of rank 1, two inputs, two outputs.
    a_ERI, b_EOR = torch.tensor([[[1.0, 2]], [[3, 4]]]), torch.tensor([[[5.0], [6]], [[7], [8]]])
    assert to_file(a_ERI, is_first=True).tolist() == [[1, 2], [3, 4]]
    assert to_file(b_EOR, is_first=False).tolist() == [[5, 7], [6, 8]]
    for factor, is_first in ((a_ERI, True), (b_EOR, False), (torch.randn(3, 4, 5), False)):
        assert torch.equal(from_file(to_file(factor, is_first=is_first), len(factor), is_first=is_first), factor)
    # Of expert 1: 0.5 * [7; 8] [3 4] = [10.5 14; 12 16].
    assert delta(a_ERI, b_EOR, 0.5, transposed=False)[1].tolist() == [[10.5, 14], [12, 16]]
    assert delta(a_ERI, b_EOR, 0.5, transposed=True)[1].tolist() == [[10.5, 12], [14, 16]]


def test_adapters_of_experts_are_drawn_as_peft_draws_them(tmp_path: Path) -> None:
    backend = built(tmp_path, "qwen3_moe")
    for name, factor in backend._trainable.items():
        if name.endswith("lora_A"):
            # Uniform within 1 / sqrt(I), whatever the rank and the number of experts.
            bound = factor.shape[-1] ** -0.5
            assert 0.9 * bound < float(factor.abs().max()) <= bound
        else:
            assert not factor.any()


def test_an_adapter_that_was_saved_is_loaded_beside_others(batch: TokenBatch, tmp_path: Path) -> None:
    backend = trained(tmp_path, "qwen3_moe", batch)
    ours = backend.get_logprobs(batch)
    backend.save_adapters(tmp_path / "adapters")
    backend.add_adapter("other", AdapterShape(rank=2, alpha=8.0, seed=1, modules=frozenset({"mlp"})))
    backend.use_adapter("other")
    backend.train_step(batch, WeightedNll())
    exported = {name: tensor.shape for bucket in backend.export_adapters() for name, tensor in bucket.items()}
    experts = "base_model.model.model.layers.0.mlp.experts"
    assert exported[f"{experts}.lora_A.weight"] == (8 * 2, 16)  # of down_proj: 8 experts of rank 2, 16 inputs
    assert exported[f"{experts}.base_layer.lora_B.weight"] == (32, 2 * 8)  # of gate_up_proj
    backend.use_adapter("policy")
    assert torch.equal(backend.get_logprobs(batch), ours)
    fresh = built(tmp_path, "qwen3_moe")
    assert not torch.equal(fresh.get_logprobs(batch), ours)
    fresh.load_adapter(tmp_path / "adapters")
    assert torch.equal(fresh.get_logprobs(batch), ours)


def test_a_checkpoint_goes_on_bit_for_bit(batch: TokenBatch, tmp_path: Path) -> None:
    backend = trained(tmp_path, "mixtral", batch)
    (tmp_path / "saved").mkdir()
    backend.save_checkpoint(tmp_path / "saved")
    backend.train_step(batch, WeightedNll())
    other = built(tmp_path, "mixtral")
    other.load_checkpoint(tmp_path / "saved")
    other.train_step(batch, WeightedNll())
    assert all(torch.equal(p, other._trainable[name]) for name, p in backend._trainable.items())


def test_adapters_of_a_bfloat16_mixture_are_float32(batch: TokenBatch, tmp_path: Path) -> None:
    backend = built(tmp_path, "qwen3_moe", precision="bfloat16")
    backend.train_step(batch, WeightedNll())
    assert {p.dtype for p in backend._trainable.values()} == {torch.float32}
    assert all(float(p.norm()) > 0 for p in backend._trainable.values())


@pytest.mark.parametrize(
    ("architecture", "sizes", "target"),
    [
        ("qwen3_moe", MIXTURES["qwen3_moe"], "experts.gate_proj"),
        ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, "experts.down_proj"),
        ("qwen2", {}, "experts.down_proj"),
    ],
)
def test_experts_that_are_not_there_or_not_known_are_refused(
    architecture: str, sizes: dict[str, Any], target: str, tmp_path: Path, raises: Raises
) -> None:
    with raises(BackendError, "target_modules", "experts.gate_up_proj"):
        built(tmp_path, architecture, {**LORA, "target_modules": ("q_proj", target)}, {**SIZES, **sizes})
