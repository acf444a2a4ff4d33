"""``mixture`` and ``sets`` in configs."""

import json

import pytest
from nemorl.config import load_config
from nemorl.errors import ConfigError, DataError
from nemorl_rl.data.mixtures import Joined, Mixture, RowSets
from nemorl_rl.data.rows import rows_of
from nemorl_rl.evaluation.evaluation import held_out_sets
from nemorl_tasks.datasets.mixture import MixtureConfig, SetsConfig
from recorded_messages import Raises


def write(folder, name, count):
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{name}{i}", "answer": str(i)}) for i in range(count)))
    return str(path)


@pytest.fixture
def a(tmp_path):
    return write(tmp_path, "a", 4)


@pytest.fixture
def b(tmp_path):
    return write(tmp_path, "b", 6)


def config(**changes):
    return load_config({"algorithm": "grpo", "model": "org/model", "environment": "math", **changes})


def test_parts_with_weights_are_a_mixture(a, b):
    data = config(data={"name": "mixture", "parts": [{"data": a, "weight": 2}, {"data": b, "weight": 1}]}).data
    rows = data.build("train")
    assert isinstance(rows, Mixture)
    assert (rows.shares, len(rows), rows[5]["prompt"]) == ([2, 1], 10, "b1")


def test_parts_without_weights_are_joined_and_may_be_repeated(a, b):
    rows = rows_of({"name": "mixture", "parts": [{"data": a, "repeat": 2}, {"data": b}]}, "train")
    assert isinstance(rows, Joined)
    assert [row["prompt"] for row in rows] == [*(["a0", "a1", "a2", "a3"] * 2), *(f"b{i}" for i in range(6))]


def test_rows_per_step_are_shares_of_a_batch(a, b):
    rows = rows_of({"name": "mixture", "parts": [{"data": a, "per_step": 12}, {"data": b, "per_step": 4}]}, "train")
    assert (rows.shares, rows.rows_per_step) == ([3, 1], 16)


def test_a_mixture_is_validated_on_the_held_out_rows_of_its_parts(a, b):
    held_out = {"data": {"name": "file", "path": a, "validation_fraction": 0.25}}
    data = MixtureConfig(parts=[held_out, {"data": {"name": "file", "path": b}}])
    assert len(data.build("validation")) == 1
    assert len(data.build("train")) == 9


@pytest.mark.parametrize(
    ("parts", "fact"),
    [
        ([{"weight": 2}, {}], "data.parts.1.weight"),
        ([{"weight": 2, "per_step": 1}, {"weight": 1, "per_step": 1}], "data.parts"),
        ([{"weight": 0}, {"weight": 1}], "data.parts.0.weight"),
        ([{"weight": 1}, {"weight": 1.23456789}], "data.parts"),
    ],
)
def test_proportions_that_make_no_sense_are_explained(a, parts, fact, raises: Raises):
    with raises(ConfigError, fact):
        config(data={"name": "mixture", "parts": [{"data": a, **part} for part in parts]})


def test_a_part_without_training_rows_is_named(a, raises: Raises):
    with raises(DataError, 1, "PresetConfig"):
        MixtureConfig(parts=[{"data": {"name": "file", "path": a}}, {"data": "aime24"}]).build("train")


def test_mixtures_load_again_as_they_are_written(a, b):
    written = {"name": "mixture", "parts": [{"data": a, "weight": 0.5}, {"data": {"name": "gsm8k"}, "weight": 0.5}]}
    loaded = config(data=written)
    assert load_config(loaded.model_dump(mode="json")).data == loaded.data


def test_several_validation_sets_have_names(a, b):
    loaded = config(data=a, validation={"data": {"aime24": "aime24", "mine": {"name": "file", "path": b}}})
    assert isinstance(loaded.validation.data, SetsConfig)
    assert list(loaded.validation.data.sets) == ["aime24", "mine"]
    assert load_config(loaded.model_dump(mode="json")).validation.data == loaded.validation.data


def test_a_set_without_a_validation_split_is_used_whole(a, b):
    rows = SetsConfig(sets={"a": {"name": "file", "path": a}, "b": {"name": "file", "path": b}}).build("validation")
    assert isinstance(rows, RowSets)
    assert {name: len(found) for name, found in rows.sets.items()} == {"a": 4, "b": 6}


def test_sets_that_are_validated_on_whole_are_nothing_to_train_on(a, b):
    split = {"name": "file", "path": a, "validation_fraction": 0.25}
    sets = SetsConfig(sets={"a": split, "b": {"name": "file", "path": b}})
    assert [row["prompt"][0] for row in sets.build("train")] == ["a", "a", "a"]
    assert {name: len(rows) for name, rows in sets.build("validation").sets.items()} == {"a": 1, "b": 6}
    assert SetsConfig(sets={"b": {"name": "file", "path": b}}).build("train") is None


def test_checkpoints_may_be_ranked_by_the_metric_of_a_set(a, raises: Raises):
    def ranked(metric):
        validation = {"data": {"aime24": "aime24", "gsm8k": "gsm8k"}}
        return config(data=a, validation=validation, checkpoint={"metric": metric}).checkpoint.metric

    assert ranked("validation/aime24/accuracy") == "validation/aime24/accuracy"
    assert ranked("validation/aime24/pass@4")
    with raises(ConfigError, "validation/acuracy", path="checkpoint.metric"):
        ranked("validation/acuracy")


def test_options_without_a_name_are_not_taken_for_sets(a, raises: Raises):
    with raises(ConfigError, path="data", varies="(?<=got ).*"):
        config(data={"path": a, "max_rows": 3})


def test_a_wrong_option_of_a_set_is_found(a, raises: Raises):
    with raises(ConfigError, path="validation.data.sets.aime24.max_row"):
        config(data=a, validation={"data": {"aime24": {"name": "aime24", "max_row": 3}}})


def test_an_evaluation_of_a_config_is_one_of_each_set(a, b):
    loaded = config(data=a, validation={"data": {"a": a, "b": {"name": "file", "path": b}}})
    assert {name: len(rows) for name, rows in held_out_sets(loaded).items()} == {"a": 4, "b": 6}
    loaded = config(data=a, validation={"data": b})
    assert {name: len(rows) for name, rows in held_out_sets(loaded).items()} == {"validation": 6}
