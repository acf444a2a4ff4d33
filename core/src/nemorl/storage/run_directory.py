"""The directory that a run owns: its files, who may write them, and what they say of the run.

``config.yaml`` (resolved), ``metrics.jsonl``, ``events.jsonl``, ``checkpoints/``, ``model/``, and what toolkits add.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from nemorl.base.files.atomic import listed, replace_text, storing
from nemorl.base.files.jsonl import JsonlWriter, StepLog, read_jsonl
from nemorl.base.files.ownership import Ownership
from nemorl.base.text.mappings import differences
from nemorl.config.base import DEFERRED, identity
from nemorl.config.run import RunConfig
from nemorl.errors import ConfigError, ConfigIssue, RunInUseError, UsageError
from nemorl.storage.checkpoints import CheckpointManager
from nemorl.storage.fingerprints import FILE, Fingerprints
from nemorl.types import BEGINNINGS, ENDINGS


class RunDirectory:
    """The files of one run, which nobody else writes in until it is closed."""

    def __init__(
        self,
        path: Path,
        config: RunConfig,
        tell: Callable[[str], None],
        *,
        resume: bool = False,
        from_step: int | None = None,
    ) -> None:
        """
        Args:
            path: Of the directory, which is made if there is none.
            config: Of the run.
            tell: Shows a person a line of text.
            resume: Continue the run in it, if there is one.
            from_step: From its checkpoint of this step. Unset: from the newest.

        Raises:
            ConfigError, UsageError, RunInUseError, StorageError: as :meth:`claim` says.
        """
        self.path, self.config, self._tell, self.from_step = path, config, tell, from_step
        with storing(path):
            path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.callback(Ownership(path).close)
            self.is_resumed = has_progress(path)
            """A run is being continued in it."""
            if self.is_resumed:
                _require_same_run(path, config, resume=resume)
            self.metrics = stack.enter_context(JsonlWriter(path / "metrics.jsonl"))
            self.events = stack.enter_context(JsonlWriter(path / "events.jsonl"))
            self.logs: list[StepLog] = [self.metrics]
            """Files that grow step by step, and are cut where the run goes back."""
            self.checkpoints = CheckpointManager.of_run(path, config)
            self.checkpoints.repair()
            if from_step is not None:
                self.checkpoints.of_step(from_step)  # a step that there is not is said before anything is loaded
            self._stack = stack.pop_all()

    @classmethod
    def claim(
        cls, config: RunConfig, *, tell: Callable[[str], None], resume: bool = False, from_step: int | None = None
    ) -> Self:
        """Own the directory of a run.

        With ``resume``, or ``from_step``, an existing run of the same config is continued. Without, a new directory is
        made: a default name gets a counter, an explicit ``run_dir`` must not hold a run yet. A run that completed no
        step is no run.

        Raises:
            ConfigError: the directory holds a run whose config differs; lists the differences.
            UsageError: an explicit directory already holds a run and ``resume`` is off, or its config is lost.
            RunInUseError: another process runs there.
            StorageError: the directory cannot be made or written.
        """
        path, resume = run_path(config), resume or from_step is not None
        if resume or config.run_dir is not None:
            return cls(path, config, tell, resume=resume, from_step=from_step)
        numbers = itertools.count(2)
        while True:
            with suppress(RunInUseError):
                if not has_progress(path):
                    return cls(path, config, tell)
            path = run_path(config).with_name(f"{run_path(config).name}-{next(numbers)}")

    def event(self, name: str, **facts: Any) -> None:
        """One line of the audit log."""
        self.events.write({"time": time.time(), "event": name, **facts})

    def warn(self, text: str) -> None:
        """Tell the person and the audit log."""
        self._tell(f"warning: {text}")
        self.event("warning", message=text)

    def describe(self, inputs: Fingerprints) -> None:
        """Record what runs here, and with what."""
        replace_text(self.path / "config.yaml", to_yaml(self.config))
        replace_text(self.path / FILE, json.dumps(asdict(inputs), indent=1))
        if self.is_resumed:
            self._explain_previous()
        self.event("resumed" if self.is_resumed else "started", seed=self.config.seed)

    def _explain_previous(self) -> None:
        """Report a previous process that ended without the event that ends a run: it was killed."""
        names = [str(event.get("event")) for event in read_jsonl(self.path / "events.jsonl")]
        about_run = [name for name in names if name in ENDINGS | BEGINNINGS]
        if about_run and about_run[-1] in ENDINGS:
            return
        step = last_step(self.path)
        what = f"the previous process ended without a word after step {step}: killed, or the machine was"
        self.event("failed", step=step, error=what)
        self._tell(what)

    def rewind(self, step: int) -> None:
        """Drop log records after ``step``, which the continuation writes again. Warns where earlier ones are lost."""
        for log in self.logs:
            log.truncate_after(step)
        last = last_step(self.path)
        if last < step:
            self.warn(f"metrics.jsonl was damaged: it ends at step {last}, what it held up to step {step} is lost")

    def set_aside(self, checkpoints: Sequence[Path], step: int) -> Path:
        """Move checkpoints, and ``model/``, into a folder of their own, with copies of the logs.

        Args:
            checkpoints: Folders or links.
            step: The run goes on from here.

        Returns:
            The folder.
        """
        place = self.path / "set_aside"
        number = next(number for number in itertools.count(1) if not listed(place, f"{number:03d}_*"))
        folder = place / f"{number:03d}_from_step_{step}"
        with storing(folder):
            (folder / "checkpoints").mkdir(parents=True)
            for path in checkpoints:
                shutil.move(path, folder / "checkpoints" / path.name)  # perhaps from another file system
            for path in (log.path for log in self.logs if log.path.exists()):
                (shutil.copytree if path.is_dir() else shutil.copy2)(path, folder / path.name)
            if (self.path / "model").is_dir():
                (self.path / "model").rename(folder / "model")
        return folder

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def to_yaml(config: RunConfig) -> str:
    """The resolved config, loadable again."""
    from nemorl.base.text.yaml_text import format_yaml

    return format_yaml(_as_data(config))


def _as_data(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _require_same_run(path: Path, config: RunConfig, *, resume: bool) -> None:
    """Refuse a directory whose run is not to be continued, or has another config."""
    if not resume:
        raise UsageError(f"{path} already holds a run", fix="continue it with --resume, or choose another run_dir")
    before = _recorded_config(path)
    with suppress(ValidationError):  # what has come to this config since then has its default
        before = _as_data(type(config).model_validate(before, context={DEFERRED: True}))
    recorded, present = (identity(config, data) for data in (before, _as_data(config)))
    fix = "use another run_dir, or the run's own value"
    differing = differences(recorded, present)
    found = [ConfigIssue(key, f"the run has {old!r}, this config {new!r}", fix) for key, old, new in differing]
    if found:
        raise ConfigError(found, source=f"{path} holds a run with another config")


def has_progress(path: Path) -> bool:
    """A run directory holds a checkpoint or a completed step, which starting anew in it would lose."""
    return bool(listed(path / "checkpoints", "step_*")) or last_step(path) > 0


def last_step(path: Path) -> int:
    """The last step that a run directory has metrics of; 0 where there are none."""
    steps = (record.get("step") for record in read_jsonl(path / "metrics.jsonl"))
    return max((step for step in steps if type(step) is int), default=0)


def _recorded_config(path: Path) -> dict[str, Any]:
    """The config of the run in a directory, as it was recorded.

    Raises:
        UsageError: the record is missing or damaged.
    """
    from nemorl.base.text.yaml_text import parse_yaml

    file = path / "config.yaml"
    try:
        data = parse_yaml(file.read_text(encoding="utf-8"))
        cause = f"is not a config but a {type(data).__name__}"
    except (OSError, ValueError) as error:
        data, cause = None, f"cannot be read ({' '.join(str(error).split())})"
    if isinstance(data, dict):
        return data
    fix = f"put it back if you can (`nemorl config show CONFIG` prints one), else choose another run_dir than {path}"
    raise UsageError(f"{path} holds a run, but its config.yaml {cause}: what it ran is not known", fix=fix)


def run_path(config: RunConfig) -> Path:
    """The directory of a run of this config."""
    return config.run_dir or Path("runs") / default_name(config)


def default_name(config: RunConfig) -> str:
    """``grpo-1a2b3c4d``: equal for equal configs, so that running a command again continues its run."""
    digest = hashlib.sha256(json.dumps(identity(config, _as_data(config)), sort_keys=True).encode()).hexdigest()
    return f"{config.algorithm or type(config).__name__.removesuffix('Config').lower()}-{digest[:8]}"
