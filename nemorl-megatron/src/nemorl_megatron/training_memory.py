"""Memory of a model that this package trains, on its fullest rank, moment by moment.

# P = parameters of a rank, t = tensor-, p = pipeline-, d = data-parallel ranks, e = expert-parallel ranks, b = bytes

The terms are those of Megatron-LM's ``theoretical_memory_usage.py``: 18 B a parameter in bfloat16, of which masters and
moments (12 B) are divided over d by the distributed optimizer; activations of as many microbatches as are in flight
(arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemorl_rl.planning.memory.describing import PerToken
from nemorl_rl.planning.memory.head import Head, head_buffers, scored_logits
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.parts import Moments, Part, count, rested, total

if TYPE_CHECKING:
    from nemorl_megatron.config import MegatronConfig

HEAD = Head(shares_vocabulary=True)


def memory(model: HeldModel, config: MegatronConfig) -> Moments:
    """Of the rank that takes most: one of the first pipeline stage, or one of the last."""
    stages = [_stage(model, config, is_first=first) for first in (True, False)]
    resting = () if model.on_cpu else config.offload.resting
    return max((rested(stage, resting) for stage in stages), key=lambda moments: total(moments.peak))


def per_token(model: HeldModel, config: MegatronConfig) -> PerToken:
    """Of megatron-core's transformer layer, by the terms of arXiv:2205.05198, section 4, without dropout.

    With sequence parallelism norms' inputs and their outputs are divided too. SwiGLU keeps gate, up, the activated gate
    and the product, where the paper's GeLU keeps 4 D in and out.
    """
    g, b, t = model.geometry, model.element, model.tensor
    queries, keys = g.heads * g.head_dim, g.cache_width / 2
    split = t if config.sequence_parallel else 1
    norms = 2 * (b * g.hidden + b * g.hidden) / split
    attention = b * (2 * queries + 2 * keys) / t + 4 * g.heads / t
    dense = 4 * b * g.ffn / t
    expert_ffn = g.expert_ffn / config.expert_tensor_parallel_size
    routed = g.experts_per_token * b * (4 * expert_ffn + 2 * g.hidden / split)
    share = g.mixture_layers / g.layers
    return PerToken(
        layer=norms + attention + dense * (1 - share) + (routed + 8 * g.experts) * share,
        entry=b * g.hidden / split,
        outside=b * g.hidden / split + 2 * b * g.hidden,
        passing=b * (2 * max(g.ffn, g.experts_per_token * g.expert_ffn) / t + g.hidden),
        ending=3 * b * g.hidden / split,
    )


def _stage(model: HeldModel, config: MegatronConfig, *, is_first: bool) -> Moments:
    dense, experts = _rank_parameters(model, config, is_first=is_first)
    b, found = model.element, dense + experts
    share = _layers(model, config, is_first=is_first) / model.geometry.layers
    adapters = model.adapter_parameters * share / model.tensor
    text = f"{b} B x {count(found)} of this rank" + (f" + 4 B x {count(adapters)}" if adapters else "")
    lasting = [
        Part("weights", b * found + 4 * adapters, text, "weights")
    ]  # adapters are float32 whatever the precision
    if model.has_reference and not model.lora_rank:  # else it is the model without its adapters
        lasting.append(Part("reference weights", b * found, f"{b} B x {count(found)}", "reference"))
    ahead = _mtp_parameters(model, config, is_first=is_first)
    if sum(ahead):
        lasting.append(Part("MTP weights", b * sum(ahead), f"{b} B x {count(sum(ahead))} of MTP layers", "weights"))
    if model.learns:
        if config.mtp is not None and config.mtp.trains:
            dense, experts = dense + ahead[0], experts + ahead[1]
        trained = (adapters, 0.0) if model.lora_rank else (dense, experts)
        lasting += _states(model, config, *trained)
    has_head = not is_first or model.spread.pipeline == 1
    scoring = (_forward(model, config, has_head=has_head),)
    if not model.learns:
        return Moments(tuple(lasting), {}, scoring)
    head = head_buffers(model, HEAD) if has_head else ()
    backward = (_activations(model, config, is_first=is_first), *head)
    return Moments(tuple(lasting), {"backward": backward}, scoring)


def _rank_parameters(model: HeldModel, config: MegatronConfig, *, is_first: bool) -> tuple[float, float]:
    """(without experts, experts) of one rank of the stage."""
    g, share = model.geometry, _layers(model, config, is_first=is_first) / model.geometry.layers
    own = model.parameters - model.root_parameters - g.expert_parameters
    outside = float(model.root_parameters)
    if config.pipeline_parallel_size > 1:
        # The embedding is on the first stage, the head on the last, a tied one on both.
        outside = float(g.embedding_parameters)
    spread = config.expert_parallel_size * config.expert_tensor_parallel_size
    return (own * share + outside) / model.tensor, g.expert_parameters * share / spread


def _mtp_parameters(model: HeldModel, config: MegatronConfig, *, is_first: bool) -> tuple[float, float]:
    """(without experts, experts) of MTP layers on a rank of the stage, which is the last. A stage that is not the first
    holds the embedding for them."""
    is_alone = config.pipeline_parallel_size == 1
    if config.mtp is None or model.value_head or (is_first and not is_alone):
        return 0.0, 0.0
    g, layers = model.geometry, config.mtp.stored_layers
    copy = 0 if is_alone else g.embedding_parameters
    spread = config.expert_parallel_size * config.expert_tensor_parallel_size
    return (layers * g.mtp_common + copy) / model.tensor, layers * g.mtp_experts / spread


def _layers(model: HeldModel, config: MegatronConfig, *, is_first: bool) -> int:
    """Of the first stage, or the most that one of the others has."""
    parts = config.split.counts(
        model.geometry.layers, config.pipeline_parallel_size, config.virtual_pipeline_parallel_size or 1
    )
    stages: list[int] = [sum(counts) for counts in zip(*parts, strict=True)]
    return stages[0] if is_first else max(stages[1:] or stages)


def _states(model: HeldModel, config: MegatronConfig, dense: float, experts: float) -> list[Part]:
    divides = config.distributed_optimizer
    d = model.spread.data * config.context_parallel_size if divides else 1
    together = config.pipeline_parallel_size * config.expert_parallel_size * config.expert_tensor_parallel_size
    expert_d = max(1, model.ranks // together) if divides else 1
    each = dense / d + experts / expert_d
    text = f"({count(dense)} / {d} + {count(experts)} / {expert_d})" if experts else f"{count(dense)} / {d}"
    has_masters = model.element == 2 and not model.lora_rank
    masters = [Part("masters", 4 * each, f"4 B x {text}", "optimizer")] if has_masters else []
    buffers = f"4 B x {count(dense + experts)}: float32 buffers, whole"
    return [
        *masters,
        Part("moments", 8 * each, f"8 B x {text}", "optimizer"),
        Part("gradients", 4 * (dense + experts), buffers, "gradients"),
    ]


def _forward(model: HeldModel, config: MegatronConfig, *, has_head: bool) -> Part:
    """A pass without gradient: one layer's activations, and a chunk of logits on the last stage."""
    per, tokens = per_token(model, config), model.microbatch_tokens / config.context_parallel_size
    each = per.entry + 2 * per.passing
    logits = scored_logits(model, HEAD) if has_head else 0.0
    return Part("activations", tokens * each + logits, f"{count(tokens)} tokens x {count(each)}B + {count(logits)}B")


def _activations(model: HeldModel, config: MegatronConfig, *, is_first: bool) -> Part:
    per, spread = per_token(model, config), model.spread
    layers, tokens = _layers(model, config, is_first=is_first), model.microbatch_tokens / spread.context
    flying = 1.0
    if spread.pipeline > 1 and is_first:
        flying = float(spread.pipeline)
        if spread.virtual > 1:  # interleaving keeps (p - 1) / v more
            flying *= 1 + (spread.pipeline - 1) / (spread.pipeline * spread.virtual)
    each = per.entry if model.checkpointing else per.layer
    if config.mtp is not None and config.mtp.trains and (not is_first or spread.pipeline == 1):
        layers += config.mtp.num_layers
    again = per.layer if model.checkpointing else 0.0
    size = tokens * (flying * layers * each + again + per.outside + per.passing)
    rest = size / tokens - flying * layers * each
    text = f"{count(tokens)} tokens x ({flying:.3g} x {layers:.3g} layers x {count(each)}B + {count(rest)}B)"
    return Part("activations", size, text)
