import json

import pytest
from nemorl.errors import ConfigError, DataError
from nemorl_tasks.datasets import HuggingFaceConfig
from nemorl_tasks.datasets.hub import quiet
from pydantic import ValidationError
from recorded_messages import Raises


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A dataset repository on disk, as the hub would serve it: 8 training rows, 2 test rows."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "sums"
    repository.mkdir()
    for split, count in (("train", 8), ("test", 2)):
        rows = [{"question": f"{split} {i}?", "answer": i} for i in range(count)]
        (repository / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return repository


def test_splits_are_mapped_like_any_table(folder):
    config = HuggingFaceConfig(path=str(folder), validation_split="test")
    assert [len(config.build(split)) for split in ("train", "validation")] == [8, 2]
    assert config.build("validation")[1] == {"question": "test 1?", "prompt": "test 1?", "answer": "1"}
    assert config.build("test") is None


def test_rows_can_be_held_out_of_the_training_split(folder):
    config = HuggingFaceConfig(path=str(folder), validation_fraction=0.25)
    train, validation = ({row["prompt"] for row in config.build(split)} for split in ("train", "validation"))
    assert (len(train), len(validation), train & validation) == (6, 2, set())


def test_a_missing_split_is_an_error_that_lists_the_splits(folder, raises: Raises):
    config = HuggingFaceConfig(path=str(folder), validation_split="tset")
    with raises(DataError, "tset", "test"):
        config.build("validation")


def test_a_missing_dataset_is_an_error_that_says_what_to_check(tmp_path, monkeypatch, raises: Raises):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    config = HuggingFaceConfig(path=str(tmp_path / "nothing"))
    with raises(DataError, "train"):
        config.build("train")


def test_a_mistyped_column_is_reported_before_training(folder, raises: Raises):
    with raises(ConfigError, "question", path="prompt_column"):
        HuggingFaceConfig(path=str(folder), prompt_column="qestion").build("train")


def test_loading_is_silent_and_leaves_the_library_as_it_was(folder, capfd):
    import datasets

    datasets.enable_progress_bars()
    HuggingFaceConfig(path=str(folder)).build("train")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert not datasets.are_progress_bars_disabled()
    with quiet():
        assert datasets.are_progress_bars_disabled()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"validation_split": "train"}, "validation_split"),
        ({"validation_split": "test", "validation_fraction": 0.1}, "validation_fraction"),
        ({"path": __file__}, "path"),
        ({"path": ""}, "path"),
        ({"spilt": "train"}, "spilt"),
    ],
)
def test_mistakes_are_reported_at_their_field_without_the_network(options, field):
    with pytest.raises(ValidationError) as caught:
        HuggingFaceConfig(**{"path": "openai/gsm8k", **options})
    assert [error["loc"][0] for error in caught.value.errors()] == [field]
