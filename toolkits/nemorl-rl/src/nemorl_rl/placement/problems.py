"""Parts of a run that samples which do not go together: placement, engines, weights that travel, limits of length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nemorl.config.models import Placement
from nemorl.config.run import RunConfig
from nemorl.errors import ConfigIssue

from nemorl_rl.serving.snapshots import holds_adapters

if TYPE_CHECKING:
    from nemorl_rl.config import RolloutRunConfig


def placement_problems(config: RolloutRunConfig) -> Iterator[ConfigIssue]:
    """All of them, for ``RolloutRunConfig.problems``."""
    placement = config.place()
    yield from _receipt_problems(config)
    yield from _adapter_problems(config, placement)
    yield from config.generation.backend.policy_problems(
        config.policy, device=config.cluster.device, is_attached=placement.is_attached
    )
    yield from _transport_problems(config, placement)
    yield from _overlap_problems(config)
    yield from _engine_problems(config)
    yield from _length_problems(config)
    yield from _turn_problems(config)


def _receipt_problems(config: RolloutRunConfig) -> Iterator[ConfigIssue]:
    able, asked = config.generation.backend.supports, config.weights.receipts
    if asked == "digests" and "receipts" not in able:
        message = "this generation backend cannot say what weights it holds"
        yield ConfigIssue("weights.receipts", message, "set it to probe, or leave it out")
    if asked == "probe" and "prompt_logprobs" not in able:
        message = "this generation backend scores no prompts: there is nothing to compare the probe with"
        yield ConfigIssue("weights.receipts", message, "remove it, or use an engine with `prompt_logprobs`")


def _adapter_problems(config: RolloutRunConfig, placement: Placement) -> Iterator[ConfigIssue]:
    if config.rollouts.adapters == "separate" and placement.adapter_obstacle:
        message = f"adapters cannot travel apart from the model: {placement.adapter_obstacle}"
        yield ConfigIssue("rollouts.adapters", message, "remove it")
    if holds_adapters(config.generation.backend) and placement.form != "adapters":
        message = "this engine holds several versions of adapters alone, and every update brings it the whole model"
        fix = "set rollouts.adapters: separate (with policy.lora), remove snapshots, or set generation.backend: hf"
        yield ConfigIssue("generation.backend.snapshots", message, fix)


def _transport_problems(config: RolloutRunConfig, placement: Placement) -> Iterator[ConfigIssue]:
    if placement.transport is None and not placement.is_attached:
        asked = config.cluster.weight_transport
        yield ConfigIssue(
            "generation.backend" if asked is None else "cluster.weight_transport",
            f"no weight transport in common{f' called {asked!r}' if asked else ''} that works within one "
            f"{config.cluster.weight_distance} on {config.cluster.device}: training offers "
            f"{', '.join(config.policy.backend.weight_transports)}, generation accepts "
            f"{', '.join(config.generation.backend.weight_transports)}",
            "choose another generation backend" if asked is None else "leave it unset",
        )
    if placement.transport is not None:
        from nemorl_rl.transports.config import PlacedTransportConfig

        carrier = config.registry.load("weight_transports", placement.transport)
        if issubclass(carrier, PlacedTransportConfig):
            yield from carrier.place_problems(config.cluster)


def _overlap_problems(config: RolloutRunConfig) -> Iterator[ConfigIssue]:
    """Devices that would have to train and to generate at the same time."""
    overlaps = config.rollouts.mode == "async" and config.rollouts.max_staleness > 0
    if overlaps and config.cluster.lend_training_devices:
        message = "training overlaps with generation (rollouts.mode: async): its devices are not idle"
        fix = "remove it, or set rollouts.mode: sync"
        yield ConfigIssue("cluster.lend_training_devices", message, fix)
    if overlaps and (not config.cluster.uses_ray or config.cluster.colocated):
        yield ConfigIssue(
            "rollouts.mode",
            "generation and training cannot overlap on the same devices",
            "set cluster.colocated: false with gpus_per_node (workers_per_node on the CPU) of at least 2, or "
            "rollouts.max_staleness: 0",
        )


def _engine_problems(config: RolloutRunConfig) -> Iterator[ConfigIssue]:
    """Engines and devices that do not come out even."""
    cluster, width = config.cluster, config.generation.backend.devices_per_replica
    asked, per_node = f"an engine spreads over {width} devices", cluster.devices_per_node
    needed = width * cluster.generation_replicas(width)
    if not cluster.uses_ray:
        return
    if cluster.colocated and width > cluster.world_size:
        message = f"{asked}, and the run has {cluster.world_size}"
        fix = "lower the engine's parallel sizes, or raise cluster.num_nodes or gpus_per_node"
        yield ConfigIssue("generation.backend", message, fix)
    elif width > per_node and "several_nodes" not in config.generation.backend.supports:
        message = f"{asked}, and a node has {per_node}: an engine of this kind does not reach beyond its node"
        fix = "lower the engine's parallel sizes, or raise cluster.gpus_per_node (workers_per_node on the CPU)"
        yield ConfigIssue("generation.backend", message, fix)
    elif width > per_node and width % per_node:
        message = f"{asked}, and a node has {per_node}: one over several nodes takes whole nodes"
        fix = f"let it spread over a multiple of {per_node} devices, or over at most {per_node}"
        yield ConfigIssue("generation.backend", message, fix)
    elif not cluster.colocated and per_node % width and width < per_node < needed:
        message = f"{asked}, which do not divide the {per_node} of a node, and {needed} are asked for"
        fix = f"let it spread over a divisor of {per_node}, or lower cluster.generation_workers"
        yield ConfigIssue("generation.backend", message, fix)
    elif cluster.colocated and width < per_node and per_node % width:
        message = f"{asked}, which do not divide the {per_node} of a node that it shares"
        fix = f"let it spread over a divisor of {per_node}, or set cluster.colocated: false"
        yield ConfigIssue("generation.backend", message, fix)
    elif cluster.colocated and needed > cluster.world_size:
        message = f"{cluster.generation_workers} engines over {width} devices each, of {cluster.world_size} devices"
        fix = f"set it to at most {cluster.world_size // width}, or leave it unset"
        yield ConfigIssue("cluster.generation_workers", message, fix)


def _length_problems(config: RolloutRunConfig) -> Iterator[ConfigIssue]:
    limits = {"generation": config.generation.max_new_tokens, "validation": config.validation.max_new_tokens}
    for section, limit in limits.items():
        if limit is not None and limit >= config.policy.max_sequence_tokens:
            yield ConfigIssue(
                f"{section}.max_new_tokens",
                f"{limit} leaves no room for a prompt within "
                f"policy.max_sequence_tokens = {config.policy.max_sequence_tokens}",
                "lower it, or raise policy.max_sequence_tokens",
            )


def _turn_problems(config: RolloutRunConfig) -> Iterator[ConfigIssue]:
    if not config.cluster.take_turns:
        return
    if not config.cluster.shares_devices:
        message = "generation has devices of its own: nobody takes turns with it"
        yield ConfigIssue("cluster.take_turns", message, "remove it, or set colocated: true")
        return
    yield from offload_problems(config)
    if "sleep" not in config.generation.backend.supports:
        yield _stays("generation.backend", config.generation.backend, "sleep")


def offload_problems(config: RunConfig) -> Iterator[ConfigIssue]:
    """Models of a run whose backend cannot leave the devices' memory, which ``cluster.take_turns`` asks of all."""
    own = config.policy.backend
    models = {role: model.policy.backend for role, model in config.auxiliary_models.items()}
    # One that is not set is the policy's.
    for role, backend in {"policy": own, **{role: found for role, found in models.items() if found != own}}.items():
        if "offload" not in backend.supports:
            yield _stays(f"{role}.backend", backend, "leave the devices' memory")


def _stays(path: str, backend: Any, what: str) -> ConfigIssue:
    name = type(backend).__name__.removesuffix("Config")
    return ConfigIssue(
        path,
        f"{name} cannot {what}, which cluster.take_turns asks for",
        "choose another backend, or set cluster.take_turns: false",
    )
