"""Reading, overriding, resolving and describing configs."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import nemorl
import pytest
import yaml
from nemorl.base.text.mappings import apply_overrides
from nemorl.config.base import DEFERRED, Config
from nemorl.config.explain import field_paths
from nemorl.config.load import load_config
from nemorl.config.models import PolicyConfig
from nemorl.config.plugin_lists import PluginsConfig
from nemorl.config.run import RunConfig
from nemorl.errors import ConfigError, ConfigIssue, DataError, NemorlError, StorageError
from nemorl.plugins import registry
from nemorl.storage.run_directory import to_yaml
from pydantic import ValidationError

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
MINIMAL = {
    "grpo": {"algorithm": "grpo", "model": "some/model", "data": "arithmetic", "environment": "math"},
    "sft": {"algorithm": "sft", "model": "some/model", "data": "arithmetic"},
}
RICH = {
    "grpo": {
        **MINIMAL["grpo"],
        "policy": {"backend": {"layout": "padded"}, "optimizer": {"betas": [0.9, 0.95]}, "lora": {"rank": 4}},
        "generation": {"backend": {"max_batch_rows": 8}, "stop_strings": ["\n"]},
        "reward_scaling": {"source_min": -1.0},
        "loggers": ["tensorboard"],
        "validation": {"data": {"name": "arithmetic", "max_digits": 3}},
        "plugins": {"prefer": {"environments.math": "nemorl-math-env"}},
        "run_dir": "runs/ünïcode",
    },
    "sft": {**MINIMAL["sft"], "batch_size": 4, "policy": {"schedule": {"kind": "linear"}}, "max_steps": 5},
}


def same(one: RunConfig, other: RunConfig) -> bool:
    """Equal but for ``model``, which is short for ``policy.model_name``."""
    return type(one) is type(other) and one.model_copy(update={"model": None}) == other.model_copy(
        update={"model": None}
    )


# Sources


@pytest.mark.parametrize("data", [*MINIMAL.values(), *RICH.values()], ids=["grpo", "sft", "rich grpo", "rich sft"])
def test_a_file_and_a_dict_say_the_same(data: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")
    (tmp_path / "c.yml").write_text(yaml.safe_dump(data), encoding="utf-8")
    (tmp_path / "c.json").write_text(json.dumps(data), encoding="utf-8")
    expected = load_config(data)
    assert [load_config(tmp_path / name) for name in ("c.yaml", "c.yml", "c.json")] == [expected] * 3
    assert load_config(str(tmp_path / "c.yaml")) == expected


@pytest.mark.parametrize("data", [*MINIMAL.values(), *RICH.values()], ids=["grpo", "sft", "rich grpo", "rich sft"])
def test_a_resolved_config_loads_to_an_equal_one(data: dict[str, Any], tmp_path: Path) -> None:
    config = load_config(data)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load_config(tmp_path / "config.yaml")
    assert same(again, config)
    assert to_yaml(again) == to_yaml(config)


@pytest.mark.parametrize("data", RICH.values(), ids=RICH)
def test_a_config_travels_by_value(data: dict[str, Any]) -> None:
    config = load_config(data)
    assert pickle.loads(pickle.dumps(config)) == config


def test_loading_leaves_the_given_dict_alone() -> None:
    data = copy.deepcopy(RICH["grpo"])
    load_config(data, ["policy.optimizer.lr=1", "data.max_digits=3"])
    assert data == RICH["grpo"]


def test_what_is_no_plain_data_is_named_and_not_copied() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config({"algorithm": "grpo", "model": "m", "max_steps": -1, "data": (row for row in [{"prompt": "1"}])})
    assert {problem.path for problem in refused.value.problems} == {"data", "max_steps"}


def test_a_home_folder_is_expanded_beside_a_ready_policy_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = RunConfig.model_validate({"model": "~/m", "policy": PolicyConfig(init="random")}, context={DEFERRED: True})
    assert config.policy.model_name == str(tmp_path / "m")


def test_ready_lists_of_plugins_are_taken_as_they_are() -> None:
    lists = PluginsConfig(block=("acme-env",))
    assert load_config({"algorithm": "grpo", "model": "m", "plugins": lists}).plugins.block == ("acme-env",)
    kind = registry().load("algorithms", "grpo")
    assert kind(model="m", plugins=lists).plugins == lists


@pytest.mark.parametrize(
    "error", [StorageError("the disk is full"), DataError("no rows"), OSError("odd"), KeyError("x")]
)
def test_a_failure_of_problems_is_one_of_them(error: Exception) -> None:
    class Failing(Config):
        """Asks somebody who fails."""

        def problems(self) -> Iterator[ConfigIssue]:
            yield ConfigIssue("first", "is found all the same")
            raise error

    found = Failing.model_construct().own_problems()
    assert found[0].path == "first"
    assert str(error.args[0]) in found[1].message


def test_a_config_is_frozen() -> None:
    config = load_config(MINIMAL["grpo"])
    with pytest.raises(ValidationError):
        config.seed = 3  # type: ignore[misc]


# Shorthands


@pytest.mark.parametrize(
    "data",
    [
        {"model": "some/model"},
        {"policy": {"model_name": "some/model"}},
        {"model": "some/model", "policy": {"model_name": "some/model"}},
        {"model": "some/model", "policy": None},
    ],
    ids=str,
)
def test_the_model_may_be_written_at_two_places(data: dict[str, Any]) -> None:
    assert load_config({"algorithm": "grpo", **data}).policy.model_name == "some/model"


def test_the_model_is_filled_into_a_ready_policy() -> None:
    config = nemorl.GRPOConfig(model="some/model", policy=PolicyConfig(precision="bfloat16"))
    assert (config.policy.model_name, config.policy.precision) == ("some/model", "bfloat16")


@pytest.mark.parametrize(
    "backend", ["dtensor", {"name": "dtensor"}, {"layout": "auto"}, {}, {"name": "nemorl-dtensor:dtensor"}], ids=str
)
def test_a_backend_is_a_name_a_mapping_or_options_of_the_default(backend: Any) -> None:
    config = load_config({**MINIMAL["grpo"], "policy": {"backend": backend}})
    assert config == load_config(MINIMAL["grpo"])


def test_a_ready_config_object_is_taken_as_it_is() -> None:
    from nemorl_math_env.config import ArithmeticConfig

    data = ArithmeticConfig(max_digits=3)
    assert nemorl.GRPOConfig(model="some/model", data=data).data is data


# Overrides


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("max_steps=10", "max_steps", 10),
        ("policy.optimizer.lr=1e-5", "policy.optimizer.lr", 1e-5),
        ("policy.optimizer.lr=0.1", "policy.optimizer.lr", 0.1),
        ("policy.precision=bfloat16", "policy.precision", "bfloat16"),
        ("leave_one_out=false", "leave_one_out", False),
        ("max_steps=null", "max_steps", None),
        ("max_steps=", "max_steps", None),
        ("policy.optimizer.betas=[0.9, 0.95]", "policy.optimizer.betas", (0.9, 0.95)),
        ("generation.stop_strings=['a=b']", "generation.stop_strings", ("a=b",)),
        ("policy.backend.layout=padded", "policy.backend.layout", "padded"),
        ("data.max_digits=3", "data.max_digits", 3),
        ("environment={name: math, timeout_s: 2}", "environment.timeout_s", 2.0),
        ("reward_scaling.source_max=2", "reward_scaling.source_max", 2.0),
        (" seed=7", "seed", 7),
    ],
)
def test_overrides_are_typed_by_the_schema(override: str, path: str, value: Any) -> None:
    found: Any = load_config(MINIMAL["grpo"], [override])
    for key in path.split("."):
        found = getattr(found, key)
    assert found == value
    assert type(found) is type(value)


def test_later_overrides_win() -> None:
    assert load_config(MINIMAL["grpo"], ["seed=1", "seed=2"]).seed == 2


def test_an_option_of_a_component_given_by_name_keeps_the_name() -> None:
    assert apply_overrides({"data": "arithmetic"}, ["data.max_digits=3"]) == {
        "data": {"name": "arithmetic", "max_digits": 3}
    }


def test_all_broken_overrides_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(MINIMAL["grpo"], ["seed", "=3", "seed=[1"])
    assert len(caught.value.problems) == 3


def test_an_algorithm_can_be_chosen_by_override() -> None:
    assert type(load_config({"model": "some/model"}, ["algorithm=sft"])).__name__ == "SFTConfig"


# The schema for editors


@pytest.fixture(scope="module", params=["grpo", "sft"])
def algorithm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def schema(algorithm: str) -> dict[str, Any]:
    made: dict[str, Any] = registry().load("algorithms", algorithm).model_json_schema()
    return made


def valid(schema: dict[str, Any], data: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(json.dumps(data))))


@pytest.mark.slow
def test_the_schema_is_a_json_schema(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)


def test_the_schema_accepts_what_loads(schema: dict[str, Any], algorithm: str) -> None:
    assert valid(schema, MINIMAL[algorithm])
    assert valid(schema, RICH[algorithm])


def test_the_schema_accepts_a_resolved_config(schema: dict[str, Any], algorithm: str) -> None:
    assert valid(schema, load_config(RICH[algorithm]).model_dump(mode="json"))


@pytest.mark.parametrize(
    "change",
    [
        {"max_step": 3},
        {"policy": {"precison": "float32"}},
        {"policy": {"precision": "bf16"}},
        {"policy": {"backend": {"layot": "padded"}}},
        {"policy": {"backend": "nowhere"}},
        {"data": {"name": "arithmetic", "digits": 3}},
        {"data": {"max_digits": 3}},
        {"seed": -1},
        {"max_steps": "ten"},
    ],
    ids=str,
)
def test_the_schema_refuses_what_does_not_load(schema: dict[str, Any], algorithm: str, change: dict[str, Any]) -> None:
    wrong = {**MINIMAL[algorithm], **change}
    assert not valid(schema, wrong)
    with pytest.raises(ConfigError):
        load_config(wrong)


# Documentation


def config_classes() -> dict[str, type[Config]]:
    """Every config class of the kernel and the installed plugins, by name."""
    found: dict[str, type[Config]] = {}

    def walk(cls: type[Config]) -> None:
        for sub in cls.__subclasses__():
            if sub.__module__.startswith("nemorl") and not sub.__module__.startswith("nemorl_testing"):
                found[f"{sub.__module__}.{sub.__name__}"] = sub
            walk(sub)

    for entry in registry().index.entries:
        if not entry.diagnostics and entry.distribution.startswith("nemorl-"):
            try:
                registry().load(entry.kind, entry.id)
            except NemorlError:
                continue
    walk(Config)
    return found


@pytest.mark.parametrize("name", sorted(config_classes()))
def test_every_field_of_every_config_says_what_it_means(name: str) -> None:
    cls = config_classes()[name]
    assert (cls.__doc__ or "").strip()
    assert [option["name"] for option in cls.describe_options() if not option["description"]] == []


def test_the_walk_finds_the_configs() -> None:
    names = {name.rpartition(".")[2] for name in config_classes()}
    assert {
        "GRPOConfig",
        "SFTConfig",
        "PolicyConfig",
        "DTensorConfig",
        "MathConfig",
        "FileConfig",
        "LoraConfig",
    } <= names


def test_field_paths_reach_every_level() -> None:
    paths = list(field_paths(nemorl.GRPOConfig))
    assert {"seed", "policy.optimizer.lr", "policy.lora.rank", "overlong_penalty.penalty"} <= set(paths)


# Examples


def test_a_minimal_config_fits_on_ten_lines() -> None:
    for data in MINIMAL.values():
        text = yaml.safe_dump(data)
        assert len(text.splitlines()) <= 10
        load_config(data, for_launch=True)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_loads_and_is_short(path: Path, tiny_model: Path) -> None:
    assert len(path.read_text().splitlines()) < 30
    given = yaml.safe_load(path.read_text())
    model = given.get("model") or given["policy"]["model_name"]
    key = "model" if given.get("model") else "policy.model_name"
    replace = [] if not model.startswith((".", "/", "~", "models/", "runs/")) else [f"{key}={tiny_model}"]
    load_config(path, replace, for_launch=True)


@pytest.mark.parametrize("name", MINIMAL)
def test_a_config_can_be_made_in_python(name: str) -> None:
    cls = registry().load("algorithms", name)
    given = {key: value for key, value in MINIMAL[name].items() if key != "algorithm"}
    assert cls(**given) == load_config(MINIMAL[name])


def test_options_show_their_choices() -> None:
    class Options(Config):
        engine: Literal["rows", "paged"] = "rows"
        size: int | None = None
        names: tuple[str, ...] = ()

    shown = {option["name"]: option["type"] for option in Options.describe_options()}
    assert shown == {"engine": "'rows' | 'paged'", "size": "int | None", "names": "tuple"}
