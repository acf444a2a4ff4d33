"""Order through the guard, and what happens when a hook raises, exits, or cannot be built."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl import Callback, hookimpl
from nemorl.errors import ForeignError, PluginError, UsageError
from nemorl.plugins import Index, Registry
from nemorl.plugins.hooks import Hooks, build_hooks
from nemorl.plugins.kinds import HookConfig
from nemorl_cli.console import Console
from nemorl_testing.plugin import use_registry
from recorded_messages import Raises

DOCS = (Path(__file__).parents[3] / "docs/hooks.md").read_text()
ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(4)]
BEGIN = {"trainer": None, "step": 1}
said: list[str] = []


@pytest.fixture(autouse=True)
def _silence() -> None:
    said.clear()


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def hooks(reports: list[str]) -> Hooks:
    return Hooks(reports.append)


def saying(word: str, **options: bool) -> object:
    """A hook object whose ``on_step_begin`` says a word."""

    def on_step_begin(self: Any, step: int) -> None:
        said.append(word)

    return type(word, (), {"on_step_begin": hookimpl(**options)(on_step_begin)})()  # type: ignore[call-overload]


class Failing:
    def on_step_begin(self) -> None:
        said.append("failing")
        raise ValueError("no")


def registered(hooks: Hooks, *plugins: object) -> Hooks:
    """The first given is the first called, as in a run."""
    for number, plugin in reversed(list(enumerate(plugins))):
        hooks.register(plugin, f"acme:{number}")
    return hooks


# Order


def test_first_and_last_are_relative_to_all_others(hooks: Hooks) -> None:
    late, early = saying("late", trylast=True), saying("early", tryfirst=True)
    registered(hooks, late, saying("one"), early, saying("two")).fire("on_step_begin", **BEGIN)
    assert said == ["early", "one", "two", "late"]


def test_the_example_of_the_page_runs(tiny_model: Path, tmp_path: Path) -> None:
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL) if "order = []" in block]

    class Tiny:
        def fit(self, callbacks: list[object]) -> None:
            fit(tiny_model, tmp_path / "run", callbacks)

    names: dict[str, Any] = {"trainer": Tiny()}
    exec(compile(code, "docs/hooks.md", "exec"), names)
    assert names["order"].count("before the others") == 2


# A hook that raises


def test_an_observer_that_raises_is_disabled_and_the_others_run(hooks: Hooks, reports: list[str]) -> None:
    registered(hooks, Failing(), saying("one"))
    for _ in range(2):
        hooks.fire("on_step_begin", **BEGIN)
    assert said == ["failing", "one", "one"]
    assert reports == ["hook on_step_begin of acme:0 raised ValueError: no; it is disabled for the rest of this run"]


def test_a_failing_on_exception_does_not_hide_the_error_of_the_run(hooks: Hooks, reports: list[str]) -> None:
    class Unlucky:
        essential = True

        def on_exception(self, error: BaseException) -> None:
            raise OSError("no network either")

    registered(hooks, Unlucky()).fire("on_exception", trainer=None, error=ValueError("the cause"))
    assert reports == ["hook on_exception of acme:0 raised OSError: no network either"]


# A hook that exits


class Exits:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_begin(self) -> None:
        raise self.error


def test_an_observer_that_exits_is_disabled_like_one_that_raises(hooks: Hooks, reports: list[str]) -> None:
    registered(hooks, Exits(SystemExit(0)), saying("one")).fire("on_step_begin", **BEGIN)
    assert said == ["one"]
    assert reports == ["hook on_step_begin of acme:0 raised SystemExit: 0; it is disabled for the rest of this run"]


def test_an_essential_hook_that_exits_ends_the_run_with_an_error(hooks: Hooks, raises: Raises) -> None:
    exits = Exits(SystemExit(0))
    exits.essential = True  # type: ignore[attr-defined]
    with raises(ForeignError, "acme:0", "SystemExit", 0, "trainer.stop"):
        registered(hooks, exits).fire("on_step_begin", **BEGIN)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(int(signal.SIGTERM))], ids=["Ctrl-C", "SIGTERM"])
def test_what_a_person_asks_for_passes_through_hooks(hooks: Hooks, reports: list[str], error: BaseException) -> None:
    registered(hooks, Exits(error))
    with pytest.raises(type(error)) as caught:
        hooks.fire("on_step_begin", **BEGIN)
    assert caught.value is error
    assert reports == []


# In a real run


class Clumsy:
    """A hook plugin of the tests that fails at the first step."""

    def on_step_begin(self, step: int) -> None:
        said.append(f"clumsy {step}")
        raise KeyError("loss_of_mind")

    def on_fit_end(self) -> None:
        said.append("clumsy at the end")


class EssentialClumsy(Clumsy):
    """The same, and the run depends on it."""

    essential = True


class ConstructedWrong:
    """Needs what nobody gives."""

    def __init__(self, project: str) -> None: ...


class Unconnected:
    """Cannot reach its service."""

    def __init__(self) -> None:
        raise ConnectionError("no route to host")


class Refuses:
    """Knows what is wrong."""

    def __init__(self) -> None:
        raise UsageError("ACME_TOKEN is not set", fix="export ACME_TOKEN=…")


class ExitsAtOnce:
    """Exits while it is made."""

    def __init__(self) -> None:
        sys.exit(0)


class ClumsyConfig(HookConfig):
    """Builds each of them."""

    def build(self) -> object:
        return Clumsy()


class EssentialConfig(HookConfig):
    def build(self) -> object:
        return EssentialClumsy()


class UnbuiltConfig(HookConfig):
    """Cannot be built."""

    why: str

    def build(self) -> object:
        return {"wrong": ConstructedWrong, "unconnected": Unconnected, "refuses": Refuses, "exits": ExitsAtOnce}[
            self.why
        ]()


@pytest.fixture
def plugins() -> Iterator[Registry]:
    scoped = Registry(Index.installed())
    offered = {"clumsy": ClumsyConfig, "essential": EssentialConfig, "unbuilt": UnbuiltConfig}
    for name, config in offered.items():
        scoped.register("hooks", name, config)
    with use_registry(scoped):
        yield scoped


def fit(model: Path, run_dir: Path, callbacks: list[object], **changes: Any) -> nemorl.TrainResult:
    """Two steps of two prompts with two responses of three tokens."""
    config = {
        "algorithm": "grpo",
        "model": str(model),
        "run_dir": str(run_dir),
        "max_steps": 2,
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "kl_penalty": 0.0,
        "policy": {"init": "random", "max_sequence_tokens": 32},
        "generation": {"max_new_tokens": 3},
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"export": False},
        **changes,
    }
    return nemorl.load_config(config).build().fit(ROWS, length, callbacks=callbacks, console=Console(quiet=True))


def length(prompt: str, response: str) -> float:
    return float(len(response))


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def test_a_hook_plugin_that_raises_is_named_once_in_the_audit_log_and_the_run_goes_on(
    plugins: Registry, tiny_model: Path, tmp_path: Path
) -> None:
    assert fit(tiny_model, tmp_path / "run", [], plugins={"hooks": ["clumsy"]}).steps == 2
    identity = plugins.index.find("hooks", "clumsy").id
    assert identity.endswith(":clumsy")
    (warning,) = [line for line in events(tmp_path / "run") if line["event"] == "warning"]
    assert f"hook on_step_begin of {identity} raised KeyError: 'loss_of_mind'" in warning["message"]
    assert "disabled for the rest of this run" in warning["message"]
    assert "clumsy at the end" not in said


def test_an_essential_hook_plugin_that_raises_ends_the_run(
    plugins: Registry, tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    with raises(ForeignError, "on_step_begin", "test_hook_policy:essential", "KeyError"):
        fit(tiny_model, tmp_path / "run", [], plugins={"hooks": ["essential"]})
    assert [line["event"] for line in events(tmp_path / "run")] == ["started", "weight_receipt", "failed"]
    assert said == ["clumsy 1"]


def test_an_exit_in_a_callback_does_not_end_the_run(tiny_model: Path, tmp_path: Path) -> None:
    class Quits(Callback):
        def on_step_end(self) -> None:
            sys.exit(3)

    assert fit(tiny_model, tmp_path / "run", [Quits()]).steps == 2
    (warning,) = [line for line in events(tmp_path / "run") if line["event"] == "warning"]
    assert "hook on_step_end of callback 0 (Quits) raised SystemExit: 3" in warning["message"]


@pytest.mark.parametrize(
    ("why", "facts"),
    [
        ("wrong", ["TypeError"]),
        ("unconnected", ["ConnectionError", "plugins.hooks"]),
        ("refuses", ["ACME_TOKEN"]),
        ("exits", ["SystemExit", 0, "plugins.hooks"]),
    ],
)
def test_a_hook_plugin_that_cannot_be_built_is_an_error_that_names_it(
    plugins: Registry, why: str, facts: list[object], raises: Raises
) -> None:
    with raises(PluginError, "test_hook_policy:unbuilt", *facts):
        build_hooks(plugins, [UnbuiltConfig(why=why)], [], print)


def test_a_class_passed_as_a_callback_is_named_after_itself(raises: Raises) -> None:
    with raises(PluginError, 0, "Clumsy"):
        build_hooks(Registry(Index([])), [], [Clumsy], print)
