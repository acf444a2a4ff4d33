"""From a run's config to a scene: which models it holds, how they are spread, and how much work a step is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from nemorl.errors import UsageError

from nemorl_rl.models.model_files import stored_config
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.planning.devices import Fleet, parse_fleet, shared_by, this_cpu, this_gpu, with_memory
from nemorl_rl.planning.memory.budgets import settled
from nemorl_rl.planning.memory.engines import Engines
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.scene import Scene
from nemorl_rl.planning.memory.work import Work
from nemorl_rl.serving.snapshots import held_versions

if TYPE_CHECKING:
    from nemorl.config.cluster import ClusterConfig
    from nemorl.config.models import GenerationConfig, Placement, PolicyConfig
    from nemorl.config.run import RunConfig

EXPECTED_FRAC = 0.5
"""Mean response as a share of the longest allowed one, where nothing is known of it."""
LONGEST_PROMPT = 2.0
"""The longest prompt of a step as a multiple of the mean one: engines make room for it, and for the longest response
that is allowed, in each row."""


@dataclass(frozen=True)
class Lengths:
    """Expected lengths in tokens; unset: a guess from the limits."""

    prompt: float | None = None
    response: float | None = None
    longest: float | None = None

    def or_else(self, others: Lengths) -> Lengths:
        """These, and where one is unset that of ``others``."""
        pairs = zip(astuple(self), astuple(others), strict=True)
        return Lengths(*(own if own is not None else other for own, other in pairs))


EXPECTED = Lengths()
LEAST = Lengths(1.0, 1.0, 1.0)
"""The least lengths: what does not fit then does not fit with any data."""


class Sizes:
    """Sizes of models by name, from the machine's files or as given."""

    def __init__(
        self, given: Mapping[str, Any] | None = None, by_name: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """
        Args:
            given: A ``config.json`` for the policy's model and others of its name, in place of its own.
            by_name: The same for other models.
        """
        self._given, self._by_name = given, by_name or {}

    def of(self, policy: PolicyConfig, *, is_policy: bool = True) -> Geometry:
        """The geometry of a model.

        Raises:
            UsageError: Its config is not on this machine.
        """
        name = policy.model_name
        stored = (
            self._given if is_policy and self._given is not None else self._by_name.get(name) or stored_config(name)
        )
        if stored is None:
            raise UsageError(
                f"the sizes of model {name!r} are not known: its config.json is not on this machine",
                fix="give a local folder, or --model-config with a file like the model's config.json",
            )
        return Geometry.from_config({**stored, **policy.hf_config_overrides})


def scene_of(config: RunConfig, fleet: Fleet, sizes: Sizes, lengths: Lengths = EXPECTED) -> Scene:
    """The run on these devices.

    Raises:
        UsageError: A model's sizes are not known, or its backend does not describe itself.
    """
    sampler = config.sampler
    width = sampler.backend.devices_per_replica if sampler is not None else 1
    apart = not config.cluster.colocated and sampler is not None
    replicas = config.cluster.generation_workers or (max(1, fleet.size // width) if not apart else 1)
    ranks = fleet.size - (replicas * width if apart else 0)
    if ranks < 1:
        raise UsageError(
            f"generation takes all {fleet.size} devices, training has none",
            fix="lower cluster.generation_workers, or plan for more devices",
        )
    work, on_cpu = _work(config, lengths), fleet.device.is_cpu
    policy = HeldModel(
        "policy",
        config.policy,
        sizes.of(config.policy),
        ranks,
        on_cpu,
        has_reference=config.needs_reference,
        value_head=config.policy_head == "value",
    )
    others = tuple(
        HeldModel(
            role,
            model.policy,
            sizes.of(model.policy, is_policy=model.policy.model_name == config.policy.model_name),
            ranks,
            on_cpu,
            learns=model.learns,
            value_head=model.head == "value",
        ).fed(work)
        for role, model in config.auxiliary_models.items()
    )
    one_process = fleet.size == 1 and not config.cluster.uses_ray
    placement = _placement(config, fleet)
    engines = None
    if sampler is not None:
        engines = _engines(config, sampler, placement, policy, replicas, work, one_process=one_process)
    rollouts = _rollouts(config)
    staleness = int(rollouts.get("max_staleness", 1))
    is_async = rollouts.get("mode") == "async" and apart and staleness > 0
    return settled(
        Scene(
            fleet,
            policy.fed(work),
            others,
            engines,
            work,
            colocated=not apart,
            lends=apart and config.cluster.lend_training_devices,
            is_async=is_async,
            staleness=max(1, staleness),
            turns=config.cluster.take_turns,
            one_process=one_process,
            placement=placement,
            others_beside=partial(_others_beside, config),
        )
    )


def _others_beside(config: RunConfig, policy: PolicyConfig) -> Mapping[str, PolicyConfig]:
    """The run's other models, which may inherit what they do not set themselves, beside another policy."""
    beside = config.model_copy(update={"policy": policy})
    return {role: model.policy for role, model in beside.auxiliary_models.items()}


def fleet_of(
    cluster: ClusterConfig, nodes: int | None = None, gpus: str | None = None, memory_gib: float | None = None
) -> Fleet:
    """The devices to plan for: those asked for, else those of the config, on this machine's kind.

    Raises:
        UsageError: The config asks for GPUs, and neither it nor this machine says which.
    """
    if gpus is not None:
        return with_memory(parse_fleet(nodes or cluster.num_nodes, gpus), memory_gib)
    on_gpus = (cluster.gpus_per_node or 0) > 0 or (cluster.gpus_per_node is None and cluster.uses_gpus)
    count, per_node = nodes or cluster.num_nodes, cluster.devices_per_node
    if not on_gpus:
        return with_memory(Fleet(shared_by(this_cpu(), per_node), count, per_node), memory_gib)
    device = this_gpu()
    if device is None:
        raise UsageError(
            f"the run is for {per_node} GPUs on {count} node{'s' * (count > 1)}, of a kind that is not known here",
            fix=f"say which, e.g. --gpus {per_node}xH100",
        )
    return with_memory(Fleet(device, count, per_node), memory_gib)


def asked_for(nodes: int | None, gpus: str | None) -> dict[str, object]:
    """The keys of a config that say what these arguments of :func:`fleet_of` do: it is then judged for those devices.

    >>> asked_for(1, "8xH100")
    {'cluster.num_nodes': 1, 'cluster.gpus_per_node': 8}
    """
    found: dict[str, object] = {} if nodes is None else {"cluster.num_nodes": nodes}
    if nodes is not None and nodes > 1:
        found["cluster.address"] = "auto"  # some cluster spans them: which one is no matter for a plan
    if gpus is not None and not (fleet := parse_fleet(1, gpus)).device.is_cpu:
        found["cluster.gpus_per_node"] = fleet.per_node
    return found


def known_scene(config: RunConfig, lengths: Lengths = EXPECTED) -> Scene | None:
    """The run on the devices that it will have; ``None`` where they, its models or its backends are not known here."""
    if config.cluster.address is not None:
        return None  # other machines, of which this one knows nothing
    try:
        scene = scene_of(config, fleet_of(config.cluster), Sizes(), lengths)
        _ = scene.engines and scene.engines.plan  # asked now: a backend of others may describe nothing
        return scene
    except UsageError:
        return None


def _work(config: RunConfig, lengths: Lengths) -> Work:
    knobs: dict[str, Any] = dict(config)
    limit = config.policy.max_sequence_tokens
    sampler = config.sampler
    pairs = 2 if any("chosen" in columns for columns in config.needs_columns) else 1
    if sampler is None:
        rows = int(knobs.get("batch_size", 32)) * pairs
        whole = min(limit, 2048) * EXPECTED_FRAC
        prompt = lengths.prompt if lengths.prompt is not None else whole / 4
        response = lengths.response if lengths.response is not None else whole - prompt
        return Work(rows, prompt, response, lengths.longest or limit - prompt, pairs)
    group = int(knobs.get("num_generations_per_prompt", 1))
    sequences = int(knobs.get("num_prompts_per_step", 1)) * group
    passes, minibatches = int(knobs.get("num_epochs_per_rollout", 1)), int(knobs.get("num_minibatches", 1))
    most = sampler.max_new_tokens
    prompt = lengths.prompt if lengths.prompt is not None else min(512.0, max(16.0, (limit - most) / 2))
    response = lengths.response if lengths.response is not None else most * EXPECTED_FRAC
    response = min(response, float(most))  # another run's may have been longer
    longest = lengths.longest if lengths.longest is not None else 2.5 * response
    longest = min(float(most), max(longest, response))
    # In one pass the first minibatch's own forward pass is the old policy.
    old_frac = 1 - 1 / minibatches if passes == 1 else 1.0
    return Work(sequences, prompt, response, longest, group, minibatches * passes, passes, old_frac)


def check_lengths(config: RunConfig, lengths: Lengths) -> None:
    """
    Raises:
        UsageError: No step of the run can have them.
    """
    limit = (config.policy.max_sequence_tokens, "policy.max_sequence_tokens")
    sampler = config.sampler
    most = limit if sampler is None else (sampler.max_new_tokens, "generation.max_new_tokens")
    limits = {"prompt": limit, "response": most, "longest": most}
    for name, (allowed, key) in limits.items():
        asked = getattr(lengths, name)
        if asked is not None and asked > allowed:
            what = "longest response" if name == "longest" else f"mean {name}"
            raise UsageError(f"a {what} of {asked:g} tokens exceeds {key} = {allowed}", fix=f"lower it, or raise {key}")
    if lengths.response is not None and lengths.longest is not None and lengths.response > lengths.longest:
        raise UsageError(
            f"the mean response has {lengths.response:g} tokens and the longest {lengths.longest:g}",
            fix="raise --longest-response, or leave it out",
        )


def _rollouts(config: RunConfig) -> Mapping[str, Any]:
    found = dict(config).get("rollouts")
    return found.model_dump() if found is not None else {}


def _placement(config: RunConfig, fleet: Fleet) -> Placement:
    """Of the run on these devices, which may be others than this machine has."""
    on_cpu = fleet.device.is_cpu
    counts = {"gpus_per_node": 0 if on_cpu else fleet.per_node, "workers_per_node": fleet.per_node if on_cpu else None}
    cluster = config.cluster.model_copy(update={"num_nodes": fleet.nodes, **counts})
    return config.model_copy(update={"cluster": cluster}).place()


def _engines(
    config: RunConfig,
    sampler: GenerationConfig,
    placement: Placement,
    policy: HeldModel,
    replicas: int,
    work: Work,
    *,
    one_process: bool,
) -> Engines:
    backend = sampler.backend
    shares = one_process and "shared_weights" in backend.supports and held_versions(backend) == 1
    rank = policy.lora_rank if placement.form == "adapters" else 0
    row = LONGEST_PROMPT * work.prompt_tokens + sampler.max_new_tokens
    return Engines(
        backend,
        policy.geometry,
        policy.element,
        replicas,
        config.policy.max_sequence_tokens,
        policy.on_cpu,
        shares_weights=shares,
        merges=shares and config.policy.lora is not None,
        is_attached=placement.is_attached,
        adapter_rank=rank,
        rank_bytes=policy.element * policy.adapter_parameters / rank if rank else 0.0,
        row=min(config.policy.max_sequence_tokens, ceil(row)),
    )
