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

from nemorl.errors import UsageError
from nemorl_base.display import Display
from nemorl_base.files import replace_text

from nemorl_diff.run_files import RunFiles
from nemorl_diff.stages import STAGES, Stage
from nemorl_diff.walking import Walk, walk

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig

Only = Literal["trainer", "sampler"]
OF_SAMPLER: tuple[Stage, ...] = ("data", "tokens", "rewards")
OF_TRAINER: tuple[Stage, ...] = ("advantages", "logprobs", "loss", "gradient", "weights")
OF_REPLAY: tuple[Stage, ...] = tuple(stage for stage in STAGES if stage != "validation")
KEEPS: Mapping[str, Any] = {
    "loggers": [],
    "validation": {"every": 0, "at_start": False, "at_end": False},
    "checkpoint": {"every": 0, "keep_last": 1000, "export": False},
}
"""What a replay keeps, and how: all but results of the step."""
ALL_GROUPS = 1_000_000


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

    def __post_init__(self) -> None:
        if self.step > self.run.last_step:
            raise UsageError(
                f"{self.run.path} has no step {self.step}", fix=f"its last one is {self.run.last_step}: give --step"
            )

    @property
    def begins_after(self) -> int:
        """The step of the newest checkpoint before it; 0: the run's beginning."""
        return max((step for step in self.run.checkpoints if step < self.step), default=0)

    @property
    def scores(self) -> bool:
        """Another engine gives log-probs of the recorded tokens: from the same seeds it would draw other ones."""
        own, changed = self._both_configs()
        return self.only == "sampler" and _engine_of(own) != _engine_of(changed)

    def _both_configs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        from nemorl_base.mappings import apply_overrides

        own = dict(self.run.data.config)
        return own, apply_overrides(deepcopy(own), self.changes)

    @property
    def parts(self) -> tuple[Stage, ...]:
        """What can be compared with the run."""
        if self.scores:
            return ("tokens",)
        chosen = {"sampler": OF_SAMPLER, "trainer": OF_TRAINER, None: OF_REPLAY}[self.only]
        return tuple(part for part in chosen if part != "weights") if self.is_foreign else chosen

    @property
    def is_foreign(self) -> bool:
        """The weights come over from a checkpoint of another backend, whose optimizer's state does not."""
        own, changed = self._both_configs()
        return self.begins_after > 0 and _backend_of(own) != _backend_of(changed)

    def config(self) -> RunConfig:
        """The run's config with the changes, in the replay's folder.

        Raises:
            UsageError: data or reward of the run were given in Python.
            ConfigError: the changes are no config.
        """
        from nemorl.config.load import load_config
        from nemorl_base.mappings import apply_overrides

        data = deepcopy(dict(self.run.data.config))
        for section, values in KEEPS.items():
            data[section] = {**(data.get(section) or {}), **values} if isinstance(values, Mapping) else values
        data["checkpoint"] |= {"must_save_by": None, "keep_every": None, "metric": None}
        if "records" in data:
            data["records"] = {**data["records"], "every": 1, "groups": ALL_GROUPS, "print_completions": 0}
            data["records"]["max_gib"] = max(2.0, data["records"]["max_gib"])
        data["run_dir"] = str(self.folder)
        if self.scores and self.step == self.begins_after + 1:
            data["policy"]["max_sequence_tokens"] += 1  # an engine scores a prompt, and answers with a token
        given = [key for key in ("data", "environment") if key in data and data[key] is None]
        if given:
            raise UsageError(
                f"{self.run.path} was given its {' and '.join(given)} in Python: its config cannot make a step",
                fix="name them in the config (`data:`, `environment:`, or a plugin of your own)",
            )
        return load_config(apply_overrides(data, self.changes, "--set"), for_launch=True)


def _backend_of(data: Mapping[str, Any]) -> str:
    """The training backend's name."""
    return _name(data["policy"]["backend"])


def _engine_of(data: Mapping[str, Any]) -> str:
    """The generation backend's name; empty for a run that does not sample."""
    return _name((data.get("generation") or {}).get("backend") or "")


def _name(part: Any) -> str:
    return str(part["name"] if isinstance(part, Mapping) else part)


def make(replay: Replay, display: Display) -> Walk:
    """Make the step again, and compare it with the run's.

    Args:
        replay: The step.
        display: Shows what happens.

    Raises:
        UsageError: the run did not keep what the replay needs; says which setting keeps it.
    """
    from nemorl_diff.halves import Foreign, StopAfter, trainer_for

    config, begins = replay.config(), replay.begins_after
    callbacks: list[object] = [StopAfter(replay.step)]
    if replay.is_foreign:
        foreign = Foreign.prepare(replay, config)
        config = foreign.config
        callbacks.append(foreign)
    elif begins:
        link_checkpoint(replay.run.checkpoints[begins], begins, replay.folder, config)
    trainer = trainer_for(config, replay)
    resume = begins > 0 and not replay.is_foreign
    # Other rows are a finding of the comparison.
    trainer.fit(resume=resume, accept_changed_data=True, callbacks=callbacks, console=display)
    return compare(replay)


def compare(replay: Replay, tolerance: float = 0.0) -> Walk:
    """The steps that were made again, beside the run's."""
    steps = range(replay.step if replay.is_foreign else replay.begins_after + 1, replay.step + 1)
    return walk(replay.run, RunFiles.of(replay.folder), tolerance=tolerance, steps=list(steps), parts=replay.parts)


def link_checkpoint(checkpoint: Path, step: int, folder: Path, config: RunConfig) -> None:
    """Make a folder in which a run of this config has been saved after a step.

    Args:
        checkpoint: Of any run; it is linked, and stays where it is.
        step: Of it.
        folder: Of the run that goes on from it.
        config: Of that run.
    """
    from nemorl.storage.run_directory import to_yaml

    place = folder / "checkpoints"
    place.mkdir(parents=True, exist_ok=True)
    (place / checkpoint.name).symlink_to(checkpoint.resolve(), target_is_directory=True)
    replace_text(folder / "config.yaml", to_yaml(config))
    # So that the logs of the steps before are not found to be lost, or their process to have been killed.
    replace_text(folder / "metrics.jsonl", json.dumps({"step": step, "time": 0.0}) + "\n")
    replace_text(folder / "events.jsonl", json.dumps({"time": 0.0, "event": "stopped"}) + "\n")
