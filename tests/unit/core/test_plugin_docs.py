"""The pages about plugins: examples are installed and pass their conformance tests, and lists match the code."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import nemorl
import pytest
import yaml
from nemorl.base.packages.plugin_policy import read_policy
from nemorl.config.load import load_config
from nemorl.plugins import KINDS, Index, Registry
from nemorl.plugins.index import CAN_BE_ISOLATED
from nemorl_cli.console import Console
from nemorl_testing.plugin import use_registry

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
KIND_PAGES = {kind: DOCS / "plugin-kinds" / f"{kind.removesuffix('s').replace('_', '-')}.md" for kind in KINDS}
PAGES = (DOCS / "plugins.md", DOCS / "isolation.md", DOCS / "trust.md", *KIND_PAGES.values())
HEAVY = {"algorithms": pytest.mark.full, "training_backends": pytest.mark.full, "generation_backends": pytest.mark.slow}
"""Kinds whose conformance runs models, with the tier of theirs."""
NAMED_BLOCK = re.compile(r"`([\w./-]+\.\w+)`[^`\n]*(?:\[[^\n]*)?:\n\n```(?:\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

page_of_kind = pytest.mark.parametrize("kind", [pytest.param(kind, marks=HEAVY.get(kind, ())) for kind in KIND_PAGES])


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of one language."""
    return [code for found, code in BLOCK.findall(page.read_text()) if found == language]


@dataclass
class Example:
    """The package that a page shows, on disk and importable."""

    distribution: str
    test: Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Example]]:
    """Writes the package of a kind's page where an editable install would have it."""
    before = set(sys.modules)

    def write(kind: str) -> Example:
        folder = tmp_path / kind
        files: Mapping[str, str] = dict(NAMED_BLOCK.findall(KIND_PAGES[kind].read_text()))
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        for package in {(folder / name).parent for name in files if name.endswith(".py")}:
            (package / "__init__.py").touch()
        project = tomllib.loads(files["pyproject.toml"])["project"]
        info = folder / "src" / f"{project['name'].replace('-', '_')}-0.1.0.dist-info"
        info.mkdir()
        requires = "".join(f"Requires-Dist: {requirement}\n" for requirement in project["dependencies"])
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n{requires}")
        ((group, points),) = project["entry-points"].items()
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        assert group == f"nemorl.{kind}"
        monkeypatch.syspath_prepend(str(folder / "src"))
        importlib.invalidate_caches()
        (code,) = [text for name, text in files.items() if name.startswith("tests/")]
        return Example(project["name"], _test_in(code))

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def _test_in(code: str) -> Callable[..., None]:
    names: dict[str, Any] = {}
    exec(code, names)
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    found: Callable[..., None] = test
    return found


@page_of_kind
def test_the_example_passes_its_conformance_test(
    kind: str, install: Callable[[str], Example], tmp_path: Path, nemorl_shared: dict[str, dict[str, Any]]
) -> None:
    example = install(kind)
    (cases,) = [mark.args[1] for mark in example.test.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    with use_registry(Registry(Index.installed())) as registry:
        assert registry.index.of_kind(kind)
        skipped = []
        for case in cases:
            (check,) = case.values
            folder = tmp_path / "checks" / check.name
            folder.mkdir(parents=True)
            try:
                example.test(check, folder, nemorl_shared)
            except pytest.skip.Exception as why:
                skipped.append(f"{check.name}: {why}")
    assert len(skipped) < len(cases) / 2, skipped


@pytest.mark.slow
def test_a_run_uses_the_parts_that_the_pages_show(
    install: Callable[[str], Example], tiny_model: Path, tmp_path: Path
) -> None:
    kinds = ("environments", "datasets", "loggers", "hooks", "report_sections")
    config: dict[str, Any] = {"plugins": {}}
    for kind in kinds:
        install(kind)
        (shown,) = (yaml.safe_load(text) for text in blocks(KIND_PAGES[kind], "yaml"))
        config |= {"plugins": {**config["plugins"], **shown["plugins"]}} if "plugins" in shown else shown
    config |= {
        "algorithm": "grpo",
        "model": str(tiny_model),
        "run_dir": str(tmp_path / "run"),
        "max_steps": 2,
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "policy": {"init": "random", "max_sequence_tokens": 48},
        "generation": {"max_new_tokens": 3},
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"export": False},
    }
    with use_registry(Registry(Index.installed())):
        load_config(config, for_launch=True).build().fit(console=Console(quiet=True))
    run = tmp_path / "run"
    assert len((run / "metrics.md").read_text().splitlines()) == 2 + 2  # title and rule, a row per step
    assert '"best/reward"' in (run / "metrics.jsonl").read_text()
    assert "Cut off" in (run / "report.html").read_text()
    recorded = (run / "plugins.lock.json").read_text()
    assert all(name in recorded for name in ("palindrome-env", "reversal-data", "markdown-log", "best-reward-hook"))


def test_a_package_may_register_in_the_running_process() -> None:
    (code,) = [text for text in blocks(DOCS / "plugins.md", "python") if "@register" in text]
    with use_registry(Registry(Index.installed())) as registry:
        exec(code, {"__name__": "notebook"})
        assert registry.load("environments", "always_one")().build() is not None


def test_a_run_may_ask_for_a_transport_that_no_backend_lists(
    install: Callable[[str], Example], tiny_model: Path
) -> None:
    install("weight_transports")
    (text,) = blocks(KIND_PAGES["weight_transports"], "yaml")
    data = {"algorithm": "grpo", "model": str(tiny_model), "policy": {"init": "random"}, **yaml.safe_load(text)}
    with use_registry(Registry(Index.installed())):
        assert load_config(data).place().transport == "by-value-transport:by_value"


