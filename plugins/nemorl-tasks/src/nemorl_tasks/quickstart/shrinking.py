"""A config made small enough to try on a laptop: random models of two layers, two steps, one process on the CPU.

All that says what is learnt, and how, stays: algorithm, losses, environment, backend of training, options of plugins.
What says on which machine, with which models and how much is replaced, and so is data that is not on this disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import replace_text
from nemorl.config.component import Component
from nemorl.config.load import load_config
from nemorl.config.run import RunConfig
from nemorl.errors import NemorlError
from nemorl.plugins import registry
from nemorl_rl.models.tiny import TOOLS_TEMPLATE, write_tiny_model
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

STEPS = 2
SIZES: Mapping[str, Any] = {
    "num_prompts_per_step": 2,
    "num_generations_per_prompt": 2,
    "batch_size": 2,
    "num_minibatches": 1,
    "critic_warmup_steps": 0,
    "dynamic_sampling": False,
    "overlong_filtering": False,
}
"""Set where an algorithm has them. The last two leave nothing to train on where rewards are all the same and responses
are all cut, as they are here."""
MOST_TURNS = 3
NEW_TOKENS = 8
MOST_LIKELIEST = 64
"""Tokens that a teacher names at each place, of the small models' 89."""
ROWS = 16
MODEL_KEYS = frozenset({"model", "model_name"})
MACHINE_KEYS = frozenset({"python", "device", "dtype", "attn_implementation", "data_parallel_replicas", "workers"})
"""Options of any part that say where it runs. So do those with one of ``LAYOUT_WORDS`` in their names."""
LAYOUT_WORDS = ("_parallel_size", "_stage", "_counts_as_layer")
PLACES = frozenset({"path", "validation_path"})
"""Options of a dataset that say where its rows are."""
MODEL_SIZE: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MIXTURE_SIZE: Mapping[str, Any] = {
    **MODEL_SIZE,
    "architecture": "glm4_moe",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
"""Where options of routers are to be tried: an architecture that has all of them."""


def shrunk(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A config as it is written -> one that trains two steps within seconds.

    Args:
        config: Read from a file, with overrides applied, not yet validated: it need not be valid on this machine.
        folder: Where models, rows and the run go.
    """
    longest = max(1024, _section(config, "policy").get("max_sequence_tokens") or 4096)
    has_router = bool(_section(_section(config, "policy"), "backend").get("router"))
    models = _write_models(folder, longest, MIXTURE_SIZE if has_router else MODEL_SIZE)
    small = {
        key: _without_machine(value, str(models["judge" if key == "environment" else "other"]))
        for key, value in config.items()
    }
    policy = {**_section(small, "policy"), "precision": "float32", "init": "pretrained", "hf_config_overrides": {}}
    policy["tokenizer"] = _own_template(_section(policy, "tokenizer"))
    generation = {key: value for key, value in _section(small, "generation").items() if key != "backend"}
    fields = registry().load("algorithms", str(config.get("algorithm"))).model_fields
    small |= {key: value for key, value in SIZES.items() if key in fields}
    small |= {
        "model": str(models["policy"]),
        "policy": {key: value for key, value in policy.items() if key not in MODEL_KEYS},
        "cluster": {"gpus_per_node": 0},
        "data": _data(config, folder),
        "validation": {**_validation(small), "every": 0, "at_start": False, "at_end": True, "max_samples": 2},
        "checkpoint": {**_section(small, "checkpoint"), "every": 0, "export": False},
        "loggers": [],
        "max_steps": STEPS,
        "run_dir": str(folder / "run"),
    }
    if "topk" in fields:
        given = config.get("topk", fields["topk"].default)
        small["topk"] = min(given, MOST_LIKELIEST) if isinstance(given, int) else given
    if isinstance(config.get("max_turns"), int):
        small["max_turns"] = min(config["max_turns"], MOST_TURNS)
    if "generation" in fields:
        small["generation"] = {**generation, "max_new_tokens": NEW_TOKENS}
        small["rollouts"] = {**_section(small, "rollouts"), "max_staleness": 0}  # nothing overlaps in one process
    return small


def load_shrunk(config: Mapping[str, Any], folder: Path) -> RunConfig:
    """The small config, validated.

    Raises:
        ConfigError: every mistake of the config that is not of its size.
    """
    return load_config(shrunk(config, folder), for_launch=True)


def _section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A section as it is written; empty where it is missing, or no mapping."""
    section = config.get(key)
    return dict(section) if isinstance(section, Mapping) else {}


def _own_template(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer section for the small model's tokenizer: the template, if it has one, and what that reads."""
    kept = ("chat_template", "chat_template_kwargs") if tokenizer.get("chat_template") else ()
    return {key: tokenizer[key] for key in kept if key in tokenizer}


def _without_machine(value: Any, model: str) -> Any:
    """A part of a config without what says where it runs, and with ``model`` in place of each model in it, but for
    those that a server at some ``url`` has."""
    if isinstance(value, list):
        return [_without_machine(item, model) for item in value]
    if not isinstance(value, Mapping):
        return value
    loaded = frozenset() if "url" in value else MODEL_KEYS
    return {
        key: model if key in loaded and isinstance(item, str) else _without_machine(item, model)
        for key, item in value.items()
        if key not in MACHINE_KEYS and not any(word in str(key) for word in LAYOUT_WORDS)
    }


def _write_models(folder: Path, longest: int, sizes: Mapping[str, Any]) -> dict[str, Path]:
    """Model folders with random weights: the policy, another one (teacher, critic), a judge with one label, which is
    never a mixture."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    roles: dict[str, Any] = {
        "policy": AutoModelForCausalLM,
        "other": AutoModelForCausalLM,
        "judge": AutoModelForSequenceClassification,
    }
    paths = {role: folder / "models" / role for role in roles}
    for seed, (role, path) in enumerate(paths.items()):
        size = MODEL_SIZE if role == "judge" else sizes
        write_tiny_model(path, max_position_embeddings=longest, chat_template=TOOLS_TEMPLATE, **size)
        config = AutoConfig.from_pretrained(path, **({"num_labels": 1} if role == "judge" else {}))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            roles[role].from_config(config).save_pretrained(path)
    return paths


def _data(config: Mapping[str, Any], folder: Path) -> Any:
    """The config's own data if its rows can be seen from here, or if its options are wrong, which is to be reported;
    else rows with all columns that algorithms ask for."""
    written = config.get("data")
    if written is not None and not _is_elsewhere(written):
        return written
    path = folder / "rows.jsonl"
    replace_text(path, "".join(json.dumps(_row(config, index)) + "\n" for index in range(ROWS)))
    chat = bool(_section(config, "data").get("chat") or _section(config, "data").get("system_prompt"))
    return {"name": "file", "path": str(path), "chat": chat, "validation_fraction": 0.25}


def _validation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The section without data whose rows cannot be seen from here: what is trained on has some to validate on."""
    section = _section(config, "validation")
    if section.get("data") is not None and _is_elsewhere(section["data"]):
        del section["data"]
    return section


def _is_elsewhere(data: Any) -> bool:
    """A dataset whose options are right as far as that shows without its rows, which are not on this disk."""
    try:
        dataset: Any = Component("datasets").resolve(data)
        return dataset.first_row() is None
    except ValidationError as error:
        return all(item["loc"][:1] and item["loc"][0] in PLACES for item in error.errors())
    except PydanticCustomError:
        return False  # no such dataset
    except NemorlError:
        return True


def _row(config: Mapping[str, Any], index: int) -> dict[str, Any]:
    one, other = index % 4, index // 4
    row: dict[str, Any] = {
        "prompt": f"{one}+{other}=",
        "answer": str(one + other),
        "response": str(one + other),
        "chosen": str(one + other),
        "rejected": str(one + other + 1),
        "tests": [{"input": "", "output": str(one + other)}],
    }
    for key, column in config.items():  # `margin_column: margin` names a further one
        if str(key).endswith("_column") and isinstance(column, str):
            choices = list(_section(config, str(key).removesuffix("_column") + "s"))
            row[column] = choices[index % len(choices)] if choices else 1.0
    return row
