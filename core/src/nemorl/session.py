"""From a trainer and its inputs to a run under way, and its end: what is built, in which order, and recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemorl.base.process.deadlines import deadline
from nemorl.contracts import DataModule, DataSource, Fingerprinted, HeldOut
from nemorl.contracts.display import Display, Silence
from nemorl.contracts.slots import CONSOLE, OPEN_DATA, WEIGHTS_FINGERPRINT
from nemorl.errors import ConfigError, NemorlError, StorageError, UsageError, boundary
from nemorl.plugins.hooks import Hooks, build_hooks
from nemorl.run import Run
from nemorl.storage.fingerprints import Fingerprints
from nemorl.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig
    from nemorl.trainer import BaseTrainer


@dataclass(frozen=True)
class Inputs:
    """The arguments of ``fit`` that are built into parts of the run."""

    data: DataSource | None
    held_out: DataSource | None
    callbacks: Sequence[object]
    accept_changed_data: bool


@contextmanager
def opened(trainer: BaseTrainer[Any], directory: RunDirectory, console: Display, inputs: Inputs) -> Iterator[None]:
    """The run of ``trainer``, built, for the length of the block. Whatever ends it is recorded, and all is closed."""
    trainer.directory = directory
    hooks = Hooks(directory.warn)
    with ExitStack() as parts:
        try:
            with boundary(trainer.owner, passing=(Exception,)):
                hooks = _hooks(trainer, inputs.callbacks)
                _build(trainer, console, hooks, inputs, parts)
            yield
        except BaseException as error:
            with suppress(StorageError):  # on a full disk the error itself says so
                directory.event("failed", step=trainer.progress.step, error=f"{type(error).__name__}: {error}")
            hooks.fire("on_exception", trainer=trainer, error=error)
            with suppress(NemorlError):  # has an event of its own, and this error comes first
                parts.close()
            raise


def _hooks(trainer: BaseTrainer[Any], callbacks: Sequence[object]) -> Hooks:
    settings, directory = trainer.config.plugins, trainer.directory
    limits = {"limit_s": settings.hook_timeout_s, "build_limit_s": settings.build_timeout_s}
    hooks = build_hooks(trainer.config.registry, settings.hooks, callbacks, directory.warn, **limits)
    for name, hook in trainer.own_hooks().items():
        hooks.register(hook, name)
    return hooks


def _build(trainer: BaseTrainer[Any], console: Display, hooks: Hooks, inputs: Inputs, parts: ExitStack) -> None:
    """Build everything the run needs, in a directory that is already ours: a failure leaves an event there."""
    config = trainer.config
    console.announce("reading the data and trying the reward")
    limit_s = config.plugins.build_timeout_s
    with deadline("building environment and dataset", limit_s, setting="plugins.build_timeout_s"):
        trainer.open_inputs()
        trainer.data, held_out = _open_data(inputs, config, trainer.batch_size)
        trainer.accept_changed_data = inputs.accept_changed_data
        trainer.inputs = _fingerprints(trainer, held_out)
        if trainer.directory.is_resumed:
            trainer.foresee_changes()
    if problems := list(trainer.preflight()):
        raise ConfigError(problems, source="before loading anything")
    planned = trainer.planned_updates
    trainer.run = Run.build(
        config,
        trainer.directory,
        console,
        hooks,
        trainer.data,
        held_out,
        planned_updates=planned,
        resources=trainer.resources_class,
    )
    parts.callback(trainer.run.close)
    trainer.build_parts()
    trainer.directory.describe(trainer.inputs)
    hooks.fire("on_build_end", trainer=trainer)


def _open_data(inputs: Inputs, config: RunConfig, batch_size: int) -> tuple[DataModule, HeldOut | None]:
    """The batches of the run, and the rows to validate on."""
    open_data = OPEN_DATA.filled()
    if open_data is None:
        raise UsageError("nothing here reads data", fix="pip install nemorl-rl")
    assert inputs.data is not None, "missing_inputs says so"
    accepts = inputs.accept_changed_data
    return open_data(inputs.data, inputs.held_out, config, batch_size, accept_changed_data=accepts)


def _fingerprints(trainer: BaseTrainer[Any], held_out: HeldOut | None) -> Fingerprints:
    config = trainer.config
    asked = config.validation.model_dump(mode="json", include={"data"})["data"]
    data, validation = (
        part.fingerprint() if isinstance(part, Fingerprinted) else None for part in (trainer.data, held_out)
    )
    fingerprint = WEIGHTS_FINGERPRINT.filled() or (lambda _: None)
    policies = {"policy": config.policy, **{name: one.policy for name, one in config.auxiliary_models.items()}}
    # Random ones follow from the config.
    weights = {name: fingerprint(one.model_name) for name, one in policies.items() if one.init == "pretrained"}
    return Fingerprints(data, validation, asked, trainer.code_fingerprints(), weights)


def display_of(given: Display | None) -> AbstractContextManager[Display]:
    """The display that was given, else the terminal, where the command line is installed."""
    console: Any = CONSOLE.filled() or Silence
    found: AbstractContextManager[Display] = given if given is not None else console()  # type: ignore[assignment]
    return found
