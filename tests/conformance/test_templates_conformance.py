"""Every template of this repository against every clause of its kind, as it stands, on a machine with eight GPUs."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import yaml
from nemorl.config.load import load_config
from nemorl.plugins import registry
from nemorl_testing import conformance
from nemorl_trust.source import template_text

FOLDER = tempfile.TemporaryDirectory(prefix="nemorl-templates-")
ROWS = Path(FOLDER.name) / "rows.jsonl"
ROW = {
    **{"prompt": "1+1=", "answer": "2", "response": "2", "chosen": "2", "rejected": "3", "tests": []},
    **{"margin": 1, "task": "math", "solution": "2"},
}
ROWS.write_text((json.dumps(ROW) + "\n") * 4)
FILE_ROWS = ("data.path=" + str(ROWS),)
"""In place of the file that the user of a template has."""
TRAINED_BEFORE = ("environment.model=org/judge", "critic.model_name=org/judge")
OWN = {"ppo_reward_model": TRAINED_BEFORE}

ENTRIES = [e for e in registry().index.of_kind("templates") if e.distribution.startswith("nemorl-")]


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")


for entry in ENTRIES:
    data = yaml.safe_load(template_text(entry))["data"]
    needs_file = isinstance(data, dict) and data["name"] == "file"
    overrides = (*(FILE_ROWS if needs_file else ()), *OWN.get(entry.name, ()))
    tested = conformance("templates", entry.name, overrides=overrides)
    globals()[f"test_{entry.name}"] = pytest.mark.usefixtures("eight_gpus")(tested)


def test_each_family_has_at_least_five_under_forty_lines() -> None:
    families: dict[str, int] = {}
    for entry in ENTRIES:
        family = entry.value.partition(".templates")[0]
        families[family] = families.get(family, 0) + 1
        assert len(template_text(entry).splitlines()) < 40, entry.name
    preferences = {"nemorl_preference.dpo", "nemorl_preference.rm"}
    assert set(families) == {"nemorl_grpo", "nemorl_ppo", "nemorl_sft", "nemorl_distillation"} | preferences
    assert min(families.values()) >= 5


def test_each_loads_for_its_cluster_where_nothing_of_it_is_here() -> None:
    for entry in ENTRIES:
        config = yaml.safe_load(template_text(entry))
        assert load_config(config, OWN.get(entry.name, ()), for_launch=True, for_cluster=True).policy.model_name
