"""A step of a run, made again in a folder of its own: from the checkpoint before it, as the run did or otherwise.

The run is only read: its checkpoint is linked, not moved, and all that the replay writes goes to the new folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nemorl.base.files.atomic import replace_text
from nemorl.contracts.display import Display
from nemorl.errors import UsageError

from nemorl_insight.diff.run_files import RunFiles
from nemorl_insight.diff.stages import STAGES, Stage
from nemorl_insight.diff.walking import Walk, walk

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig
    from nemorl.trainer import BaseTrainer

Only = Literal["trainer", "sampler"]
OF_SAMPLER: tuple[Stage, ...] = ("data", "tokens", "rewards")
OF_TRAINER: tuple[Stage, ...] = ("advantages", "logprobs", "loss", "gradient", "weights")
OF_REPLAY: tuple[Stage, ...] = tuple(stage for stage in STAGES if stage != "validation")
OF_HALF = {"sampler": OF_SAMPLER, "trainer": OF_TRAINER, None: OF_REPLAY}
KEEPS: Mapping[str, Any] = {
    "loggers": [],
    "validation": {"every": 0, "at_start": False, "at_end": False},
    "checkpoint": {"every": 0, "keep_last": 1000, "export": False},
}
"""Settings that a replay keeps, and how: all but results of the step."""
ALL_GROUPS = 1_000_000
SAMPLING = ("data", "environment", "generation", "rollouts")
"""Sections of a config that act on samples, and nowhere else."""


@dataclass(frozen=True)
class Replay:
    """A step to be made again."""

    run: RunFiles
    step: int
    folder: Path
    """Where: new, or empty."""
    changes: Sequence[str] = ()
    """``path=value``: settings that are others than the run's."""
    only: Only | None = None
    """The part that is made again, with the other from the record."""
    from_start: bool = False
    """All steps up to it are made again, whatever checkpoints there are."""

    def __post_init__(self) -> None:
        last = self.run.last_step
        if not 0 < self.step <= last:
            fix = f"its last one is {last}: give --step" if last else "let it make one first"
            raise UsageError(f"{self.run.path} has no step {self.step}", fix=fix)

    @property
    def begins_after(self) -> int:
        """The step of the newest checkpoint before it; 0: the run's beginning."""
        if self.from_start:
            return 0
        return max((step for step in self.run.checkpoints if step < self.step), default=0)

    @property
    def half(self) -> Only | None:
        """What is made again. Rollouts that ran beside training are taken from the record: which weights sampled which
        of their tokens was a matter of milliseconds."""
        return "trainer" if self.only is None and is_asynchronous(self.run) else self.only

    @property
    def steps_before(self) -> range:
        """Steps between the checkpoint and this one that are made again by themselves, as the run made them; none where
        this one is made again as they are."""
        is_alike = self.half is None and not self.changes
        return range(0) if is_alike else range(self.begins_after + 1, self.step)

    @property
    def folder_before(self) -> Path:
        """Where they are made."""
        return Path(f"{self.folder}-before") if self.is_foreign else self.folder

    @property
    def scores(self) -> bool:
        """Another engine gives log-probs of the recorded tokens: from the same seeds it would draw other ones."""
        own, changed = self._both_configs()
        return self.only == "sampler" and _engine_of(own) != _engine_of(changed)

    def _both_configs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        from nemorl.base.text.mappings import apply_overrides

        own = dict(self.run.data.config)
        return own, apply_overrides(deepcopy(own), self.changes)

    @property
    def parts(self) -> tuple[Stage, ...]:
        """Parts that can be compared with the run."""
        if self.scores:
            return ("tokens",)
        chosen = OF_HALF[self.half]
        return tuple(part for part in chosen if part != "weights") if self.is_foreign else chosen

    @property
    def is_foreign(self) -> bool:
        """The weights come over from a checkpoint of another backend, whose optimizer's state does not."""
        own, changed = self._both_configs()
        return self.step > 1 and _backend_of(own) != _backend_of(changed)

    def config(self) -> RunConfig:
        """The run's config with the changes, in the replay's folder.

        Raises:
            UsageError: data or reward of the run were given in Python.
            ConfigError: the changes are no config.
        """
        return self._config(self.changes, self.folder, room=int(self.scores))

    def config_before(self) -> RunConfig:
        """The run's own config, in the folder of the steps before this one."""
        return self._config((), self.folder_before)

    def _config(self, changes: Sequence[str], folder: Path, room: int = 0) -> RunConfig:
        from nemorl.base.text.mappings import apply_overrides
        from nemorl.config.load import load_config

        data = deepcopy(dict(self.run.data.config))
        for section, values in KEEPS.items():
            data[section] = {**(data.get(section) or {}), **values} if isinstance(values, Mapping) else values
        data["checkpoint"] |= {"must_save_by": None, "keep_every": None, "metric": None}
        if "records" in data:
            data["records"] = {**data["records"], "every": 1, "groups": ALL_GROUPS, "print_completions": 0}
            data["records"]["max_gib"] = max(2.0, data["records"]["max_gib"])
        data["run_dir"] = str(folder)
        if room:  # an engine scores a prompt, and answers with a token
            data["policy"]["max_sequence_tokens"] += room
        given = [key for key in ("data", "environment") if key in data and data[key] is None]
        if given:
            raise UsageError(
                f"{self.run.path} was given its {' and '.join(given)} in Python: its config cannot make a step",
                fix="name them in the config (`data:`, `environment:`, or a plugin of your own)",
            )
        return load_config(apply_overrides(data, changes, "--set"), for_launch=True)


