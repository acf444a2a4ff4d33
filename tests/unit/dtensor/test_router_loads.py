"""Routers of mixtures on dtensor: the auxiliary loss by its formula, counts of tokens, the bias that moves by them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor import DTensorConfig, recomputation
from nemorl_dtensor.model import load_model
from nemorl_dtensor.ranks import as_part
from nemorl_dtensor.router_loads import RouterLoads
from nemorl_dtensor.training import DTensorBackend
from nemorl_rl.models.routers import RouterConfig
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.rows import fed_lengths
from recorded_messages import Raises
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**ROUTED, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**ROUTED, "num_experts": 4, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    "glm4_moe": {**SHARED, "topk_group": 1, "head_dim": 8},
    "deepseek_v3": {
        **{**SHARED, "topk_group": 1, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    },
}
BIASED = ("glm4_moe", "deepseek_v3")
COEFFICIENT = 0.5
RATE = 0.125


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By architecture, weights spread out so that experts differ."""
    found = {}
    for name, sizes in MIXTURES.items():
        folder = tmp_path_factory.mktemp(name)
        write_tiny_model(folder / "tiny", architecture=name, **{**SIZES, **sizes})
        model = load_model(PolicyConfig(model_name=str(folder / "tiny"), init="random"), seed=7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4) if parameter.ndim > 1 else None
        model.save_pretrained(folder)
        found[name] = folder
    return found


def backend(folder: Path, router: dict[str, Any], options: dict[str, Any] | None = None, **policy: Any) -> Any:
    config = DTensorConfig(**{"router": router, **(options or {})})
    fields = {"model_name": str(folder), "optimizer": {"lr": 1e-2}, "max_grad_norm": 1e6, **policy}
    made = config.build(PolicyConfig(**fields), WorkerContext(), reference=False)
    assert isinstance(made, DTensorBackend)
    return made


