"""What ``test_megatron_generation_layouts`` compares: what ranks that share a live model say and leave behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flash_kernels import flash_kernels_on_cpu
from megatron_models import write_reference
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle
from nemorl_megatron import MegatronGenerationConfig
from nemorl_megatron.bridge.own import OwnBridge
from nemorl_megatron.generation import MegatronGeneration
from nemorl_megatron.model import PolicyModel
from nemorl_megatron.parallel import Parallel, Sizes
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors.engines.model_config import read_model_config

PROMPTS = ((9, 18, 10), (11, 12, 13, 14, 15, 16, 17, 40), (30,), (61, 60, 20, 21, 61), (9, 18, 10))
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_new_tokens=10)
REQUESTS = [
    *(GenerationRequest(prompt, GREEDY) for prompt in PROMPTS),
    *(GenerationRequest(prompt, SAMPLED, (number, 100 + number)) for number, prompt in enumerate(PROMPTS)),
]
LIVE_VERSION = 4


@dataclass(frozen=True)
class Generated:
    """What one rank was told."""

    requests: Sequence[int]
    """Which of all requests it was given."""
    completions: list[list[Completion]]
    after_update: list[list[Completion]]
    """To the last of them again, once the trainer's weights had changed in place."""
    is_as_before: bool
    """Whether the model's modules and configs were left as they were found."""


@dataclass(frozen=True)
class LiveCase:
    """One model in one layout."""

    model: str
    sizes: Sizes
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the generation backend."""
    shards: bool = False
    """Each copy has requests of its own."""


def write_model(folder: Path, architecture: str, sizes: Mapping[str, Any]) -> Path:
    """A random model whose log-probs are far from uniform, with a tokenizer."""
    write_tiny_model(folder, architecture=architecture)
    return write_reference(folder, architecture, {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, **sizes})


def policy_of(model: str) -> PolicyConfig:
    return PolicyConfig(model_name=model, max_sequence_tokens=64)


def generate_live(context: WorkerContext, case: LiveCase) -> Generated:
    """One rank: a trainer's model, and a generator over it."""
    policy = policy_of(case.model)
    parallel = Parallel.join(context, case.sizes)
    bridge = OwnBridge(policy, read_model_config(policy))
    pieces = bridge.build(parallel, dtype=torch.float32, attention="auto", activation_checkpointing=False)
    bridge.load(pieces, parallel, seed=0)
    for piece in pieces:
        piece.train()
    before = _state(pieces)
    given = [*range(len(REQUESTS))]
    if case.shards:
        given = given[:-3] if parallel.place.data == 0 else given[-3:]
    generator = MegatronGeneration(pieces, parallel, bridge, policy, MegatronGenerationConfig(**case.options))
    completions = generator.generate([REQUESTS[number] for number in given])
    with torch.no_grad():
        for piece in pieces:
            piece.decoder.layers[0].self_attention.linear_proj.weight.mul_(-1)
    generator.update_weights(WeightHandle("in_process", LIVE_VERSION, None), LIVE_VERSION)
    after_update = generator.generate([REQUESTS[given[-1]]])
    generator.shutdown()
    found = Generated(given, completions, after_update, _state(pieces) == before)
    parallel.leave()
    return found


def converse_live(context: WorkerContext, case: LiveCase, goes_on: bool) -> list[list[Completion]]:
    """One rank: the second turn of each response to ``REQUESTS``."""
    policy = policy_of(case.model)
    parallel = Parallel.join(context, case.sizes)
    bridge = OwnBridge(policy, read_model_config(policy))
    pieces = bridge.build(parallel, dtype=torch.float32, attention="auto", activation_checkpointing=False)
    bridge.load(pieces, parallel, seed=0)
    generator = MegatronGeneration(pieces, parallel, bridge, policy, MegatronGenerationConfig(**case.options))
    first = generator.generate([replace(request, goes_on=goes_on) for request in REQUESTS])
    second = [
        GenerationRequest((*request.token_ids, *completion.token_ids, *PROMPTS[number % 3]), SAMPLED, (number,))
        for request, group in zip(REQUESTS, first, strict=True)
        for number, completion in enumerate(group)
    ]
    found = generator.generate(second)
    generator.shutdown()
    parallel.leave()
    return found


def generate_live_paged(context: WorkerContext, case: LiveCase) -> Generated:
    """The same over megatron-core's paged cache, without CUDA."""
    with flash_kernels_on_cpu():
        return generate_live(context, case)


def generate_empty_shard(context: WorkerContext, model: str) -> list[int]:
    """Two copies of a model, one of which has nothing to say."""
    policy = policy_of(model)
    parallel = Parallel.join(context, Sizes())
    bridge = OwnBridge(policy, read_model_config(policy))
    pieces = bridge.build(parallel, dtype=torch.float32, attention="auto", activation_checkpointing=False)
    bridge.load(pieces, parallel, seed=0)
    generator = MegatronGeneration(pieces, parallel, bridge, policy, MegatronGenerationConfig())
    found = generator.generate(REQUESTS if context.rank == 0 else [])
    parallel.leave()
    return [len(group) for group in found]


def _state(pieces: Sequence[PolicyModel]) -> list[tuple[Any, ...]]:
    modules = [module for piece in pieces for module in piece.modules()]
    names = ("training", "sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
    return [
        tuple(vars(owner).get(name) for name in names)
        for module in modules
        for owner in (module, vars(module).get("config", module))
    ]
