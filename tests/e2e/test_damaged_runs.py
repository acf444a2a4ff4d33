"""Every file of a run directory is damaged in turn, in several ways, and the run continued.

Either it ends as the undamaged run does, or it is refused with one clear error. It never ends in another way.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.base.files.jsonl import read_jsonl
from nemorl.errors import NemorlError
from nemorl.trainer import BaseTrainer
from nemorl_cli.console import Console
from nemorl_rl.callbacks import Callback
from recorded_messages import Raises
from safetensors.torch import load_file
from tiers import only

ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(6)]


def flip(path: Path, dice: random.Random) -> None:
    """One bit, anywhere."""
    content = bytearray(path.read_bytes())
    if content:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(content)


def in_place_of(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path, random.Random], Any]] = {
    "cut": lambda path, _: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": flip,
    "emptied": lambda path, _: path.write_bytes(b""),
    "gone": lambda path, _: path.unlink(),
    "a folder": lambda path, _: in_place_of(path, Path.mkdir),
    "other JSON": lambda path, _: path.write_text('[1, {"step": "x"}]\n'),
    "a dangling link": lambda path, _: in_place_of(path, lambda link: link.symlink_to("nowhere")),
}


class StopAfter(Callback):
    def __init__(self, step: int) -> None:
        self.at = step

    def on_step_end(self, trainer: BaseTrainer[Any], step: int) -> None:
        if step == self.at:
            trainer.stop("for the test")


def config(model: Path, run_dir: Path) -> Any:
    data = {
        "algorithm": "sft",
        "model": str(model),
        "run_dir": str(run_dir),
        "batch_size": 2,
        "max_steps": 3,
        "checkpoint": {"every": 1, "keep_last": 2},
        "validation": {"every": 0},
        "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 1e-3}},
    }
    return nemorl.load_config(data)


def fit(model: Path, run_dir: Path, **options: Any) -> Any:
    return config(model, run_dir).build().fit(ROWS, console=Console(quiet=True), **options)


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["train/loss"]) for r in read_jsonl(run_dir / "metrics.jsonl") if "train/loss" in r]


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The whole run, and one that stopped after step 2 with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("runs")
    fit(tiny_model, folder / "whole")
    fit(tiny_model, folder / "stopped", callbacks=[StopAfter(2)])
    return folder / "whole", folder / "stopped"


def ends_as(whole: Path, place: Path) -> bool:
    """The same losses as far as they are recorded, the last step's among them, and the same weights."""
    same = set(losses(place)) <= set(losses(whole)) and losses(place)[-1:] == losses(whole)[-1:]
    one, other = (load_file(folder / "model/model.safetensors") for folder in (whole, place))
    return same and all(one[name].equal(other[name]) for name in one)


def refusal(action: Callable[[], Any]) -> NemorlError | None:
    """The error of ours that an action ends with, if it does; any other passes."""
    try:
        action()
    except NemorlError as error:
        return error
    return None


def warnings(run_dir: Path) -> list[str]:
    return [event["message"] for event in read_jsonl(run_dir / "events.jsonl") if event["event"] == "warning"]


REFUSED = {"config.yaml"}
"""Without it nobody knows what ran. All else is made anew or not needed, or an older checkpoint steps in."""
TOLD = {"metrics.jsonl", "plugins.lock.json"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    only("cut", of=DAMAGES),
)
def test_a_damaged_run_ends_as_the_sound_one_or_is_refused(
    damage: str, runs: tuple[Path, Path], tiny_model: Path, tmp_path: Path
) -> None:
    whole, stopped = runs
    older = {Path("checkpoints/step_000001") / name for name in ("manifest.json", "trainer.json")}
    files = [path.relative_to(stopped) for path in sorted(stopped.rglob("*")) if path.is_file()]
    chosen = [file for file in files if file.parts[:2] != ("checkpoints", "step_000001") or file in older]
    assert len(chosen) >= 14
    dice = random.Random(damage)
    for file in chosen:
        place = tmp_path / file.as_posix().replace("/", ":")
        shutil.copytree(stopped, place)
        DAMAGES[damage](place / file, dice)
        error = refusal(lambda place=place: fit(tiny_model, place, resume=True))
        if error is not None:
            assert "fix: " in str(error), f"{damage} {file}"
            is_blocked = damage == "a folder" and len(file.parts) == 1
            is_blocked |= damage == "a dangling link" and file.name == "run.lock"  # no lock is taken through a link
            assert file.name in REFUSED or is_blocked, f"{damage} {file}: {error}"
            continue
        assert file.name not in REFUSED or damage == "flipped", f"{damage} {file}"
        assert ends_as(whole, place), f"{damage} {file}"
        told = "\n".join(warnings(place))
        if file.parts[0] == "checkpoints" and (file.parts[1] == "step_000002" or file.name == "manifest.json"):
            assert f"{file.parts[1]}" in told, f"{damage} {file}"
            assert list((place / "set_aside").glob(f"001_from_step_*/checkpoints/{file.parts[1]}"))
        elif file.name in TOLD and damage != "flipped" and (place / file).name != "plugins.lock.json":
            assert f"{file.name} was damaged" in told, f"{damage} {file}"


@pytest.mark.parametrize("limit", [0, 300, 2_000, 10_000, 40_000, 80_000])
def test_a_disk_that_is_full_at_any_moment_is_named_and_nothing_is_lost(
    limit: int, runs: tuple[Path, Path], tiny_model: Path, tmp_path: Path, small_files_only: Any, raises: Raises
) -> None:
    # The system refuses to let any file grow beyond the limit: a real refusal, as that of a full disk.
    whole, stopped = runs
    place = tmp_path / "run"
    shutil.copytree(stopped, place)
    with small_files_only(limit), raises(NemorlError, "ulimit", varies=r"^\w+: cannot write \S+"):
        fit(tiny_model, place, resume=True)
    assert sorted(path.name for path in (place / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
    fit(tiny_model, place, resume=True)
    assert ends_as(whole, place)
    assert losses(place) == losses(whole)
