"""Every mistake in a config is found at load, with its place, what is wrong and how to fix it.

Each row of a table: a name, what is changed in a correct config (``...`` removes a key, ``{files}`` and ``{model}``
stand for folders), the path of the problem, words of its message, words of its fix.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from command_line import Command
from nemorl.config.load import load_config
from nemorl.errors import ConfigError
from nemorl.plugins.index import Index
from nemorl.plugins.kinds import DatasetConfig, GenerationBackendConfig, LoggerConfig
from nemorl.plugins.registry import Registry
from nemorl.types import Row
from nemorl_testing.plugin import use_registry
from recorded_messages import Raises, paths

GRPO = {"algorithm": "grpo", "model": "{model}", "data": "arithmetic", "environment": "math"}
SFT = {"algorithm": "sft", "model": "{model}", "data": "arithmetic"}


def file_data(name: str, **options: Any) -> dict[str, Any]:
    return {"data": {"name": "file", "path": f"{{files}}/{name}", **options}}


UNKNOWN_KEYS = [
    ("at the top", {"max_step": 3}, "max_step"),
    ("like nothing known", {"zzzzqq": 3}, "zzzzqq"),
    ("that lives deeper", {"lr": 1e-3}, "lr"),
    ("that lives at two places", {"temperature": 1.0}, "temperature"),
    ("of another algorithm", {"batch_size": 4}, "batch_size"),
    ("in policy", {"policy": {"precison": "bfloat16"}}, "policy.precison"),
    ("in optimizer", {"policy": {"optimizer": {"beta": 1}}}, "policy.optimizer.beta"),
    ("in schedule", {"policy": {"schedule": {"warmup": 3}}}, "policy.schedule.warmup"),
    ("in lora", {"policy": {"lora": {"r": 3}}}, "policy.lora.r"),
    ("in generation", {"generation": {"max_tokens": 3}}, "generation.max_tokens"),
    ("in validation", {"validation": {"evry": 3}}, "validation.evry"),
    ("in checkpoint", {"checkpoint": {"keep": 3}}, "checkpoint.keep"),
    ("in cluster", {"cluster": {"gpus": 1}}, "cluster.gpus"),
    ("in plugins", {"plugins": {"blocked": []}}, "plugins.blocked"),
    ("in reward_scaling", {"reward_scaling": {"source": 1}}, "reward_scaling.source"),
    ("for devices", {"n_gpus": 2}, "n_gpus"),
    ("for devices, as a launcher has it", {"num_gpus": 2}, "num_gpus"),
    ("of a section, at the top", {"schedule": "cosine"}, "schedule"),
    ("of a backend", {"policy": {"backend": {"layot": 1}}}, "policy.backend.layot"),
    ("of a generator", {"generation": {"backend": {"max_rows": 3}}}, "generation.backend.max_rows"),
    ("of a dataset", {"data": {"name": "arithmetic", "digits": 2}}, "data.digits"),
    ("of an environment", {"environment": {"name": "math", "timeout": 2}}, "environment.timeout"),
    ("of a logger", {"loggers": [{"name": "tensorboard", "foldr": 1}]}, "loggers.0.foldr"),
]

WRONG_TYPES = [
    ("text for a whole number", {"max_steps": "ten"}, "max_steps"),
    ("a fraction for a whole number", {"max_steps": 1.5}, "max_steps"),
    ("text for a number", {"policy": {"optimizer": {"lr": "fast"}}}, "policy.optimizer.lr"),
    ("text for a switch", {"leave_one_out": "maybe"}, "leave_one_out"),
    ("a number for a mapping", {"policy": 3}, "policy"),
    ("one of its values for a mapping", {"policy": {"schedule": "cosine"}}, "policy.schedule"),
    ("a list for a mapping", {"generation": ["x"]}, "generation"),
    ("a number for the model", {"model": 3}, "model"),
    ("a number for model_name", {"policy": {"model_name": 3}}, "policy.model_name"),
    ("a name for a list", {"loggers": "tensorboard"}, "loggers"),
    ("an empty text to stop at", {"generation": {"stop_strings": [".", " END", ""]}}, "generation.stop_strings.2"),
    ("a token that is none to stop at", {"generation": {"stop_token_ids": [2, -1]}}, "generation.stop_token_ids.1"),
    ("a number for a switch or a word", {"kl_importance_weights": 3}, "kl_importance_weights"),
    ("another word for a switch or a word", {"kl_importance_weights": "new"}, "kl_importance_weights"),
    ("a number for names or a word", {"policy": {"lora": {"target_modules": 3}}}, "policy.lora.target_modules"),
    ("a number among names", {"policy": {"lora": {"target_modules": ["q", 3]}}}, "policy.lora.target_modules"),
    ("text for a list", {"generation": {"stop_strings": "x"}}, "generation.stop_strings"),
    ("nothing for a number", {"seed": None}, "seed"),
    ("one beta", {"policy": {"optimizer": {"betas": [0.9]}}}, "policy.optimizer.betas.1"),
    ("a number for a plugin", {"data": 3}, "data"),
    ("a list for a plugin", {"environment": []}, "environment"),
    ("a plugin without its name", {"data": {"path": "x"}}, "data"),
    ("a number for the block list", {"plugins": {"block": 3}}, "plugins.block"),
    ("an option left out", {"overlong_penalty": {}}, "overlong_penalty.max_response_tokens"),
]

OUT_OF_RANGE = [
    ("learning rate 0", {"policy": {"optimizer": {"lr": 0}}}, "policy.optimizer.lr"),
    ("beta above 1", {"policy": {"optimizer": {"betas": [0.9, 1.5]}}}, "policy.optimizer.betas"),
    ("no steps", {"max_steps": 0}, "max_steps"),
    ("negative seed", {"seed": -1}, "seed"),
    ("negative temperature", {"generation": {"temperature": -1}}, "generation.temperature"),
    ("top_p above 1", {"generation": {"top_p": 1.5}}, "generation.top_p"),
    ("top_k 0", {"generation": {"top_k": 0}}, "generation.top_k"),
    ("min_p 1", {"generation": {"min_p": 1}}, "generation.min_p"),
    ("group of one", {"num_generations_per_prompt": 1}, "num_generations_per_prompt"),
    ("dual_clip 1", {"dual_clip": 1.0}, "dual_clip"),
    ("clip_low 1", {"clip_low": 1.0}, "clip_low"),
    ("negative KL weight", {"kl_penalty": -0.1}, "kl_penalty"),
    ("rank 0", {"policy": {"lora": {"rank": 0}}}, "policy.lora.rank"),
    ("precision by its nickname", {"policy": {"precision": "bf16"}}, "policy.precision"),
    (
        "a decay that ends in the warm-up",
        {"policy": {"schedule": {"kind": "linear", "warmup_steps": 9, "decay_steps": 8}}},
        "policy.schedule.decay_steps",
    ),
    ("a key that is no index", {"loggers": ["tensorboard"], "loggers.5.folder": 1}, "loggers.5.folder"),
    ("a digit that is none", {"loggers": ["tensorboard"], "loggers.².folder": 1}, "loggers.².folder"),
    ("schedule misspelt", {"policy": {"schedule": {"kind": "cosin"}}}, "policy.schedule.kind"),
    ("unknown estimator", {"kl_type": "k4"}, "kl_type"),
    ("unknown level", {"loss_aggregation": "tokens"}, "loss_aggregation"),
    ("unknown launcher", {"cluster": {"launcher": "slurm"}}, "cluster.launcher"),
    ("unknown option value", {"policy": {"backend": {"layout": "pad"}}}, "policy.backend.layout"),
    ("no operations", {"data": {"name": "arithmetic", "operations": []}}, "data.operations"),
]

MODELS_AND_PLUGINS = [
    ("no model", {"model": ...}, "model"),
    ("model folder missing", {"model": "/no/such/model"}, "model"),
    ("relative model folder missing", {"model": "./nowhere"}, "model"),
    ("model folder of something else", {"model": "{files}"}, "model"),
    ("model in policy", {"model": ..., "policy": {"model_name": "./no"}}, "policy.model_name"),
    ("two models", {"policy": {"model_name": "a/b"}}, "model"),
    ("adapters on random weights", {"policy": {"init": "random", "lora": {}}}, "policy.lora"),
    ("unknown algorithm", {"algorithm": "grop"}, "algorithm"),
    ("no algorithm", {"algorithm": ...}, "algorithm"),
    ("algorithm in capitals", {"algorithm": "GRPO"}, "algorithm"),
    ("algorithm in a list", {"algorithm": ["grpo"]}, "algorithm"),
    ("unknown backend", {"policy": {"backend": "dtensr"}}, "policy.backend"),
    ("known, not installed", {"policy": {"backend": "acme"}}, "policy.backend"),
    ("unknown generator", {"generation": {"backend": "hff"}}, "generation.backend"),
    ("unknown environment", {"environment": "maths"}, "environment"),
    ("unknown logger", {"loggers": ["tensorbord"]}, "loggers.0"),
    ("unknown hook", {"plugins": {"hooks": ["nope"]}}, "plugins.hooks.0"),
    ("unknown validation data", {"validation": {"data": "arithmetics"}}, "validation.data"),
    ("blocked environment", {"plugins": {"block": ["nemorl-math-env"]}}, "environment"),
    ("blocked algorithm", {"plugins": {"block": ["nemorl_grpo"]}}, "algorithm"),
    ("default not allowed", {"plugins": {"allow": ["nemorl-grpo"]}}, "policy.backend"),
    ("blocked, misspelt", {"plugins": {"block": ["nemorl-gpro"]}}, "plugins.block.0"),
    ("allowed, misspelt", {"plugins": {"allow": ["nemorl_sfft"]}}, "plugins.allow.0"),
    ("library missing", {"loggers": ["absent"]}, "loggers.0"),
    ("no common transport", {"generation": {"backend": "remote"}}, "generation.backend"),
    ("a transport that cannot", {"cluster": {"weight_transport": "nccl"}}, "cluster.weight_transport"),
    ("a folder that nobody named", {"cluster": {"weight_transport": "delta_folder"}}, "cluster.weight_transport"),
    ("two nodes", {"cluster": {"num_nodes": 2}}, "cluster.num_nodes"),
    ("two nodes in one process", {"cluster": {"launcher": "local", "num_nodes": 2}}, "cluster.num_nodes"),
    (
        "two workers in one process",
        {"cluster": {"launcher": "local", "workers_per_node": 2}},
        "cluster.workers_per_node",
    ),
    ("generation apart in one process", {"cluster": {"launcher": "local", "colocated": False}}, "cluster.colocated"),
    (
        "generation takes every device",
        {"cluster": {"workers_per_node": 2, "colocated": False, "generation_workers": 2}},
        "cluster.generation_workers",
    ),
    (
        "devices that are shared anyhow, lent",
        {"cluster": {"lend_training_devices": True}},
        "cluster.lend_training_devices",
    ),
    (
        "devices that are never idle, lent",
        {
            "cluster": {"workers_per_node": 2, "colocated": False, "lend_training_devices": True},
            "rollouts": {"mode": "async"},
        },
        "cluster.lend_training_devices",
    ),
    ("an address in one process", {"cluster": {"launcher": "local", "address": "auto"}}, "cluster.address"),
    ("half of TLS", {"cluster": {"security": {"tls_ca": __file__}}}, "cluster.security.tls_certificate"),
    (
        "a token that is not there",
        {"cluster": {"security": {"token_file": "/nowhere/token"}}},
        "cluster.security.token_file",
    ),
    (
        "an interpreter that is not there",
        {"cluster": {"launcher": "ray"}, "generation": {"python": "/nowhere/python"}},
        "generation.python",
    ),
    ("another interpreter in one process", {"policy": {"python": sys.executable}}, "policy.python"),
    ("GPUs on a CPU machine", {"cluster": {"gpus_per_node": 1}}, "cluster.gpus_per_node"),
    ("more ranks than processes", {"policy": {"tensor_parallel_size": 2}}, "policy.tensor_parallel_size"),
]

DATA = [
    ("unknown dataset", {"data": "arithmetik"}, "data"),
    ("no data", {"data": ...}, "data"),
    ("no environment", {"environment": ...}, "environment"),
    ("file missing", file_data("promts.jsonl"), "data.path"),
    ("file of unknown kind", file_data("config.txt"), "data.path"),
    ("file empty", file_data("empty.jsonl"), "data.path"),
    ("file malformed", file_data("broken.jsonl"), "data.path"),
    ("file of lists", file_data("list.jsonl"), "data.path"),
    ("file without prompts", file_data("texts.jsonl"), "data.path"),
    ("column misspelt", file_data("prompts.jsonl", prompt_column="prmpt"), "data.prompt_column"),
    ("path left out", {"data": {"name": "file"}}, "data.path"),
    ("a file from the hub", {"data": {"name": "huggingface", "path": "{files}/prompts.jsonl"}}, "data.path"),
    ("no prompt in the rows", {"data": "answers"}, "data"),
    ("dataset that raises", {"data": "raising"}, "data"),
    ("too many problems", {"data": {"name": "arithmetic", "max_digits": 1}}, "data.num_train"),
]

COMBINATIONS = [
    ("greedy groups", {"generation": {"temperature": 0}}, "generation.temperature"),
    (
        "more minibatches than responses",
        {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "num_minibatches": 5},
        "num_minibatches",
    ),
    (
        "two length penalties",
        {"overlong_penalty": {"max_response_tokens": 200}, "truncation_reward_factor": 0.5},
        "overlong_penalty",
    ),
    ("advantage bounds crossed", {"advantage_clip_low": 1, "advantage_clip_high": -1}, "advantage_clip_low"),
    (
        "no room for a prompt",
        {"policy": {"max_sequence_tokens": 64}, "generation": {"max_new_tokens": 64}},
        "generation.max_new_tokens",
    ),
    ("empty source range", {"reward_scaling": {"source_min": 1, "source_max": 0}}, "reward_scaling.source_max"),
    (
        "buffer longer than the limit",
        {"overlong_penalty": {"max_response_tokens": 10, "buffer_tokens": 20}},
        "overlong_penalty.buffer_tokens",
    ),
    ("greedy pass@k", {"validation": {"num_generations": 4}}, "validation.temperature"),
    (
        "two validation sources",
        file_data("prompts.jsonl", validation_path="{files}/prompts.jsonl", validation_fraction=0.5),
        "data.validation_fraction",
    ),
    (
        "column and template",
        file_data("prompts.jsonl", prompt_column="prompt", prompt_template="Q: {{prompt}}"),
        "data.prompt_template",
    ),
]

SFT_MISTAKES = [
    ("knob of another algorithm", {"kl_penalty": 0.1}, "kl_penalty"),
    ("batch of none", {"batch_size": 0}, "batch_size"),
    ("rows without responses", file_data("prompts.jsonl"), "data"),
    ("no data", {"data": ...}, "data"),
]

OVERRIDES = [
    ("no equals sign", "max_steps", ""),
    ("no path", "=3", ""),
    ("empty part", "policy..lr=3", ""),
    ("through a list", "loggers.0=wandb", "loggers"),
    ("through a number", "seed.x=1", "seed"),
    ("unknown path", "policy.optimiser.lr=1", "policy.optimiser"),
    ("wrong type", "policy.optimizer.lr=abc", "policy.optimizer.lr"),
    ("broken value", "seed=[1", "seed"),
]

FILES = [
    ("empty.yaml", "", ""),
    ("comment.yaml", "# nothing yet\n", ""),
    ("list.yaml", "- algorithm: grpo\n", ""),
    ("twice.yaml", "algorithm: grpo\nseed: 1\nseed: 2\n", ""),
    ("twice_below.yaml", "algorithm: grpo\npolicy:\n  init: random\n  init: random\n", ""),
    ("tabs.yaml", "algorithm: grpo\npolicy:\n\tinit: random\n", ""),
    ("bad.json", '{"algorithm": "grpo",}', ""),
    ("bytes.yaml", "algorithm: gr\udcffpo\n", ""),
]


# Plugins that only these tests need; the registry finds them by module and name, as it would installed ones.


class RemoteConfig(GenerationBackendConfig):
    """Takes weights in a way that no trainer offers."""

    weight_transports: ClassVar[tuple[str, ...]] = ("pigeon",)


class AbsentLoggerConfig(LoggerConfig):
    """Needs a library that nobody has."""

    requires_modules: ClassVar[tuple[str, ...]] = ("no_such_library",)
    install_hint: ClassVar[str] = "pip install acme[absent]"


class AnswersConfig(DatasetConfig):
    """Rows that have answers, but no questions."""

    def build(self, split: str) -> list[Row]:
        return [{"answer": "4", "prompt": None}]


class RaisingConfig(DatasetConfig):
    """A dataset with a bug."""

    def build(self, split: str) -> list[Row]:
        return [{"prompt": 1 // 0}]


@pytest.fixture(autouse=True)
def _test_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    scoped = Registry(Index.installed())
    scoped.register("generation_backends", "remote", RemoteConfig)
    scoped.register("datasets", "answers", AnswersConfig)
    scoped.register("datasets", "raising", RaisingConfig)
    scoped.register("loggers", "absent", AbsentLoggerConfig)
    with use_registry(scoped):
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    texts = {
        "prompts.jsonl": '{"prompt": "1+1="}\n',
        "texts.jsonl": '{"text": "1+1="}\n',
        "empty.jsonl": "",
        "broken.jsonl": '{"prompt": "1+1="\n',
        "list.jsonl": "[1]\n",
        "config.txt": "prompt",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def changed(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``change`` merged in; ``...`` removes."""
    result = dict(base)
    for key, value in change.items():
        if value is ...:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = changed(result[key], value)
        else:
            result[key] = value
    return result


