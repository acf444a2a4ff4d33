"""The settings of a run: which differ from the defaults, and how two runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemorl.base.text.mappings import differences
from nemorl.config.load import load_config
from nemorl.errors import NemorlError, PluginError, boundary
from nemorl.plugins import registry
from nemorl.plugins.registry import config_bases
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from nemorl_cli.report.comparing.variants import config_differences, surrounding_differences, variants_of
from nemorl_cli.report.run_data import RunData

NO_DEFAULT = "–"


def settings_of(run: RunData) -> dict[str, Any]:
    """``{"rows": [{"key", "value", "default"}], "problem": why defaults are not known}``: what the run was told that
    is not the default."""
    try:
        with boundary("defaults of the config"):
            config = load_config(dict(run.config), for_cluster=True)  # its model may be elsewhere, or gone
            told = list(_told(config, None, ""))
    except NemorlError as error:
        return {"rows": [], "problem": f"the config does not load here ({' '.join(error.message.split())})"}
    rows = [{"key": key, "value": _shown(value), "default": _shown(default)} for key, value, default in told]
    return {"rows": rows, "problem": ""}


def differences_between(first: Path, second: Path) -> list[dict[str, Any]]:
    """``[{"key", "first", "second", "neutral"}]``: config, plugins and machine of two runs, where they differ.

    Raises:
        UsageError: A folder is no run.
    """
    found = variants_of([first, second])
    if len(found) == 1:  # of one variant: only what makes a run a run of its own may differ
        before, after = ({"seed": RunData.load(folder).config.get("seed")} for folder in (first, second))
        rows = differences(before, after)
        return [{"key": key, "first": _shown(a), "second": _shown(b), "neutral": False} for key, a, b in rows]
    one, other = found
    return [
        {"key": row.key, "first": _shown(row.first), "second": _shown(row.second), "neutral": row.is_neutral}
        for row in (*config_differences(one, other), *surrounding_differences(one, other))
    ]


def _told(model: BaseModel, default: BaseModel | None, path: str) -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, value, default) of the fields that are not at their defaults.

    Args:
        model: A section of the config.
        default: The same section as it is by default; ``None`` where that is of another class, or there is none.
        path: Of the section.
    """
    has_default = type(default) is type(model)
    for name, field in type(model).model_fields.items():
        key, value = f"{path}.{name}" if path else name, getattr(model, name)
        usual = getattr(default, name) if has_default else _usual(field, model)
        if isinstance(value, BaseModel):
            same = usual if isinstance(usual, BaseModel) and type(usual) is type(value) else None
            if same is None:
                yield key, _called(value), NO_DEFAULT if usual is PydanticUndefined else usual
            yield from _told(value, same, key)
        elif value != usual:
            yield key, value, NO_DEFAULT if usual is PydanticUndefined else usual


def _usual(field: FieldInfo, model: BaseModel) -> Any:
    """The default of a field; one that depends on other fields is made of those of ``model``."""
    if field.default_factory_takes_validated_data:
        return field.get_default(call_default_factory=True, validated_data=dict(model))
    return field.get_default(call_default_factory=True)


def _called(value: BaseModel) -> str:
    """A section by the name that a config writes: of its plugin, or of its variant."""
    with suppress(PluginError):
        kind = next((kind for kind, base in config_bases().items() if isinstance(value, base)), None)
        if kind is not None and kind != "algorithms":
            return registry().name_of(kind, type(value))
    return str(getattr(value, "name", None) or "set")


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, BaseModel):
        return _called(value)
    if not isinstance(value, Mapping | list | tuple | int | float | None):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)
