"""NeMo-Gym: the servers to start, and the rows that they play."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.old_config import OldConfig

GYM_NAME, GYM_DATASET = "nemo_gym", "NemoGymDataset"
THEIR_MODEL = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
OUR_MODEL = "responses_api_models/openai_model/configs/openai_model.yaml"
"""Gym's model server for NeMo RL asks the engine for token ids; nemorl has them, and needs one that forwards."""
GYM_SERVERS = ("resources_servers", "responses_api_agents")


def gym_environment(old: OldConfig, new: Pieces) -> None:
    """The environment, with the servers of the config."""
    paths = old.get("env.nemo_gym.config_paths")
    if not isinstance(paths, list) or THEIR_MODEL not in paths:
        new.miss("env.nemo_gym.config_paths", f"NeMo-Gym without {THEIR_MODEL}")
        return
    start: dict[str, Any] = {"config_paths": [OUR_MODEL if path == THEIR_MODEL else path for path in paths]}
    overrides = list(_overrides(old))
    if overrides:
        start["overrides"] = overrides
    new.put("environment", {"name": GYM_NAME, "start": start})
    new.differ("env.nemo_gym.config_paths", "Gym is started where nemorl is, by `ng_run` (environment.start)")


def _overrides(old: OldConfig) -> Iterator[str]:
    """Settings of servers, as arguments of Gym's command."""
    for key, value in old.leaves.items():
        path = key.removeprefix("env.nemo_gym.")
        if path != key and path.split(".")[1:2] in ([name] for name in GYM_SERVERS):
            yield f"++{path}={json.dumps(value)}"
