"""Memory of a model that this package trains, on one rank, moment by moment.

# P = parameters, R = those outside of layers (embedding, head), L = layers, N = FSDP shards, t = tensor-parallel ranks,
# T = tokens of a microbatch, V = vocabulary, D = hidden size, b = bytes of a weight

Follows ``training``, ``optim``, ``sharding`` and the chunked head: a microbatch's gradients are added to float32 sums
beside the masters, FSDP gathers a layer while it computes the one before, and reduces gradients in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nemorl_rl.planning.memory.head import Head, head_buffers, scored_logits
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.parts import UPDATE, Moments, Moved, Part, Parts, count, rested, total

from nemorl_dtensor.activations import per_token
from nemorl_dtensor.config import method_of

if TYPE_CHECKING:
    from nemorl_dtensor.config import DTensorConfig

ATTENTION_BYTES = 32 << 20
"""Of a layer's attention weights on a CPU: kept for the backward pass if they take no more (``attention_cpu``)."""
BLOCK_QUERIES = 64
LAYERS_ON_DEVICE = 2
"""Whose activations are on their way to the host (``host_activations``)."""
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Of a number in 4 bits: a scale in 8 bits for 64, and a float32 scale for 256 of these (``model_quantized``)."""


class Memory:
    """Of one rank."""

    def __init__(self, model: HeldModel, config: DTensorConfig, *, fused: bool) -> None:
        """
        Args:
            model: With its microbatches.
            config: The backend's options.
            fused: With the functions for a CPU and one process.
        """
        self._model, self._shards = model, model.spread.shards
        self._divided = self._shards * model.tensor
        ways = model.tensor * model.spread.context
        by_ring = method_of(config.context_parallel_method, model.geometry.heads, ways) == "ring"
        self._per = per_token(model, sequence_parallel=config.sequence_parallel, fused=fused, by_ring=by_ring)
        self._head = Head(model.tensor > 1, adds_directly=fused, chunk_tokens=config.logprob_chunk_tokens)
        self._attention = _attention_weights(model) if fused else 0.0
        g, experts = model.geometry, model.geometry.experts
        # FSDP cuts stacks of experts along the experts: fewer of them than shards take as much as that many would.
        # Those that expert-parallel ranks divide are cut evenly, and a rank gathers its own alone.
        apart = model.spread.expert
        padding = -(-experts // self._shards) * self._shards / experts if experts and apart == 1 else 1.0
        in_layer = g.expert_parameters / g.layers
        self._layer = g.layer_parameters + (padding - 1) * in_layer
        self._whole_layer = self._layer - (1 - model.tensor / apart) * in_layer
        """Of which a tensor-parallel group has the weights and gradients before FSDP divides them: its ranks have other
        experts, or the same ones"""
        self._held = model.parameters + (padding - 1) * g.expert_parameters
        self._trained = model.adapter_parameters if model.lora_rank else self._held
        self._element = 4 if model.lora_rank else model.element
        """Bytes of a parameter that is trained"""
        lora = model.policy.lora
        self._packed = _linear_parameters(model) if lora is not None and lora.base == "nf4" else 0.0
        offload = config.offload
        self._hosts_parameters = offload.parameters and not model.on_cpu  # whose memory the host's is
        self._hosts_activations = offload.activations and not model.on_cpu
        self._resting = () if model.on_cpu else offload.resting

    def moments(self) -> Moments:
        """Of a model that does not learn, its weights and a forward pass."""
        found = rested(self._all_moments(), self._resting)
        return self._with_parameters_on_host(found) if self._hosts_parameters else found

    def _with_parameters_on_host(self, found: Moments) -> Moments:
        """Weights, optimizer state and sums of gradients lie there, and the optimizer steps there. A microbatch gathers
        the weights twice and hands its gradients back."""
        model, leaving = self._model, total(found.lasting)
        weights = model.element * self._held / self._divided
        gradients = self._element * self._trained / self._divided if model.learns else 0.0
        moved = replace(
            found.moved,
            on_host=found.moved.on_host + leaving,
            per_microbatch=found.moved.per_microbatch + 2 * weights + gradients,
            per_update=0.0,
            per_scoring=weights,
        )
        training = {name: parts for name, parts in found.training.items() if name != UPDATE}
        scoring = tuple(part for part in found.scoring if part.name != "reference weights")
        return replace(found, lasting=(), training=training, scoring=scoring, moved=moved)

    def _all_moments(self) -> Moments:
        model = self._model
        scoring = self._scoring()
        if not model.learns:
            return Moments(self._weights(), {}, scoring)
        layers = model.geometry.layers
        training = {
            "output head": (*self._kept(), *head_buffers(model, self._head), *self._gathered(1)),
            "upper layers backward": self._layers_backward(above=1),
            "lower layers backward": self._layers_backward(above=max(1, layers - 2)),
            "first layer backward": self._layers_backward(above=layers - 1),
            "end of backward": (*self._end_of_backward(), *self._gathered(0)),
            UPDATE: self._update(),
        }
        kept = layers * self._layer_bytes if self._hosts_activations else 0.0
        moved = Moved(on_host=kept, per_microbatch=kept)  # it leaves beside the next layer, and is waited for
        return Moments((*self._weights(), *self._states()), training, scoring, moved)

    @property
    def _layer_bytes(self) -> float:
        """What one layer of a microbatch keeps until its backward pass."""
        tokens = self._model.microbatch_tokens
        if self._model.checkpointing:
            return tokens * self._per.entry
        return tokens * self._per.layer + self._attention

    def _weights(self) -> Parts:
        model, b = self._model, self._model.element
        packed = self._packed
        adapters = 4 * model.adapter_parameters  # float32 whatever the precision
        size = (b * (self._held - packed) + NF4_BYTES * packed + adapters) / self._divided
        text = f"{b} B x {count(self._held - packed)} / {self._divided}"
        text += f" + {NF4_BYTES:.3f} B x {count(packed)}" if packed else ""
        text += f" + adapters {count(adapters)}B" if adapters else ""
        found = [Part("weights", size, text, "weights")]
        if model.has_reference and not model.lora_rank:
            found.append(Part("reference weights", size, text, "reference"))
        return tuple(found)

    def _states(self) -> Parts:
        """The optimizer's states, and the sums of gradients."""
        model, each = self._model, self._trained / self._divided
        text = f"{count(self._trained)} / {self._divided}"
        found = [Part("masters", 4 * each, f"4 B x {text}", "optimizer")] if self._element == 2 else []
        is_muon = model.policy.optimizer.name == "muon"
        matrices = is_muon * (self._held - model.root_parameters) / self._divided
        moments = f"8 B x {text}" + (", matrices 4 B" if is_muon else "")
        found.append(Part("moments", 8 * each - 4 * matrices, moments, "optimizer"))
        if model.accumulates:
            found.append(Part("gradient sums", 4 * each, f"4 B x {text}", "gradients"))
        return tuple(found)

    def _kept(self) -> Parts:
        """Activations of a microbatch when its forward pass is done."""
        layers, tokens, per = self._model.geometry.layers, self._model.microbatch_tokens, self._per
        if self._hosts_activations:
            layers = min(layers, LAYERS_ON_DEVICE)
        each = self._layer_bytes / tokens
        text = f"{count(tokens)} tokens x ({layers} layers x {count(each)}B + {count(per.outside)}B)"
        return (Part("activations", tokens * (layers * each + per.outside), text),)

    def _layers_backward(self, *, above: int) -> Parts:
        """The backward pass of a layer, when ``above`` layers have had theirs.

        At its beginning the layer's activations are still there, at its end all of its gradients. FSDP holds the layer
        and the next one, and reduces the gradients of the one before.
        """
        model, per, t = self._model, self._per, self._model.tensor
        g, tokens, b = model.geometry, model.microbatch_tokens, model.element
        below = g.layers - above - 1
        kept = tokens * per.layer + self._attention
        waiting = 0.0 if self._hosts_activations else below * self._layer_bytes
        begin = kept + tokens * (per.passing + (per.entry if model.checkpointing else 0))
        elsewhere = self._layer - self._whole_layer
        layer = 0.0 if model.lora_rank else b * (g.layer_parameters - elsewhere) / t
        decoded = b * g.hidden * g.ffn if self._packed else 0  # the weight that is multiplied with
        inside = max(begin + decoded, tokens * per.ending + layer)
        text = f"{count(tokens)} tokens x {below} layers + {count(inside)}B in the layer"
        activations = Part("activations", waiting + inside, text)
        if model.lora_rank:
            return activations, *self._gathered(min(2, 1 + below))
        in_sums = (b == 4 and model.accumulates) or self._hosts_parameters
        done = 0.0 if in_sums else b * above * self._layer / self._divided
        head = 0.0 if model.value_head else b * g.embedding_parameters / t
        reduced = 4 * self._whole_layer / t if self._shards > 1 else 0.0
        text = f"{b} B x {above} layers / {self._divided} + head {count(head)}B + reduced {count(reduced)}B"
        return activations, Part("gradients", done + head + reduced, text), *self._gathered(min(2, 1 + below))

    def _end_of_backward(self) -> Parts:
        """All gradients of the microbatch are there, those outside of layers still whole."""
        model, tokens, b = self._model, self._model.microbatch_tokens, self._element
        root = 0.0 if model.lora_rank else model.root_parameters / model.tensor
        layers = (self._trained - root * model.tensor) / self._divided
        # float32 gradients are added to the sums as they come, those of parameters on the host leave for there.
        in_place = (b == 4 and model.accumulates) or self._hosts_parameters
        own = 0.0 if in_place else b * layers
        outside = (b + 4 + 4 / self._shards) * root if self._shards > 1 else b * root
        return (
            Part("gradients", own + outside, f"{b} B x {count(layers)} + outside of layers {count(outside)}B"),
            Part("activations", tokens * self._per.entry, f"{count(tokens)} tokens x {count(self._per.entry)}B"),
        )

    def _update(self) -> Parts:
        """The norm of sharded gradients is taken in float64; the sums of one microbatch alone are made here."""
        model, divided = self._model, self._divided
        largest = model.geometry.embedding_parameters
        if model.lora_rank:
            largest = model.lora_rank * max(model.geometry.ffn, model.geometry.hidden)
        factor = 16 if divided > 1 else 0
        norm = Part("norm", factor * largest / divided, f"{factor} B x {count(largest)} / {divided}")
        if model.accumulates:
            return (norm,)
        added = 2 * largest if self._element == 2 else 0  # bfloat16 gradients go one by one
        size = (4 * self._trained + added) / divided
        return norm, Part("gradients", size, f"(4 B x {count(self._trained)} + {count(added)}B) / {divided}")

    def _gathered(self, layers: int) -> Parts:
        """Weights that FSDP has put together: everything outside of layers, and as many layers."""
        if self._shards == 1 and not self._hosts_parameters:
            return ()
        b, t, root = self._model.element, self._model.tensor, self._model.root_parameters
        text = f"{b} B x ({count(root)} + {layers} x {count(self._whole_layer)}) / {t}"
        return (Part("gathered layers", b * (root + layers * self._whole_layer) / t, text),)

    def _scoring(self) -> Parts:
        """The fullest moment of a pass without gradient: in a layer, where the next one is gathered, or in the head."""
        tokens, per = self._model.microbatch_tokens, self._per
        each, logits = per.entry + 2 * per.passing, scored_logits(self._model, self._head)
        layer = Part("activations", tokens * each, f"{count(tokens)} tokens x {count(each)}B")
        text = f"{count(tokens)} tokens x {count(per.entry)}B + logits {count(logits)}B"
        head = Part("activations", tokens * per.entry + logits, text)
        return max((layer, *self._gathered(2)), (head, *self._gathered(1)), key=total)


def _attention_weights(model: HeldModel) -> float:
    """Bytes that a layer keeps of them: causal, in blocks of queries; of rows that are not trees."""
    if model.layout == "shared":
        return 0.0
    row = min(model.longest or model.width, model.microbatch_tokens)
    size = model.element * model.geometry.heads * model.microbatch_tokens * (row + BLOCK_QUERIES) / 2
    return size if size <= ATTENTION_BYTES else 0.0


def _linear_parameters(model: HeldModel) -> float:
    """Of linear layers within the model's layers. Stacks of experts are none."""
    g = model.geometry
    routed = g.mixture_layers * g.experts_per_token * g.mlp_matrices * g.hidden * g.expert_ffn
    return float(g.active_parameters - routed)
