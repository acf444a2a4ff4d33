"""Runs that differ in their seed alone are one variant; how variants differ in what they were told to do and ran on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl.base.text.mappings import differences
from nemorl.base.text.reading import UnreadableError, parse_json, read_text
from nemorl.config.base import identity
from nemorl.config.load import load_config
from nemorl.errors import NemorlError, UsageError
from nemorl.storage.fingerprints import FILE as INPUTS
from nemorl_trust.lock import FILE, LockedPlugin, read_lock
from nemorl_trust.lock import differences as plugin_differences

from nemorl_cli.report.run_data import RunData, no_run

OF_ONE_RUN = ("seed", "run_dir")
"""Keys by which repetitions of a run differ."""
ENVIRONMENT = ("python", "machine", "cpus", "threads", "libraries", "git")
"""Of ``environment.json``: what may explain a difference."""
CODE, WEIGHTS = "the code of ", "the first weights of "
"""Beginnings of keys of what a run was given."""


@dataclass(frozen=True)
class Variant:
    """Runs of one config, one per seed."""

    runs: Sequence[RunData]
    folders: Sequence[Path]

    @property
    def name(self) -> str:
        """Of its first run, and how many there are."""
        more = f" ({len(self.runs)} seeds)" if len(self.runs) > 1 else ""
        return f"{self.runs[0].name}{more}"

    @property
    def config(self) -> Mapping[str, Any]:
        """All but the keys of one run."""
        return _settings(self.runs[0])

    @property
    def seeds(self) -> list[Any]:
        return [run.config.get("seed") for run in self.runs]

    @property
    def plugins(self) -> list[LockedPlugin] | None:
        """As the first run recorded them; ``None`` where it did not."""
        with suppress(UsageError):
            return read_lock(self.folders[0] / FILE)
        return None


@dataclass(frozen=True)
class Difference:
    """Something that two variants were told or ran on."""

    key: str
    """Dotted path of the config; ``plugin`` or ``environment`` and a name; ``the training rows``, ``the code of …``,
    ``the first weights of …``."""
    first: Any
    second: Any
    is_neutral: bool = False
    """Of what may change between a run and its continuation: it changes no result beyond rounding."""

    @property
    def text(self) -> str:
        return f"{self.key}: {_shown(self.first)} -> {_shown(self.second)}"


def variants_of(folders: Sequence[Path]) -> list[Variant]:
    """The variants among some runs, in the order given.

    Raises:
        UsageError: a folder is no run.
    """
    found: dict[str, tuple[list[RunData], list[Path]]] = {}
    for folder in folders:
        if not (folder / "config.yaml").is_file():
            raise no_run(folder)
        run = RunData.load(folder)
        what = _settings(run), _inputs(folder).get("code")
        runs, places = found.setdefault(json.dumps(what, sort_keys=True, default=str), ([], []))
        if folder.resolve() not in [place.resolve() for place in places]:
            runs.append(run)
            places.append(folder)
    return [Variant(runs, places) for runs, places in found.values()]


def split(variant: Variant) -> list[Variant]:
    """Each run of a variant as one of its own: seeds against each other."""
    return [Variant([run], [folder]) for run, folder in zip(variant.runs, variant.folders, strict=True)]


def config_differences(first: Variant, second: Variant) -> list[Difference]:
    """Keys of the config that differ."""
    deciding = _deciding(first.runs[0]) | _deciding(second.runs[0])
    return [
        Difference(key, old, new, bool(deciding) and not any(_covers(path, key) for path in deciding))
        for key, old, new in differences(dict(first.config), dict(second.config))
    ]


def surrounding_differences(first: Variant, second: Variant) -> Iterator[Difference]:
    """Rows, code, first weights, plugins, libraries and the state of the source that differ."""
    yield from input_differences(first, second)
    if first.plugins is not None and second.plugins is not None:
        for line in plugin_differences(first.plugins, second.plugins):
            yield Difference("plugin", None, line)
    old, new = ({name: variant.runs[0].environment.get(name) for name in ENVIRONMENT} for variant in (first, second))
    for key, one, other in differences(old, new):
        yield Difference(f"environment.{key}", one, other)


def input_differences(first: Variant, second: Variant) -> Iterator[Difference]:
    """Differences of the first runs' inputs beside their configs, as far as both recorded them: rows, code by name."""
    one, other = (_given(variant) for variant in (first, second))
    pairs = {name: (one[name], other[name]) for name in one if name in other}
    yield from (Difference(name, *pair) for name, pair in pairs.items() if None not in pair and pair[0] != pair[1])


def unknown_inputs(first: Variant, second: Variant) -> list[str]:
    """Inputs of both of which a record lacks whether they are the same."""
    one, other = (_given(variant) for variant in (first, second))
    return [name for name in {**one, **other} if None in (one.get(name), other.get(name))]


def _given(variant: Variant) -> dict[str, str | None]:
    """Fingerprints of what its first run was given; ``None`` where it was given something that has none."""
    config, inputs = variant.runs[0].config, _inputs(variant.folders[0])
    found: dict[str, str | None] = {"the training rows": inputs.get("data")}
    if inputs.get("validation") is not None:
        found["the validation rows"] = inputs["validation"]
    found |= {f"{CODE}{name}": digest for name, digest in (inputs.get("code") or {}).items()}
    if "environment" in config and config["environment"] is None and not inputs.get("code"):
        found[f"{CODE}rewards"] = None  # given in Python, and without a source that can be read
    policy = config.get("policy")
    if isinstance(policy, Mapping) and policy.get("init") != "random":
        found |= {f"{WEIGHTS}{name}": digest for name, digest in (inputs.get("weights") or {"policy": None}).items()}
    return found


def _inputs(folder: Path) -> dict[str, Any]:
    """``inputs.json``; empty where a run has none that can be read."""
    with suppress(OSError, UnreadableError):
        found = parse_json(read_text(folder / INPUTS))
        return found if isinstance(found, dict) else {}
    return {}


def _settings(run: RunData) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if key not in OF_ONE_RUN}


def _deciding(run: RunData) -> set[str]:
    """Dotted paths that make a run the run it is; empty where its config no longer loads."""
    with suppress(NemorlError):
        config = load_config(dict(run.config))
        return {path for path, _, _ in differences(identity(config, dict(run.config)), {})}
    return set()


def _covers(path: str, key: str) -> bool:
    return key == path or key.startswith(f"{path}.") or path.startswith(f"{key}.")


def _shown(value: Any) -> str:
    return "–" if value is None else json.dumps(value, ensure_ascii=False, default=str)
