"""From a policy's config to a model that can be scored: whole in one process, or spread over ranks.

The order matters: adapters go into the plain model, then layers recompute their activations, then it is sharded, and
only then, if it is sharded, does it get memory and weights. Not here: what it must prove before it is used
(``verification``).
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from nemorl.errors import BackendError
from nemorl_media.sight import Sight, freeze

from nemorl_dtensor.attention_cpu import use_fast_attention
from nemorl_dtensor.context_parallel import share_rows
from nemorl_dtensor.host_activations import HostActivations
from nemorl_dtensor.model import load_model, sight_of, skeleton
from nemorl_dtensor.model_head import Scorer
from nemorl_dtensor.model_kernels import use_fast_kernels
from nemorl_dtensor.model_lora import Adapters
from nemorl_dtensor.model_quantized import prepare_layers, quantization
from nemorl_dtensor.published_names import PublishedNames
from nemorl_dtensor.recomputation import recompute_layers
from nemorl_dtensor.router_loads import RouterLoads
from nemorl_dtensor.sharded_head import ShardedScorer
from nemorl_dtensor.sharded_weights import fill, hollow
from nemorl_dtensor.sharding import decoder_layers
from nemorl_dtensor.value_head import ValueScorer
from nemorl_dtensor.vocabulary_gradient import VocabularyGradient, gradient_of, vocabulary_gradients

if TYPE_CHECKING:
    from nemorl.config.models import TrainingOptions
    from nemorl.contracts import Head
    from nemorl.resources.worker import WorkerContext
    from torch import Tensor
    from transformers import PreTrainedModel

    from nemorl_dtensor.config import DTensorConfig
    from nemorl_dtensor.ranks import Ranks


AnyScorer = Scorer | ValueScorer | ShardedScorer


@dataclass(frozen=True)
class Assembly:
    """A policy's model and the ways to use it, not verified yet."""

    model: PreTrainedModel
    names: PublishedNames
    scorer: AnyScorer
    adapters: Adapters | None
    is_packed: bool
    """Sequences share rows where they do not share tokens"""
    loads: RouterLoads
    """Of a mixture's routers"""
    reference: AnyScorer | None = None
    """The frozen initial weights, where they are asked for and no adapter can be turned off to get them"""
    frozen: PreTrainedModel | None = None
    """The model that it is of"""
    gradients: Mapping[str, VocabularyGradient] = field(default_factory=dict)
    """Of parameters whose gradient, or a part of it, does not come from autograd"""


def assemble(
    policy: TrainingOptions,
    worker: WorkerContext,
    config: DTensorConfig,
    ranks: Ranks | None,
    *,
    reference: bool,
    head: Head,
) -> Assembly:
    """The model of this rank. Collective where there are several.

    Raises:
        BackendError: The model cannot be loaded or spread as the config asks.
    """
    has_flash = worker.device.startswith("cuda") and importlib.util.find_spec("flash_attn") is not None
    is_packed = has_flash if config.layout == "auto" else config.layout == "packed"
    attention: str = config.attn_implementation
    if attention == "auto" and is_packed and has_flash and config.context_parallel_size == 1:
        attention = "flash_attention_2"
    keeps_copy = reference and policy.lora is None
    if ranks is None:
        return _whole(policy, worker, config, attention, packed=is_packed, copied=keeps_copy, head=head)
    build = partial(_sharded, policy, worker, config, ranks, attention, packed=is_packed, head=head)
    frozen = build(trained=False) if keeps_copy else None
    trained = build(trained=True)
    return trained if frozen is None else replace(trained, reference=frozen.scorer, frozen=frozen.model)


