"""Names of well-known plugins, and who provides them: the only ones that are known without looking."""

from __future__ import annotations

from collections.abc import Mapping

STANDARD_PLUGINS: Mapping[str, str] = {
    "algorithms:grpo": "nemorl-grpo",
    "algorithms:ppo": "nemorl-ppo",
    "algorithms:sft": "nemorl-sft",
    "algorithms:dpo": "nemorl-preference",
    "algorithms:kto": "nemorl-preference",
    "algorithms:orpo": "nemorl-preference",
    "algorithms:simpo": "nemorl-preference",
    "algorithms:rm": "nemorl-preference",
    "algorithms:distillation": "nemorl-distillation",
    "algorithms:opd": "nemorl-distillation",
    "training_backends:dtensor": "nemorl-dtensor",
    "training_backends:megatron": "nemorl-megatron",
    "generation_backends:hf": "nemorl-dtensor",
    "generation_backends:vllm": "nemorl-vllm",
    "generation_backends:megatron": "nemorl-megatron",
    "generation_backends:server": "nemorl-agents",
    "environments:math": "nemorl-math-env",
    "environments:dapo_math": "nemorl-math-env",
    "environments:multi_reward_math": "nemorl-math-env",
    "environments:reward_model": "nemorl-preference",
    "environments:weighted": "nemorl-tasks",
    "environments:chain": "nemorl-tasks",
    "environments:exact_match": "nemorl-tasks",
    "environments:format": "nemorl-tasks",
    "environments:multiple_choice": "nemorl-tasks",
    "environments:sliding_puzzle": "nemorl-tasks",
    "environments:calculator": "nemorl-tasks",
    "environments:code_jaccard": "nemorl-tasks",
    "environments:retriever": "nemorl-tasks",
    "environments:judge": "nemorl-tasks",
    "environments:code": "nemorl-tasks",
    "environments:function": "nemorl-rl",
    "environments:agent": "nemorl-agents",
    "algorithms:client_loop": "nemorl-agents",
    "environments:reasoning_gym": "nemorl-agents",
    "environments:verifiers": "nemorl-agents",
    "environments:openenv": "nemorl-agents",
    "environments:verifiers_env": "nemorl-agents",
    "environments:nemo_gym": "nemorl-agents",
    "datasets:arithmetic": "nemorl-math-env",
    "datasets:sliding_puzzle": "nemorl-tasks",
    "datasets:calculator": "nemorl-tasks",
    "datasets:reasoning_gym": "nemorl-agents",
    "datasets:client_requests": "nemorl-agents",
    "datasets:verifiers": "nemorl-agents",
    "datasets:verifiers_env": "nemorl-agents",
    "datasets:nemo_gym": "nemorl-agents",
    "datasets:huggingface": "nemorl-tasks",
    "datasets:file": "nemorl-tasks",
    "datasets:preset": "nemorl-tasks",
    "datasets:mixture": "nemorl-tasks",
    "loggers:tensorboard": "nemorl-insight",
    "loggers:wandb": "nemorl-insight",
    "loggers:swanlab": "nemorl-insight",
    "loggers:mlflow": "nemorl-insight",
    "loggers:prometheus": "nemorl-ops",
    "hooks:early_stopping": "nemorl-insight",
    "hooks:logs": "nemorl-insight",
    "hooks:replicate": "nemorl-ops",
    "weight_transports:shared_memory": "nemorl-rl",
    "weight_transports:object_store": "nemorl-rl",
    "weight_transports:cuda_ipc": "nemorl-rl",
    "weight_transports:nccl": "nemorl-rl",
    "commands:quickstart": "nemorl-tasks",
    "commands:doctor": "nemorl-insight",
    "commands:plan": "nemorl-insight",
    "commands:try": "nemorl-insight",
    "commands:engines": "nemorl-agents",
    "commands:serve": "nemorl-agents",
    "commands:launch": "nemorl-ops",
    "commands:view.page": "nemorl-insight",
    "commands:compare.steps": "nemorl-insight",
    "commands:compare.replay": "nemorl-insight",
    "commands:compare.bisect": "nemorl-insight",
    "commands:compare.hindsight": "nemorl-insight",
    "commands:audit": "nemorl-ops",
    "commands:grafana": "nemorl-ops",
    "commands:certs": "nemorl-ops",
    "commands:plugins.sign": "nemorl-ops",
    "commands:plugins.verify": "nemorl-ops",
    "commands:runs.copy": "nemorl-ops",
    "commands:runs.verify": "nemorl-insight",
    "commands:config.migrate": "nemorl-compat",
    "commands:runs.import-checkpoint": "nemorl-compat",
    "commands:plugins.new": "nemorl-testing",
}
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
