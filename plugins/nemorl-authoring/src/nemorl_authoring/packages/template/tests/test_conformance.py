"""The template is found, and is a config that could be launched."""

from __future__ import annotations

from pathlib import Path

from nemorl.config.load import load_config
from nemorl.plugins import registry
from nemorl.plugins.source import read_source, template_text


def test_the_template_is_listed_with_its_first_line() -> None:
    entry = registry().index.find("templates", "example")
    facts = read_source(entry)
    assert (entry.status, facts.problem) == ("ok", None)
    assert facts.summary == "GRPO on sums, for a small chat model"


def test_the_template_is_a_valid_config(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(template_text(registry().index.find("templates", "example")))
    config = load_config(file, for_launch=True)
    assert (config.algorithm, config.max_steps) == ("grpo", 100)
