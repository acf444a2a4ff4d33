"""Distributions of before 0.1.0 by their names of then, which records, locks and settings may hold."""

from __future__ import annotations

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
