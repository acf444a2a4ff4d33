"""What ``test_megatron_balance`` compares: a step of a mixture by hand, on transformers' model, and on ranks.

# T = tokens of a sequence that the model is fed, E = experts, K = experts of each token
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from megatron_runs import Spread
from nemorl.config import PolicyConfig
from nemorl.metrics import Mean, Metrics
from nemorl.resources.worker import WorkerContext
from nemorl_megatron.bridge.exchange import Exchange, global_names
from nemorl_megatron.bridge.own import OwnBridge
from nemorl_megatron.training import MegatronBackend
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_sft.loss import NLLLoss
from nemorl_tensors import TokenBatch
from nemorl_testing.batches import branching_batch, ragged_batch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear

COEFFICIENT, RATE = 0.3, 0.01
BIAS = "e_score_correction_bias"
ROUTER = {"balance_loss": COEFFICIENT, "bias_update_rate": RATE}
BATCHES = {"ragged": ragged_batch, "branching": branching_batch}


@dataclass(frozen=True)
class Case(Spread):
    """One step in one layout."""

    batch: str = "branching"
    saves: str = ""
    """Folder for a checkpoint after the update."""
    resumes: str = ""
    """Folder of a checkpoint, of which only the biases are looked at."""


@dataclass(frozen=True)
class Found:
    """Of one step; by hand, or on one rank."""

    loss: float
    """Of the policy: on a rank that of its shard"""
    balance: float
    """Mean over layers and tokens of the auxiliary loss, without its coefficient"""
    busiest: float
    dead: float
    gradients: dict[str, Tensor]
    """By stored name; empty on ranks other than 0"""
    biases: dict[str, Tensor]
    """After the update; likewise"""


class Endless:
    """A loss without end."""

    requires: frozenset[str] = frozenset()

    def __call__(self, outputs: Tensor, batch: TokenBatch, /) -> tuple[Tensor, Metrics]:
        return (outputs * torch.where(batch.mask, float("inf"), 0.0)).sum(), {}


def by_hand(folder: Path, batch: TokenBatch) -> Found:
    """The formulas, token by token and layer by layer, in float32 (sums in float64)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    gates = {name: part for name, part in model.named_modules() if name.endswith("mlp.gate")}
    inputs: dict[str, Tensor] = {}
    for name, gate in gates.items():
        gate.register_forward_hook(lambda _gate, given, _found, name=name: inputs.update({name: given[0]}))
    experts, chosen = model.config.num_local_experts, model.config.num_experts_per_tok
    loads = {name: torch.zeros(experts, dtype=torch.float64) for name in gates}
    policy_loss, auxiliary, tokens = torch.zeros(()), torch.zeros((), dtype=torch.float64), 0
    start = 0
    for length in batch.lengths.tolist():
        ids, mask, weights = (of[start : start + length] for of in (batch.token_ids, batch.mask, batch.loss_weights))
        start += length
        scored = [place for place in range(1, length) if mask[place]]
        if not scored:
            continue
        fed = scored[-1]
        tokens += fed
        logits = model(ids[None, :fed]).logits[0].float()
        logprobs = torch.log_softmax(logits / batch.temperature, -1)
        policy_loss = policy_loss - sum(weights[place] * logprobs[place - 1, ids[place]] for place in scored)
        for name, gate in gates.items():
            products = linear(inputs[name].reshape(-1, inputs[name].shape[-1]).float(), gate.weight.float())
            has_bias = hasattr(gate, BIAS)
            scores = products.sigmoid() if has_bias else products.softmax(-1)
            choice = (scores + getattr(gate, BIAS) if has_bias else scores).topk(chosen).indices
            counts = torch.bincount(choice.flatten(), minlength=experts).double()
            loads[name] += counts
            share = counts / (chosen * fed)  # f
            mean = (scores / scores.sum(-1, keepdim=True)).double().mean(0)  # P
            auxiliary = auxiliary + fed * experts * (share * mean).sum()
    (policy_loss + COEFFICIENT * auxiliary / tokens).backward()
    biases = {
        f"{name}.{BIAS}": getattr(gate, BIAS) + RATE * torch.sign(loads[name].mean() - loads[name]).float()
        for name, gate in gates.items()
        if hasattr(gate, BIAS)
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder / "gradients")
    return Found(
        loss=float(policy_loss.detach()),
        balance=float(auxiliary.detach()) / tokens / len(gates),
        busiest=max(float(load.max() / load.mean()) for load in loads.values()),
        dead=sum(int((load == 0).sum()) for load in loads.values()),
        gradients=load_file(folder / "gradients" / "model.safetensors"),
        biases=biases,
    )


