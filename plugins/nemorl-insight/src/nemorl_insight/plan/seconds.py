"""Seconds of one step, phase by phase, each with the roofline that binds it.

Compute: FLOPs over the peak. Memory: bytes over its bandwidth. Links: bytes over NVLink within a node, over the network
beyond it. A phase takes the longest of those that overlap, plus those that do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nemorl.contracts.memory import MemoryPart
from nemorl_rl.planning.memory.budgets import budgets
from nemorl_rl.planning.memory.engines import Engines
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.parts import count
from nemorl_rl.planning.memory.scene import Scene

from nemorl_insight.plan.efficiencies import Efficiencies, starting_efficiencies


@dataclass(frozen=True)
class Phase:
    """A part of the step."""

    name: str
    seconds: float
    bound: str
    """``compute``, ``memory``, ``links`` or ``starting kernels``"""
    formula: str


@dataclass(frozen=True)
class StepTime:
    """One step."""

    phases: tuple[Phase, ...]
    is_async: bool
    tokens: float
    devices: int
    mfu: float = 0.0
    """Of the policy's training: FLOPs that its tokens need (forward and backward, each once) over the devices' peak"""

    @property
    def seconds(self) -> float:
        """Sampling and the rest one after the other, or side by side. Rewards are not counted."""
        sampling = sum(phase.seconds for phase in self.phases if phase.name in SAMPLING)
        rest = sum(phase.seconds for phase in self.phases if phase.name not in (*SAMPLING, "weight sync"))
        sync = sum(phase.seconds for phase in self.phases if phase.name == "weight sync")
        return (max(sampling, rest) if self.is_async else sampling + rest) + sync

    @property
    def tokens_per_device(self) -> float:
        """Per second, of prompts and responses."""
        return self.tokens / self.seconds / self.devices if self.seconds else 0.0


SAMPLING = ("prefill", "decoding")
SUM_S = 2e-5
"""Of adding up few numbers over the ranks of an engine, by NVLink."""
KEPT_ASIDE: tuple[MemoryPart, ...] = ("weights", "optimizer", "reference")
"""Parts that move to the host's memory and back where models take turns."""


def step_time(scene: Scene, efficiencies: Efficiencies | None = None) -> StepTime:
    """The step of a run on its devices."""
    found = efficiencies or starting_efficiencies(scene)
    phases: list[Phase] = []
    if scene.engines is not None:
        phases += [_prefill(scene, scene.engines, found), _decoding(scene, scene.engines, found)]
    if scene.work.old_frac:
        phases.append(_scoring("old log-probs", scene, scene.policy, found, share=scene.work.old_frac))
    if scene.policy.has_reference:
        phases.append(_with_bus(_scoring("reference log-probs", scene, scene.policy, found), scene, found, scoring=1.0))
    for held in scene.others:
        phases.append(_scoring(f"{held.role} scoring", scene, held, found))
        phases += [_trained(f"{held.role} training", scene, held, found)] if held.learns else []
    phases.append(_trained("training", scene, scene.policy, found))
    if scene.engines is not None and scene.engines.has_own_weights:
        phases.append(_sync(scene, scene.engines, found))
    if scene.takes_turns:
        phases.append(_moving(scene, found))
    devices = scene.policy.ranks + (0 if scene.colocated or scene.engines is None else scene.engines.devices)
    return StepTime(tuple(phases), scene.is_async, scene.work.tokens, devices, _mfu(scene, phases))


def _mfu(scene: Scene, phases: Sequence[Phase]) -> float:
    """Tokens that sequences share are needed once, so no layout of rows reaches more than the device."""
    held, work = scene.policy, scene.work
    tokens, squares = work.computed_tokens(held.layout), work.squares(held.layout)
    scored = 0.0 if held.value_head else work.sequences * work.response_tokens
    needed = work.passes * held.geometry.training_flops(tokens, scored, squares)
    seconds = sum(phase.seconds for phase in phases if phase.name == "training")
    return needed / seconds / held.ranks / _flops_per_s(scene, held.element)


