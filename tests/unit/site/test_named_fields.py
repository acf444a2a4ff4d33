"""Fields declare by their types that they name a model, dataset, file, server, command, code or secret."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from nemorl.base.text.naming import Named, is_url, kind_by_name
from nemorl.config import Config, ModelName, Options, PlainText, RunConfig, ServerURL, Variables, load_config
from nemorl.plugins import registry
from nemorl.plugins.registry import config_bases
from nemorl_testing.every_config import undeclared_names
from pydantic import Field


def config_classes() -> Iterator[type[Config]]:
    """Those of all installed plugins and algorithms, and all configs in them."""
    waiting: list[Any] = [RunConfig]
    for kind in config_bases():
        waiting += [registry().load(kind, entry.name) for entry in registry().index.of_kind(kind)]
    seen: set[Any] = set()
    while waiting:
        found = waiting.pop()
        if isinstance(found, type) and issubclass(found, Config):
            if found not in seen:
                seen.add(found)
                yield found
                waiting += [field.annotation for field in found.model_fields.values()]
        else:
            waiting += [part for part in get_args(found) if part not in (None, Ellipsis)]


def test_every_field_that_sounds_like_it_names_something_says_what() -> None:
    classes = list(config_classes())
    assert len(classes) > 100
    missing = {owner.__name__: names for owner in classes if (names := undeclared_names(owner))}
    assert not missing, "give these a type of nemorl.base.text.naming"


def test_a_field_that_does_not_say_so_is_seen() -> None:
    class Forgetful(Config):
        reward_model: str = ""
        base_urls: tuple[str, ...] = ()
        secrets_of: dict[str, float] = Field({})
        api_key_env: str | None = None
        model_column: str = ""
        declared_model: ModelName | None = None
        plain_path: PlainText = ""

    assert undeclared_names(Forgetful) == {"reward_model": "model", "base_urls": "server", "api_key_env": "secret"}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("model", "model_name_or_path pretrained_model_name_or_path tokenizer_name_or_path adapter_name_or_path "
                  "model_id base_model draft_model reward_models peft_path ckpt_path repo_id hf_repo "
                  "teacher_model_name_or_path"),
        ("dataset", "dataset_name dataset_path eval_dataset train_file val_files data_dir dataset_ids train_files"),
        ("server", "api_base base_url server_host endpoint_url"),
        ("code", "_target_ plugin_path reward_function scheduler_cls kv_connector_module_path"),
        ("secret", "api_key_env hf_token_env"),
        ("file", "cache_dir log_file output_path"),
        ("text", "model_column dataset_config_name"),
        (None, "lr lora_r max_model_len model_type datasets_seen reward_weights data token_ids checkpointing"),
    ],
)  # fmt: skip
def test_options_are_guessed_by_the_names_that_others_give_them(kind: str | None, names: str) -> None:
    """Names of transformers, TRL, verl, peft, vLLM and Hydra."""
    assert {name: kind_by_name(name) for name in names.split()} == dict.fromkeys(names.split(), kind)


class Inner(Config):
    judge_model: ModelName = "org/judge"
    url: ServerURL | None = None


class Outer(Config):
    parts: dict[str, Inner] = Field({"a": Inner(url="https://node7")})
    more: tuple[Inner, ...] = (Inner(),)
    lists: dict[str, tuple[Inner, ...]] = Field({"b": (Inner(judge_model="org/deep"),)})
    weights: Path = Path("weights")
    engine: Options = Field({"tokenizer": "org/t", "speculative": {"model": "org/d"}, "dtype": "auto", "seed": 1})
    variables: Variables = Field({"A": "1"})
    note: str = "see https://example.org"
    other: str = "https://example.org/v1"
    undeclared_model: str = "org/u"


def test_values_are_found_wherever_they_stand() -> None:
    assert sorted(Outer().named_values("x")) == sorted([
        Named("x.parts.a.judge_model", "model", "org/judge"),
        Named("x.parts.a.url", "server", "https://node7"),
        Named("x.more.0.judge_model", "model", "org/judge"),
        Named("x.lists.b.0.judge_model", "model", "org/deep"),
        Named("x.weights", "file", "weights"),
        Named("x.engine.tokenizer", "model", "org/t", True),
        Named("x.engine.speculative.model", "model", "org/d", True),
        Named("x.variables", "variables", {"A": "1"}),
        Named("x.other", "server", "https://example.org/v1", True),
        Named("x.undeclared_model", "model", "org/u", True),
    ])  # fmt: skip


def test_a_dataset_by_a_name_of_ours_is_the_repository_that_it_is_read_from() -> None:
    config = load_config({"algorithm": "grpo", "model": "org/m", "data": "gsm8k", "environment": "math"})
    assert Named("data.preset", "dataset", "openai/gsm8k") in list(config.named_values())


def test_a_long_text_is_no_address_within_a_moment() -> None:
    assert not is_url("https://" + "a" * 1_000_000 + " x")
