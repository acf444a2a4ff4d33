"""The hook: what it does at the events of a run, in the run's own thread. Sending is in ``sender``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.base.files.sealed_folders import read_manifest
from nemorl.errors import CheckpointError, ConfigError, ConfigIssue, StorageError, UsageError

from nemorl_ops.replicate.place import Place
from nemorl_ops.replicate.sender import Retention, Sender
from nemorl_ops.replicate.transfer import CHECKPOINTS, Copied, checkpoints_in, copy_checkpoint

if TYPE_CHECKING:
    from nemorl_ops.replicate.config import ReplicateConfig

FETCHING = ".fetching_"
"""Before the name of a checkpoint that is being fetched: what is there already is not fetched again."""
FAILED_RUN_WAIT_S = 60.0


class Replication:
    """Sends checkpoints after they appear, and fetches the newest where a run has none."""

    def __init__(self, config: ReplicateConfig) -> None:
        self._config = config
        self._sender: Sender | None = None
        self._newest = 0
        self._found: dict[str, dict[str, Any]] = {}
        """Manifests of the replicas that were there when the run began, by name."""

    def on_build_end(self, trainer: Any) -> None:
        """Look at what is there, begin from it if asked to, and start to send.

        Raises:
            UsageError: There is a run already, and this one is not to continue it.
            StorageError: It is to begin from there, and cannot.
        """
        config, directory = self._config, trainer.directory
        url = f"{config.to.rstrip('/')}/{directory.path.resolve().name}"
        place = Place(url, config.options, timeout_s=config.timeout_s)
        checkpoints = directory.checkpoints
        try:
            found = checkpoints_in(place)
        except StorageError as error:
            if config.resume and not checkpoints.all():
                raise
            directory.warn(f"checkpoints may have no copy: {error.message}")
            found = {}
        if found and not checkpoints.all():
            if not config.resume:
                fix = "continue it with resume: true at the hook, or give this run another run_dir or `to`"
                raise UsageError(f"{url} already holds a run, and {directory.path} has no checkpoint of it", fix=fix)
            self._begin_from(trainer, place, found)
        self._found = found
        retention = Retention(checkpoints.config, checkpoints.metric, checkpoints.sign)
        self._sender = Sender(config, directory.path, place, retention)

    def on_fit_begin(self, trainer: Any) -> None:
        """Send what has no copy: the process that saved it was killed before it was sent."""
        for checkpoint in trainer.directory.checkpoints.all():
            self._newest = checkpoint.step
            if read_manifest(checkpoint.path) == self._found.get(checkpoint.path.name):
                self._sending.newest = checkpoint.step
            else:
                self._sending.send(checkpoint.step, checkpoint.path)

    def on_checkpoint_saved(self, step: int, path: Path) -> None:
        self._newest = step
        self._sending.send(step, path)

    def on_log(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._tell(trainer)
        sender = self._sending
        metrics["replication/behind_steps"] = float(self._newest - sender.newest) if self._newest else 0.0
        metrics["replication/failures"] = float(sender.failures)
        metrics["replication/gib"] = sender.copied.bytes / 2**30

    def on_fit_end(self, trainer: Any) -> None:
        self._end(trainer, self._config.wait_at_end_s)

    def on_exception(self, trainer: Any) -> None:
        if self._sender is not None:
            self._end(trainer, min(FAILED_RUN_WAIT_S, self._config.wait_at_end_s))

    @property
    def _sending(self) -> Sender:
        assert self._sender is not None, "on_build_end comes first"
        return self._sender

    def _end(self, trainer: Any, wait_s: float) -> None:
        sender, path = self._sending, trainer.directory.path
        is_done = sender.finish(wait_s)
        self._tell(trainer)
        if not is_done:
            trainer.directory.warn(
                f"the newest checkpoints are not copied after {wait_s:.0f} s: the newest copy is of step "
                f"{sender.newest}. `nemorl runs copy {path} {sender.place.url}` sends the rest"
            )

    def _tell(self, trainer: Any) -> None:
        """Report what the sender did since the last time, as events and warnings of the run."""
        for outcome in self._sending.outcomes():
            if outcome.problem is None:
                facts = {"step": outcome.step, "to": outcome.url, "bytes": outcome.bytes, "seconds": outcome.seconds}
                trainer.directory.event("replicated", **facts)
            else:
                trainer.directory.warn(f"the checkpoint of step {outcome.step} has no copy: {outcome.problem}")

    def _begin_from(self, trainer: Any, place: Place, found: dict[str, dict[str, Any]]) -> None:
        """Fetch the newest replica that is whole, and let the run continue from it."""
        directory = trainer.directory
        _require_same_config(place, trainer.config)
        for name, manifest in reversed(found.items()):
            trainer.run.console.announce(f"fetching {place.url}/{CHECKPOINTS}/{name}")
            folder = directory.checkpoints.folder
            try:
                copy_checkpoint(
                    place.sub(f"{CHECKPOINTS}/{name}"), Place(str(folder.resolve() / f"{FETCHING}{name}")), Copied()
                )
            except (StorageError, CheckpointError, FileNotFoundError) as error:
                directory.warn(f"a replica cannot be used: {error}")
                continue
            if damaged := directory.checkpoints.damaged():
                aside = directory.set_aside(sorted(damaged), manifest["step"])
                directory.warn(f"{len(damaged)} checkpoints that cannot be used and the logs so far are in {aside}")
            os.rename(folder / f"{FETCHING}{name}", folder / name)
            directory.metrics.truncate_after(-1)  # what a run began here; the replica's stand in their place
            for record in _records(place, manifest["step"]):
                directory.metrics.write(record)
            directory.is_resumed = True
            directory.event("remark", message=f"continues from the replica {place.url} after step {manifest['step']}")
            return
        raise StorageError(f"no checkpoint in {place.url} can be used", fix="see the warnings above")


def _require_same_config(place: Place, config: Any) -> None:
    """Refuse the replica of another run."""
    from nemorl.base.text.mappings import differences
    from nemorl.base.text.yaml_text import parse_yaml
    from nemorl.config.base import identity

    recorded = parse_yaml(b"".join(place.pieces("config.yaml")).decode())
    present = config.model_dump(mode="json")
    fix = "use another run_dir, or the run's own value"
    found = [
        ConfigIssue(key, f"the replica has {old!r}, this config {new!r}", fix)
        for key, old, new in differences(identity(config, recorded), identity(config, present))
    ]
    if found:
        raise ConfigError(found, source=f"{place.url} holds a run with another config")


def _records(place: Place, last: int) -> list[dict[str, Any]]:
    """The metrics of the steps up to ``last``."""
    records = []
    for line in b"".join(place.pieces("metrics.jsonl")).splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # cut by the end of the process that wrote it
            continue
        if isinstance(record, dict) and record.get("step", 0) <= last:
            records.append(record)
    return records
