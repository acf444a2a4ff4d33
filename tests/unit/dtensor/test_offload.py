"""What lies in the host's memory changes no number: optimizer state, reference, activations, parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.errors import ConfigIssue
from nemorl_dtensor import DTensorConfig
from nemorl_dtensor.host_activations import LEAST_BYTES, HostActivations
from nemorl_dtensor.training import DTensorBackend
from nemorl_tensors import TokenBatch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .conftest import Build, WeightedNll

RESTS = {"optimizer": True, "reference": True}
KEPT = {"activations": True}
EVERYTHING = {"parameters": True, **RESTS, **KEPT}
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "lora": {"lora": {"rank": 4}},
    "recomputed": {"activation_checkpointing": True},
}


def learnt(backend: DTensorBackend, batch: TokenBatch, loss: WeightedNll) -> list[Tensor]:
    """All that three steps have to show: log-probs of policy and reference, losses, gradient norms, weights."""
    found = [backend.get_logprobs(batch), backend.get_logprobs(batch, "reference")]
    for _ in range(3):
        metrics = backend.train_step(batch, loss)
        found += [torch.tensor(metrics[name].value) for name in ("loss", "grad_norm")]
    found += [tensor.detach().clone() for bucket in backend.export_weights() for tensor in bucket.values()]
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_the_same_bit_for_bit(name: str, build: Build, batch: TokenBatch, weighted_nll: WeightedNll) -> None:
    fields = {"microbatch_tokens": 64, **SETTINGS[name]}
    wanted = learnt(build(reference=True, **fields), batch, weighted_nll)
    for offload in (RESTS, KEPT):
        found = learnt(build(reference=True, options={"offload": offload}, **fields), batch, weighted_nll)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), offload


@pytest.mark.parametrize("name", ["float32", "lora", "recomputed"])
def test_parameters_on_the_host_learn_what_they_learn_on_the_device(
    name: str, build: Build, batch: TokenBatch, weighted_nll: WeightedNll
) -> None:
    # In one process they are sharded over it alone, without the functions for whole models: the order of sums differs.
    fields = {"microbatch_tokens": 64, "optimizer": {"lr": 1e-2, "eps": 1e-3}, **SETTINGS[name]}
    wanted = learnt(build(reference=True, **fields), batch, weighted_nll)
    for offload in ({"parameters": True}, EVERYTHING):
        backend = build(reference=True, options={"offload": offload}, **fields)
        found = learnt(backend, batch, weighted_nll)
        backend.shutdown()
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_two_models_of_one_process_may_both_have_parameters_on_the_host(
    build: Build, batch: TokenBatch, weighted_nll: WeightedNll
) -> None:
    before = torch.distributed.is_initialized()  # an engine of vLLM in this process leaves one behind
    policy, critic = (build(options={"offload": {"parameters": True}}) for _ in range(2))
    critic.shutdown()
    policy.train_step(batch, weighted_nll)
    policy.shutdown()
    assert torch.distributed.is_initialized() == before


@pytest.mark.parametrize(
    ("name", "offload", "tolerance"), [("float32", RESTS, 0), ("bfloat16", RESTS, 0), ("float32", EVERYTHING, 1e-5)]
)
def test_a_checkpoint_goes_on_with_and_without(
    name: str,
    offload: dict[str, bool],
    tolerance: float,
    build: Build,
    batch: TokenBatch,
    weighted_nll: WeightedNll,
    tmp_path: Path,
) -> None:
    fields = {"microbatch_tokens": 64, "optimizer": {"lr": 1e-2, "eps": 1e-3}, **SETTINGS[name]}
    kinds = {"off": {}, "on": {"options": {"offload": offload}}}
    for kind, options in kinds.items():
        first = build(**options, **fields)
        first.train_step(batch, weighted_nll)
        (tmp_path / kind).mkdir()
        first.save_checkpoint(tmp_path / kind)
        first.shutdown()
    for kind in kinds:
        after = []
        for options in kinds.values():
            second = build(**options, **fields)
            second.load_checkpoint(tmp_path / kind)
            second.train_step(batch, weighted_nll)
            after.append(second.get_logprobs(batch))
            second.shutdown()
        torch.testing.assert_close(*after, atol=tolerance, rtol=0)


def test_what_rests_leaves_the_device_but_for_its_work(
    build: Build, batch: TokenBatch, weighted_nll: WeightedNll
) -> None:
    backend = build(reference=True, options={"offload": RESTS}, precision="bfloat16")
    at_work: list[int] = []

    class Asked(WeightedNll):
        def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> Any:
            at_work.append(backend.held_bytes()["optimizer"])
            return super().__call__(policy_logprobs, batch)

    assert backend.held_bytes()["reference"] == 0
    for _ in range(2):
        backend.train_step(batch, Asked())
    backend.get_logprobs(batch, "reference")
    assert set(at_work) == {0}, "masters and moments are away while the loss is computed"
    held = backend.held_bytes()
    assert held["optimizer"] == held["reference"] == 0
    backend.offload(["optimizer", "weights"])
    backend.onload(["optimizer", "weights"])
    backend.train_step(batch, weighted_nll)


def test_layers_give_away_what_they_save_and_neither_weights_nor_what_all_layers_are_given() -> None:
    # Rows of 64 x 32 float32 numbers: 8,192 bytes each. The linear layer saves its input, relu its output, the product
    # both of its factors; the mask is an argument.
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, states: Tensor, mask: Tensor) -> Tensor:
            return torch.relu(self.linear(states)) * mask

    layers = [Layer(), Layer()]
    host = HostActivations("cpu")
    host.take_over([*layers])
    states, mask = torch.randn(64, 32, requires_grad=True), torch.rand(64, 32)
    with torch.no_grad():
        layers[0](states, mask)
    assert host.moved_bytes == 0
    for layer in layers:
        states = layer(states, mask)
    # Input and output of relu of each layer; weights are 4,096 bytes each, the mask 8,192.
    assert layers[0].linear.weight.nbytes >= LEAST_BYTES
    assert host.moved_bytes == 2 * 2 * 8192
    states.sum().backward()


def test_what_a_layer_has_given_away_is_let_go() -> None:
    # As long as the graph lives, autograd keeps the hooks that packed it: they must hold nothing of the device's.
    within: list[StorageWeakRef] = []

    class Layer(nn.Module):
        def forward(self, states: Tensor) -> Tensor:
            squares = states * states
            within.append(StorageWeakRef(squares.untyped_storage()))
            return squares * squares

    layers = [Layer(), Layer()]
    HostActivations("cpu").take_over([*layers])
    given = torch.full((64, 32), 0.9, requires_grad=True)
    states = layers[1](layers[0](given))
    assert [squares.expired() for squares in within] == [True, True]
    states.sum().backward()
    assert given.grad is not None
    torch.testing.assert_close(given.grad, torch.full((64, 32), 16 * 0.9**15))  # of x^16


def problems(offload: dict[str, bool], **policy: Any) -> list[ConfigIssue]:
    config = DTensorConfig(offload=offload)  # type: ignore[arg-type]
    return [*config.rank_problems(PolicyConfig.model_validate({"backend": config, **policy}), 1)]


@pytest.mark.parametrize(
    ("policy", "path"),
    [
        ({"optimizer": {"name": "muon"}}, "optimizer.name"),
        ({"lora": {"rank": 4, "head": True}}, "lora.head"),
        ({"lora": {"rank": 4, "base": "nf4"}}, "lora.base"),
    ],
)
def test_parameters_on_the_host_refuse_what_needs_whole_matrices(policy: dict[str, Any], path: str) -> None:
    assert [issue.path for issue in problems({"parameters": True}, **policy)] == [path]
    assert not problems({"optimizer": True, "activations": True}, **policy)
