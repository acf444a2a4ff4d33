"""What the ranks of these tests do: train a few steps one way or another, and report what can be compared."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor.config import DTensorConfig
from nemorl_dtensor.ranks import local, whole
from nemorl_dtensor.training import DTensorBackend
from nemorl_tensors import (
    TokenBatch,
    linear_logprobs,
    linear_topk_logprobs,
    parallel_logprobs,
    vocab_parallel_logprobs,
    vocab_parallel_topk_logprobs,
)
from nemorl_tensors.filtering import TokenFilter
from nemorl_testing.batches import Selective, WeightedNLL, ragged_batch
from spread_cases import halved_step
from torch import Tensor, distributed

STEPS = 3
TEMPERATURE = 0.9
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
"""Adam divides by |gradient| + eps: a small eps would make a step of gradients that are nothing but rounding (those of
key biases), and of their differences."""


@dataclass(frozen=True)
class Case:
    """One way to train."""

    name: str
    model: str
    world_size: int = 1
    policy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    all_on_first: bool = False
    """The first data-parallel rank has the whole batch, the others have nothing."""
    halved: bool = False
    """Each step is a pass over either half of a rank's shard, and an update."""
    some_zero: bool = False
    """Two of three sequences have no advantage; several ranks are given a loss that says so."""
    saves: str = ""
    """Folder for a checkpoint after ``STEPS`` steps and a Hugging Face export."""
    resumes: str = ""
    """Folder of a checkpoint to continue from."""


@dataclass(frozen=True)
class Found:
    """What one rank reports; tensors are of its own shard of the batch, in the order of ``sequences``."""

    sequences: list[int]
    before: Tensor
    """[N] log-probs at the start"""
    after: Tensor
    reference: Tensor | None
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    """The export; empty on ranks other than 0"""
    local_sizes: dict[str, int]
    """Elements of each parameter on this rank"""


def shard_of(batch: TokenBatch, rank: int, ranks: int, *, all_on_first: bool) -> list[int]:
    """Sequences of a data-parallel rank, as the driver would choose them."""
    if all_on_first:
        return list(range(len(batch))) if rank == 0 else []
    return batch.shards(ranks)[rank]


def train(context: WorkerContext, case: Case) -> Found:
    """One rank of a run."""
    backend = build(context, case)
    batch, loss = _batch(case), Selective() if case.some_zero and context.world_size > 1 else WeightedNLL()
    width = case.policy.get("tensor_parallel_size", 1)
    rank, ranks = context.rank // width, context.world_size // width
    sequences = shard_of(batch, rank, ranks, all_on_first=case.all_on_first)
    mine = batch.select(sequences)
    if case.resumes:
        backend.load_checkpoint(Path(case.resumes))
    before = backend.get_logprobs(mine)
    step = partial(halved_step, backend) if case.halved else backend.train_step
    metrics = [step(mine, loss) for _ in range(STEPS)]
    if case.saves:
        backend.save_checkpoint(Path(case.saves))
        backend.save_pretrained(Path(case.saves) / "exported")
        if "lora" in case.policy:
            backend.save_adapters(Path(case.saves) / "adapter")
    exported = [dict(bucket) for bucket in backend.export_weights()]
    found = Found(
        sequences,
        before,
        backend.get_logprobs(mine),
        backend.get_logprobs(mine, "reference"),
        [m["loss"].value for m in metrics],
        [m["grad_norm"].value for m in metrics],
        {name: tensor.detach().clone() for bucket in exported for name, tensor in bucket.items()},
        {name: local_size(p) for name, p in backend._model.named_parameters()},
    )
    backend.shutdown()
    return found


def _batch(case: Case) -> TokenBatch:
    batch = ragged_batch(temperature=TEMPERATURE)
    if not case.some_zero:
        return batch
    return batch.with_tokens(advantages=torch.where(batch.sequence_ids % 3 == 0, batch["advantages"], 0.0))


def build(context: WorkerContext, case: Case) -> DTensorBackend:
    fields = {"optimizer": OPTIMIZER, "microbatch_tokens": 64, "max_grad_norm": 0.05, **case.policy}
    policy = PolicyConfig(model_name=case.model, **fields)
    backend = DTensorConfig(**case.options).build(policy, context, reference=True)
    assert isinstance(backend, DTensorBackend)
    return backend


def masters(context: WorkerContext, case: Case) -> dict[str, Tensor]:
    """The float32 masters that training begins with, whole."""
    backend = build(context, case)
    state = backend._optimizer.tensors()
    found = {name.removesuffix(".master"): whole(state[name]) for name in state if name.endswith(".master")}
    backend.shutdown()
    return found


