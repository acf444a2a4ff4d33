"""From checks to tests: which checks a kind has, what they are run on, and how a failure reads.

A check is a function ``check_xxx(subject)`` in the module of its kind. The first line of its docstring states the
clause and ends with the section of docs/design.md that it comes from. It calls :func:`expect`; what it raises becomes a
:class:`ConformanceError` that names clause, section and what was seen.
"""

from __future__ import annotations

import importlib
import inspect
import re
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import NemorlError, PluginError, UsageError
from nemorl.plugins import KINDS, PluginEntry, registry
from nemorl.plugins.index import singular
from nemorl.plugins.kinds import PluginConfig
from nemorl.plugins.registry import BASES

from nemorl_testing.attribution import describe

if TYPE_CHECKING:
    from nemorl.resources.worker import WorkerContext

T = TypeVar("T")

CONFIG_KINDS = tuple(BASES)
"""Kinds whose plugin is a config class."""

_OF_CONFIGS = ("entry_points", "every_config")
_OF_TRAINERS = ("training_backends", "training_outputs", "memory_plan", "asynchronous_saves")
_ABLE_TRAINERS = ("adapters", "halved_steps", "moments", "observed_trainers", "rates", "shared_base")
_OF_ENGINES = ("generation_backends", "single_requests", "snapshots", "observed_samplers", "receipts")
_MODULES: Mapping[str, tuple[str, ...]] = {
    **{kind: (*_OF_CONFIGS, kind) for kind in CONFIG_KINDS},
    "algorithms": (*_OF_CONFIGS, "algorithms", "trained_tokens", "learning"),
    "environments": (*_OF_CONFIGS, "environments", "agents", "episodes"),
    "training_backends": (*_OF_CONFIGS, *_OF_TRAINERS, *_ABLE_TRAINERS, "pairs"),
    "generation_backends": (*_OF_CONFIGS, *_OF_ENGINES, "pairs"),
    **{kind: ("entry_points", kind) for kind in ("commands", "templates")},
}
CHECKED_KINDS = tuple(_MODULES)
"""Kinds that have checks."""


class ConformanceError(NemorlError, AssertionError):
    """A plugin that breaks a clause of its contract. Carries every broken one when several were checked.

    Example:
        >>> isinstance(ConformanceError("the reward is NaN"), AssertionError)
        True
    """


class NotApplicable(Exception):  # noqa: N818  (an outcome, not an error)
    """A check that says nothing about this plugin; the message is why. pytest shows it as a skip.

    Example:
        >>> raise NotApplicable("it keeps no state")
        Traceback (most recent call last):
            ...
        nemorl_testing.kit.NotApplicable: it keeps no state
    """


def expect(holds: object, seen: str) -> None:
    """State that the clause holds; ``seen`` is what was seen if it does not."""
    if not holds:
        raise ConformanceError(seen)


@dataclass(frozen=True)
class Settings:
    """Examples and settings for the checks of one plugin. Every field has a default that suits most plugins.

    Example:
        >>> Settings(examples=[("1+1=", "2", 1.0)]).tolerance
        0.0001
    """

    examples: Sequence[tuple[Any, str | Sequence[str], float | None]] = ()
    """Environments: ``(prompt, response, expected reward)``. The prompt is text, a ``Prompt`` or a mapping of
    ``Prompt`` fields such as ``{"text": "1+1=", "answer": "2"}``; reward ``None`` means any finite one. A list of
    replies in place of the response is a conversation, and its reward the total of all turns."""
    model: Path | str | None = None
    """Backends and algorithms: a small Hugging Face folder with weights. Unset: a Qwen2 of 100k parameters."""
    policy: Mapping[str, Any] = field(default_factory=dict)
    """Backends: fields of ``PolicyConfig`` that this plugin needs set."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Generation backends: fields of ``GenerationConfig`` that this plugin needs set."""
    partner: str | Mapping[str, Any] | None = None
    """Backends: the other side of the pair checks. Unset: ``dtensor`` or ``hf``."""
    stays_asleep: Collection[str] = ()
    """Generation backends: parts of the memory that ``sleep(1)`` leaves where they are, e.g. ``["weights"]``."""
    device: str = "cpu"
    """Backends: the torch device to build on."""
    ranks: WorkerContext | None = None
    """Training backends: this process's place among ranks that all run the same checks. Unset: it is alone."""
    tolerance: float = 1e-4
    """Backends: largest allowed difference of two log-probs, in nats."""
    rows: Sequence[Mapping[str, Any]] = ()
    """Algorithms: rows to train on. Unset: sums, with ``response``, ``chosen`` and ``rejected`` columns."""
    reward_fn: Callable[..., Any] | None = None
    """Algorithms: scores responses. Unset: a deterministic score that varies with the text."""
    writes_files: bool = True
    """Loggers: whether something appears in the run directory."""
    run_dir: Path | str | None = None
    """Report sections: a run directory that the section has something to say about. Unset: made-up records."""
    overrides: Sequence[str] = ()
    """Templates: what its user fills in, e.g. ``["data.path=rows.jsonl"]``. A model is filled in where it has none."""


