"""Data of devices: memory, speed, and links between them, for plans and for utilisation. Imports no torch.

Speeds are those of the vendors' data sheets for dense matrices, links in one direction. Memory is what the driver
reports (``nvidia-smi``), which is less than the name says. Links: NVLink per GPU, else PCI Express; between nodes the
usual network of such machines (one 400 Gb/s port per H100 in a DGX H100, one 200 Gb/s port per A100 in a DGX A100); to
the host's memory what 16 lanes of PCI Express can carry (generation 4: 32 GB/s, 5: 64 GB/s), which no transfer reaches.
``docs/planning.md`` says which figures nobody has looked up.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import UsageError

TIMEOUT_S = 10
GPU_FILES = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Speed:
    """Dense TFLOP/s of matrix products by number format."""

    bfloat16: float
    tf32: float
    """float32 matrices on tensor cores, rounded to 10 bits; PyTorch uses it only where it is told to"""
    float32: float

    def of(self, element: int) -> float:
        """Of matrices whose elements take so many bytes."""
        return self.bfloat16 if element == 2 else self.float32


@dataclass(frozen=True)
class Device:
    """One GPU, or a machine's processor."""

    name: str
    memory_gib: float
    speed: Speed
    memory_gb_s: float
    link_gb_s: float
    """To its neighbours in the node"""
    network_gb_s: float
    """To other nodes, its share"""
    host_gb_s: float
    """To the host's memory"""
    source: str
    is_cpu: bool = False
    island: int = 0
    """Devices that ``link_gb_s`` joins, where these are more than a node's"""


A100, H100 = Speed(312, 156, 19.5), Speed(989.5, 494.5, 67)
TABLE = (
    Device("A100-40GB", 39.6, A100, 1555, 300, 25, 32, "NVIDIA A100 data sheet (SXM4 40 GB)"),
    Device("A100", 79.3, A100, 2039, 300, 25, 32, "NVIDIA A100 data sheet (SXM4 80 GB)"),
    Device("A100-PCIE", 79.3, A100, 1935, 32, 25, 32, "NVIDIA A100 data sheet (PCIe 80 GB)"),
    Device("H100", 79.6, H100, 3350, 450, 50, 64, "NVIDIA H100 data sheet (SXM5)"),
    Device("H100-PCIE", 79.6, Speed(756.5, 378, 51), 2000, 64, 25, 64, "NVIDIA H100 data sheet (PCIe)"),
    Device("H100-NVL", 93.6, Speed(835, 417.5, 60), 3900, 300, 50, 64, "NVIDIA H100 data sheet (NVL)"),
    Device("H800", 79.6, H100, 3350, 200, 50, 64, "as H100 with half the NVLink"),
    Device("H20", 95.6, Speed(148, 74, 44), 4000, 450, 50, 64, "pages of resellers; TF32 and float32 unverified"),
    Device("H200", 140.4, H100, 4800, 450, 50, 64, "NVIDIA H200 data sheet (SXM5)"),
    Device("B200", 179.1, Speed(2250, 1100, 80), 7700, 900, 50, 64, "NVIDIA HGX B200 data sheet"),
    Device("B300", 268.0, Speed(2250, 1125, 75), 8000, 900, 100, 64, "NVIDIA HGX B300 data sheet, as others quote it"),
    Device(
        "GB200", 185.0, Speed(2450, 1250, 80), 8000, 900, 50, 450, "NVIDIA GB200 NVL72 data sheet, per GPU", island=72
    ),
    Device("GB300", 268.0, Speed(2450, 1250, 80), 8000, 900, 100, 450, "unverified", island=72),
    Device("L40S", 45.0, Speed(362, 183, 91.6), 864, 32, 12.5, 32, "NVIDIA L40S data sheet"),
    Device("L4", 22.5, Speed(121, 60, 30.3), 300, 32, 12.5, 32, "NVIDIA L4 data sheet"),
    Device("A10", 22.5, Speed(125, 62.5, 31.2), 600, 32, 12.5, 32, "NVIDIA A10 data sheet"),
    Device("A10G", 22.5, Speed(70, 35, 31.5), 600, 32, 12.5, 32, "memory: Baseten; speeds unverified"),
    Device("A40", 44.9, Speed(149.7, 74.8, 37.4), 696, 32, 12.5, 32, "NVIDIA A40 data sheet"),
    Device(
        "RTX-4090", 24.0, Speed(165, 82.6, 82.6), 1008, 32, 12.5, 32, "NVIDIA Ada white paper, float32 accumulation"
    ),
    Device("RTX-3090", 24.0, Speed(71, 35.6, 35.6), 936, 32, 12.5, 32, "NVIDIA Ampere GA102 white paper"),
    Device("RTX-6000-ADA", 47.5, Speed(182, 91, 91), 960, 32, 12.5, 32, "NVIDIA Ada white paper, float32 accumulation"),
    Device("RTX-A6000", 47.5, Speed(155, 77.4, 38.7), 768, 32, 12.5, 32, "NVIDIA RTX A6000 data sheet"),
)
CORE_TFLOPS = 0.2
"""Of one server core with 512-bit vectors, bfloat16 (docs/results/smollm2-grpo.md measures 0.19 to 0.39)."""
CORE_GB_S = 10.0


