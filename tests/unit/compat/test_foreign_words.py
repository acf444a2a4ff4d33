"""Names of TRL, verl and OpenRLHF in a nemorl config, in rows and in rewards: errors say what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nemorl
import pytest
from nemorl.config import load_config
from nemorl.errors import ConfigError, DataError, UsageError
from nemorl.plugins import registry
from nemorl_compat.peers.tables import NEUTRAL, SYSTEMS, table
from nemorl_compat.peers.words import foreign_words
from nemorl_rl.data.encoding import encode_row
from nemorl_rl.data.tokenizer import Tokenizer
from recorded_messages import Raises

GRPO = {"algorithm": "grpo", "model": "org/model"}
KIN = ("sapo", "vespo", "dr_grpo", "gspo", "gmpo", "dppo", "clip_cov", "kl_cov", "dro", "reinforce_plus_plus")
ALGORITHMS = ("grpo", *KIN, "sft", "dpo", "kto", "orpo", "simpo")


def fix_of(config: dict[str, Any], overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as found:
        load_config(config, overrides)
    (problem,) = found.value.problems
    assert problem.fix is not None
    return problem.fix


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**GRPO, "learning_rate": 1e-5}, "TRL's `learning_rate` lives at policy.optimizer.lr"),
        ({**GRPO, "policy": {"learning_rate": 1e-5}}, "lives at policy.optimizer.lr"),
        ({**GRPO, "num_generations": 8}, "lives at num_generations_per_prompt"),
        ({**GRPO, "per_device_train_batch_size": 8}, "num_prompts_per_step: it counts responses per device"),
        (
            {"algorithm": "sft", "model": "m", "per_device_train_batch_size": 8},
            "batch_size: batch_size counts the rows",
        ),
        ({**GRPO, "logging_steps": 5}, "needs no counterpart: it is about logs"),
        ({**GRPO, "entropy_coef": 0.1}, "lives at entropy_bonus"),
        ({**GRPO, "micro_rollout_batch_size": 4}, "OpenRLHF's `micro_rollout_batch_size` has no counterpart"),
        ({**GRPO, "rollout": {"n": 4}}, "verl's `rollout.n` lives at num_generations_per_prompt"),
        (
            {**GRPO, "actor_rollout_ref": {"actor": {"ppo_epochs": 1, "clip_ratio": 0.2}, "model": {"path": "m"}}},
            "`nemorl config migrate --from verl FILE`",
        ),
    ],
)
def test_a_key_of_another_system_says_where_it_lives(config: dict[str, Any], words: str) -> None:
    assert words in fix_of(config)


def test_overrides_as_these_systems_write_them() -> None:
    assert "lives at num_generations_per_prompt" in fix_of(GRPO, ("actor_rollout_ref.rollout.n=8",))
    assert "policy.microbatch_tokens" in fix_of(GRPO, ("--micro_train_batch_size=4",))


@pytest.mark.parametrize("key", ["data.promt_column", "generation.temprature", "environment.learning_rate"])
def test_misspelt_keys_of_nemorl_are_not_taken_for_others(key: str) -> None:
    config = {**GRPO, "data": {"name": "huggingface", "path": "org/rows"}, "environment": {"name": "math"}}
    fix = fix_of(config, (f"{key}=1",))
    assert not any(name in fix for name in ("TRL", "verl", "OpenRLHF"))


@pytest.mark.parametrize("system", SYSTEMS)
def test_where_a_key_is_said_to_live_there_is_such_a_key(system: str) -> None:
    from nemorl.config.explain import field_paths

    fields = {path for name in ALGORITHMS for path in field_paths(registry().load("algorithms", name))}
    plugins = {
        "policy.backend",
        "generation.backend",
        "data",
        "environment",
        "validation.data",
    }  # with their own options
    for entry in table(system).entries:
        to = entry.row.get("to")
        assert to is None or to in fields or any(to.startswith(f"{plugin}.") for plugin in plugins), (entry.keys, to)
        assert entry.row.get("neutral") in {None, *NEUTRAL}
        assert entry.row.keys() & {"to", "missing", "differs", "neutral"}, entry.keys
        assert entry.row.keys() <= {
            "key",
            "to",
            "part",
            "only",
            "values",
            "default",
            "missing",
            "differs",
            "neutral",
            "says",
            "open",
        }


def test_trl_itself_has_no_argument_that_the_table_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl")
    from dataclasses import fields

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.orpo import ORPOConfig

    stable = {"grpo": trl.GRPOConfig, "sft": trl.SFTConfig, "dpo": trl.DPOConfig, "kto": trl.KTOConfig}
    for family, config in {**stable, "orpo": ORPOConfig, "cpo": CPOConfig}.items():
        unknown = [item.name for item in fields(config) if table("trl").find(item.name, family) is None]
        assert unknown == [], family


def test_columns_say_what_to_do(tiny_model: Any, raises: Raises) -> None:
    tokenizer = Tokenizer.load(str(tiny_model))
    with raises(DataError):
        encode_row({"text": "a"}, tokenizer)
    for column, words in (("data_source", "set `environment:`"), ("ground_truth", "answer_column: ground_truth")):
        assert words in str(foreign_words("column", column))
    assert "copy it to a column `answer`" in str(foreign_words("column", "reward_model.ground_truth"))
    assert foreign_words("column", "prompt") is None


@pytest.mark.parametrize(
    ("function", "framework"),
    [
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0.0, "verl's"),
        (lambda queries, prompts, labels: 0.0, "OpenRLHF's"),
    ],
)
def test_rewards_of_other_conventions_are_refused_with_the_way_to_write_them(
    function: Callable[..., Any], framework: str, raises: Raises
) -> None:
    with raises(UsageError, framework):
        nemorl.RewardFunction(function)
