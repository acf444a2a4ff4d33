"""The stable surface is frozen in docs/stable-surface.txt; the renames that docs/versions.md describes work."""

from __future__ import annotations

import difflib
import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
import typer
from nemorl.config import RESUMABLE, Config
from pydantic import Field, model_validator

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
HOW_TO_CHANGE = """\
the stable surface has changed. A new line: run python docs/generate_stable_surface.py and commit it. A line that is
gone, or says something else: it is a promise to users; docs/versions.md says how a name, key, option, metric or format
is retired, and for how long the old one goes on working.
"""


@pytest.fixture(scope="module")
def surface() -> ModuleType:
    path = DOCS / "generate_stable_surface.py"
    spec = importlib.util.spec_from_file_location("generate_stable_surface", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(DOCS))
    return module


@pytest.mark.slow
def test_the_stable_surface_is_the_frozen_one(surface: ModuleType) -> None:
    frozen = (DOCS / "stable-surface.txt").read_text("utf-8").splitlines()
    changes = list(difflib.unified_diff(frozen, surface.text().splitlines(), "frozen", "now", lineterm="", n=0))
    if changes:
        pytest.fail(HOW_TO_CHANGE + "\n".join(changes), pytrace=False)


def test_every_section_is_there(surface: ModuleType) -> None:
    frozen = (DOCS / "stable-surface.txt").read_text("utf-8")
    for line in (
        "nemorl.train(",
        "nemorl.plugins.hooks.HookSpecs.on_step_end(",
        "nemorl.contracts.TrainingBackend.",
        "nemorl.hooks: ",
        "nemorl runs",
        "every run: policy.optimizer.lr: float, > 0, ≤ 1 = 1e-06",
        "train/reward [",
        "checkpoint folder: 1",
        "rollout records: reward: double",
    ):
        assert f"\n{line}" in frozen, line


class Optimizer(Config):
    """Two keys."""

    lr: Annotated[float, Field(gt=0)] = 0.5
    workers: Annotated[int, RESUMABLE] = 4


class Run(Config):
    """A key, and a section."""

    steps: int
    optimizer: Optimizer = Optimizer()


def test_a_key_is_frozen_with_its_type_limits_default_and_mark(surface: ModuleType) -> None:
    assert surface.keys_of(Run) == {
        "steps": "int = required",
        "optimizer": "a mapping = its defaults",
        "optimizer.lr": "float, > 0 = 0.5",
        "optimizer.workers": "int = 4, may change on resumption",
    }


def test_a_command_is_frozen_with_its_arguments_options_and_defaults(surface: ModuleType) -> None:
    app = typer.Typer()

    @app.command()
    def seal(folder: Path, days: int = 90, json: Annotated[bool, typer.Option("--json")] = False) -> None:
        """Do nothing."""

    @app.command(hidden=True)
    def secret() -> None:
        """Do nothing."""

    found = dict(surface.commands_of("nemorl audit", typer.main.get_command(app)))
    assert found == {
        "nemorl audit": "nemorl audit",
        "nemorl audit seal": "nemorl audit seal --days=90 --json FOLDER",
    }


def test_what_one_algorithm_shares_with_those_above_is_told_once(surface: ModuleType) -> None:
    assert surface.beyond({"a": "int = 1", "b": "int = 2", "c": "int = 3"}, {"a": "int = 1", "b": "int = 5"}) == {
        "b": "int = 2",
        "c": "int = 3",
    }


# The rename of a key, as docs/versions.md shows it


class Sampler(Config):
    """A key that was called ``temp``."""

    temperature: float = 1.0

    @model_validator(mode="before")
    @classmethod
    def _old_names(cls, data: Any) -> Any:
        if isinstance(data, dict) and "temp" in data:
            warnings.warn("temp is called temperature since 0.2 and goes in 0.4", FutureWarning, stacklevel=2)
            return {"temperature": data["temp"], **{key: value for key, value in data.items() if key != "temp"}}
        return data


def test_a_key_is_read_under_its_old_name_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="temp"):
        assert Sampler.model_validate({"temp": 0.5}).temperature == 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Sampler.model_validate({"temperature": 0.25}).temperature == 0.25
    assert Sampler(temperature=0.5).model_dump() == {"temperature": 0.5}