@dataclass(frozen=True)
class Fleet:
    """The devices of a run."""

    device: Device
    nodes: int
    per_node: int

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    @property
    def island(self) -> int:
        """Neighbours that are joined by more than the network: a node, or a rack of nodes."""
        return max(self.per_node, self.device.island)

    def link_gb_s(self, ranks: int) -> float:
        """Of each device, among so many that are neighbours."""
        return self.device.link_gb_s if ranks <= self.island else self.device.network_gb_s


def device_named(name: str) -> Device:
    """A device of the table, whatever the case and the dashes.

    Raises:
        UsageError: The table has none of this name.
    """
    if _plain(name) == "cpu":
        return this_cpu()
    for device in TABLE:
        if _plain(device.name) == _plain(name) or _plain(device.name + "80GB") == _plain(name):
            return device
    known = [device.name for device in TABLE] + ["CPU"]
    raise UsageError(
        f"no device {name!r} in the table",
        fix=did_you_mean(name.upper(), known)
        or f"it has {', '.join(known)}; for another one, name the closest and add --gpu-memory",
    )


def parse_fleet(nodes: int, gpus: str) -> Fleet:
    """``8xH100`` or ``H100`` on each of so many nodes.

    Raises:
        UsageError: It is not of that form, or no such device is known.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*[xX*]\s*)?([A-Za-z][\w .-]*?)\s*", gpus)
    if match is None or match[1] == "0":
        raise UsageError(f"--gpus {gpus!r} is not a number and a device", fix="write e.g. --gpus 8xH100")
    return Fleet(device_named(match[2]), nodes, int(match[1] or 1))


def shared_by(device: Device, workers: int) -> Device:
    """The device as each of so many workers has it."""
    speed = Speed(*(value / workers for value in astuple(device.speed)))
    memory_gb_s = device.memory_gb_s / workers
    return replace(device, memory_gib=device.memory_gib / workers, speed=speed, memory_gb_s=memory_gb_s)


def with_memory(fleet: Fleet, gib: float | None) -> Fleet:
    """The same with devices of another memory."""
    return fleet if gib is None else replace(fleet, device=replace(fleet.device, memory_gib=gib))


def this_cpu() -> Device:
    """This machine's memory and cores, as far as the process may use them."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    speed = Speed(CORE_TFLOPS * cores, CORE_TFLOPS * cores / 2, CORE_TFLOPS * cores / 2)
    return Device("CPU", _memory_gib(), speed, CORE_GB_S * cores, 5.0, 1.0, CORE_GB_S, "this machine", is_cpu=True)


def this_gpu() -> Device | None:
    """This machine's GPU as the table has it; ``None`` where it has none or the table does not know it.

    The driver's files are read first, which takes no time; ``nvidia-smi`` is asked where there are none.
    """
    names = [_model_of(path) for path in sorted(GPU_FILES.glob("*/information"))] or _ask_driver()
    return named_by_driver(names[0]) if names else None


def named_by_driver(name: str) -> Device | None:
    """A device of the table by the driver's name for it, e.g. ``NVIDIA A100-SXM4-40GB``."""
    heard = set(re.findall(r"[a-z0-9]+", name.lower()))
    known = [device for device in TABLE if set(device.name.lower().split("-")) <= heard]
    return max(known, key=lambda device: len(device.name), default=None)


def _model_of(path: Path) -> str:
    try:
        found = re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


def _ask_driver() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=False).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []


def _memory_gib() -> float:
    """Of this machine, within the limit of a container."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = ""
    return round((min(total, int(limit)) if limit.isdigit() else total) / 2**30, 1)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("nvidia", "").replace("geforce", ""))
