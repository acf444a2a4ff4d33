"""What the ranks of ``test_long_context`` do: take a step on one long sequence, and report the memory that it took."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, replace

import torch
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor.config import ContextMethod, DTensorConfig
from nemorl_tensors import TokenBatch
from nemorl_testing.batches import WeightedNLL
from torch import Tensor

PATIENCE_S = 1200.0
"""Attention to 131,072 tokens takes a CPU minutes, in which the other rank may wait"""


@dataclass(frozen=True)
class Long:
    """Of one rank."""

    logprobs: Tensor
    """[N] of the sequence before the step; empty where another rank has it"""
    loss: float
    grad_norm: float
    taken_mib: float
    """Peak of the resident set during the step, less what it was before"""
    seconds: float
    """Of the step"""


def resident_mib() -> float:
    """The largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def step(context: WorkerContext, model: str, tokens: int, context_parallel: int, method: ContextMethod) -> Long:
    """One sequence of ``tokens`` fed ones. Ranks that do not share it have none, but the first."""
    context = replace(context, collective_timeout_s=PATIENCE_S)
    ids = torch.randint(8, 80, (tokens + 1,), generator=torch.Generator().manual_seed(5))
    sequences = [ids.tolist()] if context.rank < context_parallel else []
    batch = TokenBatch.from_sequences(sequences, [[False] + [True] * tokens] * len(sequences))
    batch = batch.with_tokens(advantages=torch.ones(batch.num_tokens))
    policy = PolicyConfig(model_name=model, microbatch_tokens=tokens, optimizer={"lr": 1e-3})
    config = DTensorConfig(layout="padded", context_parallel_size=context_parallel, context_parallel_method=method)
    backend = config.build(policy, context, reference=False)
    before = resident_mib()
    start = time.perf_counter()
    metrics, logprobs = backend.forward_backward(batch, WeightedNLL())
    metrics = {**metrics, **backend.optimizer_step()}
    seconds = time.perf_counter() - start
    taken = resident_mib() - before
    backend.shutdown()
    return Long(logprobs, metrics["loss"].value, metrics["grad_norm"].value, taken, seconds)
