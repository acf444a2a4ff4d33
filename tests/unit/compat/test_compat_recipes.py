"""NeMo RL's own configs, where a copy of them lies beside the project: no traceback, no silent loss, and every file
either loads for its cluster or names the feature that is missing."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import NemorlError
from nemorl_compat import legacy_yaml
from nemorl_compat.conversions.prompts import template_of
from nemorl_compat.migration import migrate
from nemorl_compat.migration_tree import Entry, migrate_tree
from nemorl_compat.old_config import OldConfig
from nemorl_tasks.datasets.mapping import ColumnMapping

BESIDE = [parent / "shared/reference/nemo-rl-configs" for parent in Path(__file__).parents]
GIVEN = [Path(os.environ["NEMO_RL_CONFIGS"])] if "NEMO_RL_CONFIGS" in os.environ else BESIDE
TREES = sorted(path for folder in GIVEN if folder.is_dir() for path in folder.iterdir() if path.is_dir())
pytestmark = pytest.mark.skipif(not TREES, reason="no configs of NeMo RL here (NEMO_RL_CONFIGS)")


@pytest.fixture(scope="module")
def entries() -> list[tuple[Path, Entry]]:
    """Every config of every tree, with its whole path."""
    return [(tree / entry.path, entry) for tree in TREES for entry in migrate_tree(tree)]


@pytest.mark.slow
def test_every_config_loads_or_names_what_is_missing(entries: list[tuple[Path, Entry]]) -> None:
    counts = Counter(entry.verdict for _, entry in entries)
    refused = {str(path): entry.text for path, entry in entries if entry.verdict == "refused"}
    assert refused == {}, counts
    assert counts["loads"] > 0, counts
    nameless = [path for path, entry in entries if entry.verdict == "missing feature" and not entry.text]
    assert nameless == [], counts
    unknown = {change.key for _, entry in entries if entry.migration for change in entry.migration.of("unknown")}
    assert unknown == set(), counts


@pytest.mark.full
@pytest.mark.slow
def test_every_key_has_exactly_one_class(entries: list[tuple[Path, Entry]]) -> None:
    classes: Counter[str] = Counter()
    known: dict[Path, dict[str, Any]] = {}
    for path, entry in entries:
        if entry.migration is None:
            continue
        keys = [change.key for change in entry.migration.changes]
        classes.update(change.outcome.kind for change in entry.migration.changes)
        assert len(keys) == len(set(keys)), (path, classes)
        assert set(keys) >= set(OldConfig(legacy_yaml.read(path, known)).leaves), (path, classes)


def test_prompts_render_as_str_format_does() -> None:
    prompts = [path for tree in TREES for path in sorted(tree.rglob("prompts/*.txt"))]
    assert prompts
    problem = r"Find {x} where $\frac{1}{x} = 2$. {{}}"
    for path in prompts:
        text = path.read_text(encoding="utf-8")
        mapping = ColumnMapping(columns={}, prompt_template=template_of(text, "problem", path.name))
        found = mapping.convert({"problem": problem, "prompt": ""}, number=0, source=path.name)
        assert found["prompt"] == text.format(problem), path


def _sample() -> list[Path]:
    files = [path for tree in TREES for path in sorted(tree.rglob("*.yaml"))]
    return random.Random(0).sample(files, min(6, len(files)))


def _garbled(data: Any, chance: random.Random) -> Any:
    """A config with keys lost, added, misspelt, and values of other types."""
    values: list[Any] = [None, "x", -1, 0, 3.5, True, [], {}, [1, "a"], {"a": {"b": 1}}, "${", "a\n#: b"]
    if isinstance(data, dict):
        found = {}
        for key, value in data.items():
            what = chance.random()
            if what < 0.04:
                continue
            name = f"{key}x" if what < 0.08 else key
            found[name] = chance.choice(values) if 0.08 <= what < 0.14 else _garbled(value, chance)
        if chance.random() < 0.1:
            found["added by nobody"] = chance.choice(values)
        return found
    return data


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=pytest.mark.full if n else []) for n, path in enumerate(_sample())],
)
def test_a_garbled_config_is_never_lost_in_silence(path: Path) -> None:
    data = legacy_yaml.read(path)
    for seed in range(6):
        config = _garbled(data, random.Random(seed))
        try:
            found = migrate(config)
        except NemorlError:
            continue  # it is no config any more, and that was said
        assert {change.key for change in found.changes} >= set(OldConfig(config).leaves)
        assert found.is_complete or found.features
