"""Where a node is in its cluster, as custom resources of Ray.

Whoever places workers can then ask for nodes of one NVLink domain, one switch or one segment:
``ray.remote(resources={"nvlink_domain_1b2c-3": 1})``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping

_FABRIC = re.compile(r"^\s*(ClusterUUID|CliqueId)\s*:\s*(\S+)", re.MULTILINE)
NO_DOMAIN = "00000000"
"""How the UUID of a GPU begins that is in no domain."""
LONGEST_PROBE_S = 60


def resources(
    rank: int,
    gpus: int,
    variables: Mapping[str, str],
    fabric: str,
    segment_size: int | None,
    role: str | None = None,
) -> dict[str, float]:
    """Custom resources of a node.

    Args:
        rank: Of the node in its job.
        gpus: Its number of GPUs.
        variables: Its environment, where Slurm says which switches are above it.
        fabric: What ``nvidia-smi -q`` prints there.
        segment_size: Nodes of a segment of the job; ``None``: it has none.
        role: ``training`` or ``generation``, where nodes are for one of them.

    Returns:
        Resource names with amounts: one per GPU of an NVLink domain, one per node of a switch or segment.

    >>> resources(5, 4, {"SLURM_TOPOLOGY_ADDR": "spine.leaf2.n5", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"},
    ...           "ClusterUUID : 1b2c3d4e-aa\\nCliqueId : 3", segment_size=4)
    {'nvlink_domain_1b2c3d4e-3': 4.0, 'switch_spine': 1.0, 'switch_leaf2': 1.0, 'segment_1': 1.0}
    """
    found: dict[str, float] = {}
    facts = dict(reversed(_FABRIC.findall(fabric)))  # of the first GPU
    domain = facts.get("ClusterUUID", "N/A")
    if gpus and domain != "N/A" and not domain.startswith(NO_DOMAIN):
        found[f"nvlink_domain_{domain[:8]}-{facts.get('CliqueId', '0')}"] = float(gpus)
    names = variables.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = variables.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    for name, kind in zip(names, kinds, strict=False):
        if kind == "switch" and name:
            found[f"switch_{name}"] = 1.0
    if segment_size is not None:
        found[f"segment_{rank // segment_size}"] = 1.0
    if role is not None:
        found[f"nemorl_{role}"] = 1.0
    return found


def fabric_of_this_machine() -> str:
    """The output of ``nvidia-smi -q``; nothing where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, "-q"], capture_output=True, text=True, timeout=LONGEST_PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
