"""Plugins of another virtual environment: listed, checked, used and lost, with none of their code imported here.

The environment is real (its own interpreter and site-packages); it borrows the libraries of this one by a path file.
``slower``, which the plugin needs, exists only there.
"""

from __future__ import annotations

import gc
import json
import pickle
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import nemorl
import nemorl_trust
import pytest
from nemorl.config import GenerationConfig
from nemorl.config.base import identity
from nemorl.config.component import Component
from nemorl.config.load import load_config, validate
from nemorl.errors import ConfigError, ForeignError, PluginError
from nemorl.plugins import Index, Registry
from nemorl.types import Prompt
from nemorl_cli.console import Console
from nemorl_rl.environments import EnvironmentPool
from nemorl_testing.plugin import use_registry
from nemorl_trust.isolation.process import process_of
from nemorl_trust.lock import locked_plugins
from nemorl_trust.source import read_source
from recorded_messages import Raises

CONFIG = '''
import os
from typing import Annotated, ClassVar

import slower  # exists in this environment only
from nemorl.config import RESUMABLE
from nemorl.plugins import kinds
from pydantic import Field


class Length(kinds.EnvironmentConfig):
    """Rewards length."""

    summary: ClassVar[str] = "rewards length"
    scale: float = Field(1.0, gt=0)
    """Factor."""
    mode: Annotated[str, RESUMABLE] = "now"
    """How it answers."""

    def build(self):
        return slower.Environment(self.scale, self.mode)


class Sums(kinds.DatasetConfig):
    """A few sums."""

    summary: ClassVar[str] = "a few sums"
    count: int
    """Rows."""

    def build(self, split):
        rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(self.count)]
        return rows if split == "train" else None


class Lines(kinds.LoggerConfig):
    """A text file."""

    summary: ClassVar[str] = "a text file"

    def build(self, run_dir):
        return slower.Lines(run_dir / "lines.txt")


class Engine(kinds.GenerationBackendConfig):
    """An engine."""

    summary: ClassVar[str] = "an engine"
    supports: ClassVar[frozenset[str]] = frozenset({"streaming"})
    weight_transports: ClassVar[tuple[str, ...]] = ("shared_memory",)
    requires_modules: ClassVar[tuple[str, ...]] = ("slower",)
    width: int = 1
    """Devices."""

    @property
    def devices_per_replica(self):
        return self.width


class Trainer(kinds.TrainingBackendConfig):
    """A trainer."""

    summary: ClassVar[str] = "a trainer"

    def ranks_per_copy(self, policy):
        return 2 * policy.tensor_parallel_size


class Hook:
    def on_step_end(self, step): ...
'''
LIBRARY = '''
import asyncio
import os

from nemorl.contracts import environment
from nemorl.types import Score, Step


class Float64(float):
    """A number type that the driver does not have."""


class Environment(environment.Environment):
    name = "length"

    def __init__(self, scale, mode):
        self.scale, self.mode = scale, mode

    def start(self, prompt):
        return Talk(self, prompt) if self.mode == "talk" else super().start(prompt)

    def score(self, prompt, response):
        if self.mode == "dies":
            print("about to die", flush=True)
            os._exit(7)
        if self.mode == "raises":
            raise ValueError(f"cannot grade {response}")
        reward = Float64(self.scale * len(response))
        return self.later(reward) if self.mode == "later" else Score(reward, {"length": reward}, answer=response)

    async def later(self, reward):
        await asyncio.sleep(0.01)
        return reward


class Talk:
    def __init__(self, environment, prompt):
        self.turns = 0

    def step(self, response):
        self.turns += 1
        return Step(Score(float(self.turns)), "again" if self.turns < 2 else None, done=self.turns == 2)


class Lines:
    def __init__(self, path):
        self.path = path

    def log(self, metrics, step):
        with open(self.path, "a") as file:
            file.write(f"{step} {sorted(metrics)[:1]}\\n")

    def close(self): ...
'''
POINTS = """
[nemorl.environments]
length = acme_iso.config:Length
[nemorl.datasets]
iso_sums = acme_iso.config:Sums
[nemorl.loggers]
iso_lines = acme_iso.config:Lines
[nemorl.generation_backends]
iso_engine = acme_iso.config:Engine
[nemorl.training_backends]
iso_trainer = acme_iso.config:Trainer
[nemorl.hooks]
iso_hook = acme_iso.config:Hook
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A NEMORL_HOME with one isolated plugin, acme-iso."""
    home = tmp_path_factory.mktemp("home")
    folder = home / "plugins" / "acme-iso"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    ours = "".join(f"{Path(part.__file__ or '').parents[1]}\n" for part in (nemorl, nemorl_trust))
    (site / "borrowed.pth").write_text(f"{ours}{sysconfig.get_path('purelib')}\n")
    (site / "acme_iso").mkdir()
    (site / "acme_iso" / "__init__.py").touch()
    (site / "acme_iso" / "config.py").write_text(dedent(CONFIG))
    (site / "slower.py").write_text(dedent(LIBRARY))
    info = site / "acme_iso-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme-iso\nVersion: 2.5\nRequires-Dist: nemorl-core>=0.1\n"
    )
    (info / "entry_points.txt").write_text(POINTS)
    (folder / "nemorl-plugin.json").write_text(json.dumps({"distribution": "acme-iso"}))
    (home / "plugins" / "half-made").mkdir()  # an installation that was interrupted
    return home


