"""Hydra's command line: values as its grammar reads them, overrides in their order, and the configs that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import DataError, UsageError
from nemorl_compat.peers import hydra, verl_hydra
from nemorl_compat.peers.reading import read
from recorded_messages import Raises

VALUES = [
    ("1e-6", 1e-6),
    ("0.", 0.0),
    ("1_000", 1000),
    ("True", True),
    ("null", None),
    ("None", "None"),
    ("", ""),
    ("007", "007"),
    ("abc def", "abc def"),
    ("'1'", "1"),
    ('"it\'s"', "it's"),
    (r"'it\'s'", "it's"),
    (r"'a\b'", r"a\b"),
    (r"a\,b", "a,b"),
    ("${a.b}", "${a.b}"),
    ("${oc.select:a.b,1}", "${oc.select:a.b,1}"),
    ("[1,a,'b c',[2]]", [1, "a", "b c", [2]]),
    ('["console","wandb"]', ["console", "wandb"]),
    ("{a: 1, b: {c: x}}", {"a": 1, "b": {"c": "x"}}),
    ("{a:1}", {"a": 1}),
    ("[]", []),
    ("{}", {}),
    ("http://h:1/x", "http://h:1/x"),
    ("~/data/x.parquet", "~/data/x.parquet"),
    ("-1", -1),
    ("[.5, -1e3]", [0.5, -1000.0]),
]
"""Text, and what hydra-core 1.3's own parser makes of it."""


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_a_value_is_read_as_hydra_reads_it(text: str, value: Any) -> None:
    found = hydra.parse_value(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["a,b", "[1", "{a: 1", "'open", "choice(a,b)", "${a", "{a}"])
def test_what_hydra_does_not_read_as_one_value_is_refused(text: str) -> None:
    with pytest.raises(DataError):
        hydra.parse_value(text)


def test_overrides_apply_in_their_order() -> None:
    words = [
        "a.b=1",
        "+a.c={x: 1}",
        "a.c={y: 2}",
        "++a.d={z: 3}",
        "++a.d={}",
        "~a.b",
        "e=[1,2]",
        "hydra.run.dir=/x",
        "a.f=",
    ]
    values = hydra.compose(words, [Path()], known={}).values
    assert values == {"a": {"c": {"x": 1, "y": 2}, "d": {}, "f": ""}, "e": [1, 2]}


def test_an_option_of_hydra_and_a_config_that_is_not_here_are_refused(tmp_path: Path, raises: Raises) -> None:
    with raises(DataError, "--multirun"):
        verl_hydra.of_command(["--multirun", "a.b=1"], tmp_path)
    with raises(DataError, "ppo_lora_trainer"):
        verl_hydra.of_command(["--config-name=ppo_lora_trainer"], tmp_path)
    with raises(DataError, "mlite_actor"):
        verl_hydra.of_command(["actor@actor_rollout_ref.actor=mlite_actor"], tmp_path)


def test_a_config_of_ones_own_with_its_defaults(tmp_path: Path) -> None:
    """As Hydra does: entries of ``defaults`` in their order, the file itself at ``_self_``, then the command line."""
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "mine.yaml").write_text(
        "hydra: {searchpath: ['file://verl/trainer/config']}\n"
        "defaults: [ppo_trainer, data: gsm8k, optional extra: none, override model_engine: megatron, _self_]\n"
        "data: {max_prompt_length: 256}\n"
        "actor_rollout_ref: {rollout: {n: 4}, actor: {optim: {lr: 3e-5}, kl_loss_coef: 0.05}}\n"
    )
    (tmp_path / "conf" / "data" / "gsm8k.yaml").write_text("max_prompt_length: 1\nmax_response_length: 1024\n")
    words = ["--config-path", str(tmp_path / "conf"), "--config-name=mine", "actor_rollout_ref.rollout.n=8"]
    assert verl_hydra.of_command(words, Path()) == {
        "model_engine": "megatron",
        "data.max_prompt_length": 256,
        "data.max_response_length": 1024,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.actor.optim.lr": 3e-5,
        "actor_rollout_ref.actor.kl_loss_coef": 0.05,
    }
    assert read(tmp_path / "conf" / "mine.yaml", "verl").values["actor_rollout_ref.rollout.n"] == 4


def test_verls_own_megatron_config_keeps_its_engine() -> None:
    by_name = verl_hydra.of_command(["--config-path=config", "--config-name=ppo_megatron_trainer.yaml"], Path())
    assert by_name == verl_hydra.of_command(["model_engine=megatron"], Path()) == {"model_engine": "megatron"}


def test_interpolations_reach_what_is_given_and_verls_defaults() -> None:
    words = ["data.seed=${data.max_prompt_length}", "data.val_batch_size=${trainer.nnodes}", "trainer.nnodes=3"]
    assert verl_hydra.of_command(["a.qat=${oc.select:actor_rollout_ref.actor.router_replay}"], Path()) == {
        "a.qat.mode": "disabled",
        "a.qat.record_file": None,
        "a.qat.replay_file": None,
    }
    # 512 is verl's default.
    assert verl_hydra.of_command(words, Path()) == {"data.seed": 512, "data.val_batch_size": 3, "trainer.nnodes": 3}


def test_a_program_of_verls_that_is_not_translated_is_named(tmp_path: Path, raises: Raises) -> None:
    script = tmp_path / "run.sh"
    script.write_text("torchrun -m verl.trainer.sft_trainer data.train_files=x\n")
    with raises(UsageError, "sft_trainer"):
        read(script, "verl")
