"""From a policy's config to a model that can be scored: whole in one process, or spread over ranks.

The order matters: adapters go into the plain model, then layers recompute their activations, then it is sharded, and
only then, if it is sharded, does it get memory and weights.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from nemorl.errors import BackendError
from nemorl_tensors.engines.layouts import Layout

from nemorl_dtensor.attention_cpu import use_fast_attention
from nemorl_dtensor.layout import choose_layout, share_prefixes
from nemorl_dtensor.model import load_model, skeleton
from nemorl_dtensor.model_head import Scorer, verify
from nemorl_dtensor.model_kernels import use_fast_kernels
from nemorl_dtensor.model_lora import Adapters
from nemorl_dtensor.model_quantized import prepare_layers, quantization
from nemorl_dtensor.published_names import PublishedNames
from nemorl_dtensor.sharded_head import ShardedScorer
from nemorl_dtensor.sharded_weights import fill, hollow
from nemorl_dtensor.sharding import reshard
from nemorl_dtensor.value_head import ValueScorer, verify_values
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
    """A policy's model and the ways to use it."""

    model: PreTrainedModel
    names: PublishedNames
    scorer: AnyScorer
    reference: AnyScorer | None
    """The frozen initial weights, where they are asked for and no adapter can be turned off to get them"""
    frozen: PreTrainedModel | None
    """The model that it is of"""
    adapters: Adapters | None
    layout: Layout
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
        BackendError: The model cannot be loaded, scored or spread as the config asks.
    """
    is_packed = _use_packed(config, worker.device)
    attention = _attention(config, packed=is_packed, device=worker.device)
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
    packing = quantization(policy)
    model = load_model(
        policy, worker.device, worker.seed, attn_implementation=attention, head=head, quantization=packing
    )
    if attention == "auto":
        use_fast_attention(model)
    logprobs = partial(Scorer.of, chunk_tokens=config.logprob_chunk_tokens, packed=packed)
    initial: PreTrainedModel | None = None
    reference: AnyScorer | None = None
    if copied:  # before anything can train
        initial = copy.deepcopy(model).requires_grad_(False)
        use_fast_kernels(initial)
        reference = ValueScorer.of(initial) if head == "value" else logprobs(initial)
        _layout(config, initial, reference, packed=packed)
    names = PublishedNames(model)
    if policy.lora is None:
        model.requires_grad_(True)
    adapters = Adapters(model, policy.lora, worker.seed) if policy.lora is not None else None
    if packing is not None:
        prepare_layers(model)
    use_fast_kernels(model)
    gradients = vocabulary_gradients(model)
    if policy.activation_checkpointing:
        _checkpoint_activations(model)
    scorer = ValueScorer.of(model) if head == "value" else logprobs(model)
    if isinstance(scorer, Scorer):
        scorer = replace(scorer, gradient=gradient_of(scorer.weight, gradients))
    layout = _layout(config, model, scorer, packed=packed)
    return Assembly(model, names, scorer, reference, initial, adapters, layout, gradients)


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
    model = skeleton(policy, attn_implementation=attention, head=head).requires_grad_(trained)
    names = PublishedNames(model)
    adapters: Adapters | None = None
    drawn: dict[str, Tensor] = {}
    if trained and policy.lora is not None:
        with hollow(model):
            adapters = Adapters(model, policy.lora, worker.seed)
            drawn = adapters.tensors()
    if trained and policy.activation_checkpointing:
        _checkpoint_activations(model)
    logprobs = partial(Scorer.find, chunk_tokens=config.logprob_chunk_tokens)
    found: Scorer | ValueScorer = ValueScorer.find(model) if head == "value" else logprobs(model)
    scorer = ShardedScorer.of(model, found, ranks, sequence_parallel=config.sequence_parallel)
    fill(model, policy, worker.device, worker.seed, drawn, worker.rank, head)
    if isinstance(found, ValueScorer):
        verify_values(model, scorer.score, width_multiple=scorer.width_multiple)
    else:
        verify(model, found, scorer.score, width_multiple=scorer.width_multiple, packed=packed)
    layout = _layout(config, model, scorer, packed=packed)
    reshard(model)
    return Assembly(model, names, scorer, None, None, adapters, layout)


def _layout(config: DTensorConfig, model: PreTrainedModel, scorer: AnyScorer, *, packed: bool) -> Layout:
    """The layout of batches for ``model``, which is made to share tokens where it is wanted and can."""
    obstacle = ""
    if config.layout == "shared" or (config.layout == "auto" and not packed):
        width = scorer.width_multiple if isinstance(scorer, ShardedScorer) else 1
        obstacle = share_prefixes(model, scorer.decoder, scorer.states, width_multiple=width)
    return choose_layout(config.layout, packed=packed, obstacle=obstacle)


def _use_packed(config: DTensorConfig, device: str) -> bool:
    if config.layout == "auto":
        return device.startswith("cuda") and importlib.util.find_spec("flash_attn") is not None
    return config.layout == "packed"


def _attention(config: DTensorConfig, *, packed: bool, device: str) -> str:
    if (
        config.attn_implementation == "auto"
        and packed
        and device.startswith("cuda")
        and importlib.util.find_spec("flash_attn")
    ):
        return "flash_attention_2"
    return config.attn_implementation


def _checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute each decoder layer in the backward pass.

    Not by transformers' own switch: that one works in training mode only, which would turn dropout on as well.
    """
    from torch.utils.checkpoint import checkpoint as recompute
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise BackendError(
            f"{type(model).__name__} does not mark its layers for activation checkpointing",
            fix="set policy.activation_checkpointing: false",
        )
    for layer in layers:
        layer.forward = partial(recompute, layer.forward, use_reentrant=False)
