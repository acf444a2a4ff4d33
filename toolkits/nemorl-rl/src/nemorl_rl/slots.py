"""Slots of toolkits and plugins, filled by whichever package is installed for them (:mod:`nemorl.plugins.slots`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.plugins.slots import Slot

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig
    from nemorl.plugins.kinds import DatasetConfig

    from nemorl_rl.agents.gateways import EpisodeGateway, GatewayRules
    from nemorl_rl.curriculum.sampler import PromptSampler
    from nemorl_rl.rollouts.recording import RolloutRecorder

FIND_DATASET: Slot[Callable[[str | Path, Sequence[str]], DatasetConfig]] = Slot("find_dataset")
"""The dataset that a name or path means, given the names of installed ones."""
GATEWAY: Slot[Callable[[GatewayRules], EpisodeGateway]] = Slot("gateway")
"""Lets programs call the policy over HTTP."""
MEMORY_PLAN: Slot[Callable[[RunConfig], dict[str, Any] | None]] = Slot("memory_plan")
"""Memory of a run's fullest device, or ``None`` where it cannot be told."""
OPEN_RECORDS: Slot[Callable[[Any], RolloutRecorder]] = Slot("open_records")
"""The recorder of a trainer's rollouts."""
PLAN_RUN: Slot[Callable[[RunConfig, int | None, str | None], dict[str, Any]]] = Slot("plan_run")
"""The plan of a run on so many machines with such devices (``8xH100``)."""
PROMPT_SAMPLER: Slot[type[PromptSampler]] = Slot("prompt_sampler")
"""``of`` the name of a sampler, as ``data.sampling`` writes it: chooses the prompts of a rollout."""
