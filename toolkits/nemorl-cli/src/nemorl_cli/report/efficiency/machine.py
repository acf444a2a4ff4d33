"""Readings of one machine: cores, memory, the run's processes, GPUs. psutil and NVML are loaded when reading begins."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GIB = 2**30


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment."""

    util: float
    """Percent of the time in which a kernel ran"""
    mem_gib: float


@dataclass(frozen=True, slots=True)
class Reading:
    """A machine at one moment."""

    cpu_percent: float
    """Of all cores, since the reading before"""
    mem_gib: float
    mem_total_gib: float
    process_mem_gib: float
    """Resident memory of the run's processes"""
    gpus: tuple[GpuReading, ...] = ()
    run_dir_gib: float | None = None
    disk_free_gib: float | None = None


@dataclass
class Machine:
    """The machine that this process is on. All its methods are called from one thread."""

    pids: Callable[[], Collection[int]] = lambda: [os.getpid()]
    """Processes of the run on this machine."""
    run_dir: Path | None = None
    """Where the run's files are; unset where another node knows."""
    warn: Callable[[str], None] = print
    """Told in one line of what cannot be read."""
    _gpus: Sequence[Any] = field(default=(), init=False)

    def open(self) -> None:
        """Begin: the use of cores is counted from here."""
        import psutil

        psutil.cpu_percent(None)
        self._gpus = self._found_gpus()

    def read(self) -> Reading:
        """The current readings."""
        import psutil

        memory = psutil.virtual_memory()
        return Reading(
            cpu_percent=psutil.cpu_percent(None),
            mem_gib=(memory.total - memory.available) / GIB,
            mem_total_gib=memory.total / GIB,
            process_mem_gib=sum(map(_resident, self.pids())) / GIB,
            gpus=self._read_gpus(),
            run_dir_gib=None if self.run_dir is None else size_of(self.run_dir) / GIB,
            disk_free_gib=None if self.run_dir is None else psutil.disk_usage(str(self.run_dir)).free / GIB,
        )

    def close(self) -> None:
        """Let go of the GPUs' driver."""
        if self._gpus:
            import pynvml

            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
            self._gpus = ()

    def _found_gpus(self) -> Sequence[Any]:
        """Handles of this machine's GPUs; none without NVIDIA's driver or its Python package."""
        try:
            import pynvml
        except ImportError:
            return ()
        try:
            pynvml.nvmlInit()
            return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError_LibraryNotFound:
            return ()  # no driver: a machine without such GPUs
        except pynvml.NVMLError as error:
            self.warn(f"GPUs are not watched: NVIDIA's driver says {error}")
            return ()

    def _read_gpus(self) -> tuple[GpuReading, ...]:
        if not self._gpus:
            return ()
        import pynvml

        try:
            return tuple(
                GpuReading(
                    float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu), pynvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB
                )
                for gpu in self._gpus
            )
        except pynvml.NVMLError as error:
            self.warn(f"GPUs are no longer watched: NVIDIA's driver says {error}")
            self.close()
            return ()


def _resident(pid: int) -> int:
    """Bytes; 0 of a process that has ended."""
    import psutil

    try:
        found: int = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
    return found


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder. What vanishes meanwhile does not count."""
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    total += size_of(Path(entry.path))
                else:
                    total += entry.stat(follow_symlinks=False).st_size
    return total
