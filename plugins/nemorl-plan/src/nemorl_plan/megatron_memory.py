"""Memory of a model that nemorl-megatron trains, on its fullest rank, moment by moment.

# P = parameters of a rank, t = tensor-, p = pipeline-, d = data-parallel ranks, e = expert-parallel ranks, b = bytes

The terms are those of Megatron-LM's ``theoretical_memory_usage.py``: 18 B a parameter in bfloat16, of which masters and
moments (12 B) are divided over d by the distributed optimizer; activations of as many microbatches as are in flight
(arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

from nemorl_plan.activations import megatron_per_token
from nemorl_plan.head_memory import head_buffers
from nemorl_plan.models import HeldModel
from nemorl_plan.parts import Moments, Part, count, total


def megatron_memory(model: HeldModel) -> Moments:
    """Of the rank that takes most: one of the first pipeline stage, or one of the last."""
    stages = [_stage(model, is_first=True), _stage(model, is_first=False)]
    return max(stages, key=lambda moments: total(moments.peak))


def _stage(model: HeldModel, *, is_first: bool) -> Moments:
    dense, experts = _rank_parameters(model, is_first=is_first)
    b, found = model.element, dense + experts
    lasting = [Part("weights", b * found, f"{b} B x {count(found)} of this rank")]
    if model.has_reference:
        lasting.append(Part("reference weights", b * found, f"{b} B x {count(found)}"))
    if model.learns:
        lasting += _states(model, dense, experts)
    activations = _activations(model, is_first=is_first)
    if not model.learns:
        return Moments(tuple(lasting), {"scoring": (activations,)})
    head = () if is_first and model.pipeline > 1 else head_buffers(model)
    return Moments(tuple(lasting), {"backward": (activations, *head)})


def _rank_parameters(model: HeldModel, *, is_first: bool) -> tuple[float, float]:
    """(without experts, experts) of one rank of the stage."""
    g, p = model.geometry, model.pipeline
    own = model.parameters - model.root_parameters - g.expert_parameters
    outside = float(model.root_parameters)
    if p > 1:  # the embedding is on the first stage, the head on the last, a tied one on both
        outside = float(g.embedding_parameters)
    return (own / p + outside) / model.tensor, g.expert_parameters / (p * model.expert * model.expert_tensor)


def _states(model: HeldModel, dense: float, experts: float) -> list[Part]:
    d = model.data_parallel * model.context if model.distributed_optimizer else 1
    spread = model.ranks // (model.pipeline * model.expert * model.expert_tensor)
    expert_d = max(1, spread) if model.distributed_optimizer else 1
    each = dense / d + experts / expert_d
    text = f"({count(dense)} / {d} + {count(experts)} / {expert_d})" if experts else f"{count(dense)} / {d}"
    masters = [Part("masters", 4 * each, f"4 B x {text}")] if model.element == 2 else []
    return [
        *masters,
        Part("moments", 8 * each, f"8 B x {text}"),
        Part("gradients", 4 * (dense + experts), f"4 B x {count(dense + experts)}: float32 buffers, whole"),
    ]


def _activations(model: HeldModel, *, is_first: bool) -> Part:
    per, g = megatron_per_token(model), model.geometry
    layers, tokens = g.layers / model.pipeline, model.microbatch_tokens / model.context
    if not model.learns:
        size = tokens * (per.entry + 2 * per.passing)
        return Part("activations", size, f"{count(tokens)} tokens x {count(per.entry + 2 * per.passing)}B")
    flying = 1.0
    if model.pipeline > 1 and is_first:
        flying = float(model.pipeline)
        if model.virtual > 1:  # interleaving keeps (p - 1) / v more
            flying *= 1 + (model.pipeline - 1) / (model.pipeline * model.virtual)
    each = per.entry if model.checkpointing else per.layer
    again = per.layer if model.checkpointing else 0.0
    size = tokens * (flying * layers * each + again + per.outside + per.passing)
    rest = size / tokens - flying * layers * each
    formula = f"{count(tokens)} tokens x ({flying:.3g} x {layers:.3g} layers x {count(each)}B + {count(rest)}B)"
    return Part("activations", size, formula)
