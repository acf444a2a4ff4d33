"""Every template trains two steps in small, as `nemorl config try` does it. Two of each family in `make test`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from nemorl.base.text.mappings import read_source
from nemorl.plugins import registry
from nemorl.plugins.index import PluginEntry
from nemorl_cli.console import Console
from nemorl_tasks.quickstart.trial import run
from nemorl_trust.source import template_text

USUAL = {"grpo_8gpu", "grpo_multi_turn", "ppo", "ppo_reward_model", "dpo_lora", "dpo_with_sft", "rm", "rm_margin",
         "sft", "sft_packing", "distillation", "opd"}  # fmt: skip
WITHOUT_SERVER = {"grpo_judge": {"environment": "math"}}
ENTRIES = {e.name: e for e in registry().index.of_kind("templates") if e.distribution.startswith("nemorl-")}


@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=name, marks=pytest.mark.slow if name in USUAL else pytest.mark.full)
     for name, e in ENTRIES.items()],
)  # fmt: skip
def test_a_template_trains_two_steps_in_small(entry: PluginEntry, tmp_path: Path) -> None:
    text = template_text(entry)
    if "name: megatron" in text:
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    file = tmp_path / "template.yaml"
    file.write_text(text)
    with Console(quiet=True) as console:
        metrics = run(read_source(file) | WITHOUT_SERVER.get(entry.name, {}), tmp_path / "small", console).metrics
    assert math.isfinite(metrics["train/loss"])
    assert (tmp_path / "small" / "run" / "checkpoints").is_dir()


def test_two_of_each_family_are_usual() -> None:
    families = [ENTRIES[name].value.partition(".templates")[0] for name in USUAL]
    assert {families.count(family) for family in families} == {2}