def _whole(
    policy: TrainingOptions,
    worker: WorkerContext,
    config: DTensorConfig,
    attention: str,
    *,
    packed: bool,
    copied: bool,
    head: Head,
) -> Assembly:
    """In one process."""
    # 1. Load, and copy before anything can train.
    is_quantized = policy.lora is not None and policy.lora.base == "nf4"
    model = load_model(
        policy,
        worker.device,
        worker.seed,
        attn_implementation=attention,
        head=head,
        quantization=quantization(policy) if is_quantized else None,
    )
    if attention == "auto":
        use_fast_attention(model)
    initial = copy.deepcopy(model).requires_grad_(False) if copied else None

    # 2. What is trained.
    names = PublishedNames(model)
    sight = sight_of(model, policy)
    if policy.lora is None:
        model.requires_grad_(True)
        if sight is not None:
            freeze(model, sight.family, policy.media.train)
    adapters = None
    if policy.lora is not None:
        adapters = Adapters(model, policy.lora, worker.seed, beside_text=_beside_text(model, sight))
    if is_quantized:
        prepare_layers(model)

    # 3. How it is computed.
    for each in (model,) if initial is None else (model, initial):
        use_fast_kernels(each)
    loads = [RouterLoads(each, config.router) for each in (initial, model) if each is not None][-1]
    gradients = vocabulary_gradients(model)
    if policy.activation_checkpointing:
        recompute_layers(model)
    if config.offload.activations:
        HostActivations(worker.device).take_over(decoder_layers(model))

    # 4. How it is scored.
    reference: AnyScorer | None
    scorer: AnyScorer
    if head == "value":
        scorer, reference = ValueScorer.find(model), None if initial is None else ValueScorer.find(initial)
    else:
        logprobs = partial(Scorer.find, chunk_tokens=config.logprob_chunk_tokens)
        found = logprobs(model, sight=sight)
        on_head = None if adapters is None else adapters.on_head
        scorer = replace(found, gradient=gradient_of(found.weight, gradients), adapted=on_head)
        its_sight = None if sight is None or initial is None else Sight(initial, sight.family)
        reference = None if initial is None else logprobs(initial, sight=its_sight)
    return Assembly(model, names, scorer, adapters, packed, loads, reference, initial, gradients)


def _sharded(
    policy: TrainingOptions,
    worker: WorkerContext,
    config: DTensorConfig,
    ranks: Ranks,
    attention: str,
    *,
    packed: bool,
    head: Head,
    trained: bool,
) -> Assembly:
    """This rank's part of it: the policy, or its frozen copy."""
    # 1. Its shapes, without memory.
    model = skeleton(policy, attn_implementation=attention, head=head).requires_grad_(trained)

    # 2. What is trained.
    names = PublishedNames(model)
    sight = sight_of(model, policy)
    if sight is not None:
        _check_seeing(model, ranks)
        if trained and policy.lora is None:
            freeze(model, sight.family, policy.media.train)
    sharing = None
    if ranks.context is not None:
        method = config.context_parallel_method
        sharing = share_rows(model, ranks.context, tensor_parallel=ranks.tensor_parallel_size, method=method)
    adapters: Adapters | None = None
    drawn: dict[str, Tensor] = {}
    if trained and policy.lora is not None:
        with hollow(model):
            adapters = Adapters(model, policy.lora, worker.seed, beside_text=_beside_text(model, sight))
            drawn = adapters.tensors()
    loads = RouterLoads(model, config.router, ranks.routing)
    if trained and policy.activation_checkpointing:
        recompute_layers(model)
    if trained and config.offload.activations:
        HostActivations(worker.device).take_over(decoder_layers(model))

    # 3. How it is scored, spread over ranks; then memory and weights for this rank's part.
    logprobs = partial(Scorer.find, sight=sight, chunk_tokens=config.logprob_chunk_tokens)
    found: Scorer | ValueScorer = ValueScorer.find(model) if head == "value" else logprobs(model)
    scorer = ShardedScorer.of(model, found, ranks, sequence_parallel=config.sequence_parallel, sharing=sharing)
    on_host = ranks.parameters_on_host
    fill(model, policy, worker.device, worker.seed, drawn, worker.rank, head, parameters_on_host=on_host)
    return Assembly(model, names, scorer, adapters, packed, loads)


def _check_seeing(model: PreTrainedModel, ranks: Ranks) -> None:
    """
    Raises:
        BackendError: Ranks split what models of text alone can be split into.
    """
    if ranks.tensor_parallel_size > 1:
        raise BackendError(
            f"{type(model).__name__} sees or hears, and tensor parallelism splits models of text alone",
            fix="set policy.tensor_parallel_size: 1; FSDP shards it over the workers",
        )
    if ranks.context_parallel_size > 1:
        raise BackendError(
            f"{type(model).__name__} sees or hears, and context parallelism divides sequences of text alone",
            fix="set policy.backend.context_parallel_size: 1; FSDP shards it over the workers",
        )


def _beside_text(model: PreTrainedModel, sight: Sight | None) -> list[str]:
    """Modules that see or hear, and what connects them."""
    return [] if sight is None else [*sight.family.tower_names(model), *sight.family.connector_names(model)]
