"""What may refuse a run before anything is loaded: checks of the house and of standard plugins, no stranger's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nemorl.config.plugin_lists import PluginsConfig
from nemorl.errors import ConfigIssue, ForeignError
from nemorl.plugins import Index, PluginPolicy, Registry
from nemorl.plugins.index import LAUNCH_CHECKS
from nemorl.resources.preflight import launch_problems
from recorded_messages import Raises


def too_large(config: Any, run_dir: Path, warn: Callable[[str], None]) -> Iterator[ConfigIssue]:
    warn(f"{config.model} is large")
    yield ConfigIssue("policy.microbatch_tokens", "this does not fit", "halve it")


def broken(config: Any, run_dir: Path, warn: Callable[[str], None]) -> Iterator[ConfigIssue]:
    raise ZeroDivisionError


def point(distribution: str, function: str, folder: Path) -> EntryPoint:
    info = folder / f"{distribution}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    found = EntryPoint("check", f"{__name__}:{function}", LAUNCH_CHECKS)
    vars(found).update(dist=PathDistribution(info))
    return found


def asked(
    folder: Path, distribution: str, function: str, warn: Callable[[str], None] = print, block: tuple[str, ...] = ()
) -> list[ConfigIssue]:
    """Problems of a run where a distribution offers this check."""
    installed = Registry(Index([point(distribution, function, folder)], PluginPolicy(block=block)))
    run = SimpleNamespace(model="org/name", plugins=PluginsConfig(), registry=installed)
    return list(launch_problems(run, folder / "r", warn))  # type: ignore[arg-type]


def test_problems_and_warnings_of_a_check_are_passed_on(tmp_path: Path) -> None:
    warnings: list[str] = []
    (problem,) = asked(tmp_path, "nemorl-rl", "too_large", warnings.append)
    assert (problem.path, problem.fix) == ("policy.microbatch_tokens", "halve it")
    assert warnings == ["org/name is large"]


def test_a_check_of_a_stranger_is_never_called(tmp_path: Path) -> None:
    assert asked(tmp_path, "acme-checks", "broken") == asked(tmp_path, "nemorl-grpo-fork", "broken") == []


def test_a_blocked_standard_plugin_checks_nothing(tmp_path: Path) -> None:
    assert len(asked(tmp_path, "nemorl-insight", "too_large")) == 1
    assert asked(tmp_path, "nemorl-insight", "too_large", block=("nemorl-insight",)) == []


def test_a_check_that_fails_is_named(tmp_path: Path, raises: Raises) -> None:
    with raises(ForeignError, "nemorl-rl:check", "ZeroDivisionError"):
        asked(tmp_path, "nemorl-rl", "broken")


def test_narrowing_keeps_the_checks(tmp_path: Path) -> None:
    index = Index([point("nemorl-rl", "too_large", tmp_path)]).narrowed(PluginPolicy(block=("acme",)))
    assert list(index.launch_checks) == ["nemorl-rl:check"]
    assert index.entries == (), "it is no plugin of a kind, and no plugin of an unknown kind"
