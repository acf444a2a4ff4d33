"""A model's card, and what is pushed: to a hub that writes down what it is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.base.text.yaml_text import format_yaml
from nemorl.errors import ForeignError, UsageError
from nemorl_cli.report.model_card import model_card
from nemorl_cli.report.run_data import RunData
from recorded_messages import Raises

CONFIG = {
    "algorithm": "grpo",
    "policy": {"model_name": "Qwen/Qwen2.5-0.5B", "optimizer": {"lr": 1e-6}, "lora": None},
    "data": {"name": "huggingface", "path": "openai/gsm8k"},
    "num_prompts_per_step": 32,
    "cluster": {"env_vars": {"WANDB_API_KEY": "s3cr3t-key"}},
    "environment": {"name": "judge", "base_url": "https://user:s3cr3t-key@judge.example/v1"},
}


class RecordingHub:
    """What was asked of it, in order."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def create_repo(self, repo_id: str, **options: Any) -> None:
        self.asked.append(("create_repo", {"repo_id": repo_id, **options}))

    def upload_folder(self, **options: Any) -> None:
        self.asked.append(("upload_folder", options))

    def upload_file(self, **options: Any) -> None:
        self.asked.append(("upload_file", options))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(format_yaml(CONFIG))
    (tmp_path / "environment.json").write_text(json.dumps({"python": "3.11.7", "libraries": {"torch": "2.13.0"}}))
    lines = [{"step": 1, "train/reward": 0.25}, {"step": 20, "train/reward": 0.5, "validation/accuracy": 0.625}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_a_card_says_what_was_trained_on_what_and_how_well(run_dir: Path) -> None:
    card = model_card(RunData.load(run_dir), license="apache-2.0", notes="Trained on a Sunday.")
    metadata, _, text = card.removeprefix("---\n").partition("\n---\n")
    assert metadata.splitlines()[:4] == [
        "license: apache-2.0",
        "base_model: Qwen/Qwen2.5-0.5B",
        "datasets:",
        "- openai/gsm8k",
    ]
    for line in (
        "| validation/accuracy | 0.625 (step 20) |",
        "| train/reward | 0.5 (step 20) |",
        "| policy.optimizer.lr | 1e-06 |",
        "| torch | 2.13.0 |",
        "Trained on a Sunday.",
        "License: apache-2.0.",
    ):
        assert line in text


def test_the_hub_reads_the_metadata(run_dir: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    data = hub.ModelCard(model_card(RunData.load(run_dir), license="mit")).data
    assert (data.license, data.base_model, data.datasets) == ("mit", "Qwen/Qwen2.5-0.5B", ["openai/gsm8k"])
    assert (data.pipeline_tag, data.tags) == ("text-generation", ["nemorl", "grpo"])


def test_no_secret_path_or_address_gets_into_a_card(run_dir: Path) -> None:
    config = {
        **CONFIG,
        "algorithm": "grpo\n[x](https://e.example)",
        "policy": {"model_name": "/home/someone/s3cr3t-key/model"},
        "data": {"name": "file", "path": "https://user:s3cr3t-key@files.example/rows.jsonl"},
    }
    (run_dir / "config.yaml").write_text(json.dumps(config))
    for card in (model_card(RunData.load(run_dir)), model_card(RunData("hf_s3cr3t/key", config=config))):
        assert "s3cr3t" not in card
        assert "someone" not in card
        assert "example" not in card
        assert "not stated by the author" in card


def test_a_push_makes_a_private_repository_and_uploads_model_and_card(run_dir: Path) -> None:
    hub = RecordingHub()
    assert nemorl.push_to_hub(run_dir, "me/sums", hub=hub) == "https://huggingface.co/me/sums"
    (_, made), (_, folder), (_, card) = hub.asked
    assert made == {"repo_id": "me/sums", "private": True, "exist_ok": True}
    assert folder["folder_path"] == run_dir / "model"
    assert "*.safetensors" in folder["allow_patterns"]
    assert card["path_in_repo"] == "README.md"
    assert b"validation/accuracy" in card["path_or_fileobj"]


def test_what_cannot_be_pushed_is_refused_before_the_hub_is_asked(
    run_dir: Path, tmp_path: Path, raises: Raises
) -> None:
    hub = RecordingHub()
    with raises(UsageError, "'sums'"):
        nemorl.push_to_hub(run_dir, "sums", hub=hub)
    with raises(UsageError):
        nemorl.push_to_hub(run_dir, "me/sums", model=tmp_path / "nothing", hub=hub)
    with raises(UsageError):
        nemorl.push_to_hub(tmp_path / "nothing", "me/sums", hub=hub)
    assert hub.asked == []


def test_a_hub_that_refuses_is_named(run_dir: Path, raises: Raises) -> None:
    class Refusing(RecordingHub):
        def create_repo(self, repo_id: str, **options: Any) -> None:
            raise RuntimeError("401 Unauthorized")

    with raises(ForeignError):
        nemorl.push_to_hub(run_dir, "me/sums", hub=Refusing())