def _flops_per_s(scene: Scene, element: int) -> float:
    return scene.fleet.device.speed.of(element) * 1e12


def _prefill(scene: Scene, engines: Engines, found: Efficiencies) -> Phase:
    work = scene.work
    prompts = work.sequences / work.group / scene.sampling_engines
    flops = prompts * engines.geometry.forward_flops(work.prompt_tokens, 1, work.prompt_tokens**2)
    speed = _flops_per_s(scene, engines.element) * found.prefill * engines.tensor
    seconds = flops / speed
    return Phase("prefill", seconds, "compute", f"{count(flops)}FLOP / {count(speed)}FLOP/s")


def _decoding(scene: Scene, engines: Engines, found: Efficiencies) -> Phase:
    """As many steps as the longest response has tokens, or as full batches take; each reads weights and cache.

    Rows begin together, so the cache must hold them at their full length: those that it has no room for then wait, or
    are computed again. A batch that is sampled over several steps of training waits for its longest response once in
    as many, while rows of the next ones fill its place.
    """
    work, g, t = scene.work, engines.geometry, engines.tensor
    rows = max(1.0, work.sequences / scene.sampling_engines)
    depth = scene.staleness if scene.is_async else 1
    tail = max(0.0, work.longest_response - work.response_tokens) / depth
    context = work.prompt_tokens + work.response_tokens / 2
    cached = engines.plan.cached_tokens(engines, scene.capacity)
    at_once = max(1.0, min(engines.plan.max_rows, cached / work.length))
    steps = max(work.longest_response / depth, rows * work.response_tokens / at_once + tail)
    batch = rows * work.response_tokens / steps
    active = g.active_parameters + g.embedding_parameters
    if g.experts:  # the share of experts that some row of the batch goes to
        touched = 1 - (1 - g.experts_per_token / g.experts) ** batch
        routed = g.mixture_layers * g.experts_per_token * g.mlp_matrices * g.hidden * g.expert_ffn
        read = active - routed + touched * g.expert_parameters
    else:
        read = active
    device = scene.fleet.device
    of_layers = engines.layer_element * (read - g.embedding_parameters)
    bytes_read = (of_layers + engines.element * (g.embedding_parameters + batch * context * g.cache_elements)) / t
    flops = batch * (2 * active + g.attention_flops(1, context)) / t
    memory_s = bytes_read / (device.memory_gb_s * 1e9 * found.decode)
    compute_s = flops / (_flops_per_s(scene, engines.element) * found.prefill)
    starting_s = found.decode_layer_s * g.layers + found.decode_step_s + found.decode_row_s * batch
    links_s = 0.0
    if t > 1:  # sums over ranks, after attention and after the MLP
        states = 2 * (t - 1) / t * engines.element * batch * g.hidden
        links_s = 2 * g.layers * (SUM_S + states / (scene.fleet.link_gb_s(t) * 1e9 * found.links))
    each = max(memory_s, compute_s) + links_s + starting_s
    bounds = {"memory": memory_s, "compute": compute_s, "links": links_s, "starting kernels": starting_s}
    speed = device.memory_gb_s * 1e9 * found.decode
    formula = (
        f"{count(steps)} steps of {batch:.3g} rows x max({count(bytes_read)}B / {count(speed)}B/s, "
        f"{count(flops)}FLOP) + {(links_s + starting_s) * 1e3:.2g} ms"
    )
    return Phase("decoding", steps * each, max(bounds, key=lambda name: bounds[name]), formula)


def _scoring(name: str, scene: Scene, held: HeldModel, found: Efficiencies, *, share: float = 1.0) -> Phase:
    """A forward pass over a share of the sequences."""
    scored = scene.work.sequences * scene.work.response_tokens
    g = held.geometry
    tokens, squares = scene.work.computed_tokens(held.layout), scene.work.squares(held.layout)
    flops = share * g.forward_flops(tokens, 0 if held.value_head else scored, squares)
    speed = _flops_per_s(scene, held.element) * found.scoring * held.ranks
    links = _links(scene, held, found, passes=share / 3)
    starting = share / 3 * _starting(scene, held, found)
    return _longest(name, flops / speed, links, f"{count(flops)}FLOP / {count(speed)}FLOP/s", starting=starting)


