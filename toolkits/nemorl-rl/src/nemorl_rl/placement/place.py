"""Where the parts of a run that samples go, and how weights get from its trainer to its engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemorl.config.models import Placement
from nemorl.errors import PluginNotFoundError
from nemorl.plugins.registry import Registry, registry
from nemorl.weights import IN_PROCESS, Distance

from nemorl_rl.serving.snapshots import held_versions

if TYPE_CHECKING:
    from nemorl_rl.config import RolloutRunConfig

_DISTANCES: tuple[Distance, ...] = ("process", "node", "cluster")


def place(config: RolloutRunConfig) -> Placement:
    """All of it, decided from the config and the plugins that the run may use; only whether all models fit the devices
    at once is left to the plan of their memory."""
    cluster, plugins = config.cluster, config.registry
    training, engine = config.policy.backend, config.generation.backend

    # 1. On the trainer's devices, an engine that can live in its processes does.
    host = engine.colocates_with if cluster.colocated else None
    is_attached = host is not None and registry().entry_of("training_backends", type(training)).name == host

    # 2. Weights take the best way that both ends, their distance and their devices allow, or the one that is asked for:
    #    every trainer can send by any, as the kernel does it with what `export_weights` yields.
    offered, accepted = training.weight_transports, engine.weight_transports
    if (asked := cluster.weight_transport) is not None:
        offered, accepted = (asked,), (*accepted, asked) if "any_transport" in engine.supports else accepted
    transport = choose_transport(
        offered,
        accepted,
        cluster.weight_distance,
        plugins=plugins,
        device=cluster.device,
        colocated=cluster.shares_devices,
    )
    carrier = None if transport is None else plugins.load("weight_transports", transport)

    # 3. Adapters go without the model where that is asked for, or spares a network; then they come from one rank. The
    #    model goes in pieces where all of its ranks have their own.
    is_far = cluster.weight_distance == "cluster" and cluster.uses_gpus
    is_separate = config.rollouts.adapters == "separate" or (config.rollouts.adapters == "auto" and is_far)
    obstacle = _adapter_obstacle(config) if is_separate else ""
    sends_adapters = is_separate and not obstacle
    has_pieces = "weight_pieces" in training.supports & engine.supports and carrier is not None and carrier.is_mapped
    is_whole = is_attached or sends_adapters or cluster.training_workers(engine.devices_per_replica) == 1

    # 4. An engine in the trainer's process reads the trainer's own weights, unless it keeps older ones.
    is_here = transport is not None and transport.endswith(f":{IN_PROCESS}")
    is_reader = is_here and "shared_weights" in engine.supports and held_versions(engine) == 1

    # 5. Models take turns as asked; else on GPUs alone, where an engine has weights of its own and both can leave.
    can_leave = "offload" in training.supports and "sleep" in engine.supports
    is_tight = cluster.shares_devices and cluster.uses_gpus and can_leave and not (is_attached or is_reader)
    turns = cluster.take_turns
    return Placement(
        is_attached=is_attached,
        shares_weights=is_attached or is_reader,
        transport=transport,
        copies_on_device=carrier is not None and carrier.takes_device_memory,
        form="adapters" if sends_adapters else "model",
        adapter_obstacle=obstacle,
        spreads_weights=has_pieces and not is_whole,
        takes_turns=(None if is_tight else False) if turns is None else turns,
    )


def _adapter_obstacle(config: RolloutRunConfig) -> str:
    """Why adapters cannot travel apart from the model; empty if they can."""
    from nemorl_rl.models.routers import names_experts

    lora, training, generation = config.policy.lora, config.policy.backend, config.generation.backend
    if lora is None:
        return "the policy has none: policy.lora is unset"
    if lora.base != "full":
        return "they belong to a base in 4 bits, which the engine does not have"
    if lora.target_modules != "all-linear" and any(map(names_experts, lora.target_modules)):
        return "some are of experts, which no engine is known to apply"
    if generation.devices_per_replica > config.cluster.devices_per_node:
        return "an engine over several nodes is sent the whole model"
    if "adapters" not in training.supports:
        return f"training backend {registry().name_of('training_backends', type(training))} cannot hand them over"
    if "adapters" not in generation.supports:
        return f"generation backend {registry().name_of('generation_backends', type(generation))} cannot apply them"
    return ""


def choose_transport(
    offered: Sequence[str],
    accepted: Sequence[str],
    distance: Distance = "process",
    *,
    plugins: Registry,
    device: str = "cpu",
    colocated: bool = False,
) -> str | None:
    """The sender's first choice that the receiver accepts and that works between them, by its id; else ``None``.

    Args:
        offered: What the training backend offers, best first.
        accepted: What the generation backend accepts.
        distance: What they share.
        plugins: Those that may be used.
        device: torch device string of both.
        colocated: Whether they share devices.
    """
    for name in offered:
        if name not in accepted:
            continue
        try:
            config = plugins.load("weight_transports", name)
        except PluginNotFoundError:
            continue
        reaches = _DISTANCES.index(config.reach) >= _DISTANCES.index(distance)
        serves = config.devices is None or device.partition(":")[0] in config.devices
        if reaches and serves and (config.works_colocated or not colocated):
            return plugins.index.find("weight_transports", name).id
    return None
