"""The hook ``efficiency``: adds rates, waste and readings of the machines to each step's record, and sums a run up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nemorl.plugins.hooks import hookimpl

from nemorl_cli.report.efficiency.machine import Reading
from nemorl_cli.report.efficiency.nodes import Nodes
from nemorl_cli.report.efficiency.rates import STEP, Devices, rates
from nemorl_cli.report.efficiency.totals import Totals


class Disabled:
    """Nothing."""


class Efficiency:
    """One run's account of its time and machines."""

    def __init__(self, sample_every_s: float) -> None:
        """
        Args:
            sample_every_s: Seconds between two readings of a node; 0: none.
        """
        self._every_s = sample_every_s
        self._devices: Devices
        self._nodes: Nodes | None = None
        self._groups: list[list[int]] = []
        """Tokens of the step's responses, by prompt"""
        self._totals = Totals()

    def on_fit_begin(self, trainer: Any) -> None:
        samples = trainer.config.sampler is not None
        engines = trainer.generation.workers.data_parallel_size if samples else 1
        self._devices, self._totals = Devices.of(trainer.config, engines), Totals()
        if self._every_s:
            self._nodes = Nodes(trainer, every_s=self._every_s)

    def on_rollout_end(self, samples: Any) -> None:
        groups: dict[int, list[int]] = {}
        for sample in samples:
            groups.setdefault(sample.prompt.index, []).append(sample.response_tokens)
        self._groups = list(groups.values())

    @hookimpl(tryfirst=True)  # so that other hooks are shown what it adds
    def on_log(self, metrics: dict[str, float]) -> None:
        if STEP in metrics:
            found = rates(metrics, self._devices, self._groups)
            metrics.update({f"performance/{name}": value for name, value in found.items()})
            metrics.update(self._seen())
        self._totals.add(metrics)

    def on_fit_end(self, trainer: Any) -> None:
        self._close()
        if line := self._totals.line:
            trainer.run.console.message(line)
            trainer.progress.latest.update({f"efficiency/{n}": value for n, value in self._totals.figures.items()})

    def on_exception(self) -> None:
        self._close()

    def _seen(self) -> dict[str, float]:
        taken = self._nodes.take() if self._nodes is not None else {}
        return {name: value for number, readings in taken.items() for name, value in system_metrics(number, readings)}

    def _close(self) -> None:
        nodes, self._nodes = self._nodes, None
        if nodes is not None:
            nodes.close()


def system_metrics(number: int, readings: Sequence[Reading]) -> Iterator[tuple[str, float]]:
    """Metrics of a node's readings: means of what is used over time, the largest of what fills up.

    Example:
        >>> readings = [Reading(20.0, 1.0, 8.0, 0.5), Reading(40.0, 3.0, 8.0, 0.25)]
        >>> found = dict(system_metrics(0, readings))
        >>> found["system/node.0.cpu_percent"], found["system/node.0.mem_gib"]
        (30.0, 3.0)
    """
    node, newest = f"system/node.{number}", readings[-1]
    yield f"{node}.cpu_percent", _mean([reading.cpu_percent for reading in readings])
    for name in ("mem_gib", "mem_total_gib", "process_mem_gib"):
        yield f"{node}.{name}", max(getattr(reading, name) for reading in readings)
    for index in range(min(len(reading.gpus) for reading in readings)):
        yield f"{node}.gpu.{index}.util", _mean([reading.gpus[index].util for reading in readings])
        yield f"{node}.gpu.{index}.mem_gib", max(reading.gpus[index].mem_gib for reading in readings)
    if newest.run_dir_gib is not None and newest.disk_free_gib is not None:
        yield "system/run_dir_gib", newest.run_dir_gib
        yield "system/disk_free_gib", newest.disk_free_gib


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