def gradients(made: DTensorBackend, batch: TokenBatch, loss: Any) -> dict[str, Tensor]:
    made.forward_backward(batch, loss)
    return {name: part.clone() for name, part in made._optimizer.gathered().items()}


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Logits and choices of each router call of a plain model."""
    found: list[tuple[Tensor, Tensor]] = []
    routers = [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]
    hooks = [each.register_forward_hook(lambda _m, _i, out: found.append((out[0], out[2]))) for each in routers]
    assert routers
    yield found
    for hook in hooks:
        hook.remove()


def by_hand(folder: Path, batch: TokenBatch, sigmoid: bool) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Of a plain model, one sequence at a time: the mean over tokens of the auxiliary loss, added up over layers; its
    gradients; [L, E] counts of tokens."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.get_input_embeddings().padding_idx = None  # the row of the padding token learns too
    total: Any = torch.zeros(())
    tokens, start = 0, 0
    counts: Any = 0
    for length, fed in zip(batch.lengths.tolist(), fed_lengths(batch).tolist(), strict=True):
        if fed:
            with recorded(model) as calls:
                model(input_ids=batch.token_ids[start : start + fed][None])
            for logits, _ in calls:
                assert logits.shape == (fed, 4)
            chosen = torch.stack([torch.nn.functional.one_hot(choice, 4).sum(1) for _, choice in calls]).float()
            counts = counts + chosen.sum(1)
            for (logits, _), chosen_TE in zip(calls, chosen, strict=True):
                scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
                share = (scores / scores.sum(1, keepdim=True)).mean(0)
                total = total + fed * 4 * (chosen_TE.sum(0) / (2 * fed) * share).sum()
            tokens += fed
        start += length
    (total / tokens).backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return (total / tokens).detach(), found, counts


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_auxiliary_loss_adds_the_gradient_of_its_formula(
    name: str, recomputed: bool, folders: dict[str, Path], batch: TokenBatch, weighted_nll: Any
) -> None:
    value, expected, counts = by_hand(folders[name], batch, sigmoid=name in BIASED)
    policy: dict[str, Any] = {"activation_checkpointing": recomputed, "microbatch_tokens": 40}
    plain = gradients(backend(folders[name], {}, **policy), batch, weighted_nll)
    made = backend(folders[name], {"balance_loss": COEFFICIENT}, **policy)
    found = gradients(made, batch, weighted_nll)
    for key, gradient in found.items():
        wanted = plain[key] + COEFFICIENT * expected.get(key, torch.zeros(()))
        assert float((gradient - wanted).norm()) <= 5e-6 * float(wanted.norm()) + 1e-8, key
    assert any((found[key] - plain[key]).norm() > 1e-3 * plain[key].norm() for key in found), "it changed nothing"
    metrics = made.optimizer_step()
    # The metric is of one layer, the mean of all.
    assert metrics["balance_loss"].value == pytest.approx(float(value) / len(counts), abs=1e-6)
    loads = counts / counts.mean(1, keepdim=True)
    assert metrics["expert_load_max"].value == pytest.approx(float(loads.max()), abs=1e-6)
    assert metrics["dead_experts"].value == int((counts == 0).sum())


def test_of_one_sequence_and_layer_it_is_that_of_transformers(folders: dict[str, Path]) -> None:
    sequence = TokenBatch.from_sequences([list(range(3, 15))], [[True] * 12])
    model = AutoModelForCausalLM.from_pretrained(folders["mixtral"])
    value, _, counts = by_hand(folders["mixtral"], sequence, sigmoid=False)
    with recorded(model) as calls, torch.no_grad():
        model(input_ids=sequence.token_ids[None, :11])
    # transformers adds up the shares of a token's two experts, so its value is twice ours where all is even.
    theirs = sum(load_balancing_loss_func((logits,), 4, 2) / 2 for logits, _ in calls)
    assert float(value) == pytest.approx(float(theirs), abs=1e-6)
    assert counts.sum(1).tolist() == [22, 22]  # 11 tokens, two experts each


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("budget", [24, 4096])
def test_padding_and_layout_count_nothing(
    layout: str, budget: int, folders: dict[str, Path], weighted_nll: Any
) -> None:
    # Three sequences with four tokens in common: each counts them. 3 + 7 + 9 are fed, to two experts in each layer.
    ids = [[5, 9, 7, 3], [5, 9, 7, 3, 11, 12, 2, 8], [5, 9, 7, 3, 11, 12, 4, 6, 1, 10]]
    common = TokenBatch.from_sequences(ids, [[True] * len(each) for each in ids])
    common = common.with_tokens(advantages=torch.ones(common.num_tokens))
    _, _, counts = by_hand(folders["qwen3_moe"], common, sigmoid=False)
    assert counts.sum(1).tolist() == [38, 38]
    made = backend(folders["qwen3_moe"], {}, {"layout": layout}, microbatch_tokens=budget)
    metrics = made.train_step(common, weighted_nll)
    assert metrics["expert_load_max"].value == pytest.approx(float(counts.max()) * 4 / 38)
    assert metrics["dead_experts"].value == int((counts == 0).sum())


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", BIASED)
def test_the_bias_moves_by_the_sign_of_what_is_missing(
    name: str, recomputed: bool, folders: dict[str, Path], batch: TokenBatch, weighted_nll: Any, tmp_path: Path
) -> None:
    _, _, counts = by_hand(folders[name], batch, sigmoid=True)
    made = backend(folders[name], {"bias_update_rate": RATE}, activation_checkpointing=recomputed)
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    before = _exported(made)[key]
    made.forward_backward(batch, weighted_nll)
    made.clear_gradients()
    made.optimizer_step()
    assert torch.equal(_exported(made)[key], before), "what was cleared moves nothing"
    made.train_step(batch, weighted_nll)
    moved = _exported(made)[key]
    assert torch.equal(moved - before, RATE * torch.sign(counts[0].mean() - counts[0]))
    assert moved.dtype == torch.float32

    made.save_checkpoint(tmp_path)
    other = backend(folders[name], {})
    other.load_checkpoint(tmp_path)
    assert torch.equal(_exported(other)[key], moved)
    other.train_step(batch, weighted_nll)
    assert torch.equal(_exported(other)[key], moved), "without a rate it stays"


def test_an_update_that_is_skipped_moves_no_bias(
    folders: dict[str, Path], batch: TokenBatch, weighted_nll: Any
) -> None:
    made = backend(folders["glm4_moe"], {"bias_update_rate": RATE})
    before = {key: value for key, value in _exported(made).items() if "bias" in key}
    broken = batch.with_tokens(advantages=torch.full_like(batch["advantages"], float("nan")))
    assert made.train_step(broken, weighted_nll)["skipped_updates"].value == 1
    assert all(torch.equal(_exported(made)[key], value) for key, value in before.items())


def test_a_second_pass_that_scores_otherwise_sends_tokens_where_the_first_did(
    folders: dict[str, Path], batch: TokenBatch, weighted_nll: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for kind in ("plain", "recomputed", "disturbed", "not kept"):
        made = backend(folders["mixtral"], {}, activation_checkpointing=kind != "plain")
        with torch.no_grad():
            for router in _gates(made):
                router.weight.mul_(1e-4)  # experts score almost alike
        if kind in ("disturbed", "not kept"):
            for router in _gates(made):
                router.register_forward_pre_hook(_turned_in_the_backward_pass)
        if kind == "not kept":
            monkeypatch.setattr(recomputation.KeptChoices, "__torch_function__", _as_it_is)
        gradient = gradients(made, batch, weighted_nll)
        found[kind] = {key: each for key, each in gradient.items() if "experts" in key}
    assert _difference(found["recomputed"], found["plain"]) < 1e-6
    assert _difference(found["disturbed"], found["plain"]) < 1e-3
    assert _difference(found["not kept"], found["plain"]) > 0.5, "every choice was another"


def _gates(made: DTensorBackend) -> list[Any]:
    return [module for name, module in made._model.named_modules() if name.endswith(".gate")]


def _turned_in_the_backward_pass(_module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (-inputs[0],) if torch._C._current_graph_task_id() != -1 else inputs


def _as_it_is(_mode: Any, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return func(*args, **(kwargs or {}))


def _difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest, over the norm of what is wanted."""
    assert len(found) == 4  # two stacks in each of two layers
    return max(float((found[key] - wanted[key]).norm() / wanted[key].norm()) for key in wanted)


