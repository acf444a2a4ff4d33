"""Facts about this machine, read without importing torch or ray. Judges nothing: :mod:`surroundings` does."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from nemorl.config.cluster import count_gpus

SHARED_MEMORY = Path("/dev/shm")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "RAY_ADDRESS",
    "TRANSFORMERS_OFFLINE",
)
"""Environment variables that change what a run does. Never those that hold a secret."""
TIMEOUT_S = 10
"""For one call of nvidia-smi."""

_CUDA = re.compile(r"CUDA(?: UMD)? Version\s*:\s*(\d+\.\d+)")


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU."""

    name: str
    memory_gib: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about one machine, as a process in ``folder`` sees it."""

    python: tuple[int, int, int]
    cpus: int
    """Cores that this process may use."""
    gpus: int = 0
    """Visible GPUs: what a run would use."""
    devices: tuple[Device, ...] = ()
    """All GPUs that the driver knows."""
    driver: str | None = None
    driver_cuda: str | None = None
    """The newest CUDA that the driver runs."""
    driver_error: str | None = None
    """Output of nvidia-smi where it is installed and failed."""
    memory_gib: float | None = None
    memory_free_gib: float | None = None
    disk_free_gib: float
    """Where runs go."""
    shared_memory_free_gib: float | None = None
    """Of ``/dev/shm``; None where there is none."""
    open_files: int | None = None
    """The hard limit, up to which Ray raises the soft one."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Those of ``VARIABLES`` that are set."""
    ray_reachable: bool | None = None
    """Whether something listens at RAY_ADDRESS; None if it names no host."""
    ray_command: Path | None = None
    """The ``ray`` that PATH finds."""
    scripts: Path | None = None
    """Where this environment keeps its commands."""

    @classmethod
    def read(cls, folder: Path) -> Machine:
        """This machine, with runs below ``folder``."""
        environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        gpus, driver_error = _visible_gpus()
        devices, driver, driver_cuda = _ask_driver() if driver_error is None else ((), None, None)
        memory, memory_free = _memory()
        command = shutil.which("ray")
        return cls(
            python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
            cpus=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
            gpus=gpus,
            devices=devices,
            driver=driver,
            driver_cuda=driver_cuda,
            driver_error=driver_error,
            memory_gib=memory,
            memory_free_gib=memory_free,
            disk_free_gib=_gib(shutil.disk_usage(folder).free),
            shared_memory_free_gib=_gib(shutil.disk_usage(SHARED_MEMORY).free) if SHARED_MEMORY.is_dir() else None,
            open_files=_open_files(),
            environment=environment,
            ray_reachable=answers(environment.get("RAY_ADDRESS", "")),
            ray_command=Path(command) if command else None,
            scripts=Path(sysconfig.get_path("scripts")),
        )


def answers(address: str, timeout_s: float = 2.0) -> bool | None:
    """Whether something listens at ``host:port`` or ``ray://host:port``; None where the address names no host."""
    try:
        parts = urlsplit(address if "://" in address else f"ray://{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return False
    if not host or port is None:  # auto, local
        return None
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def parse_devices(listing: str) -> tuple[tuple[Device, ...], str | None]:
    """Devices and driver version of ``nvidia-smi --query-gpu=name,memory.total,driver_version`` as CSV, in MiB."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line.count(",") == 2]
    devices = tuple(Device(name, round(float(mib) / 1024, 1) if _is_number(mib) else 0.0) for name, mib, _ in rows)
    return devices, rows[0][2] if rows else None


def parse_cuda(summary: str) -> str | None:
    """The CUDA version in the head of plain ``nvidia-smi``."""
    found = _CUDA.search(summary)
    return found[1] if found else None


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _visible_gpus() -> tuple[int, str | None]:
    """Visible GPUs, and what is wrong with nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return 0, str(error)
        if done.returncode != 0:
            return 0, (done.stdout + done.stderr).strip().partition("\n")[0] or f"exit code {done.returncode}"
    return count_gpus(), None


def _ask_driver() -> tuple[tuple[Device, ...], str | None, str | None]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return (), None, None
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        listing, summary = (
            subprocess.run([tool, *options], capture_output=True, text=True, timeout=TIMEOUT_S, check=False).stdout
            for options in (query, [])
        )
    except (OSError, subprocess.TimeoutExpired):
        return (), None, None
    devices, driver = parse_devices(listing)
    return devices, driver, parse_cuda(summary)


def _memory() -> tuple[float | None, float | None]:
    """(total, available) in GiB, within the limit of a container."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None, None
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    total = min(total, int(limit)) if limit.isdigit() else total
    available = re.search(r"^MemAvailable:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return _gib(total), min(_gib(int(available[1]) * 1024), _gib(total)) if available else None


def _open_files() -> int | None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _gib(size: int) -> float:
    return round(size / 2**30, 1)
