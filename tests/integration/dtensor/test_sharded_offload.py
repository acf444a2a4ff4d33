"""Spread over ranks, what lies in the host's memory changes no number either, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.resources.worker import WorkerContext
from nemorl_testing.batches import WeightedNLL, ragged_batch
from sharded_runs import Case, Found, build, train
from spawned import run_calls
from test_sharded_training import write_model

pytestmark = pytest.mark.slow

TP: dict[str, Any] = {"tensor_parallel_size": 2}
KINDS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2 bfloat16": {"precision": "bfloat16"},
    "dp2 lora": {"lora": {"rank": 4}},
    "dp2 recomputed": {"activation_checkpointing": True},
    "tp2": TP,
    "tp2 lora": {**TP, "lora": {"rank": 4}},
}
OFFLOADS: dict[str, dict[str, bool]] = {
    "rests": {"optimizer": True, "reference": True},
    "activations": {"activations": True},
    "parameters": {"parameters": True},
    "everything": {"parameters": True, "optimizer": True, "reference": True, "activations": True},
}


def test_steps_and_checkpoints_are_the_same(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model", {"tie_word_embeddings": True}))
    saved = tmp_path / "saved"
    saved.mkdir()
    cases = [Case(kind, model, 2, policy) for kind, policy in KINDS.items()]
    cases += [
        Case(f"{kind} {name}", model, 2, policy, {"offload": offload})
        for kind, policy in KINDS.items()
        for name, offload in OFFLOADS.items()
        # FSDP2 takes the place of whole parameters where tensor parallelism alone would do.
        if not ("parameters" in offload and policy.get("tensor_parallel_size"))
    ]
    everything = {"offload": OFFLOADS["everything"]}
    cases += [
        Case("saved with", model, 2, {}, everything, saves=str(saved)),
        Case("goes on without", model, 2, {}, {}, resumes=str(saved)),
        Case("goes on with", model, 2, {}, everything, resumes=str(saved)),
    ]
    found = dict(zip([case.name for case in cases], run_calls([(train, (case,)) for case in cases], 2), strict=True))
    for case in cases[len(KINDS) : -3]:
        kind = next(name for name in sorted(KINDS, key=len, reverse=True) if case.name.startswith(f"{name} "))
        for rank, one in enumerate(found[case.name]):
            assert not differing(one, found[kind][rank]), f"{case.name}, rank {rank}"
    for one, other in zip(found["goes on with"], found["goes on without"], strict=True):
        assert not differing(one, other)


@pytest.mark.full
def test_tensor_parallel_parameters_may_lie_on_the_host(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model", {"tie_word_embeddings": True}))
    cases = [Case("tp2", model, 2, TP), Case("tp2 host", model, 2, TP, {"offload": OFFLOADS["everything"]})]
    plain, hosted = run_calls([(train, (case,)) for case in cases], 2)
    for one, other in zip(hosted, plain, strict=True):
        torch.testing.assert_close(one.after, other.after, atol=1e-5, rtol=0)


def moved(context: WorkerContext, case: Case) -> int:
    """Bytes of activations that a step gave to the host."""
    backend = build(context, case)
    hosts = {layer.forward.func.__self__ for layer in backend._model.get_decoder().layers}  # type: ignore[attr-defined]
    backend.train_step(ragged_batch(), WeightedNLL())
    backend.shutdown()
    (host,) = hosts
    return int(host.moved_bytes)


def test_gathered_weights_are_no_activations(tmp_path: Path) -> None:
    """A layer's weights are larger than its activations here, and none of them moves."""
    model = str(write_model(tmp_path / "model", {"hidden_size": 128, "intermediate_size": 1024}))
    options = {"offload": {"activations": True}}
    fields = {"microbatch_tokens": 16}
    (alone,) = run_calls([(moved, (Case("one", model, 1, fields, options),))], 1)
    spread = run_calls([(moved, (Case("dp2", model, 2, fields, options),))], 2)
    # 2 ranks compute the same batch each, as one does, with other functions for norms.
    layer_bytes = 4 * 3 * 128 * 1024
    assert all(abs(one - alone[0]) < layer_bytes for one in spread[0])


def differing(one: Found, other: Found) -> list[str]:
    """What is not the same in the results of two runs."""
    pairs = {"before": (one.before, other.before), "after": (one.after, other.after)}
    if one.reference is not None and other.reference is not None:
        pairs["reference"] = (one.reference, other.reference)
    pairs |= {name: (tensor, other.weights[name]) for name, tensor in one.weights.items()}
    found = [name for name, (mine, theirs) in pairs.items() if not torch.equal(mine, theirs)]
    found += ["losses"] if one.losses != other.losses else []
    return found + (["gradient norms"] if one.grad_norms != other.grad_norms else [])
