"""docs/agents/other-projects.md: its configs load, and name what the tests play."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml
from nemorl.config.load import load_config

PAGE = (Path(__file__).parents[3] / "docs/agents/other-projects.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
CONFIGS = [yaml.safe_load(text) for language, text in BLOCKS if language == "yaml"]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["environment"]["name"])
def test_a_config_of_the_page_loads(config: dict[str, object]) -> None:
    rest = {"algorithm": "grpo", "model": "org/model", "data": "arithmetic", "max_steps": 1}
    loaded = load_config({**rest, **config}, for_cluster=True)
    assert loaded.model_dump()["environment"]["name"] == config["environment"]["name"]  # type: ignore[index]


def test_the_taskset_of_the_page_is_python() -> None:
    [source] = [text for language, text in BLOCKS if language == "python"]
    assert [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)][-1] == "Counting"
