"""The page of a trained model on the Hugging Face hub: what was trained on what, how well, and under which licence.

What a card says is chosen key by key. A config as a whole, environment variables, addresses, local paths and samples
never get into it, so a secret in one of them cannot either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemorl.base.text.yaml_text import format_yaml
from nemorl.run import HEADLINES

from nemorl_cli.report.run_data import VERSION_KEYS, RunData, number

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
ABOUT = re.compile(r"[\w .+-]{1,60}")
"""The part of a name in a config that may be shown: no address, no path."""
NUMBERS = (
    "policy.optimizer.lr",
    "num_prompts_per_step",
    "num_generations_per_prompt",
    "batch_size",
    "num_minibatches",
    "num_epochs_per_rollout",
    "kl_penalty",
    "policy.max_sequence_tokens",
    "generation.max_new_tokens",
    "generation.temperature",
    "policy.lora.rank",
    "seed",
)
"""Settings that a card lists, where a run has them."""


def model_card(run: RunData, *, license: str | None = None, notes: str = "") -> str:
    """A model card in Markdown, with the metadata that the hub reads.

    Args:
        run: Records of the run.
        license: Identifier as the hub knows it, e.g. ``apache-2.0``. Unset: the card says that none was stated.
        notes: Markdown of your own, put before the tables.

    Example:
        >>> print(model_card(RunData("sums", config={"algorithm": "grpo"}), license="mit").splitlines()[1])
        license: mit
    """
    algorithm = _plain(run.config.get("algorithm")) or "nemorl"
    base, data = _base_model(run.config), _data(run.config)
    metadata = {
        "license": license,
        "base_model": base,
        "datasets": [data] if data and HUB_NAME.fullmatch(data) else None,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["nemorl", algorithm],
    }
    kept = {key: value for key, value in metadata.items() if value is not None}
    parts = [
        f"---\n{format_yaml(kept)}---",
        f"# {_plain(run.name) or 'A model'}, trained with {algorithm}",
        f"{f'[{base}](https://huggingface.co/{base})' if base else 'A local model'}, post-trained with the algorithm "
        f"`{algorithm}` of nemorl. Data: {data or 'rows of a file or of a program'}.",
        *([notes.strip()] if notes.strip() else []),
        *_table("Results", "metric", _results(run)),
        *_table("Settings", "setting", _settings(run.config)),
        *_table("Versions", "package", _versions(run.environment)),
        f"## License\n\n{_license_line(license, base)}",
    ]
    return "\n\n".join(parts) + "\n"


def _license_line(license: str | None, base: str | None) -> str:
    if license is not None:
        return f"License: {license}."
    return f"License: not stated by the author; the terms of {base or 'the base model'} apply to what derives from it."


def _results(run: RunData) -> Iterator[tuple[str, str]]:
    validated = sorted(name for name in run.metrics if name.startswith("validation/"))
    for name in dict.fromkeys([*HEADLINES, *validated]):
        if (value := run.last(name)) is not None and ABOUT.fullmatch(name.replace("/", " ").replace("@", " ")):
            yield name, f"{number(value)} (step {max(run.metrics[name])})"


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for path in NUMBERS:
        value = _at(config, path)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield path, f"{value:g}"


def _versions(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    libraries = environment.get("libraries")
    found = {**environment, **(libraries if isinstance(libraries, Mapping) else {})}
    for name in VERSION_KEYS:
        if (version := _plain(found.get(name))) is not None:
            yield name, version


def _base_model(config: Mapping[str, Any]) -> str | None:
    """The model's name on the hub; ``None`` for a folder."""
    name = _at(config, "policy.model_name")
    is_hub = isinstance(name, str) and HUB_NAME.fullmatch(name) is not None and not Path(name).exists()
    return name if is_hub else None


def _data(config: Mapping[str, Any]) -> str | None:
    """The dataset's name, on the hub or as a preset, else the plugin's; no file names."""
    data = config.get("data")
    if isinstance(data, Mapping):
        path = data.get("path")
        if isinstance(path, str) and data.get("name") == "huggingface" and HUB_NAME.fullmatch(path):
            return path
        if data.get("name") == "preset":
            named = str(data.get("preset"))
            return None if named.endswith((".yaml", ".yml", ".json")) else _plain(named)
        data = data.get("name")
    return None if data in ("file", "huggingface") else _plain(data)


def _table(title: str, what: str, rows: Iterator[tuple[str, str]]) -> Iterator[str]:
    lines = [f"| {name} | {value} |" for name, value in rows]
    if lines:
        yield "\n".join([f"## {title}\n", f"| {what} | |", "|---|---|", *lines])


def _plain(value: Any) -> str | None:
    return value if isinstance(value, str) and ABOUT.fullmatch(value) else None


def _at(config: Mapping[str, Any], path: str) -> Any:
    found: Any = config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