@dataclass(frozen=True)
class Check:
    """One clause, ready to run.

    Example:
        >>> checks_for("loggers")[0].section
        '4'
    """

    function: Callable[[Subject], None]

    @property
    def name(self) -> str:
        return self.function.__name__.removeprefix("check_")

    @property
    def clause(self) -> str:
        return " ".join((inspect.getdoc(self.function) or "").split("\n\n")[0].split())

    @property
    def section(self) -> str:
        """Where docs/design.md states it, e.g. ``7.2``."""
        found = re.search(r"\(DESIGN ([\d.]+)\)", self.clause)
        return found[1] if found else ""

    @property
    def is_slow(self) -> bool:
        return getattr(self.function, "is_slow", False)

    def run(self, subject: Subject) -> None:
        """Run it and release what it built.

        Raises:
            ConformanceError: the clause does not hold, or something raised (says what, and where in the plugin).
            NotApplicable: the check says nothing about this plugin.
        """
        __tracebackhide__ = True
        try:
            with subject.owned:
                self.function(subject)
        except ConformanceError as error:
            raise self._broken(subject, error.message) from None
        except NotApplicable:
            raise
        except (Exception, SystemExit) as error:
            raise self._broken(subject, describe(error, subject.module)) from error

    def _broken(self, subject: Subject, seen: str) -> ConformanceError:
        return ConformanceError(
            f"{singular(subject.kind)} {subject.name!r} breaks a clause of its contract\n"
            f"  clause: {self.clause}\n  seen:   {seen}\n  check:  {self.function.__module__}.{self.function.__name__}"
        )


def slow(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
    """Mark a check that takes seconds: its test carries ``pytest.mark.slow``."""
    function.is_slow = True  # type: ignore[attr-defined]
    return function


@dataclass
class Subject:
    """One plugin as one check sees it."""

    kind: str
    given: str | Mapping[str, Any]
    """The plugin as a config file would name it."""
    settings: Settings
    folder: Path
    """Empty folder of this check."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Parts that several checks read and none changes; whoever owns the dict closes them."""
    owned: ExitStack = field(default_factory=ExitStack)
    """Closes what this check built."""

    @property
    def name(self) -> str:
        return self.given if isinstance(self.given, str) else str(self.given["name"])

    @property
    def options(self) -> dict[str, Any]:
        """The plugin's options, without its name."""
        return {} if isinstance(self.given, str) else {k: v for k, v in self.given.items() if k != "name"}

    @property
    def entry(self) -> PluginEntry:
        return registry().index.find(self.kind, self.name)

    @property
    def module(self) -> str:
        """Where its entry point leads; empty where there is no entry point."""
        entries = registry().index.of_kind(self.kind)
        return next((e.value.partition(":")[0] for e in entries if self.name in (e.name, e.id)), "")

    @cached_property
    def config_class(self) -> Any:
        return registry().load(self.kind, self.name)

    @cached_property
    def config(self) -> Any:
        """The validated config, without a look at what ``build`` needs."""
        if self.kind == "algorithms":
            from nemorl_testing.algorithms import run_config

            return run_config(self)
        return self.config_class.model_validate(self.options)

    def require_modules(self) -> None:
        """End the check where the libraries behind ``build`` are not installed."""
        missing = self.config_class.missing_modules() if issubclass(self.config_class, PluginConfig) else []
        if missing:
            raise NotApplicable(f"{self.name} needs {', '.join(missing)}: {self.config_class.install_hint}")

    def own(self, part: T, closer: str) -> T:
        """Have ``part.closer()`` called when the check ends; that it works is the business of another check."""
        self.owned.callback(_quietly, getattr(part, closer))
        return part


def _quietly(close: Callable[[], object]) -> None:
    with suppress(Exception):
        close()


def checks_for(kind: str) -> list[Check]:
    """The checks of a kind, those of every plugin first.

    Example:
        >>> "scores_are_repeatable" in [check.name for check in checks_for("environments")]
        True
    """
    if kind not in _MODULES:
        fix = did_you_mean(kind, _MODULES) or f"use one of {', '.join(_MODULES)}"
        raise UsageError(f"there are no conformance checks for {kind!r}", fix=fix)
    assert kind in KINDS
    found = []
    for name in _MODULES[kind]:
        module = importlib.import_module(f"nemorl_testing.{name}")
        functions = [
            f for key, f in vars(module).items() if key.startswith("check_") and f.__module__ == module.__name__
        ]
        found += [Check(function) for function in functions]
    return found


@dataclass(frozen=True)
class Report:
    """The outcome of each check, by name.

    Example:
        >>> Report(passed=("loads",), failed={}, skipped={}).passed
        ('loads',)
    """

    passed: tuple[str, ...]
    failed: Mapping[str, ConformanceError]
    skipped: Mapping[str, str]


def run_checks(kind: str, given: str | Mapping[str, Any], *, only: Sequence[str] = (), **settings: Any) -> Report:
    """Run the checks of a kind here and now. ``settings`` are the fields of :class:`Settings`.

    Example:
        >>> run_checks("environments", "math", only=["close_twice_is_harmless"]).passed
        ('close_twice_is_harmless',)
    """
    chosen = [check for check in _selected(kind, only) if not only or check.name in only]
    passed: list[str] = []
    failed: dict[str, ConformanceError] = {}
    skipped: dict[str, str] = {}
    shared: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="nemorl-check-") as root:
        for check in chosen:
            folder = Path(root) / check.name
            folder.mkdir()
            try:
                check.run(Subject(kind, given, Settings(**settings), folder, shared))
                passed.append(check.name)
            except ConformanceError as error:
                failed[check.name] = error
            except NotApplicable as why:
                skipped[check.name] = str(why)
        close_shared(shared)
    return Report(tuple(passed), failed, skipped)


