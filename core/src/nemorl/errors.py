"""Every error that nemorl raises on purpose, and the boundary that attributes foreign ones.

Four rules:

1. A message says what happened, why, and how to fix it, with the values.
2. Each class has a nemorl base and a stdlib base, so ``except ValueError`` keeps working.
3. Code that belongs to someone else (a plugin, a reward function) runs inside ``boundary(owner)``.
   What escapes is re-raised once as :class:`ForeignError`, naming the owner; authors raise plain Python errors.
4. ``assert`` states our own invariants; it is never how a user learns of a mistake.
"""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from nemorl.base.packages.distributions import place_of


class NemorlError(Exception):
    """Base of all deliberate errors. ``fix`` is one sentence a user can act on.

    >>> NemorlError("no model given", fix="pass one").fix
    'pass one'
    """

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        self.message = message
        self.fix = fix
        super().__init__(f"{message}\n  fix: {fix}" if fix else message)

    def __reduce__(self) -> tuple[object, ...]:
        # Workers send errors to the driver by pickle; the keyword-only argument needs help to survive it.
        return partial(type(self), fix=self.fix), (self.message,)


@dataclass(frozen=True, slots=True)
class ConfigIssue:
    """One mistake in a config: where it is, what is wrong and how to fix it.

    >>> print(ConfigIssue("policy.lr", "must be positive"))
    policy.lr: must be positive
    """

    path: str
    """Dotted path into the config; empty for the config as a whole."""
    message: str
    fix: str | None = None
    here: bool = False
    """It is about this machine (its GPUs, packages and files), and need not hold on the one that the run is for"""

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{where}{self.message}" + (f"\n    fix: {self.fix}" if self.fix else "")


class ConfigError(NemorlError, ValueError):
    """A config that cannot run. Carries every problem found, not only the first.

    >>> ConfigError([ConfigIssue("policy.lr", "must be positive")]).problems[0].path
    'policy.lr'
    """

    def __init__(self, problems: Sequence[ConfigIssue], *, source: str = "config") -> None:
        self.problems = tuple(problems)
        self.source = source
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__(f"{source}: {count}\n" + "\n".join(f"  - {problem}" for problem in self.problems))

    def __reduce__(self) -> tuple[object, ...]:
        return partial(ConfigError, source=self.source), (self.problems,)


class UsageError(NemorlError, ValueError):
    """A call that cannot mean anything: wrong arguments to a function or a command.

    >>> isinstance(UsageError("0 samples per prompt", fix="ask for 1"), ValueError)
    True
    """


class DataError(NemorlError, ValueError):
    """A dataset, row or file that does not have the shape it should.

    >>> isinstance(DataError("row 3 has no prompt"), ValueError)
    True
    """


class PluginError(NemorlError, RuntimeError):
    """A plugin that is installed but cannot be used.

    >>> isinstance(PluginError("acme-env does not import"), RuntimeError)
    True
    """


class PluginNotFoundError(NemorlError, LookupError):
    """No usable plugin has the requested name.

    >>> isinstance(PluginNotFoundError("no logger is called wand"), LookupError)
    True
    """


class BackendError(NemorlError, RuntimeError):
    """A training or generation backend that cannot do what was asked.

    >>> isinstance(BackendError("this model has no value head"), RuntimeError)
    True
    """


class CheckpointError(NemorlError, RuntimeError):
    """A checkpoint that is missing, incomplete, damaged or of another run.

    >>> isinstance(CheckpointError("step 40 is incomplete"), RuntimeError)
    True
    """


class StorageError(NemorlError, OSError):
    """A file of a run that cannot be written or read: a full or failing disk, missing permissions.

    >>> isinstance(StorageError("metrics.jsonl: no space left"), OSError)
    True
    """


class RunInUseError(NemorlError, RuntimeError):
    """A run directory that another process writes in.

    >>> isinstance(RunInUseError("process 41 writes in runs/a"), RuntimeError)
    True
    """


class DeadlineError(NemorlError, TimeoutError):
    """A wait that ended without its answer: says who waited on whom and for how long.

    >>> isinstance(DeadlineError("the grader did not answer in 60 s"), TimeoutError)
    True
    """


class ResourceError(NemorlError, RuntimeError):
    """Devices or nodes that a run asks for and a cluster does not have.

    >>> isinstance(ResourceError("8 GPUs asked for, 4 there"), RuntimeError)
    True
    """


class TerminalLostError(NemorlError, RuntimeError):
    """A run that was stopped and saved because nobody can see it any more: its terminal or its pipe is gone.

    >>> isinstance(TerminalLostError("the terminal is gone"), RuntimeError)
    True
    """