def placed(value: Any, model: Path, files: Path) -> Any:
    """``value`` with the placeholders of folders replaced."""
    if isinstance(value, Mapping):
        return {key: placed(item, model, files) for key, item in value.items()}
    if isinstance(value, list):
        return [placed(item, model, files) for item in value]
    return value.replace("{model}", str(model)).replace("{files}", str(files)) if isinstance(value, str) else value


def problems_of(raises: Raises, source: Any, overrides: tuple[str, ...] = ()) -> list[str]:
    with raises(ConfigError) as caught:
        load_config(source, overrides, for_launch=True)
    assert "Traceback" not in str(caught.value)
    return paths(caught.value)


def named(table: list[Any]) -> list[Any]:
    return [pytest.param(*row[1:], id=row[0].replace(" ", "-")) for row in table]


def test_the_config_that_the_tables_change_is_correct(tiny_model: Path, files: Path) -> None:
    for base in (GRPO, SFT):
        assert load_config(placed(base, tiny_model, files), for_launch=True).algorithm == base["algorithm"]


@pytest.mark.parametrize(
    ("change", "path"),
    named([*UNKNOWN_KEYS, *WRONG_TYPES, *OUT_OF_RANGE, *MODELS_AND_PLUGINS, *DATA, *COMBINATIONS]),
)
def test_a_mistake_in_a_grpo_config_is_named(
    change: dict[str, Any], path: str, tiny_model: Path, files: Path, raises: Raises
) -> None:
    assert path in problems_of(raises, placed(changed(GRPO, change), tiny_model, files))


