"""Nothing that TRL or OpenRLHF can be told is dropped without a word: each option of theirs, changed once."""

from __future__ import annotations

from typing import Any

import pytest
from every_option import OPENRLHF, options, silent
from nemorl_compat.peers.reading import Given
from nemorl_compat.peers.tables import table
from nemorl_compat.peers.translation import translate

BASES: dict[str, dict[str, dict[str, Any]]] = {
    "trl": {
        "grpo": {"model_name_or_path": "org/model", "num_generations": 8, "num_processes": 1},
        "sft": {"model_name_or_path": "org/model", "packing": False, "num_processes": 2},
        "dpo": {"model_name_or_path": "org/model", "beta": 0.1, "num_processes": 1},
        "kto": {"model_name_or_path": "org/model", "desirable_weight": 1.1, "num_processes": 1},
        "orpo": {"model_name_or_path": "org/model", "beta": 0.2, "num_processes": 1},
        "cpo": {"model_name_or_path": "org/model", "loss_type": "simpo", "num_processes": 1},
    },
    "openrlhf": {
        "grpo": OPENRLHF,
        "sft": {"pretrain": "org/model", "dataset": "org/rows"},
        "dpo": {"pretrain": "org/model", "dataset": "org/rows"},
    },
}
WORDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "trl": {
        "completion_only_loss": (False,),  # true is what a loss on responses is here
        "assistant_only_loss": (),  # as is what the assistant says
        "is_encoder_decoder": (True,),
        "scale_rewards": ("none", "batch", False),
        "optim": ("adafactor", "sgd"),
        "dtype": ("float16",),  # bfloat16 is what bf16 makes of a policy
    },
    "openrlhf": {},
}
CASES = [(system, family) for system, families in BASES.items() for family in families]
EVERY = 20
"""One option in so many is changed in `make test`, others in each family; all of them in `make test-full`."""


@pytest.mark.slow
@pytest.mark.parametrize("system", BASES)
def test_some_options_change_nothing_without_a_word(system: str) -> None:
    assert silent(system, BASES[system], WORDS[system], EVERY) == []


@pytest.mark.full
@pytest.mark.parametrize(("system", "family"), CASES)
def test_no_option_changes_without_a_word(system: str, family: str) -> None:
    assert silent(system, {family: BASES[system][family]}, WORDS[system]) == []


@pytest.mark.parametrize("system", BASES)
def test_every_option_is_named_by_a_row_of_its_own(system: str) -> None:
    known = table(system)
    assert len(known.options) > 150
    assert [name for name in options(system) if not any(name in entry.keys for entry in known.entries)] == []


@pytest.mark.parametrize(
    ("system", "family", "given"),
    [
        ("trl", "grpo", {"lora_r": 4}),
        ("trl", "grpo", {"warmup_steps": 3, "warmup_ratio": 0.1}),
        ("trl", "grpo", {"vllm_gpu_memory_utilization": 0.5}),
        ("openrlhf", "grpo", {"async_queue_size": 4}),
    ],
)
def test_a_key_without_effect_is_named(system: str, family: str, given: dict[str, Any]) -> None:
    made = translate(Given(system, {**BASES[system][family], **given}, family))
    last = list(given)[-1]
    assert [change.key for change in made.of("different") if change.key == last] == [last]


# What was dropped once, by hand against the systems' own code


def test_trls_none_is_a_word() -> None:
    # TRL: `if self.scale_rewards != "none": advantages /= std + 1e-4`
    made = translate(Given("trl", {**BASES["trl"]["grpo"], "scale_rewards": "none"}, "grpo"))
    assert made.config["normalize_std"] is False


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"level": "token", "mode": "clip"}, {"kind": "truncated", "cap": 5.0, "low": 0.5}),
        ({"level": "token"}, {"kind": "icepop", "low": 0.5, "high": 5.0}),
        ({"level": "seq"}, {"kind": "sequence_mask", "low": 0.5, "high": 5.0}),
    ],
)
def test_openrlhfs_correction_in_three_options(said: dict[str, str], expected: dict[str, Any]) -> None:
    # 0.11: TIS = token clip, ICEPOP = token mask, seq-mask-tis = seq mask
    given = {f"algo.advantage.is_correction_{part}": value for part, value in said.items()}
    made = translate(Given("openrlhf", {**BASES["openrlhf"]["grpo"], **given}, "grpo"))
    found = made.config["importance_correction"]
    assert found["kind"] == expected["kind"]
    assert {**expected, **found} == expected  # defaults are left out


@pytest.mark.parametrize(("system", "key"), [("trl", "warmup_ratio"), ("openrlhf", "lr_warmup_ratio")])
def test_a_warm_up_that_is_a_share_of_the_run_stays_one(system: str, key: str) -> None:
    made = translate(Given(system, {**BASES[system]["grpo"], key: 0.07}, "grpo"))
    assert made.config["policy"]["schedule"]["warmup_frac"] == 0.07
    assert [change.outcome.kind for change in made.changes if change.key == key] == ["mapped"]


def test_openrlhf_learns_the_last_turn_unless_it_is_told_otherwise() -> None:
    base = BASES["openrlhf"]["sft"]
    assert translate(Given("openrlhf", base, "sft")).config["only_last_turn"] is True
    assert "only_last_turn" not in translate(Given("openrlhf", {**base, "multiturn": True}, "sft")).config


def test_a_batch_of_part_of_a_row_is_refused() -> None:
    made = translate(Given("trl", {**BASES["trl"]["sft"], "per_device_train_batch_size": 0.75}, "sft"))
    assert made.features == ["a batch of 1.5 rows"]
