"""Nothing that NeMo RL can be told is dropped without a word: each option of its config classes, changed once.

The options are data, ``nemorl_compat/keys/options.tsv``, made from NeMo RL's code. A change shows in the new config, or
the report names the option: another meaning, refused, or neutral by a row of the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from every_option import CHANGES
from nemorl.errors import NemorlError
from nemorl_compat.key_table import is_option, judge, options, rows
from nemorl_compat.migration import NO_EFFECT, Change, Migration, migrate
from nemorl_compat.old_config import OldConfig
from whole_configs import put, remove, whole

BASES = ("grpo", "megatron", "ppo", "sft", "dpo", "rm", "distillation")
SECTIONS = {"grpo", "ppo", "sft", "dpo", "rm", "distillation", "eval"}
OF_SOME = {
    "value": ("ppo",),
    "value_loss_fn": ("ppo",),
    "teacher": ("distillation",),
    "loss_fn": ("grpo", "ppo", "distillation"),
}
EVERY = 40
"""One option in so many is changed in `make test`, others in each family; all of them in `make test-full`."""
LEARNING = re.compile(
    r"loss|reward|advantage|kl_|clip|temperature|top_[pk]$|seed|split|prompt|^lr|_lr$|decay|lr_warmup|precision|dtype|fp32|bf16"
    r"|dropout|epoch|coef|aux|mask|beta"
)
"""Names of what may change what is learnt."""


def _family(base: str) -> str:
    return "grpo" if base == "megatron" else base


def _options_of(base: str) -> list[tuple[str, str]]:
    """Options that a config of this family may have."""
    found = []
    for option, (kind, _) in options().items():
        top = option.partition(".")[0]
        if _family(base) in OF_SOME.get(top, (_family(base),)) and (top not in SECTIONS or top == _family(base)):
            found.append((option, kind))
    return found


def _values(option: str, kind: str, base: OldConfig) -> Iterator[Any]:
    """Other values than the usual one and that of the base."""
    candidates = (True, False) if kind == "bool" else CHANGES.get(kind) or kind.split("|")
    said = [*options()[option][1], base.get(option)]
    yield from (value for value in candidates if not any(value == one and type(value) is type(one) for one in said))


def _silent(base: str, chosen: list[tuple[str, str]], folder: Path) -> list[str]:
    before, usual = migrate(whole(base), folders=(folder,)).config, OldConfig(whole(base))
    found = []
    for option, kind in chosen:
        for value in _values(option, kind, usual):
            config = whole(base)
            put(config, option, value)
            try:
                made = migrate(config, folders=(folder,))
            except NemorlError:
                continue  # it is refused by name
            if not _shows(made, before, option):
                found.append(f"{base}: {option} = {value!r}")
    return found


def _shows(made: Migration, before: Any, option: str) -> bool:
    changes = [change for change in made.changes if change.key == option or change.key.startswith(f"{option}.")]
    return bool(changes) and all(_is_said(change, made, before) for change in changes)


def _is_said(change: Change, made: Migration, before: Any) -> bool:
    outcome = change.outcome
    if outcome.kind == "mapped":
        return made.config != before or bool(made.problems) or bool(made.refused)
    return outcome.kind == "unknown" or bool(outcome.text)


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_an_option_does_not_change_without_a_word(base: str, prompts: Path) -> None:
    start = BASES.index(base)
    assert _silent(base, _options_of(base)[start::EVERY], prompts) == []


@pytest.mark.full
@pytest.mark.parametrize("base", BASES)
def test_no_option_changes_without_a_word(base: str, prompts: Path) -> None:
    assert _silent(base, _options_of(base), prompts) == []


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_what_may_change_what_is_learnt_has_a_row_of_its_own(base: str) -> None:
    named = {key for row in rows(_family(base)) for key in row.keys}
    config = OldConfig(whole(base))
    found = []
    for option, kind in _options_of(base):
        for value in _values(option, kind, config):
            outcome = judge(config, option, value)
            is_neutral = outcome.kind == "neutral" and outcome.text in ("speed", "engine", "record", "unread")
            if is_neutral and LEARNING.search(option.rpartition(".")[2]) and option not in named:
                found.append(option)
    assert sorted(set(found)) == []


def test_a_pattern_of_neutral_keys_stands_for_options_alone() -> None:
    config = OldConfig(whole("megatron"))
    assert len(options()) > 700
    assert judge(config, "policy.sequence_packing.enabled", True).kind == "neutral"
    for key in (
        "policy.sequence_packing.enabld",
        "policy.megatron_cfg.inference_x",
        "policy.dtensor_cfg.nothing",
        "data_plane.x",
    ):
        assert (is_option(key), judge(config, key, 3).kind) == (False, "unknown"), key
    assert is_option("value.optimizer.kwargs.anything")  # free names are those of PyTorch


# What was dropped once


def _made(base: str, changes: dict[str, Any], folder: Path, absent: tuple[str, ...] = ()) -> Migration:
    config = whole(base)
    for path in absent:
        remove(config, path)
    for path, value in changes.items():
        put(config, path, value)
    return migrate(config, folders=(folder,))


def _kinds(made: Migration) -> dict[str, tuple[str, str]]:
    return {change.key: (change.outcome.kind, change.outcome.text) for change in made.changes}


def test_the_set_to_validate_on_keeps_its_own_options(prompts: Path) -> None:
    same = {"dataset_name": "OpenMathInstruct-2", "split": "train_2M"}
    made = _made("grpo", {"data.validation": same}, prompts)
    assert made.config["data"]["validation_split"] == "train_2M"  # what else it says is what the rows to train on have
    other = _made("grpo", {"data.validation": {**same, "prompt_file": "prompts/other.txt"}}, prompts)
    assert other.config["validation"]["data"]["split"] == "train_2M"
    assert other.config["validation"]["data"]["prompt_template"] != other.config["data"]["prompt_template"]


def test_what_is_null_for_one_dataset_is_not_what_all_have_by_default(prompts: Path) -> None:
    # NeMo RL: `if key not in data_config: data_config[key] = default_data_config[key]`
    made = _made("grpo", {"data.train.prompt_file": None}, prompts)
    assert "prompt_template" not in made.config["data"]


def test_rows_to_validate_on_may_be_named_by_the_default(prompts: Path) -> None:
    changes = {"data.default.dataset_name": "AIME2024", "data.validation": {"repeat": 4}}
    assert _made("grpo", changes, prompts).config["validation"]["data"]["preset"] == "AIME2024"


def test_each_of_several_datasets_is_read_key_by_key(prompts: Path) -> None:
    rows_of = [{"dataset_name": "OpenMathInstruct-2"}, {"dataset_name": "DeepScaler", "processor": "mine", "typo": 1}]
    found = _kinds(_made("grpo", {"data.train": rows_of}, prompts))
    assert found["data.train.1.processor"][0] == "missing"
    assert found["data.train.1.typo"][0] == "unknown"


@pytest.mark.parametrize(
    "changes",
    [
        {"data.validation": {"dataset_name": "AIME2024", "env_name": "code_jaccard"}},
        {"data.train": [{"dataset_name": "DeepScaler"}, {"dataset_name": "DeepScaler", "env_name": "code_jaccard"}]},
    ],
)
def test_rows_with_another_environment_are_refused(changes: dict[str, Any], prompts: Path) -> None:
    assert _made("grpo", changes, prompts).features == ["several environments in one run (code_jaccard beside math)"]


def test_a_key_whose_value_changes_nothing_is_named(prompts: Path) -> None:
    made = _made("grpo", {"grpo.stop_at_validation_metric": "accuracy", "checkpointing.save_optimizer": True}, prompts)
    assert _kinds(made)["grpo.stop_at_validation_metric"] == ("different", NO_EFFECT)  # without a threshold
    assert _kinds(made)["checkpointing.save_optimizer"] == ("neutral", "same")


def test_more_rows_than_a_step_has_are_one_update(prompts: Path) -> None:
    kind, text = _kinds(_made("grpo", {"policy.train_global_batch_size": 64}, prompts))[
        "policy.train_global_batch_size"
    ]
    assert (kind, text) == ("different", "the 32 responses of a step are one optimizer step")