def is_asynchronous(run: RunFiles) -> bool:
    """Its rollouts ran beside training."""
    rollouts = run.data.config.get("rollouts") or {}
    return rollouts.get("mode") == "async" and rollouts.get("max_staleness", 1) > 0


def _backend_of(data: Mapping[str, Any]) -> str:
    """The training backend's name."""
    return _name(data["policy"]["backend"])


def _engine_of(data: Mapping[str, Any]) -> str:
    """The generation backend's name; empty for a run that does not sample."""
    return _name((data.get("generation") or {}).get("backend") or "")


def _name(part: Any) -> str:
    return str(part["name"] if isinstance(part, Mapping) else part)


def make(replay: Replay, display: Display) -> None:
    """Make the step again, in the replay's folder.

    Args:
        replay: The step.
        display: Shows what happens.

    Raises:
        UsageError: the run did not keep what the replay needs; says which setting keeps it.
    """
    from nemorl_insight.diff.halves import Foreign, StopAfter, trainer_before, trainer_for

    config, begins = replay.config(), replay.begins_after
    _refuse_settings_of_the_sampler(replay)
    trainer = trainer_for(config, replay)  # refuses what cannot be made before anything is
    if replay.steps_before:
        own = replay.config_before()
        before = trainer_before(own, replay)
        if begins:
            link_checkpoint(replay.run.checkpoints[begins], begins, replay.folder_before, own)
        _fit(before, [StopAfter(replay.step - 1)], display, resume=begins > 0)
    callbacks: list[object] = [StopAfter(replay.step)]
    if replay.is_foreign:
        foreign = Foreign.prepare(replay, config)
        trainer = trainer_for(foreign.config, replay)
        callbacks.append(foreign)
    elif replay.steps_before:
        _write_config(replay.folder, config)
    elif begins:
        link_checkpoint(replay.run.checkpoints[begins], begins, replay.folder, config)
    _fit(trainer, callbacks, display, resume=bool(begins or replay.steps_before) and not replay.is_foreign)


def _fit(trainer: BaseTrainer[Any], callbacks: Sequence[object], display: Display, *, resume: bool) -> None:
    # Other rows are a finding of the comparison.
    trainer.fit(resume=resume, accept_changed_data=True, callbacks=callbacks, console=display)


def _refuse_settings_of_the_sampler(replay: Replay) -> None:
    without_effect = [text for text in replay.changes if text.partition("=")[0].partition(".")[0] in SAMPLING]
    if replay.half == "trainer" and without_effect:
        why = "" if replay.only else ": its rollouts ran beside training and cannot be sampled again"
        raise UsageError(
            f"the samples of this replay come from the record{why}; {', '.join(without_effect)} would show nothing",
            fix="replay a run with `rollouts: {mode: sync}`" if not replay.only else "leave out --only",
        )


def compare(replay: Replay, tolerance: float = 0.0) -> Walk:
    """The step that was made again, and those before it that were made alike, beside the run's."""
    first = replay.step if replay.steps_before or replay.is_foreign else replay.begins_after + 1
    steps = list(range(first, replay.step + 1))
    return walk(replay.run, RunFiles.of(replay.folder), tolerance=tolerance, steps=steps, parts=replay.parts)


def compare_before(replay: Replay, tolerance: float = 0.0) -> Walk | None:
    """The steps before it that were made as the run made them; ``None`` where there are none."""
    if not replay.steps_before:
        return None
    parts = OF_TRAINER if is_asynchronous(replay.run) else OF_REPLAY
    made = RunFiles.of(replay.folder_before)
    return walk(replay.run, made, tolerance=tolerance, steps=list(replay.steps_before), parts=parts)


def link_checkpoint(checkpoint: Path, step: int, folder: Path, config: RunConfig) -> None:
    """Make a folder in which a run of this config has been saved after a step.

    Args:
        checkpoint: Of any run; it is linked, and stays where it is.
        step: Of it.
        folder: Of the run that goes on from it.
        config: Of that run.
    """
    place = folder / "checkpoints"
    place.mkdir(parents=True, exist_ok=True)
    (place / checkpoint.name).symlink_to(checkpoint.resolve(), target_is_directory=True)
    _write_config(folder, config)
    # So that the logs of the steps before are not found to be lost, or their process to have been killed.
    replace_text(folder / "metrics.jsonl", json.dumps({"step": step, "time": 0.0}) + "\n")
    replace_text(folder / "events.jsonl", json.dumps({"time": 0.0, "event": "stopped"}) + "\n")


def _write_config(folder: Path, config: RunConfig) -> None:
    from nemorl.storage.run_directory import to_yaml

    replace_text(folder / "config.yaml", to_yaml(config))