def check_plugin(kind: str, given: str | Mapping[str, Any], *, only: Sequence[str] = (), **settings: Any) -> Report:
    """All checks in one call, e.g. from a script.

    Raises:
        ConformanceError: lists every clause that the plugin breaks.

    Example:
        >>> check_plugin("environments", "math", only=["close_twice_is_harmless"]).failed
        {}
    """
    report = run_checks(kind, given, only=only, **settings)
    if report.failed:
        raise ConformanceError("\n".join(error.message for error in report.failed.values()))
    return report


def conformance(
    kind: str,
    given: str | Mapping[str, Any],
    *,
    only: Sequence[str] = (),
    skip: Mapping[str, str] | None = None,
    **settings: Any,
) -> Callable[..., None]:
    """A pytest test function with one case per clause. Assign it to a name that starts with ``test_``.

    Args:
        kind: A plugin kind, e.g. ``training_backends``.
        given: The plugin as a config names it: ``"mine"`` or ``{"name": "mine", …options}``.
        only: Names of the checks to run. Unset: all.
        skip: Check name -> why it does not apply; shown as a skip.
        **settings: Fields of :class:`Settings`.

    Example:
        >>> test_math = conformance("environments", "math", examples=[({"text": "1+1=", "answer": "2"}, "2", 1.0)])
    """
    import pytest

    skip, told = skip or {}, Settings(**settings)
    cases = []
    for check in _selected(kind, (*only, *skip)):
        if only and check.name not in only:
            continue
        marks = [pytest.mark.slow] if check.is_slow else []
        marks += [pytest.mark.skip(reason=skip[check.name])] if check.name in skip else []
        cases.append(pytest.param(check, id=check.name, marks=marks))

    @pytest.mark.parametrize("check", cases)
    def test_conformance(check: Check, tmp_path: Path, nemorl_shared: dict[str, dict[str, Any]]) -> None:
        __tracebackhide__ = True
        shared = nemorl_shared.setdefault(f"{kind} {given} {id(told)}", {})
        try:
            check.run(Subject(kind, given, told, tmp_path, shared))
        except NotApplicable as why:
            pytest.skip(str(why))

    found: Callable[..., None] = test_conformance
    return found


def close_shared(shared: dict[str, Any]) -> None:
    """Release the parts that checks shared."""
    while shared:
        shared.popitem()[1].shutdown()


def _selected(kind: str, names: Sequence[str]) -> list[Check]:
    checks = checks_for(kind)
    known = [check.name for check in checks]
    unknown = [name for name in names if name not in known]
    if unknown:
        fix = did_you_mean(unknown[0], known) or f"the checks are {', '.join(known)}"
        raise UsageError(f"{singular(kind)}s have no check {', '.join(unknown)}", fix=fix)
    return checks


def partner_config(kind: str, partner: str | Mapping[str, Any]) -> Any:
    """The config of the plugin on the other side of a pair; the check does not apply where it is not installed."""
    from nemorl.config.component import Component

    try:
        registry().load(kind, partner if isinstance(partner, str) else str(partner["name"]))
    except NemorlError as error:
        if isinstance(error, PluginError):
            raise
        raise NotApplicable(f"the check needs another plugin: {error}") from error
    return Component(kind).resolve(partner)
