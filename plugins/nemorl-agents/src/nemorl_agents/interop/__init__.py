"""Environments and tasks of reasoning-gym, verifiers, NeMo-Gym and OpenEnv for nemorl."""

from nemorl_agents.interop.config import (
    OpenEnvConfig,
    ReasoningGymConfig,
    ReasoningGymTasksConfig,
    VerifiersConfig,
    VerifiersTasksConfig,
)
from nemorl_agents.interop.episodes_config import (
    NemoGymConfig,
    NemoGymTasksConfig,
    StartGymConfig,
    VerifiersEnvConfig,
    VerifiersEnvTasksConfig,
)

__all__ = [
    "NemoGymConfig",
    "NemoGymTasksConfig",
    "OpenEnvConfig",
    "ReasoningGymConfig",
    "ReasoningGymTasksConfig",
    "StartGymConfig",
    "VerifiersConfig",
    "VerifiersEnvConfig",
    "VerifiersEnvTasksConfig",
    "VerifiersTasksConfig",
]