def local_size(parameter: Tensor) -> int:
    return local(parameter).numel()


def refuse(context: WorkerContext, case: Case) -> str:
    """The error that building the case gives."""
    try:
        build(context, case)
    except BackendError as error:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        return f"{error.message} {error.fix}"
    raise AssertionError(f"{case.name} was built")


def die_midway(context: WorkerContext, case: Case) -> str:
    """Rank 1 is gone when the others begin their second step; what they notice."""
    backend = build(context, case)
    batch = ragged_batch(temperature=TEMPERATURE)
    mine = batch.select(shard_of(batch, context.rank, context.world_size, all_on_first=False))
    backend.train_step(mine, WeightedNLL())
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        backend.train_step(mine, WeightedNLL())
    except RuntimeError as error:
        return str(error)
    return ""


def go_back(context: WorkerContext, case: Case) -> float:
    """Save, train meanwhile, score, load: how far log-probs then are from those at the time of saving."""
    backend = build(context, case)
    batch = ragged_batch(temperature=TEMPERATURE)
    mine = batch.select(shard_of(batch, context.rank, context.world_size, all_on_first=False))
    start = backend.get_logprobs(mine)
    backend.snapshot_checkpoint(Path(case.saves))
    for _ in range(STEPS):
        backend.train_step(mine, WeightedNLL())
    assert backend.snapshot_files(wait=True)
    distributed.barrier()
    assert not torch.equal(backend.get_logprobs(mine), start)
    backend.load_checkpoint(Path(case.saves))
    distance = float((backend.get_logprobs(mine) - start).abs().max())
    backend.shutdown()
    return distance


def compare_heads(context: WorkerContext) -> list[float]:
    """Largest differences between log-probs and gradients of the spread head and of the whole one."""
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{context.master_port}",
        rank=context.rank,
        world_size=context.world_size,
    )
    generator = torch.Generator().manual_seed(1)
    differences = []
    # By default 3 positions at a time of 6 entries, which ranks of 5 would make 4.
    parallel_logprobs.CHUNK_LOGITS = 20
    keeps = (None, TokenFilter(3), TokenFilter(None, 0.7), TokenFilter(8, 0.6))
    heads = ((None, 1.0, None), (None, 0.7, 3), (5.0, 1.3, 4))
    for (softcap, temperature, chunk), keep in product(heads, keeps):
        hidden = torch.randn(10, 6, generator=generator, requires_grad=True)
        weight = torch.randn(11, 6, generator=generator, requires_grad=True)  # 11 entries on 2 ranks: 6 and 5
        bias = torch.randn(11, generator=generator, requires_grad=True)
        targets = torch.randint(0, 11, (10,), generator=generator)
        targets[::2] = (hidden @ weight.T + bias).argmax(1)[::2]  # which every filter keeps
        slopes = torch.randn(10, generator=generator)
        options: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "chunk_tokens": chunk, "keep": keep}
        whole = linear_logprobs(hidden, weight, targets, bias=bias, **options)
        kept = whole.detach().isfinite()
        assert bool(kept.all()) == (keep is None)
        wanted = torch.autograd.grad((whole[kept] * slopes[kept]).sum(), (hidden, weight, bias))
        first, last = (0, 6) if context.rank == 0 else (6, 11)
        part, part_bias = weight[first:last].detach().requires_grad_(), bias[first:last].detach().requires_grad_()
        spread = vocab_parallel_logprobs(
            hidden, part, targets, first=first, group=distributed.group.WORLD, widest=6, bias=part_bias, **options
        )
        assert torch.equal(spread.detach().isfinite(), kept)
        found = torch.autograd.grad((spread[kept] * slopes[kept]).sum(), (hidden, part, part_bias))
        expected = (wanted[0], wanted[1][first:last], wanted[2][first:last])
        differences.append(float((spread - whole)[kept].abs().max()))
        differences += [float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)]
        if keep is None:
            del options["keep"]
            ids, likeliest = linear_topk_logprobs(hidden, weight, 4, bias=bias, **options)
            options |= {"first": first, "group": distributed.group.WORLD, "widest": 6, "bias": part_bias}
            found_ids, found_likeliest = vocab_parallel_topk_logprobs(hidden, part, 4, **options)
            assert torch.equal(found_ids, ids)
            differences.append(float((found_likeliest - likeliest).abs().max()))
    distributed.destroy_process_group()
    return differences
