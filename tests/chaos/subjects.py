"""The runs that meet blows: one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blows import LOCAL, ON_RAY
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_rl.models.tiny_sight import write_tiny_sight

HERE = Path(__file__).parent
CHILDREN = ("kill child", "kill child", "freeze child")
WIRE = ("cut wire", "cut wire", "reset wire")


@dataclass(frozen=True)
class Subject:
    """A run: what its settings say beyond those of the first, what befalls it, and what it promises."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """``{address}`` is that of the stand-in, ``{here}`` this folder."""
    blows: tuple[str, ...] = LOCAL
    stand_in: str = ""
    has_reward: bool = True
    is_exact: bool = True
    """Its results are promised to the byte; not those of agents and asynchronous runs, where who was first decides."""
    inexact_after: tuple[str, ...] = ()
    """Blows after which they are not: what a grader or a judge did not say in time cannot be learnt from."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of the model, where the smallest does not do."""
    sees: bool = False
    """Its model does."""
    imports: tuple[str, ...] = ()
    """Modules that are warm before the first life."""

    def write_model(self, path: Path, **sizes: int) -> Path:
        """Its model, of these sizes where it has none of its own."""
        return write_tiny_sight(path) if self.sees else write_tiny_model(path, **{**sizes, **self.sizes})

    @property
    def has_nodes(self) -> bool:
        return self.stand_in == "nodes"

    @property
    def is_on_ray(self) -> bool:
        return self.settings.get("cluster", {}).get("launcher") == "ray"


RAY = {"launcher": "ray", "cpus_per_worker": 0.5, "worker_timeout_s": 45.0, "max_restarts": 20}
ASYNC = {"rollouts": {"mode": "async", "max_staleness": 1}, "importance_correction": "truncated"}
NODES = {
    **{**RAY, "address": "{address}", "security": {"plaintext": True, "token_auth": False}},
    **{"num_nodes": 2, "workers_per_node": 1, "colocated": False},
}
ON_NODES = (
    "kill driver",
    "cut node",
    "cut node",
    "cut node",
    "freeze node",
    "kill node",
    "drain node",
    "headless node",
    "kill trainer",
    "kill trainer",
    "kill generator",
    "kill generator",
)
SEEN = {
    "data": {"name": "drawings", "num_train": 16, "num_validation": 2},
    "policy": {"max_sequence_tokens": 64, "media": {"train": ["connector", "tower"]}},
}
LATE = {"timeout_s": 8}
"""Of graders and programs: short, for they are frozen."""
JUDGED = {"name": "judge", "url": "http://{address}/v1", "model": "stand-in", "deadline_s": 10.0}
SERVED = {
    "name": "server",
    "urls": ["http://{address}"],
    "check_weights_gib": 0,
    "timeout_s": 4,
    "reconnect_timeout_s": 8,
}
REPLICA = {
    **{"name": "replicate", "to": "s3://chaos/runs", "timeout_s": 2.0, "attempts": 2, "wait_at_end_s": 10.0},
    "options": {"client_kwargs": {"endpoint_url": "http://{address}"}},
}
VLLM = {"generation": {"backend": {"name": "vllm", "kv_cache_gib": 0.1}}}
FOR_VLLM = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
SUBJECTS: dict[str, Subject] = {
    "grpo": Subject(),
    "sft": Subject({"algorithm": "sft"}, has_reward=False),
    "images": Subject(SEEN, sees=True),
    "saving beside the step": Subject({"checkpoint": {"asynchronous": True}}),
    "megatron": Subject({"policy": {"backend": "megatron"}}),
    "math environment": Subject(
        {"environment": {"name": "formulas", **LATE}},
        (*LOCAL, *CHILDREN),
        has_reward=False,
        inexact_after=("freeze child",),
    ),
    "code environment": Subject(
        {"environment": {"name": "digit-programs", **LATE}},
        (*LOCAL, *CHILDREN),
        has_reward=False,
        inexact_after=("kill child", "freeze child"),
    ),
    "judge": Subject(
        {"environment": JUDGED}, (*LOCAL, *WIRE), "judge", has_reward=False, inexact_after=("cut wire", "reset wire")
    ),
    "agents that fork": Subject({"environment": {"name": "drafts"}}, has_reward=False, is_exact=False),
    "agent programs": Subject(
        {
            "environment": {
                "name": "agent",
                "command": ["python", "-S", "{here}/agent.py"],
                "reward": "{here}/agent.py:digits",
                **LATE,
            }
        },
        (*LOCAL, *CHILDREN),
        has_reward=False,
        is_exact=False,
    ),
    "served engine": Subject(
        {"generation": {"backend": SERVED}, "rollouts": {"mismatch_limit": None}}, (*LOCAL, *WIRE), "engine"
    ),
    "replicas": Subject(
        {"checkpoint": {"asynchronous": True}, "plugins": {"hooks": [REPLICA]}}, (*LOCAL, *WIRE), "store"
    ),
    "vllm": Subject(VLLM, sizes=FOR_VLLM, imports=("vllm", "nemorl_vllm.generation")),
    "vllm on ray": Subject(
        {**VLLM, "cluster": {**RAY, "workers_per_node": 2, "colocated": False, "worker_timeout_s": 90.0}},
        ("kill driver", "kill trainer", "kill generator", "kill generator", "freeze generator"),
        sizes=FOR_VLLM,
    ),
    "grpo on ray": Subject({"cluster": {**RAY, "gpus_per_node": 0}}, ON_RAY),
    "asynchronous on ray": Subject(
        {"cluster": {**RAY, "workers_per_node": 2, "colocated": False}, **ASYNC}, ON_RAY, is_exact=False
    ),
    "grpo on two nodes": Subject({"cluster": NODES}, ON_NODES, "nodes"),
    "asynchronous on two nodes": Subject({"cluster": NODES, **ASYNC}, ON_NODES, "nodes", is_exact=False),
}
