"""The device and its ceilings: matrix products on random data, copies within the GPU and across the bus."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from _figures import parse, seconds

PACKAGES = ("torch", "triton", "transformers", "peft", "safetensors", "flash-attn", "nemorl-core", "numpy", "pydantic")
BUS_BYTES = 2**28
ASKED = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,pcie.link.gen.max,pcie.link.width.max"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "-"
    return {**found, "cuda": str(torch.version.cuda)}


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def driver() -> str:
    """What nvidia-smi says of the devices, a line each."""
    try:
        command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {error}"


def matmul_tflops(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Of square matrices of random numbers: zeros are faster."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b) / 1e12


def copy_gb_s(count: int, device: torch.device) -> float:
    """Within the device's memory; a copy reads and writes every byte."""
    one, other = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * count / seconds(lambda: other.copy_(one)) / 1e9


def main() -> None:
    options = parse()
    figures, device = options.figures, torch.device(options.device)
    figures.add("versions", versions())
    figures.add("processor", f"{processor()}, {os.cpu_count()} cores")
    if options.is_cuda:
        facts = torch.cuda.get_device_properties(device)
        figures.add("device", facts.name)
        figures.add("driver", driver())
        figures.add("memory_gib", round(facts.total_memory / 2**30, 1))
        figures.add("capability", f"{facts.major}.{facts.minor}, {facts.multi_processor_count} multiprocessors")
    size = 256 if options.small else 8192
    for name in ("bfloat16", "float32"):
        with figures.case(f"matmul {name}"):
            figures.add(f"matmul_{name}_tflops", round(matmul_tflops(size, getattr(torch, name), device), 3))
    with figures.case("copies"):
        figures.add("copy_gb_s", round(copy_gb_s(2**20 if options.small else 2**31, device), 1))
    for kind in ("pinned", "pageable") if options.is_cuda else ():
        with figures.case(f"bus, {kind}"):
            host = torch.empty(BUS_BYTES, dtype=torch.uint8, pin_memory=kind == "pinned")
            there = torch.empty(BUS_BYTES, dtype=torch.uint8, device=device)
            for name, source, target in (("to_gpu", host, there), ("from_gpu", there, host)):
                copied_s = seconds(partial(target.copy_, source))
                figures.add(f"{name}_{kind}_gb_s", round(BUS_BYTES / copied_s / 1e9, 1))


if __name__ == "__main__":
    main()