@pytest.mark.parametrize(("change", "path"), named(SFT_MISTAKES))
def test_a_mistake_in_an_sft_config_is_named(
    change: dict[str, Any], path: str, tiny_model: Path, files: Path, raises: Raises
) -> None:
    assert path in problems_of(raises, placed(changed(SFT, change), tiny_model, files))


@pytest.mark.parametrize(("override", "path"), named(OVERRIDES))
def test_a_mistake_in_an_override_is_named(
    override: str, path: str, tiny_model: Path, files: Path, raises: Raises
) -> None:
    assert path in problems_of(raises, placed(GRPO, tiny_model, files), (override,))


@pytest.mark.parametrize(("name", "text", "path"), FILES, ids=[row[0] for row in FILES])
def test_a_file_that_is_no_config_is_named(name: str, text: str, path: str, tmp_path: Path, raises: Raises) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    assert path in problems_of(raises, tmp_path / name)


def test_a_missing_config_file_lists_its_neighbours(tmp_path: Path, raises: Raises) -> None:
    (tmp_path / "grpo.yaml").write_text("algorithm: grpo\n")
    with raises(ConfigError, "grpo.yaml", path=""):
        load_config(tmp_path / "gpro.yaml", for_launch=True)


def test_the_tables_hold_more_than_a_hundred_mistakes() -> None:
    tables = [UNKNOWN_KEYS, WRONG_TYPES, OUT_OF_RANGE, MODELS_AND_PLUGINS, DATA, COMBINATIONS, SFT_MISTAKES, OVERRIDES]
    assert sum(map(len, [*tables, FILES])) > 100


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"model": "/no/such/model"}, "model"),
        ({"model": ..., "policy": {"model_name": "./no"}}, "policy.model_name"),
        (file_data("empty.jsonl"), "data.path"),
        ({"data": {"name": "file"}}, "data.path"),
        ({"environment": "maths"}, "environment"),
        ({"policy": {"precision": "bf16"}}, "policy.precision"),
    ],
    ids=str,
)
def test_one_mistake_is_one_problem(
    change: dict[str, Any], path: str, tiny_model: Path, files: Path, raises: Raises
) -> None:
    # What is wrong is taken out to check the rest; its absence must not be reported as a second mistake.
    assert problems_of(raises, placed(changed(GRPO, change), tiny_model, files)) == [path]


