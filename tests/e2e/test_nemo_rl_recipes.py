"""docs/nemo-rl-recipes.md: each recipe loads for its cluster and trains two steps in small."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml
from nemorl.base.text.mappings import read_source
from nemorl.config import load_config
from nemorl_cli.console import Console
from nemorl_tasks.quickstart.trial import run

PAGE = Path(__file__).parents[2] / "docs" / "nemo-rl-recipes.md"
RECIPES = dict(re.findall(r"^## `(\S+)`.*?^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def test_there_are_five() -> None:
    assert len(RECIPES) == 5


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_loads_for_its_cluster_and_is_short(name: str) -> None:
    load_config(yaml.safe_load(RECIPES[name]), for_launch=True, for_cluster=True)
    assert RECIPES[name].count("\n") < 30


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_two_steps_in_small(name: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPES[name])
    with Console(quiet=True) as console:
        metrics = run(read_source(file), tmp_path / "small", console).metrics
    assert math.isfinite(metrics["train/loss"])
