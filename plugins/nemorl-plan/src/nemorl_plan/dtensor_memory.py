"""Memory of a model that nemorl-dtensor trains, on one rank, moment by moment.

# P = parameters, R = those outside of layers (embedding, head), L = layers, N = FSDP shards, t = tensor-parallel ranks,
# T = tokens of a microbatch, V = vocabulary, D = hidden size, b = bytes of a weight

Follows ``training``, ``optim``, ``sharding`` and the chunked head: a microbatch's gradients are added to float32 sums
beside the masters, FSDP gathers a layer while it computes the one before, and reduces gradients in float32.
"""

from __future__ import annotations

from nemorl_plan.activations import PerToken, dtensor_per_token
from nemorl_plan.head_memory import CHUNK_LOGITS, head_buffers
from nemorl_plan.models import HeldModel
from nemorl_plan.parts import Moments, Part, count


def dtensor_memory(model: HeldModel) -> Moments:
    """Of one rank; of a model that does not learn, its weights and the largest forward pass."""
    lasting = (*_weights(model), *(_states(model) if model.learns else ()))
    per = dtensor_per_token(model)
    if not model.learns:
        return Moments(lasting, {"scoring": (*_forward(model, per), *_gathered(model, 2))})
    passing = {
        "output head": (*_kept(model, per), *head_buffers(model), *_gathered(model, 1)),
        "upper layers backward": _layers_backward(model, per, above=1),
        "lower layers backward": _layers_backward(model, per, above=max(1, model.geometry.layers - 2)),
        "first layer backward": _layers_backward(model, per, above=model.geometry.layers - 1),
        "end of backward": (*_end_of_backward(model, per), *_gathered(model, 0)),
        "update": _update(model),
    }
    if model.has_reference and not model.lora_rank:
        passing["scoring"] = (*_forward(model, per), *_gathered(model, 2))
    return Moments(lasting, passing)


def _trained(model: HeldModel) -> float:
    return model.adapter_parameters if model.lora_rank else model.held_parameters


def _weights(model: HeldModel) -> tuple[Part, ...]:
    divided, b = model.shards * model.tensor, model.element
    size = b * (model.held_parameters + (model.adapter_parameters if model.lora_rank else 0)) / divided
    found = [Part("weights", size, f"{b} B x {count(model.held_parameters)} / {divided}")]
    if model.has_reference and not model.lora_rank:
        found.append(Part("reference weights", size, f"{b} B x {count(model.held_parameters)} / {divided}"))
    return tuple(found)


def _states(model: HeldModel) -> tuple[Part, ...]:
    """What the optimizer keeps, and the sums of gradients."""
    divided = model.shards * model.tensor
    each = _trained(model) / divided
    text = f"{count(_trained(model))} / {divided}"
    found = [Part("masters", 4 * each, f"4 B x {text}")] if model.element == 2 else []
    matrices = model.muon * (model.held_parameters - model.root_parameters) / divided
    found.append(Part("moments", 8 * each - 4 * matrices, f"8 B x {text}" + (", matrices 4 B" if model.muon else "")))
    if model.accumulates:
        found.append(Part("gradient sums", 4 * each, f"4 B x {text}"))
    return tuple(found)


def _kept(model: HeldModel, per: PerToken) -> tuple[Part, ...]:
    """Activations of a microbatch when its forward pass is done."""
    g, tokens = model.geometry, model.microbatch_tokens
    each = per.entry if model.checkpointing else per.layer
    size = tokens * (g.layers * each + per.outside)
    return (
        Part(
            "activations",
            size,
            f"{count(tokens)} tokens x ({g.layers} layers x {count(each)}B + {count(per.outside)}B)",
        ),
    )


