"""From a run's config to a scene: which models it holds, how they are spread, and how much work a step is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nemorl.errors import UsageError
from nemorl.plugins import registry
from nemorl_rl.model_files import stored_config
from nemorl_rl.model_geometry import Geometry

from nemorl_plan.devices import Fleet
from nemorl_plan.memory import MEMORY_OF
from nemorl_plan.models import HeldModel
from nemorl_plan.scene import Engines, Scene, Work

if TYPE_CHECKING:
    from nemorl.config.models import AuxiliaryModel, PolicyConfig
    from nemorl.config.run import RunConfig

MICROBATCH_TOKENS = {True: 1536, False: 16384}
"""(on the CPU?) -> what backends take where the config names none (``nemorl_tensors.engines.rows``)."""
EXPECTED_FRAC = 0.5
"""Mean response as a share of the longest allowed one, where nothing is known of it."""


@dataclass(frozen=True)
class Lengths:
    """Expected lengths in tokens; unset: a guess from the limits."""

    prompt: float | None = None
    response: float | None = None
    longest: float | None = None


class Sizes:
    """Sizes of models by name, from the machine's files or as given."""

    def __init__(
        self, given: Mapping[str, Any] | None = None, by_name: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """
        Args:
            given: A ``config.json`` for the policy's model, in place of its own.
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


def scene_of(config: RunConfig, fleet: Fleet, sizes: Sizes, lengths: Lengths = Lengths()) -> Scene:
    """The run on these devices.

    Raises:
        UsageError: A model's sizes are not known, or its backend is none that can be planned.
    """
    sampler = config.sampler
    width = sampler.devices if sampler is not None else 1
    apart = not config.cluster.colocated and sampler is not None
    replicas = config.cluster.generation_workers or (max(1, fleet.size // width) if not apart else 1)
    ranks = fleet.size - (replicas * width if apart else 0)
    if ranks < 1:
        raise UsageError(
            f"generation takes all {fleet.size} devices, training has none",
            fix="lower cluster.generation_workers, or plan for more devices",
        )
    work = _work(config, lengths)
    role = AuxiliaryRole("policy", config.policy, config.policy_head == "value", learns=True)
    policy = _held(role, ranks, fleet, sizes, work, reference=config.needs_reference)
    others = tuple(
        _held(_auxiliary(name, auxiliary), ranks, fleet, sizes, work)
        for name, auxiliary in config.auxiliary_models.items()
    )
    one_process = fleet.size == 1 and not config.cluster.uses_ray
    engines = _engines(config, policy, replicas, fleet, one_process=one_process) if sampler is not None else None
    is_async = _rollouts(config).get("mode") == "async" and apart
    turns = engines is not None and not apart and _takes_turns(config, engines, on_cpu=fleet.device.is_cpu)
    return Scene(fleet, policy, others, engines, work, not apart, is_async, turns, one_process)


def _takes_turns(config: RunConfig, engines: Engines, *, on_cpu: bool) -> bool:
    """``cluster.take_turns``, or what a run does where it is unset, on the devices of the plan."""
    if config.cluster.take_turns is not None:
        return config.cluster.take_turns
    sampler = config.sampler
    assert sampler is not None, "only runs that sample have engines"
    able = "offload" in config.policy.backend.supports and "sleep" in sampler.generation.backend.supports
    return able and not on_cpu and not engines.shares_weights and not engines.is_attached


@dataclass(frozen=True)
class AuxiliaryRole:
    """What a model is for."""

    name: str
    policy: PolicyConfig
    value_head: bool
    learns: bool


def _auxiliary(name: str, model: AuxiliaryModel) -> AuxiliaryRole:
    return AuxiliaryRole(name, model.policy, model.head == "value", model.learns)


def _held(
    role: AuxiliaryRole, ranks: int, fleet: Fleet, sizes: Sizes, work: Work, *, reference: bool = False
) -> HeldModel:
    policy, on_cpu = role.policy, fleet.device.is_cpu
    backend = registry().entry_of("training_backends", type(policy.backend)).name
    if backend not in MEMORY_OF:
        raise UsageError(
            f"the memory of training backend {backend!r} is not known", fix=f"plan with one of {', '.join(MEMORY_OF)}"
        )
    geometry = sizes.of(policy, is_policy=role.name == "policy")
    options = policy.backend.model_dump()
    tokens = policy.microbatch_tokens or MICROBATCH_TOKENS[on_cpu]
    held = HeldModel(
        role.name,
        geometry,
        backend,
        2 if policy.precision == "bfloat16" else 4,
        ranks,
        tokens,
        policy.max_sequence_tokens,
        learns=role.learns,
        has_reference=reference,
        value_head=role.value_head,
        lora_rank=policy.lora.rank if policy.lora is not None else 0,
        checkpointing=policy.activation_checkpointing,
        tensor=policy.tensor_parallel_size,
        pipeline=options.get("pipeline_parallel_size", 1),
        virtual=options.get("virtual_pipeline_parallel_size") or 1,
        context=options.get("context_parallel_size", 1),
        expert=options.get("expert_parallel_size", 1),
        expert_tensor=options.get("expert_tensor_parallel_size", 1),
        replicas=options.get("data_parallel_replicas", 1),
        sequence_parallel=options.get("sequence_parallel", True),
        distributed_optimizer=options.get("distributed_optimizer", True),
        muon=policy.optimizer.name == "muon",
        on_cpu=on_cpu,
        cpu_kernels=on_cpu and ranks == 1 and backend == "dtensor",
        budget=tokens,
    )
    return fed(held, work)


def fed(held: HeldModel, work: Work) -> HeldModel:
    """The model with what a step really feeds it: rows of a small step do not fill a microbatch."""
    rows = work.sequences / max(1, work.updates // work.passes) / held.data_parallel
    longest = min(float(held.width), work.prompt_tokens + work.longest_response)
    budget = max(float(held.budget), longest)  # a row is never cut
    available = max(rows, 1.0) * longest
    return replace(held, microbatch_tokens=int(min(budget, available)), accumulates=available > budget)


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
    most = sampler.generation.max_new_tokens
    prompt = lengths.prompt if lengths.prompt is not None else min(512.0, max(16.0, (limit - most) / 2))
    response = lengths.response if lengths.response is not None else most * EXPECTED_FRAC
    longest = lengths.longest if lengths.longest is not None else min(float(most), max(2.5 * response, response))
    return Work(
        sequences, prompt, response, longest, group, minibatches * passes, passes, scores_old=minibatches * passes > 1
    )


def _rollouts(config: RunConfig) -> Mapping[str, Any]:
    found = dict(config).get("rollouts")
    return found.model_dump() if found is not None else {}


def _engines(config: RunConfig, policy: HeldModel, replicas: int, fleet: Fleet, *, one_process: bool) -> Engines:
    sampler = config.sampler
    assert sampler is not None, "only runs that sample have engines"
    backend = sampler.generation.backend
    options = backend.model_dump()
    name = registry().entry_of("generation_backends", type(backend)).name
    on_cpu = fleet.device.is_cpu
    utilization = options.get("gpu_memory_utilization")
    kv_gib = options.get("kv_cache_gib") or (1.0 if utilization is not None and on_cpu else None)
    return Engines(
        name,
        policy.geometry,
        policy.element,
        replicas,
        sampler.devices,
        int(options.get("max_num_seqs") or options.get("max_batch_rows") or 256),
        config.policy.max_sequence_tokens,
        kv_tokens=options.get("kv_cache_tokens"),
        utilization=utilization,
        kv_gib=kv_gib,
        shares_weights=one_process and name == "hf" and not policy.lora_rank,
        is_attached=sampler.is_attached,
    )