def step(context: WorkerContext, case: Case) -> Found:
    """One rank's part of a step: gradients before the update, biases after it."""
    backend, mine = _start(context, case)
    if case.resumes:
        backend.load_checkpoint(Path(case.resumes))
        found = Found(0.0, 0.0, 0.0, 0.0, {}, _biases(backend))
        backend.shutdown()
        return found
    first, _ = backend.forward_backward(mine, NLLLoss())
    learner = backend._optimizer
    learner.add_up()
    gradients = gradients_of(backend)
    learner.add_up = lambda: None  # type: ignore[method-assign]
    metrics = backend.optimizer_step()
    if case.saves:
        backend.save_checkpoint(Path(case.saves))
    found = _found(first, metrics, gradients, _biases(backend))
    backend.shutdown()
    return found


def spoiled(context: WorkerContext, case: Case) -> list[dict[str, Tensor]]:
    """Biases at the start, after an update with gradients that are not finite, and after an update whose gradients were
    cleared before."""
    backend, mine = _start(context, case)
    found = [_biases(backend)]
    assert backend.train_step(mine, Endless())["skipped_updates"].value == 1
    found.append(_biases(backend))
    backend.forward_backward(mine, NLLLoss())
    backend.clear_gradients()
    backend.optimizer_step()
    found.append(_biases(backend))
    backend.shutdown()
    return found


def mostly_measured(context: WorkerContext, case: Case) -> tuple[float, Found]:
    """A step in which two sequences have an advantage: the share of those without a backward pass, and the step."""
    backend, mine = _start(context, case)
    logprobs = backend.get_logprobs(mine)
    mine = mine.with_tokens(
        advantages=torch.where(mine.sequence_ids < 2, 1.0, 0.0),
        old_logprobs=logprobs,
        generation_logprobs=logprobs,
    )
    metrics = backend.train_step(mine, ClippedPolicyGradientLoss())
    update = {"balance_loss": Mean(0.0), **metrics}
    found = metrics["skipped_backward_frac"].value, _found(metrics, update, {}, _biases(backend))
    backend.shutdown()
    return found


def _start(context: WorkerContext, case: Case) -> tuple[MegatronBackend, TokenBatch]:
    router = ROUTER if "glm" in case.model else {"balance_loss": COEFFICIENT}
    options = {"name": "megatron", "distributed_optimizer": False, "router": router, **case.options}
    fields = {"model_name": case.model, "microbatch_tokens": 64, "backend": options, **case.policy}
    config = PolicyConfig.model_validate(fields)
    backend = config.backend.build(config, context, reference=False)
    assert isinstance(backend, MegatronBackend)
    batch = BATCHES[case.batch](temperature=0.9)
    sequences = batch.shards(max(case.shards) + 1)[case.shards[context.rank]]
    return backend, batch.select(sequences)


def gradients_of(backend: MegatronBackend) -> dict[str, Tensor]:
    """Whole, by published name."""
    bridge = backend._bridge
    assert isinstance(bridge, OwnBridge)
    parts = {
        name: parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)
        for name, parameter in global_names(backend._pieces, bridge.settings, backend._parallel).items()
    }
    buckets = Exchange(bridge.settings, backend._parallel).whole(parts, torch.float32)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket.items() if BIAS not in name}


def _biases(backend: MegatronBackend) -> dict[str, Tensor]:
    exported = {name: tensor.clone() for bucket in backend.export_weights() for name, tensor in bucket.items()}
    return {name: tensor for name, tensor in exported.items() if BIAS in name}


def _found(passes: Metrics, update: Metrics, gradients: dict[str, Tensor], biases: dict[str, Tensor]) -> Found:
    names = ("balance_loss", "expert_load_max", "dead_experts")
    return Found(passes["loss"].value, *(update[name].value for name in names), gradients, biases)