def _layers_backward(model: HeldModel, per: PerToken, *, above: int) -> tuple[Part, ...]:
    """The backward pass of a layer, when ``above`` layers have had theirs.

    At its beginning the layer's activations are still there, at its end all of its gradients. FSDP holds the layer and
    the next one, and reduces the gradients of the one before.
    """
    g, tokens = model.geometry, model.microbatch_tokens
    b, divided, t = model.element, model.shards * model.tensor, model.tensor
    is_sharded = model.shards > 1
    below = g.layers - above - 1
    waiting = tokens * below * (per.entry if model.checkpointing else per.layer)
    begin = tokens * (per.layer + per.passing + (per.entry if model.checkpointing else 0))
    layer = 0.0 if model.lora_rank else b * g.layer_parameters / t
    end = tokens * per.ending + layer
    inside = max(begin, end)
    activations = Part(
        "activations", waiting + inside, f"{count(tokens)} tokens x {below} layers + {count(inside)}B in the layer"
    )
    if model.lora_rank:
        return activations, *_gathered(model, min(2, 1 + below))
    done = 0.0 if b == 4 and model.accumulates else b * above * model.layer_parameters / divided
    head = 0.0 if model.value_head else b * g.embedding_parameters / t
    reduced = 4 * model.layer_parameters / t if is_sharded else 0.0
    formula = f"{b} B x {above} layers / {divided} + head {count(head)}B + reduced {count(reduced)}B"
    return activations, Part("gradients", done + head + reduced, formula), *_gathered(model, min(2, 1 + below))


def _end_of_backward(model: HeldModel, per: PerToken) -> tuple[Part, ...]:
    """All gradients of the microbatch are there, those outside of layers still whole."""
    b, tokens = model.element, model.microbatch_tokens
    divided = model.shards * model.tensor
    root = 0.0 if model.lora_rank else model.root_parameters / model.tensor
    layers = (_trained(model) - root * model.tensor) / divided
    in_place = b == 4 and model.accumulates  # float32 gradients are added to the sums as they come
    own = 0.0 if in_place else b * layers
    outside = (b + 4 + 4 / model.shards) * root if model.shards > 1 else b * root
    return (
        Part("gradients", own + outside, f"{b} B x {count(layers)} + outside of layers {count(outside)}B"),
        Part("activations", tokens * per.entry, f"{count(tokens)} tokens x {count(per.entry)}B"),
    )


def _update(model: HeldModel) -> tuple[Part, ...]:
    """The norm of sharded gradients is taken in float64; the sums of one microbatch alone are made here."""
    divided = model.shards * model.tensor
    largest = model.geometry.embedding_parameters
    if model.lora_rank:
        largest = model.lora_rank * max(model.geometry.ffn, model.geometry.hidden)
    factor = 16 if divided > 1 else 0
    norm = Part("norm", factor * largest / divided, f"{factor} B x {count(largest)} / {divided}")
    if model.accumulates:
        return (norm,)
    added = 2 * largest if model.element == 2 else 0  # bfloat16 gradients go one by one
    size = (4 * _trained(model) + added) / divided
    return norm, Part("gradients", size, f"(4 B x {count(_trained(model))} + {count(added)}B) / {divided}")


def _gathered(model: HeldModel, layers: int) -> tuple[Part, ...]:
    """What FSDP has put together: everything outside of layers, and as many layers."""
    if model.shards == 1:
        return ()
    b, t = model.element, model.tensor
    size = b * (model.root_parameters + layers * model.layer_parameters) / t
    return (
        Part(
            "gathered layers",
            size,
            f"{b} B x ({count(model.root_parameters)} + {layers} x {count(model.layer_parameters)}) / {t}",
        ),
    )


def _forward(model: HeldModel, per: PerToken) -> tuple[Part, ...]:
    """A pass without gradient: one layer's activations and a chunk of logits."""
    g, tokens = model.geometry, model.microbatch_tokens
    chunk = 0.0 if model.value_head else min(tokens * g.vocabulary / model.tensor, CHUNK_LOGITS)
    size = tokens * (per.entry + 2 * per.passing) + (4 + model.element) * chunk
    return (
        Part(
            "activations",
            size,
            f"{count(tokens)} tokens x {count(per.entry + 2 * per.passing)}B + {4 + model.element} B x {count(chunk)}",
        ),
    )