@pytest.mark.parametrize(("dtype", "expected"), [("model", "bfloat16"), ("float32", "float32"), ("float64", "float64")])
def test_routers_score_in_the_precision_that_is_said(dtype: str, expected: str, folders: dict[str, Path]) -> None:
    made = backend(folders["qwen3_moe"], {"dtype": dtype}, precision="bfloat16")
    router: Any = next(module for name, module in made._model.named_modules() if name.endswith(".gate"))
    states = torch.randn(6, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    logits, _, _ = router(states)
    exact = states.double() @ router.weight.double().T
    assert logits.dtype == getattr(torch, expected)
    tolerance = {"model": 1e-2, "float32": 1e-6, "float64": 1e-12}[dtype]
    assert torch.allclose(logits.double(), exact, rtol=tolerance, atol=tolerance)


def test_options_of_routers_that_are_not_there_are_refused(
    folders: dict[str, Path], pretrained: Path, raises: Raises
) -> None:
    with raises(BackendError, "router.balance_loss", "qwen3_moe"):
        backend(pretrained, {"balance_loss": 0.1})
    with raises(BackendError, "bias", "balance_loss"):
        backend(folders["qwen3_moe"], {"bias_update_rate": 0.1})


def test_counts_lie_where_weights_of_the_host_are_computed_with(folders: dict[str, Path]) -> None:
    model = load_model(PolicyConfig(model_name=str(folders["qwen3_moe"])))
    loads = RouterLoads(model, RouterConfig())
    gate = model.get_submodule("model.layers.0.mlp.gate")
    weight: Tensor = gate.weight.detach()
    mesh = DeviceMesh("meta", [0], _init_backend=False, _rank=0)
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(weight.shape, weight.stride(), weight.dtype))
    gate.weight = nn.Parameter(as_part(weight, spec), requires_grad=False)
    assert gate.weight.device.type == "cpu"
    assert loads._zero.device.type == "meta"
    assert loads._zero.shape == (4,)


def _exported(made: DTensorBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in made.export_weights() for name, tensor in bucket.items()}
