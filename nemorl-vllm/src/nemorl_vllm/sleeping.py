"""An engine that gives its memory back while others work (``SleepingBackend``): one way per kind of device.

On CUDA vLLM does it, in an allocator of its own that keeps addresses and lets go of the memory behind them; that must
be asked for when the engine is built. On a CPU vLLM cannot: there the worker moves the memory below weights and cache,
but for packed weights (``packed``), which stay at level 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nemorl.errors import BackendError

if TYPE_CHECKING:
    from nemorl.contracts.memory import MemoryPart

TAGS: Mapping[MemoryPart, str] = {"weights": "weights", "cache": "kv_cache"}
"""vLLM's names of what sleeps."""


class Sleep(Protocol):
    """Runs on the engine's thread, between two steps."""

    forgets_asleep: bool
    """Asleep at level 1, it lets go of its copy of the weights when it is told to sleep at level 2."""

    def sleep(self, engine: Any, level: Literal[1, 2]) -> None: ...

    def wake(self, engine: Any, parts: Sequence[MemoryPart]) -> None: ...

    def held(self, counted: Mapping[MemoryPart, int], away: Collection[MemoryPart]) -> dict[MemoryPart, int]:
        """Bytes that are held, of those that tensors say they have while some parts sleep."""
        ...


class VLLMSleep:
    """vLLM's sleep mode."""

    forgets_asleep = False

    def sleep(self, engine: Any, level: Literal[1, 2]) -> None:
        engine.sleep(level)

    def wake(self, engine: Any, parts: Sequence[MemoryPart]) -> None:
        engine.wake_up(tags=[TAGS[part] for part in parts if part in TAGS])

    def held(self, counted: Mapping[MemoryPart, int], away: Collection[MemoryPart]) -> dict[MemoryPart, int]:
        """The memory behind addresses goes, and tensors keep their sizes."""
        return {part: 0 if part in away else size for part, size in counted.items()}


class ParkedMemory:
    """The worker's own way."""

    forgets_asleep = True

    def sleep(self, engine: Any, level: Literal[1, 2]) -> None:
        engine.reset_prefix_cache()
        engine.reset_encoder_cache()
        engine.collective_rpc("nemorl_sleep", args=(level,))

    def wake(self, engine: Any, parts: Sequence[MemoryPart]) -> None:
        engine.collective_rpc("nemorl_wake", args=(list(parts),))

    def held(self, counted: Mapping[MemoryPart, int], away: Collection[MemoryPart]) -> dict[MemoryPart, int]:
        """A storage that is away has no bytes; what cannot leave is counted, asleep or not."""
        return dict(counted)


class NoSleep:
    """An engine on CUDA that was not built to sleep."""

    forgets_asleep = False

    def sleep(self, engine: Any, level: Literal[1, 2]) -> None:
        raise BackendError(
            "this engine was not built to give its memory back",
            fix="set cluster.take_turns: true, or build it with a WorkerContext that leaves_memory",
        )

    def wake(self, engine: Any, parts: Sequence[MemoryPart]) -> None:
        """It never sleeps."""

    def held(self, counted: Mapping[MemoryPart, int], away: Collection[MemoryPart]) -> dict[MemoryPart, int]:
        return dict(counted)


def sleep_of(device: str, *, leaves_memory: bool) -> Sleep:
    """How an engine on a device sleeps."""
    if device == "cpu":
        return ParkedMemory()
    return VLLMSleep() if leaves_memory else NoSleep()
