"""Do the ranks that share each layer of a model divide it? Told from its ``config.json``, before anything loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemorl.errors import ConfigIssue, UsageError

from nemorl_rl.model_files import stored_config
from nemorl_rl.model_geometry import Geometry

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig


def tensor_parallel_problems(
    policy: PolicyConfig, ways: int, path: str, *, copies_key_values: bool = True
) -> Iterator[ConfigIssue]:
    """What of a model tensor-parallel ranks cannot share evenly. Nothing of a model that is not known here.

    Args:
        policy: With the model's name and what overrides its config.
        ways: Ranks that share each layer.
        path: Of the setting in the config.
        copies_key_values: Several ranks may have a copy of the same key-value head.

    >>> from nemorl.config import PolicyConfig
    >>> list(tensor_parallel_problems(PolicyConfig(model_name="nobody/knows"), 4, "policy.tensor_parallel_size"))
    []
    """
    stored = stored_config(policy.model_name) if ways > 1 else None
    if stored is None:
        return
    try:
        sizes = Geometry.from_config({**stored, **policy.hf_config_overrides})
    except UsageError:  # no decoder of attention layers: its backend knows better
        return
    if rest := undivided(sizes, ways, copies_key_values=copies_key_values):
        fitting = [n for n in range(1, ways) if not undivided(sizes, n, copies_key_values=copies_key_values)]
        message = f"{' and '.join(rest)} of this model do not divide over {ways} tensor-parallel ranks"
        yield ConfigIssue(path, message, f"set it to {' or '.join(map(str, fitting))}")


def undivided(sizes: Geometry, ways: int, *, copies_key_values: bool) -> list[str]:
    """What of each layer so many ranks cannot share evenly, in words.

    Args:
        sizes: Of the model.
        ways: Ranks.
        copies_key_values: Several ranks may have a copy of the same key-value head.
    """
    has_copies = copies_key_values and ways % sizes.kv_heads == 0
    parts = {
        "attention heads": sizes.heads,
        "key-value heads": ways if has_copies else sizes.kv_heads,
        "entries of the MLP's width": sizes.ffn if sizes.layers > sizes.mixture_layers else ways,
    }
    return [f"{size} {name}" for name, size in parts.items() if size % ways]
