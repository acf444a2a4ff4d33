"""The contract of templates, and what this one promises besides."""

from __future__ import annotations

from pathlib import Path

from nemorl.config.load import load_config
from nemorl.plugins import registry
from nemorl_testing import conformance
from nemorl_trust.source import template_text

test_conformance = conformance("templates", "example")


def test_the_run_is_short_enough_for_a_first_look(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(template_text(registry().index.find("templates", "example")))
    config = load_config(file)
    assert config.max_steps is not None
    assert config.max_steps <= 100
