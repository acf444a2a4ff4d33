"""Run: the live parts of one run, and the directory that it owns.

Parts are built in dependency order and closed in reverse, whatever happens in between. The directory holds
``config.yaml`` (resolved), ``environment.json``, ``plugins.lock.json``, ``metrics.jsonl``, ``samples.jsonl``,
``events.jsonl``, ``checkpoints/``, ``report.html`` and, at the end, ``model/``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from nemorl.breaker import CircuitBreaker
from nemorl.checkpoints import CheckpointManager
from nemorl.config.base import identity
from nemorl.config.run import RunConfig
from nemorl.contracts import DataModule, Logger
from nemorl.deadlines import deadline
from nemorl.environments import Environment, EnvironmentPool, Unscored
from nemorl.errors import ConfigError, NemorlError, Problem, RunInUseError, UsageError, boundary
from nemorl.files import replace_text, storing
from nemorl.last_words import note
from nemorl.mismatch import MismatchWatch
from nemorl.observe.console import Console
from nemorl.observe.jsonl import JsonlWriter, read_jsonl
from nemorl.observe.metric_names import MetricWatch
from nemorl.observe.provenance import describe_environment
from nemorl.observe.run_data import RunData
from nemorl.observe.timing import Timer
from nemorl.ownership import Ownership
from nemorl.plugins.hooks import Hooks, build_hooks
from nemorl.plugins.kinds import LoggerConfig
from nemorl.plugins.lock import FILE as PLUGINS_FILE
from nemorl.plugins.lock import differences, locked_plugins, read_lock, write_lock
from nemorl.plugins.registry import registry, restricted
from nemorl.policy import TrainingPolicy
from nemorl.resources.manager import ResourceManager
from nemorl.rollouts import RolloutEngine
from nemorl.tokenizer import Tokenizer
from nemorl.types import Row


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = JsonlWriter(path / "metrics.jsonl")
        self.samples = JsonlWriter(path / "samples.jsonl")
        self.events = JsonlWriter(path / "events.jsonl")

    def event(self, name: str, **facts: Any) -> None:
        """One line of the audit log."""
        self.events.write({"time": time.time(), "event": name, **facts})

    def set_aside(self, checkpoints: Sequence[Path], step: int) -> Path:
        """Move checkpoints, and ``model/``, into a folder of their own, with copies of the logs.

        Args:
            checkpoints: Folders or links.
            step: The run goes on from here.

        Returns:
            The folder.
        """
        place = self.path / "set_aside"
        number = next(number for number in itertools.count(1) if not any(place.glob(f"{number:03d}_*")))
        folder = place / f"{number:03d}_from_step_{step}"
        with storing(folder):
            (folder / "checkpoints").mkdir(parents=True)
            for path in checkpoints:
                path.rename(folder / "checkpoints" / path.name)
            for writer in (self.metrics, self.samples):
                shutil.copy2(writer.path, folder)
            if (self.path / "model").is_dir():
                (self.path / "model").rename(folder / "model")
        return folder

    def close(self) -> None:
        for writer in (self.metrics, self.samples, self.events):
            writer.close()


class Run:
    """Everything that is alive between ``fit`` and its return. Closing it releases all of it."""

    data: DataModule
    """Set before ``open``."""

    def __init__(
        self, config: RunConfig, *, resume: bool, console: Console | None, from_step: int | None = None
    ) -> None:
        self.config = config
        self.from_step = from_step
        self._stack = ExitStack()
        with ExitStack() as undo:
            undo.callback(self._stack.close)
            claim = claim_directory(config, resume=resume)
            self._stack.callback(claim.ownership.close)
            self.is_resumed = claim.is_resumed
            self.console = console or Console()
            self._stack.callback(self.console.close)
            self.directory = RunDirectory(claim.path)
            self._stack.callback(self.directory.close)
            note(run=claim.path.resolve())
            self._stack.callback(note, closed=claim.path.resolve())
            self.hooks = Hooks(self.warn)
            self.timer = Timer(on_enter=self.console.phase)
            self.checkpoints = CheckpointManager.of_run(claim.path, config)
            self.checkpoints.repair()
            if from_step is not None:
                self.checkpoints.of_step(from_step)  # a step that there is not is said before anything is loaded
            undo.pop_all()

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def learners(self) -> dict[str, TrainingPolicy]:
        """The models that checkpoints hold, by the name of their folder."""
        learning = {role: self.companions[role] for role, c in self.config.companions.items() if c.learns}
        return {"policy": self.policy, **learning}

    def open(
        self,
        validation_rows: Sequence[Row] | None,
        environment: Environment | None,
        callbacks: Sequence[object],
        *,
        planned_updates: int,
    ) -> Self:
        """Build the live parts. On failure, ``close`` closes what was built.

        Args:
            validation_rows: Held-out rows, if there are any.
            environment: What scores responses, where the algorithm samples any.
            callbacks: The user's hook objects.
            planned_updates: Optimizer steps of the whole run, the length of a learning-rate decay.
        """
        config = self.config
        self.validation_rows = validation_rows
        self.hooks = build_hooks(
            restricted(config.plugins.policy()),
            config.plugins.hooks,
            callbacks,
            self.warn,
            limit_s=config.plugins.hook_timeout_s,
        )
        if config.needs_generation:
            self.hooks.register(MismatchWatch(config, self.warn), "nemorl-core:mismatch")
            is_scored = not isinstance(environment, Unscored)
            breaker = CircuitBreaker(config.rollouts.breaker, self.warn, self.directory.event, is_scored=is_scored)
            self.hooks.register(breaker, "nemorl-core:breaker")
        self.hooks.register(MetricWatch(config.checkpoint.metric, self.warn), "nemorl-core:metric")
        self.loggers = [self._logger(logger) for logger in config.loggers]
        self.console.announce(f"loading PyTorch and the model {config.policy.model_name}")
        self.tokenizer = Tokenizer.load(config.policy.model_name)
        self.resources = self._owned(ResourceManager(config, self.path, on_restart=self.warn), "close")
        limit_s = max(config.plugins.build_timeout_s, 2 * config.cluster.worker_timeout_s)  # Ray's own come first
        with deadline("loading the model", limit_s, setting="plugins.build_timeout_s"):
            self.policy = self.resources.training_policy(planned_updates)
            self.companions = {
                role: self.resources.companion_policy(role, companion, planned_updates + companion.extra_updates)
                for role, companion in config.companions.items()
            }
            self.rollouts = self._build_rollouts(environment) if config.needs_generation else None
        self._write_description()  # from here on the directory counts as a run
        return self

    def _build_rollouts(self, environment: Environment | None) -> RolloutEngine:
        assert environment is not None, "the trainer checks that something scores responses"
        backend = registry().name_of("generation_backends", type(self.config.generation.backend))
        self.console.announce(f"starting the generator {backend}")
        self.generation = self.resources.generation_policy()
        pool = self._owned(EnvironmentPool.from_config(environment, self.config.rollouts), "close")
        limit = self.config.policy.max_sequence_tokens
        return RolloutEngine(self.generation, pool, self.tokenizer, max_sequence_tokens=limit, timer=self.timer)

    def _logger(self, config: LoggerConfig) -> Logger:
        owner = f"logger {type(config).__name__}"
        limit_s = self.config.plugins.build_timeout_s
        with boundary(owner), deadline(f"building {owner}", limit_s, setting="plugins.build_timeout_s"):
            logger: Logger = self._owned(config.build(self.path), "close")
        return logger

    def _owned(self, part: Any, closer: str) -> Any:
        self._stack.callback(self._close_part, part, closer)
        return part

    def _close_part(self, part: Any, closer: str) -> None:
        """A failure to close is an error like others: it gets an event, and the rest is closed all the same."""
        owner, limit_s = f"closing {type(part).__name__}", self.config.plugins.build_timeout_s
        try:
            with boundary(owner), deadline(owner, limit_s, setting="plugins.build_timeout_s"):
                getattr(part, closer)()
        except NemorlError as error:
            self.directory.event("failed", error=f"{type(error).__name__}: {error}")
            raise

    def warn(self, text: str) -> None:
        """Tell the person and the audit log."""
        self.console.message(f"warning: {text}")
        self.directory.event("warning", message=text)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One record to ``metrics.jsonl``, the console and every logger."""
        self.directory.metrics.write({"step": step, "time": time.time(), **metrics})
        self.console.step(step, metrics)
        for logger in self.loggers:
            with boundary(f"logger {type(logger).__name__}"):
                logger.log(metrics, step)

    def rewind_logs(self, step: int) -> None:
        """Drop records after ``step``: the continuation writes them again. Says so where earlier ones are lost."""
        self.directory.metrics.truncate_after(step)
        self.directory.samples.truncate_after(step)
        last = last_step(self.directory.path)
        if last < step:
            self.warn(f"metrics.jsonl was damaged: it ends at step {last}, what it held up to step {step} is lost")

    def close(self) -> None:
        self._stack.close()

    def _write_description(self) -> None:
        replace_text(self.path / "config.yaml", to_yaml(self.config))
        replace_text(self.path / "environment.json", json.dumps(describe_environment(registry()), indent=1))
        self._record_plugins()
        if self.is_resumed:
            self._explain_previous()
        self.directory.event("resumed" if self.is_resumed else "started", seed=self.config.seed)

    def _explain_previous(self) -> None:
        """Say so where the process before this one ended without a word: a run ends with an event."""
        before = RunData(self.path.name, events=tuple(read_jsonl(self.path / "events.jsonl")))
        if before.status == "incomplete":
            step = max((record.get("step", 0) for record in read_jsonl(self.path / "metrics.jsonl")), default=0)
            what = f"the previous process ended without a word after step {step}: killed, or the machine was"
            self.directory.event("failed", step=step, error=what)
            self.console.message(what)

    def _record_plugins(self) -> None:
        plugins, record = locked_plugins(self.config), self.path / PLUGINS_FILE
        try:
            before = read_lock(record) if record.exists() else plugins
        except UsageError as error:
            self.warn(f"which plugins it used before is not known: {error.message}")
            before = plugins
        for line in differences(before, plugins):
            self.warn(f"other plugins than before: {line} (--locked refuses this)")
        write_lock(self.path, plugins)