class WorkerLostError(NemorlError, RuntimeError):
    """A worker process that died. The run may replace it; the message names it and shows the end of its log.

    >>> isinstance(WorkerLostError("rank 1 died"), RuntimeError)
    True
    """


class WorkerHungError(WorkerLostError, DeadlineError):
    """A worker process that did not answer in time.

    >>> isinstance(WorkerHungError("rank 1 is silent"), WorkerLostError)
    True
    """


class CollectiveError(WorkerLostError):
    """A collective operation that failed or timed out: some rank of the group is gone, or the network between them.

    >>> isinstance(CollectiveError("all_reduce timed out on rank 1"), WorkerLostError)
    True
    """


class DeviceLostError(WorkerLostError):
    """A device that failed under its worker: memory beyond correction, a broken link, a GPU that is gone.

    >>> isinstance(DeviceLostError("uncorrectable ECC error on rank 1"), WorkerLostError)
    True
    """


class WeightsLostError(WorkerLostError):
    """Published weights that can no longer be fetched: the trainer that held them is gone.

    >>> isinstance(WeightsLostError("the trainer is gone"), WorkerLostError)
    True
    """


class WeightsUnprovenError(NemorlError, RuntimeError):
    """An engine that samples from other weights than it was sent, as its receipt says.

    >>> isinstance(WeightsUnprovenError("lm_head.weight is of the version before"), RuntimeError)
    True
    """


class InfrastructureError(NemorlError, ConnectionError):
    """Something that an episode depends on failed: a sandbox, a service, a machine. Raise it in an environment or a
    reward: the episode is no verdict on the policy, and the run goes on.

    >>> isinstance(InfrastructureError("no sandbox is free"), ConnectionError)
    True
    """


class ForeignError(NemorlError, RuntimeError):
    """An exception that escaped code which is not nemorl's. The original is ``__cause__``.

    >>> isinstance(ForeignError("environment math raised KeyError"), NemorlError)
    True
    """


IS_ASYNC = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Interrupted(KeyboardInterrupt):
    """A signal that asks the process to end now; its name is the message. Passes every :class:`boundary`.

    >>> isinstance(Interrupted("SIGTERM"), KeyboardInterrupt)
    True
    """


class boundary:  # noqa: N801  (reads as a statement: `with boundary("environment math"):`)
    """Attribute whatever escapes the block to ``owner``, e.g. ``boundary("environment math")``.

    nemorl's own errors pass unchanged, so nested boundaries attribute to the innermost owner; so does what a person or
    the event loop asks for. ``SystemExit``, and a ``KeyboardInterrupt`` that nobody's Ctrl-C caused, are errors of the
    owner: code that is called by a run does not decide that the run is over, still less that all went well.

    A class and not ``@contextmanager``, which takes a RuntimeError caused by ``StopIteration`` for the StopIteration.

    >>> with boundary("environment math"):
    ...     1 / 0
    Traceback (most recent call last):
        ...
    nemorl.errors.ForeignError: environment math raised ZeroDivisionError: division by zero...
    """

    def __init__(self, owner: str, *, passing: tuple[type[Exception], ...] = ()) -> None:
        """
        Args:
            owner: Whose code runs in the block.
            passing: Errors that the caller wants as they are.
        """
        self._owner = owner
        self._passing: tuple[type[Exception], ...] = (NemorlError, *passing)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, self._passing) or _is_asked_for(error, trace):
            return
        place = place_of(error)
        fix = f"the traceback of the original error (--debug shows it) points into {place or self._owner}"
        if not isinstance(error, Exception):
            fix = 'raise an Exception to end a run with an error, call trainer.stop("reason") to end it well'
        raise ForeignError(f"{self._owner} raised {type(error).__name__}: {error}", fix=fix) from error


def _is_asked_for(error: BaseException, trace: TracebackType | None) -> bool:
    """The end is wanted by a person, the machine or the event loop, and not by the code that was called."""
    if isinstance(error, Exception):
        return False
    is_main = threading.current_thread() is threading.main_thread()
    if isinstance(error, KeyboardInterrupt):
        by_default = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return isinstance(error, Interrupted) or by_default
    if isinstance(error, SystemExit):
        return is_main and error.code == signal.SIGTERM  # Ray's handler raises it wherever the program happens to be
    if trace is None:
        return False
    # Closing a generator or a coroutine throws into its own frame, cancelling one into what it awaits. Nothing throws
    # into a plain function: there, it is the code that was called.
    flags = trace.tb_frame.f_code.co_flags
    if isinstance(error, GeneratorExit):
        return trace.tb_next is None and bool(flags & (inspect.CO_GENERATOR | IS_ASYNC))
    return type(error).__name__ == "CancelledError" and bool(flags & IS_ASYNC)
