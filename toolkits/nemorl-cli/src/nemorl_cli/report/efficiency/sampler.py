"""A thread that reads a machine now and then, and keeps the readings until somebody takes them."""

from __future__ import annotations

import threading
import time

from nemorl_cli.report.efficiency.machine import Machine, Reading

FIRST_S = 1.0
"""The first reading, so that short runs have one."""
MAX_SHARE = 1 / 200
"""Of a core that reading may take: where one is dear (thousands of files, a slow driver), the next is put off."""
PATIENCE_S = 5.0
"""Longest wait for a reading under way at the end."""


class Sampler:
    """Readings of a machine every ``every_s`` seconds.

    Example:
        >>> sampler = Sampler(Machine(), every_s=30.0)
        >>> sampler.start()
        >>> sampler.stop()
        >>> sampler.take()
        []
    """

    def __init__(self, machine: Machine, *, every_s: float) -> None:
        self._machine, self._every_s = machine, every_s
        self._readings: list[Reading] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nemorl-sampler", daemon=True)
        self.cost_s = 0.0
        """CPU seconds that reading has taken so far."""

    def start(self) -> None:
        self._thread.start()

    def take(self) -> list[Reading]:
        """The readings since the last call, oldest first."""
        with self._lock:
            taken, self._readings = self._readings, []
        return taken

    def stop(self) -> None:
        """End the thread. Harmless where it has ended."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        try:
            self._machine.open()
            wait_s = min(FIRST_S, self._every_s)
            while not self._stopped.wait(wait_s):
                before_s = time.thread_time()
                reading = self._machine.read()
                with self._lock:
                    self._readings.append(reading)
                took_s = time.thread_time() - before_s
                self.cost_s += took_s
                wait_s = max(self._every_s, took_s / MAX_SHARE)
        except Exception as error:  # of a library or the system: the run goes on without
            self._machine.warn(f"machines are no longer watched: {type(error).__name__}: {error}")
        finally:
            self._machine.close()