ELEVEN = {
    "model": "/no/such/model",
    "data": "arithmetik",
    "environment": {"name": "math", "timeout": 3},
    "max_step": 10,
    "seed": "lucky",
    "num_generations_per_prompt": 1,
    "kl_type": "k4",
    "policy": {"precision": "bf16", "optimizer": {"lr": -1}},
    "generation": {"temperature": 0},
    "validation": {"num_generations": 4},
}


@pytest.mark.parametrize("algorithm", ["GRPO", "grop", "nothing_like_it", ["grpo"], None], ids=str)
def test_a_wrong_algorithm_hides_no_other_mistake(
    algorithm: Any, tiny_model: Path, files: Path, raises: Raises
) -> None:
    # What another algorithm might have at the top is not judged where nobody knows which one is meant.
    wrong = {"algorithm": algorithm, "seed": "lucky", "policy": {"precision": "bf16"}, "model": "/no/such/model"}
    found = problems_of(raises, placed(changed(GRPO, wrong), tiny_model, files))
    assert sorted(found) == ["algorithm", "model", "policy.precision", "seed"]


VERL = {
    "algorithm": {"adv_estimator": "grpo", "kl_ctrl": {"kl_coef": 0.001}},
    "data": {"train_files": "gsm8k/train.parquet", "train_batch_size": 1024},
    "actor_rollout_ref": {"actor": {"strategy": "fsdp"}, "rollout": {"n": 5}},
    "trainer": {"n_gpus_per_node": 8, "nnodes": 1},
}
NEMO_RL = {"grpo": {"num_prompts_per_step": 32}, "policy": {"train_global_batch_size": 512, "dtensor_cfg": {}}}
AXOLOTL = {"base_model": "org/model", "datasets": [], "micro_batch_size": 2, "sequence_len": 2048}