def to_yaml(config: RunConfig) -> str:
    """The resolved config, loadable again."""
    text: str = yaml.safe_dump(_as_data(config), sort_keys=False, allow_unicode=True)
    return text


def _as_data(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude={"model"})  # policy.model_name says it


@dataclass(frozen=True)
class Claim:
    """A run's directory, which nobody else writes in until ``ownership`` is closed."""

    path: Path
    is_resumed: bool
    """A run is being continued in it."""
    ownership: Ownership


def claim_directory(config: RunConfig, *, resume: bool) -> Claim:
    """Own the run's directory.

    With ``resume`` an existing run of the same config is continued. Without, a new directory is made: a default name
    gets a counter, an explicit ``run_dir`` must not hold a run yet. A run that completed no step is no run.

    Raises:
        ConfigError: the directory holds a run whose config differs; lists the differences.
        UsageError: an explicit directory already holds a run and ``resume`` is off, or its config is lost.
        RunInUseError: another process runs there.
        StorageError: the directory cannot be made or written.
    """
    path = run_path(config)
    if resume or config.run_dir is not None:
        return _claimed(path, config, resume=resume)
    for number in itertools.count(2):
        with suppress(RunInUseError):
            if not has_progress(path):
                return _claimed(path, config, resume=False)
        path = run_path(config).with_name(f"{run_path(config).name}-{number}")
    raise AssertionError("there is always a next number")


