"""Every mistake in a config is found at load, with its place, what is wrong and how to fix it.

Each row of a table: a name, what is changed in a correct config (``...`` removes a key, ``{files}`` and ``{model}``
stand for folders), the path of the problem, words of its message, words of its fix.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from nemorl.config.load import load_config
from nemorl.errors import ConfigError, ConfigIssue
from nemorl.plugins.index import Index
from nemorl.plugins.kinds import DatasetConfig, GenerationBackendConfig, LoggerConfig
from nemorl.plugins.registry import Registry
from nemorl.types import Row
from nemorl_testing.registries import use_registry

GRPO = {"algorithm": "grpo", "model": "{model}", "data": "arithmetic", "environment": "math"}
SFT = {"algorithm": "sft", "model": "{model}", "data": "arithmetic"}


def file_data(name: str, **options: Any) -> dict[str, Any]:
    return {"data": {"name": "file", "path": f"{{files}}/{name}", **options}}


UNKNOWN_KEYS = [
    ("at the top", {"max_step": 3}, "max_step", "unknown key in GRPOConfig", "Did you mean 'max_steps'?"),
    ("like nothing known", {"zzzzqq": 3}, "zzzzqq", "unknown key", "keys here: algorithm, model"),
    ("that lives deeper", {"lr": 1e-3}, "lr", "unknown key", "this key lives at policy.optimizer.lr"),
    (
        "that lives at two places",
        {"temperature": 1.0},
        "temperature",
        "unknown key",
        "temperature or generation.temperature",
    ),
    ("of another algorithm", {"batch_size": 4}, "batch_size", "unknown key", "keys here"),
    ("in policy", {"policy": {"precison": "bfloat16"}}, "policy.precison", "unknown key in policy", "'precision'"),
    ("in optimizer", {"policy": {"optimizer": {"beta": 1}}}, "policy.optimizer.beta", "policy.optimizer", "'betas'"),
    ("in schedule", {"policy": {"schedule": {"warmup": 3}}}, "policy.schedule.warmup", "unknown", "'warmup_steps'"),
    ("in lora", {"policy": {"lora": {"r": 3}}}, "policy.lora.r", "unknown key", "keys here: rank, alpha"),
    ("in generation", {"generation": {"max_tokens": 3}}, "generation.max_tokens", "unknown key", "'max_new_tokens'"),
    ("in validation", {"validation": {"evry": 3}}, "validation.evry", "unknown key", "'every'"),
    ("in checkpoint", {"checkpoint": {"keep": 3}}, "checkpoint.keep", "unknown key", "'keep_last'"),
    ("in cluster", {"cluster": {"gpus": 1}}, "cluster.gpus", "unknown key in cluster", "gpus_per_node"),
    ("in plugins", {"plugins": {"blocked": []}}, "plugins.blocked", "unknown key", "'block'"),
    ("in reward_scaling", {"reward_scaling": {"source": 1}}, "reward_scaling.source", "unknown key", "'source_min'"),
    ("of a backend", {"policy": {"backend": {"layot": 1}}}, "policy.backend.layot", "unknown key", "'layout'"),
    ("of a generator", {"generation": {"backend": {"max_rows": 3}}}, "generation.backend.max_rows", "unknown", "batch"),
    ("of a dataset", {"data": {"name": "arithmetic", "digits": 2}}, "data.digits", "unknown key", "'max_digits'"),
    ("of an environment", {"environment": {"name": "math", "timeout": 2}}, "environment.timeout", "unk", "'timeout_s'"),
    ("of a logger", {"loggers": [{"name": "tensorboard", "foldr": 1}]}, "loggers.0.foldr", "unknown key", "'folder'"),
]

WRONG_TYPES = [
    (
        "text for a whole number",
        {"max_steps": "ten"},
        "max_steps",
        "expected a whole number, got 'ten'",
        "give a whole",
    ),
    ("a fraction for a whole number", {"max_steps": 1.5}, "max_steps", "got 1.5", "give a whole number"),
    ("text for a number", {"policy": {"optimizer": {"lr": "fast"}}}, "policy.optimizer.lr", "a number, got 'fast'", ""),
    ("text for a switch", {"leave_one_out": "maybe"}, "leave_one_out", "expected true or false", "give true or false"),
    ("a number for a mapping", {"policy": 3}, "policy", "expected a mapping, got 3", "give a mapping"),
    ("a list for a mapping", {"generation": ["x"]}, "generation", "expected a mapping", "give a mapping"),
    ("a number for the model", {"model": 3}, "model", "expected text, got 3", "give text"),
    ("a number for model_name", {"policy": {"model_name": 3}}, "policy.model_name", "expected text", "give text"),
    ("a name for a list", {"loggers": "tensorboard"}, "loggers", "expected a list", "give a list"),
    ("text for a list", {"generation": {"stop_strings": "x"}}, "generation.stop_strings", "expected a list", "a list"),
    ("nothing for a number", {"seed": None}, "seed", "expected a whole number, got None", "give a whole number"),
    ("one beta", {"policy": {"optimizer": {"betas": [0.9]}}}, "policy.optimizer.betas.1", "required", "another value"),
    ("a number for a plugin", {"data": 3}, "data", "expected the name of a dataset", "write e.g."),
    ("a list for a plugin", {"environment": []}, "environment", "expected the name of an environment or", "write e.g."),
    ("a plugin without its name", {"data": {"path": "x"}}, "data", "mapping with a 'name'", "write e.g."),
    ("a number for the block list", {"plugins": {"block": 3}}, "plugins.block", "expected a list", "give a list"),
    ("an option left out", {"overlong_penalty": {}}, "overlong_penalty.max_response_tokens", "is required", "add `max"),
]

OUT_OF_RANGE = [
    ("learning rate 0", {"policy": {"optimizer": {"lr": 0}}}, "policy.optimizer.lr", "0 is out of range", "than 0"),
    ("beta above 1", {"policy": {"optimizer": {"betas": [0.9, 1.5]}}}, "policy.optimizer.betas", "[0, 1)", "0.999"),
    ("no steps", {"max_steps": 0}, "max_steps", "0 is out of range", "at least 1"),
    ("negative seed", {"seed": -1}, "seed", "-1 is out of range", "at least 0"),
    ("negative temperature", {"generation": {"temperature": -1}}, "generation.temperature", "range", "at least 0"),
    ("top_p above 1", {"generation": {"top_p": 1.5}}, "generation.top_p", "1.5 is out of range", "at most 1"),
    ("top_k 0", {"generation": {"top_k": 0}}, "generation.top_k", "out of range", "at least 1"),
    ("min_p 1", {"generation": {"min_p": 1}}, "generation.min_p", "out of range", "less than 1"),
    ("group of one", {"num_generations_per_prompt": 1}, "num_generations_per_prompt", "1 is out", "at least 2"),
    ("dual_clip 1", {"dual_clip": 1.0}, "dual_clip", "1.0 is out of range", "greater than 1"),
    ("clip_low 1", {"clip_low": 1.0}, "clip_low", "1.0 is out of range", "less than 1"),
    ("negative KL weight", {"kl_penalty": -0.1}, "kl_penalty", "-0.1 is out of range", "at least 0"),
    ("rank 0", {"policy": {"lora": {"rank": 0}}}, "policy.lora.rank", "0 is out of range", "at least 1"),
    ("precision by its nickname", {"policy": {"precision": "bf16"}}, "policy.precision", "'bf16'", "'bfloat16'"),
    ("schedule misspelt", {"policy": {"schedule": {"kind": "cosin"}}}, "policy.schedule.kind", "'cosin'", "'cosine'"),
    ("unknown estimator", {"kl_type": "k4"}, "kl_type", "'k4' is not one of", "use one of k1, k2, k3"),
    ("unknown level", {"loss_aggregation": "tokens"}, "loss_aggregation", "'tokens' is not one of", "'token'"),
    ("unknown launcher", {"cluster": {"launcher": "slurm"}}, "cluster.launcher", "'slurm' is not one of", "auto"),
    ("unknown option value", {"policy": {"backend": {"layout": "pad"}}}, "policy.backend.layout", "'pad'", "'padded'"),
    ("no operations", {"data": {"name": "arithmetic", "operations": []}}, "data.operations", "0 values", "at least 1"),
]

MODELS_AND_PLUGINS = [
    ("no model", {"model": ...}, "model", "no model given", "set `model:`"),
    (
        "model folder missing",
        {"model": "/no/such/model"},
        "model",
        "no folder '/no/such/model'",
        "existing model folder",
    ),
    ("relative model folder missing", {"model": "./nowhere"}, "model", "no folder './nowhere'", "hub name"),
    (
        "model folder of something else",
        {"model": "{files}"},
        "model",
        "has no config.json",
        "Hugging Face model folder",
    ),
    ("model in policy", {"model": ..., "policy": {"model_name": "./no"}}, "policy.model_name", "no folder", "existing"),
    ("two models", {"policy": {"model_name": "a/b"}}, "model", "policy.model_name is 'a/b'", "once"),
    ("adapters on random weights", {"policy": {"init": "random", "lora": {}}}, "policy.lora", "random", "pretrained"),
    ("unknown algorithm", {"algorithm": "grop"}, "algorithm", "no algorithm named 'grop'", "Did you mean 'grpo'?"),
    ("no algorithm", {"algorithm": ...}, "algorithm", "no algorithm given", "grpo, "),
    ("algorithm in a list", {"algorithm": ["grpo"]}, "algorithm", "expected the name", "grpo, "),
    ("unknown backend", {"policy": {"backend": "dtensr"}}, "policy.backend", "'dtensr'", "Did you mean 'dtensor'?"),
    (
        "known, not installed",
        {"policy": {"backend": "acme"}},
        "policy.backend",
        "installed: dtensor from",
        "plugins list",
    ),
    ("unknown generator", {"generation": {"backend": "hff"}}, "generation.backend", "'hff'", "'hf'"),
    ("unknown environment", {"environment": "maths"}, "environment", "no environment named", "Did you mean 'math'?"),
    ("unknown logger", {"loggers": ["tensorbord"]}, "loggers.0", "no logger named", "'tensorboard'"),
    ("unknown hook", {"plugins": {"hooks": ["nope"]}}, "plugins.hooks.0", "no hook named 'nope'", "plugins list"),
    (
        "unknown validation data",
        {"validation": {"data": "arithmetics"}},
        "validation.data",
        "no dataset",
        "'arithmetic'",
    ),
    ("blocked environment", {"plugins": {"block": ["nemorl-math-env"]}}, "environment", "not allowed", "plugins.block"),
    ("blocked algorithm", {"plugins": {"block": ["nemorl_grpo"]}}, "algorithm", "nemorl-grpo is not", "plugins.block"),
    ("default not allowed", {"plugins": {"allow": ["nemorl-grpo"]}}, "policy.backend", "not allowed", "plugins.allow"),
    ("blocked, misspelt", {"plugins": {"block": ["nemorl-gpro"]}}, "plugins.block.0", "no distribution", "nemorl-grpo"),
    ("allowed, misspelt", {"plugins": {"allow": ["nemorl_sfft"]}}, "plugins.allow.0", "no distribution", "nemorl-sft"),
    ("library missing", {"loggers": ["absent"]}, "loggers.0", "needs no_such_library", "pip install acme[absent]"),
    ("no common transport", {"generation": {"backend": "remote"}}, "generation.backend", "accepts pigeon", "another"),
    (
        "a transport that cannot",
        {"cluster": {"weight_transport": "nccl"}},
        "cluster.weight_transport",
        "called 'nccl' that works within one process on cpu",
        "unset",
    ),
    ("two nodes", {"cluster": {"num_nodes": 2}}, "cluster.num_nodes", "2 nodes need a Ray", "cluster.address"),
    (
        "two nodes in one process",
        {"cluster": {"launcher": "local", "num_nodes": 2}},
        "cluster.num_nodes",
        "not 2 nodes",
        "launcher: ray",
    ),
    (
        "two workers in one process",
        {"cluster": {"launcher": "local", "workers_per_node": 2}},
        "cluster.workers_per_node",
        "one process, not 2",
        "launcher: ray",
    ),
    (
        "generation apart in one process",
        {"cluster": {"launcher": "local", "colocated": False}},
        "cluster.colocated",
        "no device of its own",
        "launcher: ray",
    ),
    (
        "generation takes every device",
        {"cluster": {"workers_per_node": 2, "colocated": False, "generation_workers": 2}},
        "cluster.generation_workers",
        "training has none",
        "more devices",
    ),
    (
        "an address in one process",
        {"cluster": {"launcher": "local", "address": "auto"}},
        "cluster.address",
        "joins no cluster",
        "launcher: ray",
    ),
    (
        "half of TLS",
        {"cluster": {"security": {"tls_ca": __file__}}},
        "cluster.security.tls_certificate",
        "TLS also needs tls_certificate, tls_key",
        "all three",
    ),
    (
        "a token that is not there",
        {"cluster": {"security": {"token_file": "/nowhere/token"}}},
        "cluster.security.token_file",
        "no file",
        "existing file",
    ),
    (
        "an interpreter that is not there",
        {"cluster": {"launcher": "ray"}, "generation": {"python": "/nowhere/python"}},
        "generation.python",
        "no interpreter",
        "bin/python",
    ),
    (
        "another interpreter in one process",
        {"policy": {"python": sys.executable}},
        "policy.python",
        "one interpreter",
        "launcher: ray",
    ),
    ("GPUs on a CPU machine", {"cluster": {"gpus_per_node": 1}}, "cluster.gpus_per_node", "machine has 0", "leave it"),
    (
        "more ranks than processes",
        {"policy": {"tensor_parallel_size": 2}},
        "policy.tensor_parallel_size",
        "1 training proc",
        "low",
    ),
]

DATA = [
    ("unknown dataset", {"data": "arithmetik"}, "data", "no dataset named 'arithmetik'", "Did you mean 'arithmetic'?"),
    ("no data", {"data": ...}, "data", "no dataset given", "set `data:`"),
    ("no environment", {"environment": ...}, "environment", "nothing scores the responses", "set `environment:`"),
    ("file missing", file_data("promts.jsonl"), "data.path", "does not exist", "did you mean 'prompts.jsonl'"),
    ("file of unknown kind", file_data("config.txt"), "data.path", "extension '.txt'", ".jsonl"),
    ("file empty", file_data("empty.jsonl"), "data.path", "has no rows", "choose another file"),
    ("file malformed", file_data("broken.jsonl"), "data.path", "line 1: not valid JSON", "one complete JSON object"),
    ("file of lists", file_data("list.jsonl"), "data.path", "a list where a row", "one JSON object per line"),
    ("file without prompts", file_data("texts.jsonl"), "data.path", "no column for the prompt", "prompt_column"),
    ("column misspelt", file_data("prompts.jsonl", prompt_column="prmpt"), "data.prompt_column", "'prmpt'", "'prompt'"),
    ("path left out", {"data": {"name": "file"}}, "data.path", "is required", "add `path:`"),
    (
        "a file from the hub",
        {"data": {"name": "huggingface", "path": "{files}/prompts.jsonl"}},
        "data.path",
        "file",
        "na",
    ),
    ("no prompt in the rows", {"data": "answers"}, "data", "grpo needs rows with `prompt`, or `messages`", "map your"),
    ("dataset that raises", {"data": "raising"}, "data", "raised ZeroDivisionError", "points into dataset Raising"),
    ("too many problems", {"data": {"name": "arithmetic", "max_digits": 1}}, "data.num_train", "55 distinct", "lower"),
]

COMBINATIONS = [
    ("greedy groups", {"generation": {"temperature": 0}}, "generation.temperature", "greedy responses", "use 1.0"),
    (
        "more minibatches than responses",
        {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "num_minibatches": 5},
        "num_minibatches",
        "5 minibatches of 4 responses",
        "lower it",
    ),
    (
        "two length penalties",
        {"overlong_penalty": {"max_response_tokens": 200}, "truncation_reward_factor": 0.5},
        "overlong_penalty",
        "excludes truncation_reward_factor",
        "keep one",
    ),
    (
        "advantage bounds crossed",
        {"advantage_clip_low": 1, "advantage_clip_high": -1},
        "advantage_clip_low",
        "1.0 is not below",
        "swap",
    ),
    (
        "no room for a prompt",
        {"policy": {"max_sequence_tokens": 64}, "generation": {"max_new_tokens": 64}},
        "generation.max_new_tokens",
        "leaves no room for a prompt",
        "raise policy.max_sequence_tokens",
    ),
    (
        "empty source range",
        {"reward_scaling": {"source_min": 1, "source_max": 0}},
        "reward_scaling.source_max",
        "must be above source_min",
        "widen",
    ),
    (
        "buffer longer than the limit",
        {"overlong_penalty": {"max_response_tokens": 10, "buffer_tokens": 20}},
        "overlong_penalty.buffer_tokens",
        "exceeds max_response_tokens = 10",
        "lower it",
    ),
    ("greedy pass@k", {"validation": {"num_generations": 4}}, "validation.temperature", "all the same", "above 0"),
    (
        "two validation sources",
        file_data("prompts.jsonl", validation_path="{files}/prompts.jsonl", validation_fraction=0.5),
        "data.validation_fraction",
        "validation_path is set as well",
        "keep one",
    ),
    (
        "column and template",
        file_data("prompts.jsonl", prompt_column="prompt", prompt_template="Q: {{prompt}}"),
        "data.prompt_template",
        "prompt_column is set",
        "keep one",
    ),
]

SFT_MISTAKES = [
    ("knob of another algorithm", {"kl_penalty": 0.1}, "kl_penalty", "unknown key in SFTConfig", "keys here"),
    ("batch of none", {"batch_size": 0}, "batch_size", "out of range", "at least 1"),
    (
        "rows without responses",
        file_data("prompts.jsonl"),
        "data",
        "sft needs rows with `messages`, or `prompt`",
        "map",
    ),
    ("no data", {"data": ...}, "data", "no dataset given", "set `data:`"),
]

OVERRIDES = [
    ("no equals sign", "max_steps", "", "override 'max_steps' is not `path=value`", "policy.precision=bfloat16"),
    ("no path", "=3", "", "is not `path=value`", "e.g."),
    ("empty part", "policy..lr=3", "", "is not `path=value`", "e.g."),
    ("through a list", "loggers.0=wandb", "loggers", "expected a list", "give a list"),
    ("through a number", "seed.x=1", "seed", "expected a whole number", "give a whole number"),
    ("unknown path", "policy.optimiser.lr=1", "policy.optimiser", "unknown key in policy", "'optimizer'"),
    ("wrong type", "policy.optimizer.lr=abc", "policy.optimizer.lr", "expected a number, got 'abc'", "give a number"),
    ("broken value", "seed=[1", "seed", "is not valid YAML", "put it in quotes"),
]

FILES = [
    ("empty.yaml", "", "", "expected a mapping, found nothing", "algorithm:"),
    ("comment.yaml", "# nothing yet\n", "", "found nothing", "key: value"),
    ("list.yaml", "- algorithm: grpo\n", "", "expected a mapping, found a list", "key: value"),
    ("twice.yaml", "algorithm: grpo\nseed: 1\nseed: 2\n", "", "the key 'seed' appears twice", ""),
    ("twice_below.yaml", "algorithm: grpo\npolicy:\n  init: random\n  init: random\n", "", "'init' appears twice", ""),
    ("tabs.yaml", "algorithm: grpo\npolicy:\n\tinit: random\n", "", "not valid yaml", ""),
    ("bad.json", '{"algorithm": "grpo",}', "", "not valid json", ""),
    ("bytes.yaml", "algorithm: gr\udcffpo\n", "", "not UTF-8 text", ""),
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


def problems_of(source: Any, overrides: tuple[str, ...] = ()) -> dict[str, ConfigIssue]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides, for_launch=True)
    assert "Traceback" not in str(caught.value)
    return {problem.path: problem for problem in caught.value.problems}


def check(problems: Mapping[str, ConfigIssue], path: str, says: str, fix: str) -> None:
    assert path in problems, f"problems at {list(problems)}"
    assert says in problems[path].message
    assert fix in (problems[path].fix or "")


def named(table: list[Any]) -> list[Any]:
    return [pytest.param(*row[1:], id=row[0].replace(" ", "-")) for row in table]


def test_the_config_that_the_tables_change_is_correct(tiny_model: Path, files: Path) -> None:
    for base in (GRPO, SFT):
        assert load_config(placed(base, tiny_model, files), for_launch=True).algorithm == base["algorithm"]


@pytest.mark.parametrize(
    ("change", "path", "says", "fix"),
    named([*UNKNOWN_KEYS, *WRONG_TYPES, *OUT_OF_RANGE, *MODELS_AND_PLUGINS, *DATA, *COMBINATIONS]),
)
def test_a_mistake_in_a_grpo_config_is_named(
    change: dict[str, Any], path: str, says: str, fix: str, tiny_model: Path, files: Path
) -> None:
    check(problems_of(placed(changed(GRPO, change), tiny_model, files)), path, says, fix)


@pytest.mark.parametrize(("change", "path", "says", "fix"), named(SFT_MISTAKES))
def test_a_mistake_in_an_sft_config_is_named(
    change: dict[str, Any], path: str, says: str, fix: str, tiny_model: Path, files: Path
) -> None:
    check(problems_of(placed(changed(SFT, change), tiny_model, files)), path, says, fix)


@pytest.mark.parametrize(("override", "path", "says", "fix"), named(OVERRIDES))
def test_a_mistake_in_an_override_is_named(
    override: str, path: str, says: str, fix: str, tiny_model: Path, files: Path
) -> None:
    check(problems_of(placed(GRPO, tiny_model, files), (override,)), path, says, fix)


@pytest.mark.parametrize(("name", "text", "path", "says", "fix"), FILES, ids=[row[0] for row in FILES])
def test_a_file_that_is_no_config_is_named(
    name: str, text: str, path: str, says: str, fix: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    check(problems_of(tmp_path / name), path, says, fix)


def test_a_missing_config_file_lists_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("algorithm: grpo\n")
    check(problems_of(tmp_path / "gpro.yaml"), "", "no config file", "files here: grpo.yaml")


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
def test_one_mistake_is_one_problem(change: dict[str, Any], path: str, tiny_model: Path, files: Path) -> None:
    # What is wrong is taken out to check the rest; its absence must not be reported as a second mistake.
    assert list(problems_of(placed(changed(GRPO, change), tiny_model, files))) == [path]


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


def test_all_mistakes_are_reported_at_once(tiny_model: Path, files: Path) -> None:
    assert set(problems_of(placed(changed(GRPO, ELEVEN), tiny_model, files))) == {
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


def nemorl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from nemorl_commands import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_line_shows_every_problem_and_no_traceback(tiny_model: Path, files: Path, tmp_path: Path) -> None:
    config = tmp_path / "grpo.json"
    config.write_text(json.dumps(placed(changed(GRPO, ELEVEN), tiny_model, files)))
    done = nemorl("train", str(config))
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert "11 problems" in done.stderr
    for words in ("max_step: unknown key", "Did you mean 'max_steps'?", "fix:", "policy.optimizer.lr: -1"):
        assert words in done.stderr


def test_the_command_line_reports_problems_as_json(tiny_model: Path, files: Path, tmp_path: Path) -> None:
    config = tmp_path / "grpo.json"
    config.write_text(json.dumps(placed(changed(GRPO, {"environment": "maths"}), tiny_model, files)))
    done = nemorl("config", "validate", str(config), "--json")
    assert done.returncode == 2
    report = json.loads(done.stdout)
    assert report["valid"] is False
    assert [(problem["path"], problem["fix"]) for problem in report["problems"]] == [
        ("environment", "Did you mean 'math'?")
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "{files}/none.yaml"], ["no config file", "fix:"]),
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
    arguments: list[str], words: list[str], tiny_model: Path, files: Path, tmp_path: Path
) -> None:
    config = tmp_path / "grpo.json"
    config.write_text(json.dumps(placed(GRPO, tiny_model, files)))
    done = nemorl(*(argument.replace("{config}", str(config)).replace("{files}", str(files)) for argument in arguments))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