def _microbatches(scene: Scene, held: HeldModel) -> float:
    """Of one rank's share of the step. They are made of whole sequences, unless these share tokens."""
    work = scene.work
    tokens = work.computed_tokens(held.layout)
    if held.layout != "shared":
        each = max(1.0, held.microbatch_tokens // work.length) * work.length
        tokens *= held.microbatch_tokens / each
    return max(1.0, tokens / held.spread.data / held.microbatch_tokens)


def _starting(scene: Scene, held: HeldModel, found: Efficiencies) -> float:
    """Seconds of a rank's host for forward and backward passes of the step's sequences."""
    g, spread = held.geometry, held.spread
    each = g.layers * found.microbatch_s + g.mixture_layers * found.mixture_s
    return _microbatches(scene, held) * each / spread.pipeline


def _training(name: str, scene: Scene, held: HeldModel, found: Efficiencies) -> Phase:
    """Forward, backward (twice as much), the head's logits once more, and the layers' forward pass where they are
    computed again; idle stages of a pipeline; the update."""
    work, g = scene.work, held.geometry
    tokens = work.computed_tokens(held.layout) * work.passes
    squares = work.squares(held.layout) * work.passes
    scored = 0.0 if held.value_head else work.sequences * work.response_tokens * work.passes
    forward = g.forward_flops(tokens, 0, squares)
    head = g.forward_flops(0, scored, 0)
    layers = (2.0 if held.lora_rank else 3.0) + (1.0 if held.checkpointing else 0.0)
    flops = layers * forward + 4 * head + held.spread.mtp_passes * sum(g.mtp_flops(tokens, scored, squares / 2))
    speed = _flops_per_s(scene, held.element) * found.training * held.ranks
    spread = held.spread
    microbatches = _microbatches(scene, held) * work.passes
    bubble = (spread.pipeline - 1) / max(1.0, spread.virtual * microbatches / work.updates)
    starting = _starting(scene, held, found) * work.passes * (1 + bubble)
    update = 28 * held.parameters / (spread.shards * spread.tensor * spread.pipeline) * work.updates
    update_s = 0.0 if held.lora_rank else update / (scene.fleet.device.memory_gb_s * 1e9 * found.decode)
    links = _links(scene, held, found, passes=1.0 * work.passes)
    formula = f"{count(flops)}FLOP / {count(speed)}FLOP/s" + (f" x {1 + bubble:.3g} idle stages" if bubble else "")
    text = formula + f" + update {update_s:.2g} s"
    return _longest(name, flops / speed * (1 + bubble), links, text, extra=update_s, starting=starting)


def _trained(name: str, scene: Scene, held: HeldModel, found: Efficiencies) -> Phase:
    """Training, with what comes from the host's memory and goes there."""
    passes, updates = _microbatches(scene, held) * scene.work.passes, float(scene.work.updates)
    return _with_bus(_training(name, scene, held, found), scene, found, held=held, microbatches=passes, updates=updates)


def _with_bus(
    phase: Phase,
    scene: Scene,
    found: Efficiencies,
    *,
    held: HeldModel | None = None,
    scoring: float = 0.0,
    microbatches: float = 0.0,
    updates: float = 0.0,
) -> Phase:
    """A phase that waits for so many crossings between device and host."""
    moved = (held or scene.policy).moments.moved
    size = scoring * moved.per_scoring + microbatches * moved.per_microbatch + updates * moved.per_update
    if not size:
        return phase
    seconds = size / (scene.fleet.device.host_gb_s * 1e9 * found.links)
    bound = phase.bound if phase.seconds >= seconds else "links"
    formula = f"{phase.formula} + host {count(size)}B in {seconds:.2g} s"
    return Phase(phase.name, phase.seconds + seconds, bound, formula)


@dataclass(frozen=True)
class _Links:
    hidden_s: float
    """Beside computation"""
    exposed_s: float


def _links(scene: Scene, held: HeldModel, found: Efficiencies, *, passes: float) -> _Links:
    """Bytes between ranks: FSDP's gathers and reductions per microbatch, or Megatron's once per update; tensor- and
    expert-parallel exchanges within layers, which wait."""
    g, b, work, spread = held.geometry, held.element, scene.work, held.spread
    t, d = spread.tensor, spread.shards
    tokens = work.computed_tokens(held.layout) / spread.data * passes  # of one rank
    inside = scene.fleet.link_gb_s(t) * 1e9 * found.links
    exposed = 0.0
    if t > 1:  # 4 gathers and 4 reductions per layer, forward and backward together
        again = 4 / 3 if held.checkpointing else 1.0
        exposed = 8 * again * b * tokens / spread.context * g.hidden * (t - 1) / t * g.layers / spread.pipeline / inside
    if spread.expert > 1:
        across = scene.fleet.link_gb_s(spread.expert * t) * 1e9 * found.links
        share = (spread.expert - 1) / spread.expert
        sent = 4 * b * tokens * g.experts_per_token * g.hidden * share
        exposed += sent * g.mixture_layers / spread.pipeline / across / t
    if d == 1:
        return _Links(0.0, exposed)
    width = min(d * t, scene.fleet.size)
    bandwidth = scene.fleet.link_gb_s(width) * 1e9 * found.links
    if width > scene.fleet.island:  # every device of a node sends its part through its own port
        bandwidth = scene.fleet.device.network_gb_s * 1e9 * found.links
    local = held.parameters / (t * spread.pipeline)
    if spread.gathers_layers:
        microbatches = max(1.0, tokens / held.microbatch_tokens)
        gathered = local - g.expert_parameters * (1 - 1 / spread.expert)  # tokens travel to the other experts
        volume = (2 * b + 4) * gathered * (d - 1) / d * microbatches * (0.3 if passes < 1 else 1.0)
    else:
        volume = 0.0 if passes < 1 else (4 + b) * local * (d - 1) / d * work.updates
    return _Links(volume / bandwidth, exposed)


def _longest(
    name: str, compute: float, links: _Links, formula: str, extra: float = 0.0, starting: float = 0.0
) -> Phase:
    waits = max(compute, links.hidden_s, starting)
    amounts = {"compute": compute, "links": max(links.hidden_s, links.exposed_s), "starting kernels": starting}
    bound = max(amounts, key=lambda name: amounts[name])
    text = f"max({formula}, links {links.hidden_s:.2g} s, starting {starting:.2g} s) + links {links.exposed_s:.2g} s"
    return Phase(name, waits + links.exposed_s + extra, bound, text)


def _sync(scene: Scene, engines: Engines, found: Efficiencies) -> Phase:
    """All weights, or adapters, gathered from their shards and handed to every engine."""
    size = scene.sync_bytes
    device, apart = scene.fleet.device, not scene.colocated and scene.fleet.size > scene.fleet.island
    bandwidth = (device.network_gb_s if apart else device.link_gb_s) * 1e9 * found.links
    ranks = scene.policy.ranks
    is_gathered = ranks > 1 and not scene.placement.spreads_weights
    gathered = size / (scene.fleet.link_gb_s(ranks) * 1e9 * found.links) if is_gathered else 0.0
    seconds = gathered + size / bandwidth + math.ceil(size / 2**28) * 0.01
    return Phase("weight sync", seconds, "links", f"{count(size)}B gathered and sent at {count(bandwidth)}B/s")


def _moving(scene: Scene, found: Efficiencies) -> Phase:
    """Seconds of moving models and the engine off the device and back once per step; gradients are not kept."""
    size = 0.0
    for budget in budgets(replace(scene, takes_turns=False)).values():
        held = sum(budget.held_bytes(name).get(part, 0.0) for name in budget.held for part in KEPT_ASIDE)
        size = max(size, held)
    speed = scene.fleet.device.host_gb_s * 1e9 * found.links
    return Phase("taking turns", 2 * size / speed, "links", f"2 x {count(size)}B / {count(speed)}B/s")
