"""The transformers config of a policy's model: what its ``config.json`` says, with ``policy.hf_config_overrides``.

Trainers, generators and exports read it here, so that all of them build the same model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import BackendError, boundary

if TYPE_CHECKING:
    from nemorl.config.models import TrainingOptions

WHERE = "policy.hf_config_overrides"
SET_ELSEWHERE = {
    "dtype": "set policy.precision",
    "torch_dtype": "set policy.precision",
    "attn_implementation": "set attn_implementation of policy.backend",
    "architectures": "the class follows from the model and what it is trained for",
    "model_type": "choose another model",
    "num_labels": "a value head has one label",
    "quantization_config": "weights are trained as they are stored",
}
"""Keys that no override may set, and what to do instead."""
THINKER = "thinker_config"
"""Of a model that also speaks (Qwen2.5-Omni): the part that writes, which is what is run."""
ROPE = ("rope_scaling", "rope_parameters")
"""The old and the new name of how positions are rotated."""
ROPE_KEYS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
        *("full_attention", "sliding_attention", "mrope_section", "mrope_interleaved"),
    }
)
"""Keys in these, of all kinds that transformers computes."""


def name_or_path(policy: TrainingOptions) -> str:
    """Name or path by which transformers loads the model: the folder, if there is one of that name."""
    path = Path(policy.model_name).expanduser()
    return str(path) if path.is_dir() else policy.model_name


def read_model_config(policy: TrainingOptions, **further: Any) -> Any:
    """The model's transformers config with the policy's overrides.

    A value of a nested config (``text_config``) changes the keys that it has and leaves the others; any other value
    replaces the whole one, but ``rope_theta`` stays where a new ``rope_scaling`` names none.

    Args:
        policy: Its model and overrides.
        **further: Arguments of ``AutoConfig.from_pretrained``, e.g. ``num_labels``.

    Raises:
        BackendError: There is no such model, transformers does not know its architecture, or a key is none of its.
    """
    from transformers import AutoConfig

    name = name_or_path(policy)
    try:
        config = AutoConfig.from_pretrained(name, **further)
    except OSError as error:
        raise BackendError(
            f"no model {policy.model_name!r}: {_first_line(error)}",
            fix="give a folder that holds config.json, or a Hugging Face name that is cached or can be downloaded",
        ) from error
    except ValueError as error:
        raise BackendError(
            f"model {policy.model_name!r} cannot be used: {_first_line(error)}",
            fix="use a causal language model whose architecture the installed transformers knows",
        ) from error
    config = getattr(config, THINKER, config)
    return _overridden(config, name, policy.hf_config_overrides, further) if policy.hf_config_overrides else config


def _overridden(config: Any, name: str, overrides: Mapping[str, Any], further: Mapping[str, Any]) -> Any:
    """A config made anew from the stored values and the new ones: setting attributes would skip what follows from
    them."""
    stored, _ = type(config).get_config_dict(name)
    stored = stored.get(THINKER, stored)
    merged = _merged(stored, config.to_dict(), overrides, f"{config.model_type} ", WHERE)
    with boundary(f"transformers, applying {WHERE} to {name!r},"):
        return type(config).from_dict(merged, **further)


def _merged(
    stored: Mapping[str, Any], full: Mapping[str, Any], overrides: Mapping[str, Any], owner: str, path: str
) -> dict[str, Any]:
    """The values of a config, or of one nested in it, with the overrides.

    Args:
        stored: What the model's files say.
        full: The same with all defaults, whose keys are those that there are.
        overrides: New values.
        owner: Whose keys these are, for messages.
        path: Where the overrides are written, for messages.
    """
    found = dict(stored)
    for key, value in overrides.items():
        if key in SET_ELSEWHERE:
            raise BackendError(f"{path}.{key}: this is not for overrides to set", fix=SET_ELSEWHERE[key])
        _require_known(key, {*stored, *full, *ROPE, "rope_theta"}, f"{owner}config", path)
        old = full.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and key.endswith("_config"):
            found[key] = _merged(stored.get(key, {}), old, value, f"{key} of the {owner}", f"{path}.{key}")
        else:
            # transformers refuses 0 where it expects 0.0.
            found[key] = float(value) if type(old) is float and type(value) is int else value
    given = next((key for key in ROPE if key in overrides), None)
    if given is not None:
        old_rope = full.get("rope_parameters") or {}
        theta = {key: old_rope[key] for key in ("rope_theta",) if key in old_rope}
        value = overrides[given] or {"rope_type": "default"}
        for key in value:
            _require_known(key, ROPE_KEYS, given, f"{path}.{given}")
        found = {key: entry for key, entry in found.items() if key not in ROPE}
        found["rope_parameters"] = {**theta, **value}
    return found


def _require_known(key: str, known: Collection[str], what: str, path: str) -> None:
    if key not in known:
        raise BackendError(
            f"{path}.{key}: the {what} has no such key",
            fix=did_you_mean(key, known) or f"it has {', '.join(sorted(known))}",
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
