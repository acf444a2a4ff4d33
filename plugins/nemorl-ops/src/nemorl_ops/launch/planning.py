"""Defaults by ``nemorl plan``: nodes, GPUs and a layout, where neither the section ``launch`` nor the run says them.

The planner is asked through a slot. Whatever it chooses is said before anything is submitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from nemorl.base.text.mappings import apply_overrides
from nemorl.base.text.yaml_text import format_yaml
from nemorl.config.load import load_config
from nemorl.errors import ConfigError, UsageError
from nemorl_rl.slots import PLAN_RUN

from nemorl_ops.launch.base import LauncherConfig
from nemorl_ops.launch.section import CLUSTER, on_its_nodes

NODES = (1, 2, 4, 8, 16, 32)
GPUS = (1, 2, 4, 8)
"""Numbers that are tried where nobody says how many: the smallest that fits is taken."""
NEVER_CHANGED = ("cluster.colocated", "cluster.generation_workers", "rollouts.mode")
"""Keys that make it another run, not another layout of this one: only people change them."""


@dataclass(frozen=True)
class Planned:
    """The planner's answer for a job."""

    data: dict[str, Any]
    """The run's config with what it chose."""
    words: str
    """In a line: the devices, the planner's verdict, and every setting that it chose."""
    chosen: Mapping[str, object]
    """Keys of the config that nobody gave and that it set."""
    cannot_fit: bool = False
    """Such a run certainly fails."""


def planned(data: Mapping[str, Any], launcher: LauncherConfig) -> Planned:
    """The run with what the planner chooses; as it is where the planner is not asked or cannot know.

    Args:
        data: The run's config, as it was written, on the launcher's nodes.
        launcher: It says the kind of GPU, and whether to plan at all.
    """
    plan_run, kind = PLAN_RUN.filled(), launcher.gpu_type
    if not launcher.plan or launcher.gpus_per_node == 0:
        return Planned(dict(data), "not asked", {})
    if not launcher.is_uniform:
        return Planned(dict(data), "not asked: the nodes are of two kinds", {})
    if plan_run is None or kind is None:
        missing = "launch.gpu_type, e.g. h100" if plan_run is not None else "pip install nemorl-insight"
        return Planned(dict(data), f"not asked, for want of: {missing}", {})
    is_fixed = all((data.get("cluster") or {}).get(key) is not None for key in CLUSTER.values())
    words, cannot_fit = "not asked: the config has mistakes", False
    for nodes, gpus in _fleets(data):
        try:
            tried = _on(data, launcher, nodes, gpus)
            found = plan_run(load_config(tried, for_cluster=True), nodes, f"{gpus}x{kind}")
        except ConfigError:  # not on so few devices; whoever reads the config says why
            continue
        except UsageError as error:
            return Planned(dict(data), f"not asked: {error.message}", {})
        fitting = _fitting(data, tried, found, f"{_devices(nodes, gpus)} {kind}")
        if fitting is not None:
            return fitting
        words = f"{_devices(nodes, gpus)} {kind}: {found['verdict']}"
        cannot_fit = found["cannot_fit"] or not is_fixed
    return Planned(dict(data), words, {}, cannot_fit)


def _fleets(data: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Nodes and GPUs of each to try, the smallest first."""
    cluster = data.get("cluster") or {}
    nodes, gpus = cluster.get("num_nodes"), cluster.get("gpus_per_node")
    tried = product(NODES if nodes is None else (nodes,), GPUS if gpus is None else (gpus,))
    for count, each in tried:
        if count == 1 or gpus is not None or nodes is not None or each == GPUS[-1]:  # whole nodes before more of them
            yield count, each


def _on(data: Mapping[str, Any], launcher: LauncherConfig, nodes: int, gpus: int) -> dict[str, Any]:
    cluster = {**(data.get("cluster") or {}), "num_nodes": nodes, "gpus_per_node": gpus}
    return on_its_nodes({**data, "cluster": cluster}, launcher)


def _fitting(data: Mapping[str, Any], tried: dict[str, Any], found: dict[str, Any], on: str) -> Planned | None:
    """The run on these devices, if a layout fits that contradicts nothing that was written."""
    written = data.get("cluster") or {}
    chosen: dict[str, object] = {
        f"cluster.{key}": tried["cluster"][key] for key in CLUSTER.values() if written.get(key) is None
    }
    present = found["present"]
    if present["fits"]:
        head = f"{on}: {found['verdict']}, {present['seconds_per_step']:.3g} s a step"
        return Planned(tried, f"{head}; {_set(chosen)}", chosen)
    layout = found["smallest_change"]
    if layout is None or any(_is_written(data, key) or key in NEVER_CHANGED for key in layout):
        return None
    changed = apply_overrides(tried, [f"{key}={format_yaml(value, one_line=True)}" for key, value in layout.items()])
    return Planned(changed, f"{on}: fits with another layout; {_set({**chosen, **layout})}", {**chosen, **layout})


def _is_written(data: Any, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(data, Mapping) or data.get(key) is None:
            return False
        data = data[key]
    return True


def _set(chosen: Mapping[str, object]) -> str:
    said = " ".join(f"{key}={format_yaml(value, one_line=True)}" for key, value in chosen.items())
    return f"chosen: {said}" if said else "nothing was left to choose"


def _devices(nodes: int, gpus: int) -> str:
    return f"{nodes} node{'s' * (nodes > 1)} x {gpus}"
