"""Rates and waste of one step, from its record: plain numbers under NeMo RL's names.

NeMo RL's ``print_performance_metrics`` divides the same tokens by the same seconds. Differs: its idle ratio is 0
wherever the wait exceeds 0.1 s; here it is the wait over the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemorl.config.run import RunConfig

STEP = "timing/train/total_step_time"


@dataclass(frozen=True)
class Devices:
    """Devices of a run, by what they do; one process on the CPU counts as one."""

    all: int
    training: int
    generation: int
    are_shared: bool
    """Generation takes turns with training on them."""
    engines: int = 1
    """Generators that share the prompts of a step."""

    @classmethod
    def of(cls, config: RunConfig, engines: int = 1) -> Devices:
        """Those of a config; how many engines there are, the run knows."""
        cluster, sampler = config.cluster, config.sampler
        width = 1 if sampler is None else sampler.backend.devices_per_replica
        if sampler is None or cluster.colocated:
            return cls(cluster.world_size, cluster.world_size, cluster.world_size, are_shared=True, engines=engines)
        training = cluster.training_workers(width)
        generation = cluster.world_size - (0 if cluster.lend_training_devices else training)
        return cls(cluster.world_size, training, generation, are_shared=False, engines=engines)


def rates(record: Mapping[str, float], devices: Devices, groups: Sequence[Sequence[int]]) -> dict[str, float]:
    """Speed of a step, from its seconds and tokens.

    Args:
        record: A step's metrics by full name.
        devices: Of the run.
        groups: Tokens of each response that the step sampled, by prompt.

    Example:
        >>> record = {STEP: 2.0, "timing/train/policy_training": 1.0, "train/total_num_tokens": 100.0}
        >>> found = rates(record, Devices(2, 2, 2, are_shared=True), [])
        >>> found["tokens_per_sec_per_gpu"], found["policy_training_tokens_per_sec_per_gpu"]
        (25.0, 50.0)
    """
    responses: list[int] = [length for group in groups for length in group]
    tokens, step_s = record.get("train/total_num_tokens", 0.0), record[STEP]
    training_s, logprobs_s = _seconds(record, "policy_training"), _seconds(record, "policy_and_reference_logprobs")
    waited_s, generation_s = _seconds(record, "exposed_generation"), _seconds(record, "generation")
    if waited_s:  # rollouts run beside training: what hides behind it is part of their time
        generation_s = waited_s + training_s + logprobs_s
    found = {
        "tokens_per_sec_per_gpu": (tokens, step_s * devices.all),
        "samples_per_sec_per_gpu": (record.get("performance/samples_per_sec", 0.0), devices.all),
        "policy_training_tokens_per_sec_per_gpu": (tokens, training_s * devices.training),
        "policy_and_reference_logprobs_tokens_per_sec_per_gpu": (tokens, logprobs_s * devices.training),
        "training_worker_group_tokens_per_sec_per_gpu": (tokens, (training_s + logprobs_s) * devices.training),
        "training_worker_group_tokens_per_sec": (tokens, training_s + logprobs_s),
        "generation_tokens_per_sec_per_gpu": (tokens, generation_s * devices.generation),
        "generation_tokens_per_sec": (tokens, generation_s),
        "generated_tokens_per_sec_per_gpu": (sum(responses), generation_s * devices.generation),
        "training_worker_idle_time_ratio": (_idle_s(record, devices), step_s),
    }
    longest = max(responses, default=0)
    if longest:
        places = longest * len(responses)
        found["generation_tail_frac"] = (places - sum(responses), places)
        if devices.engines > 1 and not waited_s and record.get("train/avg_turns_per_sample") == 1:
            found["average_token_imbalance"] = _imbalance(groups, devices.engines)
    return {name: amount / per for name, (amount, per) in found.items() if per > 0}


def _imbalance(groups: Sequence[Sequence[int]], engines: int) -> tuple[float, float]:
    """Tokens that engines could have made while the fullest was at work, and did not, of all that they could: prompts
    go to the engines in turn."""
    loads = [sum(map(sum, groups[engine::engines])) for engine in range(engines)]
    most = max(loads) * engines
    return most - sum(loads), most


def _idle_s(record: Mapping[str, float], devices: Devices) -> float:
    """Seconds of the step in which the devices that train have nothing to do."""
    waited_s = _seconds(record, "exposed_generation")
    if waited_s:
        return waited_s
    rewards_s = _seconds(record, "reward_calculation")
    return rewards_s if devices.are_shared else rewards_s + _seconds(record, "generation")


def _seconds(record: Mapping[str, float], phase: str) -> float:
    return record.get(f"timing/train/{phase}", 0.0)
