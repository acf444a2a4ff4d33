"""Readings of a machine against the kernel's own account in /proc, their thread, and GPUs that are none."""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nemorl_cli.report.efficiency.hook import system_metrics
from nemorl_cli.report.efficiency.machine import GIB, GpuReading, Machine, Reading, size_of
from nemorl_cli.report.efficiency.sampler import Sampler


class NVMLError(Exception):
    pass


class LibraryNotFoundError(NVMLError):
    pass


def fake_nvml(init: Callable[[], None], util: Callable[[], float] = lambda: 30.0) -> Any:
    """NVIDIA's module with one GPU that has 2 GiB in use."""
    module: Any = types.ModuleType("pynvml")
    module.NVMLError, module.NVMLError_LibraryNotFound = NVMLError, LibraryNotFoundError
    module.nvmlInit, module.nvmlShutdown = init, lambda: None
    module.nvmlDeviceGetCount, module.nvmlDeviceGetHandleByIndex = lambda: 1, lambda index: index
    module.nvmlDeviceGetUtilizationRates = lambda gpu: types.SimpleNamespace(gpu=util())
    module.nvmlDeviceGetMemoryInfo = lambda gpu: types.SimpleNamespace(used=2 * GIB)
    return module


def of_proc(name: str, key: str) -> int:
    """Bytes that a file of /proc gives in kB under a key."""
    lines = Path("/proc", name).read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="needs Linux")
def test_memory_is_what_the_kernel_says() -> None:
    machine = Machine()
    machine.open()
    reading = machine.read()
    assert reading.mem_total_gib == of_proc("meminfo", "MemTotal:") / GIB
    in_use = of_proc("meminfo", "MemTotal:") - of_proc("meminfo", "MemAvailable:")
    assert reading.mem_gib == pytest.approx(in_use / GIB, abs=1.0)  # other programs go on meanwhile
    assert reading.process_mem_gib == pytest.approx(of_proc("self/status", "VmRSS:") / GIB, abs=0.05)
    assert 0 <= reading.cpu_percent <= 100


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="needs Linux")
def test_the_runs_processes_add_up_and_those_that_have_ended_count_nothing() -> None:
    gone = 2**22 + 1  # above any process id of Linux
    alone, twice = Machine(lambda: [os.getpid(), gone]), Machine(lambda: [os.getpid()] * 2)
    assert twice.read().process_mem_gib == pytest.approx(2 * alone.read().process_mem_gib, rel=0.05)


def test_the_run_directory_is_measured_with_its_folders_and_not_through_links(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "one").write_bytes(b"x" * 1000)
    (tmp_path / "a/b/two").write_bytes(b"x" * 24)
    (tmp_path / "a/again").symlink_to(tmp_path)
    link_bytes = (tmp_path / "a/again").lstat().st_size
    assert size_of(tmp_path) == 1024 + link_bytes
    assert size_of(tmp_path / "nowhere") == 0
    reading = Machine(run_dir=tmp_path).read()
    assert reading.run_dir_gib == (1024 + link_bytes) / GIB
    assert reading.disk_free_gib is not None
    assert reading.disk_free_gib > 0


def test_gpus_are_read_through_nvidias_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(lambda: None))
    machine = Machine()
    machine.open()
    assert machine.read().gpus == (GpuReading(30.0, 2.0),)
    machine.close()


def test_without_a_driver_or_its_package_there_are_no_gpus_and_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def absent() -> None:
        raise LibraryNotFoundError("no libnvidia-ml.so")

    for module in (fake_nvml(absent), None):  # None: importing it fails
        monkeypatch.setitem(sys.modules, "pynvml", module)
        machine = Machine(warn=said.append)
        machine.open()
        assert machine.read().gpus == ()
    assert said == []


def test_a_broken_driver_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def broken() -> None:
        raise NVMLError("Driver/library version mismatch")

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(broken))
    machine = Machine(warn=said.append)
    machine.open()
    assert machine.read().gpus == machine.read().gpus == ()
    assert said == ["GPUs are not watched: NVIDIA's driver says Driver/library version mismatch"]


def test_a_gpu_that_is_lost_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def lost() -> float:
        raise NVMLError("GPU is lost")

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(lambda: None, lost))
    machine = Machine(warn=said.append)
    machine.open()
    assert machine.read().gpus == machine.read().gpus == ()
    assert said == ["GPUs are no longer watched: NVIDIA's driver says GPU is lost"]


class Scripted(Machine):
    """Gives readings 1, 2, 3, … of the CPU, and lets a test wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.warn = self.said.append
        self.read_so_far = 0
        self.is_closed = False
        self.reached = threading.Event()

    def open(self) -> None:
        pass

    def read(self) -> Reading:
        self.read_so_far += 1
        if self.read_so_far == 3:
            self.reached.set()
            raise OSError("the disk is gone")
        return Reading(float(self.read_so_far), 1.0, 8.0, 0.5)

    def close(self) -> None:
        self.is_closed = True


def test_readings_are_handed_over_once_and_a_failure_ends_the_thread_alone() -> None:
    machine = Scripted()
    sampler = Sampler(machine, every_s=0.001)
    sampler.start()
    assert machine.reached.wait(30)
    sampler.stop()
    assert [reading.cpu_percent for reading in sampler.take()] == [1.0, 2.0]
    assert sampler.take() == []
    assert machine.said == ["machines are no longer watched: OSError: the disk is gone"]
    assert machine.is_closed


def test_stopping_ends_the_thread() -> None:
    sampler = Sampler(Machine(), every_s=60.0)
    sampler.start()
    assert "nemorl-sampler" in [thread.name for thread in threading.enumerate()]
    sampler.stop()
    assert "nemorl-sampler" not in [thread.name for thread in threading.enumerate()]
    sampler.stop()


def test_readings_of_a_step_become_its_metrics() -> None:
    one = Reading(20.0, 3.0, 8.0, 0.5, (GpuReading(10.0, 4.0),), 0.25, 90.0)
    two = Reading(60.0, 1.0, 8.0, 0.75, (GpuReading(50.0, 2.0),), 0.5, 80.0)
    assert dict(system_metrics(2, [one, two])) == {
        "system/node.2.cpu_percent": 40.0,
        "system/node.2.mem_gib": 3.0,
        "system/node.2.mem_total_gib": 8.0,
        "system/node.2.process_mem_gib": 0.75,
        "system/node.2.gpu.0.util": 30.0,
        "system/node.2.gpu.0.mem_gib": 4.0,
        "system/run_dir_gib": 0.5,
        "system/disk_free_gib": 80.0,
    }