def _claimed(path: Path, config: RunConfig, *, resume: bool) -> Claim:
    with storing(path):
        path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as undo:
        ownership = Ownership(path)
        undo.callback(ownership.close)
        is_resumed = has_progress(path)
        if is_resumed and not resume:
            raise UsageError(f"{path} already holds a run", fix="continue it with --resume, or choose another run_dir")
        if is_resumed:
            recorded, present = (identity(config, data) for data in (_recorded_config(path), _as_data(config)))
            differences = list(_differences(recorded, present))
            if differences:
                raise ConfigError(differences, source=f"{path} holds a run with another config")
        undo.pop_all()
    return Claim(path, is_resumed, ownership)


def has_progress(path: Path) -> bool:
    """Whether a run directory holds anything that starting anew in it would lose: a checkpoint, or a completed step."""
    return any((path / "checkpoints").glob("step_*")) or last_step(path) > 0


def last_step(path: Path) -> int:
    """The last step that a run directory has metrics of; 0 where there are none."""
    steps = (record.get("step") for record in read_jsonl(path / "metrics.jsonl"))
    return max((step for step in steps if type(step) is int), default=0)


def _recorded_config(path: Path) -> dict[str, Any]:
    """The config of the run in a directory, as it was recorded.

    Raises:
        UsageError: the record is missing or damaged.
    """
    file = path / "config.yaml"
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
        cause = f"is not a config but a {type(data).__name__}"
    except (OSError, ValueError, yaml.YAMLError) as error:
        data, cause = None, f"cannot be read ({' '.join(str(error).split())})"
    if isinstance(data, dict):
        return data
    fix = f"put it back if you can (`nemorl config show CONFIG` prints one), else choose another run_dir than {path}"
    raise UsageError(f"{path} holds a run, but its config.yaml {cause}: what it ran is not known", fix=fix)


def run_path(config: RunConfig) -> Path:
    """Where a run of this config lives."""
    return config.run_dir or Path("runs") / default_name(config)


def default_name(config: RunConfig) -> str:
    """``grpo-1a2b3c4d``: equal for equal configs, so that running a command again continues its run."""
    digest = hashlib.sha256(json.dumps(identity(config, _as_data(config)), sort_keys=True).encode()).hexdigest()
    return f"{config.algorithm or type(config).__name__.removesuffix('Config').lower()}-{digest[:8]}"


def _differences(old: Any, new: Any, path: str = "") -> list[Problem]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted({*old, *new}):
            found += _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        return found
    if old == new:
        return []
    return [Problem(path, f"the run has {old!r}, this config {new!r}", "use another run_dir, or the run's own value")]