@pytest.mark.parametrize("theirs", [VERL, NEMO_RL, AXOLOTL], ids=["verl", "NeMo-RL", "axolotl"])
def test_the_config_of_another_system_is_one_problem_that_says_how_to_go_on(
    theirs: dict[str, Any], raises: Raises
) -> None:
    assert problems_of(raises, theirs) == ["algorithm"]


def test_all_mistakes_are_reported_at_once(tiny_model: Path, files: Path, raises: Raises) -> None:
    assert set(problems_of(raises, placed(changed(GRPO, ELEVEN), tiny_model, files))) == {
        "model",
        "data",
        "environment.timeout",
        "max_step",
        "seed",
        "num_generations_per_prompt",
        "kl_type",
        "policy.precision",
        "policy.optimizer.lr",
        "generation.temperature",  # found once the field errors are out of the way
        "validation.temperature",
    }


def test_the_command_line_shows_every_problem_and_no_traceback(
    nemorl: Command, tiny_model: Path, files: Path, tmp_path: Path
) -> None:
    config = tmp_path / "grpo.json"
    config.write_text(json.dumps(placed(changed(GRPO, ELEVEN), tiny_model, files)))
    done = nemorl("train", str(config))
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.err
    assert "11 problems" in done.err
    for words in ("max_step: unknown key", "Did you mean 'max_steps'?", "fix:", "policy.optimizer.lr: -1"):
        assert words in done.err


