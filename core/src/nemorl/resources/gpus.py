"""The GPUs of this machine, counted without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache


def count_gpus() -> int:
    """GPUs visible to this process, without importing torch (nvidia-smi, then CUDA_VISIBLE_DEVICES)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    tool = shutil.which("nvidia-smi")
    return _gpus_listed_by(tool) if tool is not None else 0


@cache
def _gpus_listed_by(tool: str) -> int:
    listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
