"""A run's beginning and end: what is built is closed once, whatever happens, and the first error is the one told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.contracts.display import Silence
from nemorl.errors import ForeignError, NemorlError
from nemorl.plugins import Index, Registry
from nemorl.plugins.kinds import LoggerConfig, TrainingBackendConfig
from nemorl_rl.callbacks import Callback
from nemorl_testing.plugin import use_registry
from recorded_messages import Raises

ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(6)]


@pytest.fixture(autouse=True)
def _scoped() -> Iterator[Registry]:
    """Registrations end with the test."""
    with use_registry(Registry(Index.installed())) as registry:
        yield registry


class Shown(Silence):
    """A display that keeps what it is told, and when it was left."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)

    announce = message

    def __exit__(self, *_: object) -> None:
        self.lines.append("(closed)")


class Log:
    """A logger that cannot be closed."""

    closings = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None:
        Log.closings += 1
        raise OSError("the server is gone")


class Sticky(LoggerConfig):
    """A logger that cannot be closed."""

    def build(self, run_dir: Path) -> Log:
        return Log()


class Unloadable(TrainingBackendConfig):
    """A backend that does not load."""

    def build(self, *_: Any, **__: Any) -> Any:
        raise MemoryError("7 GiB are missing")


class Witness(Callback):
    """Keeps what it is told of the end."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        self.seen.append(f"{trainer.directory.path.name}: {type(error).__name__}")

    def on_fit_end(self) -> None:
        self.seen.append("fit end")


def planned_config(model: Path, run_dir: Path, **changes: Any) -> Any:
    """Of a short run that leaves nothing but its logs and its last checkpoint."""
    settings = {"model": str(model), "run_dir": str(run_dir), "max_steps": 2, **changes}
    quick = {"validation": {"at_end": False}, "checkpoint": {"export": False}}
    policy = {"init": "random", "max_sequence_tokens": 32, **settings.pop("policy", {})}
    return nemorl.load_config({**quick, **settings, "policy": policy})


def sft(model: Path, run_dir: Path, **changes: Any) -> Any:
    return planned_config(model, run_dir, algorithm="sft", batch_size=2, **changes)


def events(run_dir: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [(line["event"], line.get("error", "").partition(" raised")[0]) for line in lines]


def test_a_part_that_cannot_be_closed_does_not_hide_why_the_run_was_not_built(
    tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    nemorl.register_logger("sticky")(Sticky)
    nemorl.register_training_backend("unloadable")(Unloadable)
    config = sft(tiny_model, tmp_path / "run", loggers=["sticky"], policy={"backend": "unloadable"})
    witness, shown, Log.closings = Witness(), Shown(), 0
    with raises(ForeignError, "MemoryError", 7):
        config.build().fit(ROWS, callbacks=[witness], console=shown)
    assert Log.closings == 1
    assert witness.seen == ["run: ForeignError"]  # there is a directory, if no run
    closing, ending = events(tmp_path / "run")
    assert closing == ("failed", "ForeignError: closing Log")
    assert ending[0] == "failed"
    assert "MemoryError" not in closing[1]
    assert shown.lines[-1] == "(closed)"
    with nemorl.storage.run_directory.RunDirectory.claim(config, tell=print) as directory:  # its lock is gone
        assert not directory.is_resumed


def test_a_part_that_cannot_be_closed_fails_a_run_that_went_well(
    tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    nemorl.register_logger("sticky")(Sticky)
    witness, Log.closings = Witness(), 0
    with raises(ForeignError, "Log", "OSError"):
        sft(tiny_model, tmp_path / "run", loggers=["sticky"]).build().fit(ROWS, callbacks=[witness], console=Silence())
    assert Log.closings == 1
    assert witness.seen == ["fit end"]
    assert events(tmp_path / "run")[-2:] == [("finished", ""), ("failed", "ForeignError: closing Log")]


@pytest.mark.slow
def test_a_trainer_that_was_stopped_goes_on_where_it_was(tiny_model: Path, tmp_path: Path) -> None:
    class StopOnce(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            trainer.stop("for the test")

    trainer = sft(tiny_model, tmp_path / "run", max_steps=3).build()
    first = trainer.fit(ROWS, callbacks=[StopOnce()], console=Silence())
    assert (first.steps, first.stopped) == (1, "for the test")
    second = trainer.fit(ROWS, resume=True, console=Silence())
    assert (second.steps, second.stopped) == (3, None)
    assert [[record["step"] for record in result.history] for result in (first, second)] == [[1], [2, 3]]


def test_what_a_group_is_may_depend_on_what_setup_made(tiny_model: Path, tmp_path: Path) -> None:
    class Planned(nemorl.GRPOTrainer):
        def setup(self) -> None:
            super().setup()
            self.plan = super().rollout_plan

        @property
        def rollout_plan(self) -> Any:
            return self.plan

    settings = {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "generation": {"max_new_tokens": 2}}
    config = planned_config(tiny_model, tmp_path / "run", algorithm="grpo", max_steps=1, **settings)
    assert Planned(config).fit(ROWS, lambda prompt, response: float(len(response)), console=Silence()).steps == 1


def test_a_damaged_tokenizer_is_said_before_the_model_is_loaded(
    tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "tokenizer.json").write_text("{")
    shown = Shown()
    trainer = nemorl.GRPOTrainer.from_pretrained(str(model), run_dir=str(tmp_path / "run"), max_steps=1)
    with raises(NemorlError):
        trainer.fit(ROWS, lambda prompt, response: 1.0, console=shown)
    assert not any("loading PyTorch" in line for line in shown.lines)
