"""Where a run executes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field

from nemorl.config.base import Config
from nemorl.errors import Problem


class ClusterConfig(Config):
    """Nodes, devices and the launcher that uses them."""

    launcher: Literal["auto", "local"] = "auto"
    """``local``: one process, nothing else started. ``auto``: the smallest launcher that fits."""
    num_nodes: int = Field(1, ge=1)
    """Machines in the run."""
    gpus_per_node: int | None = Field(None, ge=0)
    """GPUs used on each node. Unset: one if the machine has any, else the CPU."""

    @classmethod
    def auto_detect(cls) -> Self:
        """This machine: its GPUs if it has any, else its CPU."""
        return cls(num_nodes=1, gpus_per_node=count_gpus())

    @property
    def world_size(self) -> int:
        """Training processes: one per GPU, or one on CPU."""
        return self.num_nodes * max(1, self.gpus_per_node or 0)

    @property
    def device(self) -> str:
        """torch device string of the local process."""
        gpus = min(1, count_gpus()) if self.gpus_per_node is None else self.gpus_per_node
        return "cuda:0" if gpus else "cpu"

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.num_nodes > 1:
            yield Problem(
                "num_nodes", f"the local launcher runs one process, not {self.num_nodes} nodes", "set num_nodes: 1"
            )
        if (self.gpus_per_node or 0) > max(1, count_gpus()) or (self.gpus_per_node or 0) > 0 == count_gpus():
            yield Problem(
                "gpus_per_node",
                f"asked for {self.gpus_per_node} GPUs, this machine has {count_gpus()}",
                "lower it, or leave it out",
            )


def count_gpus() -> int:
    """GPUs visible to this process, without importing torch (nvidia-smi, then CUDA_VISIBLE_DEVICES)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
