"""docs/migration.md: its examples run, and it says what the warnings send people to read."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import spec_world as world
from nemorl.plugins import Index, Registry
from nemorl_compat.names import MODULES
from nemorl_testing.plugin import use_registry
from spec_blocks import python_blocks

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
EXAMPLES = python_blocks(PAGE)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = world.write_terse_model(tmp_path / "model")
    source = EXAMPLES[name].replace("Qwen/Qwen2.5-1.5B", str(model))
    with use_registry(Registry(Index.installed())), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="nemo_rl.* is deprecated")
        given = {"__name__": "migration_example", "rows": world.ROWS}
        exec(compile(source, name, "exec", dont_inherit=True), given)


def test_the_page_names_everything_that_has_another_shape() -> None:
    text = PAGE.read_text()
    for names in MODULES.values():
        for name, new in names.items():
            if not new.is_same:
                assert name in text or f"{name[-7:]}` and its like" in text, name