def generator_named(name: str) -> ModuleType:
    spec = spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    generator = module_from_spec(spec)
    spec.loader.exec_module(generator)
    return generator


def test_the_tables_of_metrics_are_what_plugins_declare() -> None:
    generator, page = generator_named("generate_metrics"), (DOCS / "metrics.md").read_text()
    assert generator.filled_in(page) == page, "run python docs/generate_metrics.py"
    shown = set(re.findall(r"<!-- generated: (.+?) -->", page))
    empty = {name for name, table in generator.tables().items() if table.count("\n") == 2}
    assert set(generator.tables()) - empty == shown


def test_the_tables_of_keys_of_nemo_rl_are_up_to_date() -> None:
    wanted = generator_named("generate_migration").wanted()
    stale = [page.name for page, text in wanted.items() if page.read_text() != text]
    assert not stale, "run python docs/generate_migration.py"


def test_the_table_of_datasets_is_what_the_presets_say() -> None:
    page = (DOCS / "datasets.md").read_text()
    assert generator_named("generate_datasets").filled_in(page) == page, "run python docs/generate_datasets.py"


def test_what_the_pages_take_from_the_code_is_up_to_date() -> None:
    generator = generator_named("generate_kinds")
    assert set(generator.pages()) == {DOCS / "plugins.md", *KIND_PAGES.values()}
    stale = [page.name for page in generator.pages() if generator.filled_in(page.read_text()) != page.read_text()]
    assert not stale, "run python docs/generate_kinds.py"
    marked = {name for page in generator.pages() for name in re.findall(r"<!-- generated: (.+?) -->", page.read_text())}
    # Kinds without class data of their own show none.
    unused = {name for name in set(generator.parts()) - marked if not name.startswith("data of ")}
    assert not unused


def test_every_kind_has_its_row_and_its_page() -> None:
    rows = re.findall(r"^\| `nemorl\.(\w+)` \|.*\]\((.+?)\)", (DOCS / "plugins.md").read_text(), re.MULTILINE)
    assert {kind: DOCS / page for kind, page in rows} == KIND_PAGES
    assert all(page.is_file() for page in KIND_PAGES.values())


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    missing = [str(page.relative_to(DOCS)) for page in PAGES if f" {page.relative_to(DOCS)}\n" not in text]
    assert not missing


@pytest.mark.slow
def test_the_table_of_codes_is_that_of_the_sources() -> None:
    table = re.findall(r"^\| (NRL\d+) \| `([\w-]+)` \|", (DOCS / "plugins.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(set(_diagnostics()))
    assert len(table) == len(dict(table))


def _diagnostics() -> Iterator[tuple[str, str]]:
    """(code, state) of every ``Diagnostic("state", "code", …)`` and ``entry.stopped("state", "code", …)``."""
    root = Path(nemorl.__file__).parents[3]
    for path in (*(root / "core/src").rglob("*.py"), *(root / "toolkits").rglob("src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Diagnostic", ".stopped")):
                given = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
                if len(given) == 2:
                    yield str(given[1]), str(given[0])


def test_the_pages_agree_with_the_code_about_isolation() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "isolation.md").read_text(), re.MULTILINE)
    assert set(rows) == CAN_BE_ISOLATED
    for kind, page in KIND_PAGES.items():
        says_no = "cannot be isolated" in " ".join(page.read_text().split())
        assert says_no == (kind not in CAN_BE_ISOLATED), page.name
        assert ("(../isolation.md)" in page.read_text()) == (kind in CAN_BE_ISOLATED), page.name


def test_the_folders_on_the_pages_are_those_of_the_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    from platformdirs.macos import MacOS
    from platformdirs.unix import Unix

    for name in ("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    home = str(Path.home())
    trust, isolation = (DOCS / "trust.md").read_text(), (DOCS / "isolation.md").read_text()
    for folders in (Unix("nemorl"), MacOS("nemorl")):
        for path in (folders.site_config_path, folders.user_config_path):
            assert f"`{path / 'config.yaml'}`".replace(home, "~") in trust
        assert f"`{folders.user_data_path / 'plugins'}`".replace(home, "~") in isolation


@pytest.mark.parametrize("number", [0, 1])
def test_a_policy_of_the_page_can_be_read(number: int, tmp_path: Path) -> None:
    text = blocks(DOCS / "trust.md", "yaml")[number]
    (tmp_path / "config.yaml").write_text(text)
    policy = read_policy(tmp_path / "config.yaml")
    assert policy.admits("nemorl-grpo")
    assert not policy.admits("acme-math")


def test_a_part_can_be_selected_by_the_name_that_the_page_gives(tiny_model: Path) -> None:
    (text,) = blocks(DOCS / "plugins.md", "yaml")
    config = load_config({"algorithm": "grpo", "model": str(tiny_model), **yaml.safe_load(text)})
    assert type(config.environment).__name__ == "MathConfig"
    assert config.plugins.policy().preferred("environments.math") == "nemorl-math-env"


def test_the_record_on_the_page_has_the_fields_of_a_record() -> None:
    import json
    from dataclasses import fields

    from nemorl_trust.lock import LockedPlugin

    (text,) = blocks(DOCS / "trust.md", "json")
    assert list(json.loads(text)) == [field.name for field in fields(LockedPlugin)]


def test_what_plugins_new_is_asked_for_exists() -> None:
    authoring = pytest.importorskip("nemorl_testing.scaffold.names", reason="nemorl-testing is not installed")
    asked = {kind for page in PAGES for kind in re.findall(r"nemorl plugins new ([a-z-]+)", page.read_text())}
    assert {f"{authoring.kind_called(kind)}s" for kind in asked} == set(KINDS)
