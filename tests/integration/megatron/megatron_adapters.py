"""What ranks of ``test_megatron_adapters`` do: train adapters a few steps, and report what can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from nemorl.config import PolicyConfig
from nemorl.plugins.kinds import TrainingBackendConfig
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_megatron import MegatronConfig, MegatronGenerationConfig
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_tensors import TokenBatch
from nemorl_testing.batches import ragged_batch
from safetensors.torch import save_file
from torch import Tensor

STEPS, SAVED_AFTER = 4, 2
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
LOSS = ClippedPolicyGradientLoss(kl_penalty=0.1)
REQUESTS = [GenerationRequest((9, 18, 10, 11), SamplingParams(max_new_tokens=8), (1, 2))]


@dataclass(frozen=True)
class Case:
    """One way to train adapters."""

    model: str
    world_size: int = 1
    policy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    start: str = ""
    """File of adapters to begin with, under peft's names; they are written there if it is not."""
    saves: str = ""
    """Folder for a checkpoint after ``SAVED_AFTER`` steps, and for adapters and the merged model after all."""
    resumes: str = ""
    """Folder of a checkpoint to take the remaining steps from."""
    shared: bool = False
    """Sequences come in groups with one prompt each, so that rows are shared."""


@dataclass(frozen=True)
class Found:
    """What one rank reports; tensors are of its own shard of the batch, in the order of ``sequences``."""

    sequences: list[int]
    before: Tensor
    reference: Tensor
    """Log-probs of the model with adapters off, after training."""
    first: dict[str, Tensor]
    """Adapters after the first step; empty on ranks other than 0"""
    after: Tensor
    losses: list[float]
    grad_norms: list[float]
    adapters: dict[str, Tensor]
    weights: dict[str, Tensor]
    tree_ratio: float
    spoken: Any
    """What an engine over these weights says, where there is one."""


def policy_of(case: Case, backend: TrainingBackendConfig) -> PolicyConfig:
    lora = {"rank": 4, "alpha": 8.0, **case.lora}
    fields = {"optimizer": OPTIMIZER, "microbatch_tokens": 64, "max_grad_norm": 0.05, **case.policy}
    schedule = {"kind": "linear", "warmup_steps": 2, "decay_steps": 6}
    return PolicyConfig(model_name=case.model, backend=backend, schedule=schedule, lora=lora, **fields)


def batch_of(case: Case) -> TokenBatch:
    return grouped_batch() if case.shared else ragged_batch(temperature=0.9)


def grouped_batch() -> TokenBatch:
    """Three groups of three responses to a prompt of 20 tokens."""
    draw = torch.Generator().manual_seed(5)
    sequences, masks = [], []
    for _ in range(3):
        prompt = torch.randint(8, 80, (20,), generator=draw).tolist()
        for length in (4, 6, 5):
            sequences.append([*prompt, *torch.randint(8, 80, (length,), generator=draw).tolist()])
            masks.append([False] * 20 + [True] * length)
    batch = TokenBatch.from_sequences(sequences, masks, loss_aggregation="token")
    return batch.with_tokens(advantages=torch.randn(batch.num_tokens, generator=draw))


def train(context: WorkerContext, case: Case) -> Found:
    """One rank of a run with megatron."""
    config = MegatronConfig(**case.options)
    policy = policy_of(case, config)
    backend: Any = config.build(policy, context, reference=True)
    if case.start:
        begin(backend, Path(case.start))
    shards = config.data_shards(policy, case.world_size)
    batch = batch_of(case)
    sequences = batch.shards(max(shards) + 1)[shards[context.rank]]
    found = run(backend, batch.select(sequences), sequences, case)
    backend.shutdown()
    return found


def begin(backend: Any, file: Path) -> None:
    """Give the backend the adapters of a file."""
    from nemorl_megatron.bridge.sources import Tensors
    from safetensors.torch import load_file

    adapters = backend._adapters
    adapters._exchange.fill(adapters._parts, Tensors(load_file(file)))


def run(backend: Any, batch: TokenBatch, sequences: list[int], case: Case) -> Found:
    reference = backend.get_logprobs(batch, "reference")
    batch = batch.with_tokens(reference_logprobs=reference, old_logprobs=reference, generation_logprobs=reference)
    if case.resumes:
        backend.load_checkpoint(Path(case.resumes))
    before = backend.get_logprobs(batch)
    metrics: list[Any] = []
    first: dict[str, Tensor] = {}
    for step in range(SAVED_AFTER if case.resumes else 0, STEPS):
        if case.saves and step == SAVED_AFTER:
            backend.save_checkpoint(Path(case.saves))
        metrics.append(backend.train_step(batch, LOSS))
        if len(metrics) == 1:
            first = adapters_of(backend)
    if case.saves:
        backend.save_adapters(Path(case.saves) / "adapters")
        backend.save_pretrained(Path(case.saves) / "merged")
    spoken = None
    if case.options.get("attention") == "sdpa":
        engine = backend.generator(MegatronGenerationConfig())
        spoken = engine.generate(REQUESTS)
        engine.shutdown()
    exported = [dict(bucket) for bucket in backend.export_weights()]
    return Found(
        sequences,
        before,
        backend.get_logprobs(batch, "reference"),
        first,
        backend.get_logprobs(batch),
        [m["loss"].value for m in metrics],
        [m["grad_norm"].value for m in metrics],
        adapters_of(backend),
        {name: tensor.detach().clone() for bucket in exported for name, tensor in bucket.items()},
        metrics[0]["tree_ratio"].value if "tree_ratio" in metrics[0] else 1.0,
        spoken,
    )


def adapters_of(backend: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for bucket in backend.export_adapters() for name, tensor in bucket.items()}


def write_adapters(file: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file(dict(tensors), file)
