"""Names of well-known plugins, and who provides them: the only ones that are known without looking."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

LISTED = Path(__file__).with_name("plugins.json")
"""An index of plugins, of all that is made where nemorl-core is: ``docs/generate_directory.py`` writes it."""


def _listed() -> Mapping[str, str]:
    plugins = json.loads(LISTED.read_bytes())["index"]["plugins"]
    kinds = ((each["name"], *named) for each in plugins for named in each["parts"].items())
    return {f"{kind}:{name}": distribution for distribution, kind, names in kinds for name in names}


STANDARD_PLUGINS = _listed()
"""Which distribution provides a well-known name: used in hints only, never to choose a plugin."""

EXTRAS = {
    "nemorl-vllm": "vllm",
    "nemorl-agents": "agents",
    "nemorl-insight": "insight",
    "nemorl-ops": "ops",
    "nemorl-compat": "migrate",
    "nemorl-testing": "dev",
}
"""Distributions that ``pip install nemorl`` leaves out, and the extra that brings each."""

DEFAULT_PLUGINS: Mapping[str, str] = {"training_backends": "dtensor", "generation_backends": "hf"}
"""Default plugin of each kind, for runs that name none."""


def how_to_install(distribution: str) -> str:
    """
    >>> how_to_install("nemorl-insight"), how_to_install("nemorl-megatron")
    ("pip install 'nemorl[insight]'", 'pip install nemorl-megatron')
    """
    return f"pip install 'nemorl[{EXTRAS[distribution]}]'" if distribution in EXTRAS else f"pip install {distribution}"


# Distributions of before 0.1.0 by their names of then, which records, locks and settings may hold


_SINCE = {
    "nemorl-core": ("base",),
    "nemorl-rl": ("transports",),
    "nemorl-trust": ("isolation",),
    "nemorl-cli": ("commands", "report"),
    "nemorl-testing": ("authoring",),
    "nemorl-preference": ("dpo", "rm"),
    "nemorl-tasks": ("environments", "code-env", "datasets", "quickstart"),
    "nemorl-agents": ("agent-env", "gateway", "interop-envs", "server-engine"),
    "nemorl-insight": ("view", "diff", "doctor", "plan", "loggers", "hooks"),
    "nemorl-ops": ("launch", "replicate", "prometheus", "site"),
}
_OF = {f"nemorl-{old}": new for new, names in _SINCE.items() for old in names}


def todays_name(distribution: str) -> str:
    """
    >>> todays_name("nemorl-view"), todays_name("nemorl-grpo")
    ('nemorl-insight', 'nemorl-grpo')
    """
    return _OF.get(distribution, distribution)


def todays_id(name: str) -> str:
    """Of ``distribution:name``, or of a name alone.

    >>> todays_id("nemorl-environments:chain"), todays_id("chain")
    ('nemorl-tasks:chain', 'chain')
    """
    distribution, colon, rest = name.partition(":")
    return f"{todays_name(distribution)}:{rest}" if colon else name