@pytest.fixture
def registry(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setenv("NEMORL_HOME", str(home))
    with use_registry(Registry(Index.installed())) as found:
        yield found


def a_prompt() -> Prompt:
    return Prompt(index=0, text="1+1=", token_ids=(1,), row={"prompt": "1+1="})


def test_an_isolated_plugin_is_listed_from_its_files(registry: Registry) -> None:
    entry = registry.index.find("environments", "length")
    assert (entry.id, entry.version, entry.status) == ("acme-iso:length", "2.5", "ok")
    assert entry.venv is not None
    assert read_source(entry).summary == "rewards length"
    assert "acme_iso" not in sys.modules


def test_a_part_that_runs_in_the_driver_cannot_be_isolated(registry: Registry, raises: Raises) -> None:
    with raises(PluginError, "iso_hook", "acme-iso"):
        registry.load("hooks", "iso_hook")


def test_options_are_checked_where_the_plugin_is(registry: Registry, tiny_model: Path, raises: Raises) -> None:
    config = {"algorithm": "grpo", "model": str(tiny_model), "environment": {"name": "length", "scale": -1, "sclae": 2}}
    with pytest.raises(ConfigError) as caught:
        load_config({**config, "policy": {"init": "random"}})
    problems = {problem.path: problem for problem in caught.value.problems}
    assert problems["environment.scale"].message == "-1 is out of range"
    assert problems["environment.scale"].fix == "give a value greater than 0.0"
    assert "scale" in str(problems["environment.sclae"].fix)
    with raises(ConfigError, path="data.count"):
        load_config({**config, "environment": "length", "data": "iso_sums"})


def test_a_stand_in_dumps_and_loads_like_the_real_config(registry: Registry) -> None:
    component = Component("environments")
    config = component.resolve({"name": "length", "scale": 2})
    dumped = component.dump(config)
    assert dumped == {"name": "length", "scale": 2, "mode": "now"}
    assert component.resolve(dumped).model_dump() == config.model_dump()
    assert identity(config, dumped) == {"name": "length", "scale": 2}
    assert type(config).model_json_schema()["properties"]["scale"]["exclusiveMinimum"] == 0
    arrived = pickle.loads(pickle.dumps(config))
    assert type(arrived) is type(config)
    assert arrived == config


def test_class_data_of_a_backend_are_known_here(registry: Registry) -> None:
    engine = registry.load("generation_backends", "iso_engine")
    assert engine.summary == "an engine"
    assert engine.supports == frozenset({"streaming"})
    assert engine.weight_transports == ("shared_memory",)
    assert engine.missing_modules() == []  # `slower` is missing here, not there
    generation = validate(GenerationConfig, {"backend": {"name": "iso_engine", "width": 2}})
    assert generation.backend.devices_per_replica == 2
    venv = registry.index.find("generation_backends", "iso_engine").venv
    assert venv is not None
    assert generation.interpreter == venv.python


def test_an_isolated_backend_needs_workers(registry: Registry, tiny_model: Path, raises: Raises) -> None:
    data = {"algorithm": "grpo", "model": str(tiny_model), "generation": {"backend": "iso_engine"}}
    with raises(ConfigError, "acme-iso/bin/python", path="generation.backend"):
        load_config({**data, "policy": {"init": "random"}, "cluster": {"launcher": "local"}})


@pytest.mark.parametrize("mode", ["now", "later"])
def test_scores_come_as_plain_numbers(registry: Registry, mode: str) -> None:
    environment = Component("environments").resolve({"name": "length", "scale": 2.0, "mode": mode}).build()
    pool = EnvironmentPool(environment)
    episodes = [pool.start(a_prompt()) for _ in range(20)]
    steps = pool.step(episodes, ["x" * n for n in range(20)])
    assert [step.score.reward for step in steps] == [2.0 * n for n in range(20)]
    assert {type(step.score.reward) for step in steps} == {float}
    assert all(step.done for step in steps)
    pool.close()


def test_a_conversation_keeps_its_state_over_there(registry: Registry) -> None:
    pool = EnvironmentPool(Component("environments").resolve({"name": "length", "mode": "talk"}).build())
    one, other = pool.start(a_prompt()), pool.start(a_prompt())
    first = pool.step([one, other], ["a", "b"])
    assert [(step.score.reward, step.observation, step.done) for step in first] == [(1.0, "again", False)] * 2
    (second,) = pool.step([one], ["c"])
    assert (second.score.reward, second.observation, second.done) == (2.0, None, True)


def test_what_the_plugin_raises_names_it(registry: Registry, raises: Raises) -> None:
    pool = EnvironmentPool(Component("environments").resolve({"name": "length", "mode": "raises"}).build())
    with raises((PluginError, ForeignError), "acme-iso", "ValueError"):
        pool.step([pool.start(a_prompt())], ["x"])


@pytest.mark.slow
def test_a_process_that_dies_is_reported_with_its_last_words_and_started_again(
    registry: Registry, raises: Raises
) -> None:
    pool = EnvironmentPool(Component("environments").resolve({"name": "length", "mode": "dies"}).build())
    lost = pool.start(a_prompt())
    with raises(PluginError, "acme-iso", 7):
        pool.step([lost], ["x"])
    again = EnvironmentPool(Component("environments").resolve("length").build())
    episode = again.start(a_prompt())
    del lost  # tells the process to forget an episode, which is none of those that it has now
    gc.collect()
    assert again.step([episode], ["xyz"])[0].score.reward == 3.0


def test_another_kernel_version_is_refused(registry: Registry, monkeypatch: pytest.MonkeyPatch, raises: Raises) -> None:
    from nemorl_trust.isolation import process as isolated_process

    venv = registry.index.find("environments", "length").venv
    assert venv is not None
    monkeypatch.setattr(isolated_process, "__version__", "9.9")
    with raises(PluginError, "nemorl-core", 0, "9.9", "acme-iso", "--isolated"):
        isolated_process.IsolatedProcess(venv).call("describe", "acme_iso.config:Length")


def test_an_option_that_cannot_travel_is_refused(registry: Registry, raises: Raises) -> None:
    venv = registry.index.find("environments", "length").venv
    assert venv is not None
    with raises(PluginError):
        process_of(venv).call("check", "acme_iso.config:Length", {"scale": lambda: 1})


def test_what_cannot_be_isolated_says_so_when_the_config_loads(
    registry: Registry, tiny_model: Path, raises: Raises
) -> None:
    config = {"algorithm": "grpo", "model": str(tiny_model), "data": "arithmetic"}
    with pytest.raises(ConfigError) as caught:
        load_config({**config, "environment": {"name": "length", "scale": object()}, "policy": {"init": "random"}})
    (problem,) = caught.value.problems
    assert (problem.path, problem.fix) == ("environment.scale", "install it here: nemorl plugins install acme-iso")
    assert "only text, numbers, lists and mappings" in problem.message
    # A driver that did not know of these two ranks would send each the data of another.
    with raises(ConfigError, "ranks_per_copy", path="policy.backend"):
        load_config({**config, "environment": "math", "policy": {"init": "random", "backend": "iso_trainer"}})


def test_rows_travel_in_pages(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemorl_trust.isolation import process as isolated_process

    asked: list[str] = []
    real = isolated_process.IsolatedProcess.call

    def counted(self: isolated_process.IsolatedProcess, verb: str, *args: object, **options: object) -> object:
        asked.append(verb)
        return real(self, verb, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(isolated_process.IsolatedProcess, "call", counted)
    # A row has some 35 bytes: 60,000 of them are 2 MiB, so three pages of a MiB each at most.
    rows = Component("datasets").resolve({"name": "iso_sums", "count": 60_000}).build("train")
    assert [row["prompt"] for row in rows] == [f"{n}+{n}=" for n in range(60_000)]
    assert asked.count("rows") == 3


@pytest.mark.slow
def test_a_run_uses_isolated_parts_and_records_them(registry: Registry, tiny_model: Path, tmp_path: Path) -> None:
    config = load_config(
        {
            "algorithm": "grpo",
            "model": str(tiny_model),
            "run_dir": str(tmp_path / "run"),
            "data": {"name": "iso_sums", "count": 4},
            "environment": {"name": "length", "scale": 0.5},
            "loggers": ["iso_lines"],
            "max_steps": 2,
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 2,
            "policy": {"init": "random", "max_sequence_tokens": 32},
            "generation": {"max_new_tokens": 3},
            "checkpoint": {"export": False},
        },
        for_launch=True,
    )
    result = config.build().fit(console=Console(quiet=True))
    assert result.steps == 2
    assert (tmp_path / "run" / "lines.txt").read_text().startswith("1 ")
    recorded = json.loads((tmp_path / "run" / "plugins.lock.json").read_text())["plugins"]
    (iso,) = [plugin for plugin in recorded if plugin["distribution"] == "acme-iso"]
    assert (iso["version"], len(iso["files_sha256"])) == ("2.5", 64)
    assert iso["parts"] == ["datasets:iso_sums", "environments:length", "loggers:iso_lines"]
    toolkits = {f"nemorl-{name}" for name in ("tensors", "media", "rl", "trust", "cli", "testing")}
    assert {plugin.distribution for plugin in locked_plugins(config)} - toolkits == {
        "acme-iso",
        "nemorl-core",
        "nemorl-dtensor",
        "nemorl-grpo",
    }
    assert "acme_iso" not in sys.modules