def test_the_command_line_reports_problems_as_json(
    nemorl: Command, tiny_model: Path, files: Path, tmp_path: Path
) -> None:
    config = tmp_path / "grpo.json"
    config.write_text(json.dumps(placed(changed(GRPO, {"environment": "maths"}), tiny_model, files)))
    done = nemorl("config", "validate", str(config), "--json")
    assert done.code == 2
    report = done.json
    assert report["valid"] is False
    assert [(problem["path"], problem["fix"]) for problem in report["problems"]] == [
        ("environment", "Did you mean 'math'?")
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "{files}/none.yaml"], ["no such file", "fix:"]),
        (["train", "{config}", "max_steps=ten"], ["max_steps: expected a whole number", "fix: give a whole number"]),
        (["eval", "{config}", "--temperature", "0", "--generations", "4"], ["validation.temperature", "fix:"]),
        (
            ["train", "{config}", "--resume", "--run-dir", "{files}/no_run"],
            ["no run to continue", "fix: drop --resume"],
        ),
        (["report", "{files}"], ["is not a run directory", "fix: give the path of a run"]),
        (["plugins", "show", "dtensr"], ["no plugin named 'dtensr'", "fix:"]),
    ],
    ids=["missing file", "override", "eval", "resume", "report", "plugins"],
)
def test_a_command_given_nonsense_exits_2_and_says_why(
    nemorl: Command, arguments: list[str], words: list[str], tiny_model: Path, files: Path, tmp_path: Path
) -> None:
    config = tmp_path / "grpo.json"
    config.write_text(json.dumps(placed(GRPO, tiny_model, files)))
    done = nemorl(*(argument.replace("{config}", str(config)).replace("{files}", str(files)) for argument in arguments))
    assert done.code == 2
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"policy": {"backend": {"name": "dtensor", "pipeline_parallel_size": 2}}}, "policy.backend"),
        ({"policy": {"pipeline_parallel_size": 2}}, "policy.backend"),
        ({"generation": {"max_num_seqs": 8}}, "generation.backend"),
    ],
)
def test_an_option_of_another_plugin_is_told_from_a_typing_mistake(
    section: dict[str, Any], path: str, raises: Raises
) -> None:
    data = {**GRPO, **section}
    with raises(ConfigError, path, "vllm" if "generation" in section else "megatron"):
        load_config(data)
