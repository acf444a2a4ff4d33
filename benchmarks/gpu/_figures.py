"""What the parts of the GPU check share: figures that are on disk at once, cases that fail alone, time and memory."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from nemorl_testing import simulated_device

ERROR_LINES = 12
"""Of a failed case's traceback that are kept."""


class Figures:
    """What a part measured, in a file that is complete after each figure: a part may be stopped at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._figures: dict[str, Any] = {}
        self._failures: dict[str, str] = {}
        self._write()

    def add(self, name: str, value: Any) -> None:
        """One figure, or a mapping of several."""
        self._figures[name] = value
        print(f"{name}: {value}", flush=True)
        self._write()

    def require(self, name: str, value: float, at_most: float) -> None:
        """A figure that is a failure where it is larger."""
        self.add(name, value)
        if not value <= at_most:
            self._failures[name] = f"{value:.4g}, at most {at_most:.4g} was expected"
            self._write()

    def fail(self, name: str, message: str) -> None:
        """Something that went wrong."""
        self._failures[name] = message
        self._write()

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Within it an error ends this case alone."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            lines = traceback.format_exception(error)
            self.fail(name, "".join(lines[-ERROR_LINES:]))
        finally:
            free()

    def _write(self) -> None:
        self._path.write_text(json.dumps({"figures": self._figures, "failures": self._failures}))


def parse() -> argparse.Namespace:
    """``--device``, ``--json`` and ``--small``, with ``figures`` made."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a trial on the CPU")
    options = parser.parse_args()
    options.figures = Figures(options.json)
    if options.device == simulated_device.DEVICE:
        simulated_device.install()
    options.is_cuda = options.device.startswith("cuda")
    if options.is_cuda:
        torch.cuda.set_device(options.device)
    return options


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def free() -> None:
    """Give back what nobody uses."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def seconds(work: Callable[[], Any], *, warm_up: int = 2, repeats: int = 5) -> float:
    """Median wall seconds of a call, to the end of what it starts on the GPU."""
    for _ in range(warm_up):
        work()
    times = []
    for _ in range(repeats):
        synchronize()
        start_s = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


@contextmanager
def peak_bytes(device: str) -> Iterator[Callable[[], int]]:
    """How many bytes were allocated on the GPU at most, above those at the beginning; 0 on the CPU."""
    if device == "cpu":
        yield lambda: 0
        return
    free()
    memory: Any = torch.get_device_module(device)
    memory.reset_peak_memory_stats(device)
    before = memory.memory_allocated(device)
    yield lambda: memory.max_memory_allocated(device) - before
