"""Do the ranks that share each layer of a model divide it? Told from its ``config.json``, before anything loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemorl.errors import ConfigIssue, UsageError

from nemorl_rl.models.model_files import stored_config
from nemorl_rl.models.model_geometry import Geometry

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of each layer that tensor-parallel ranks divide.

    >>> LayerSizes(heads=14, kv_heads=2, width=4864, copies_key_values=True).problem(4)
    ('14 attention heads of this model do not divide over 4 tensor-parallel ranks', 'set it to 1 or 2')
    """

    heads: int
    kv_heads: int
    width: int | None
    """Of the MLP; ``None``: no layer has one, but experts"""
    copies_key_values: bool
    """Several ranks may have a copy of the same key-value head"""

    @classmethod
    def of(cls, geometry: Geometry, *, copies_key_values: bool) -> LayerSizes:
        """Those of a model."""
        width = geometry.ffn if geometry.layers > geometry.mixture_layers else None
        return cls(geometry.heads, geometry.kv_heads, width, copies_key_values)

    def divide(self, ways: int) -> bool:
        """So many ranks can share each layer."""
        return not self._rest(ways)

    def problem(self, ways: int) -> tuple[str, str] | None:
        """The sizes that so many ranks cannot share evenly, and how many can; ``None``: they can."""
        rest = self._rest(ways)
        if not rest:
            return None
        fitting = [str(fewer) for fewer in range(1, ways) if self.divide(fewer)]
        message = f"{' and '.join(rest)} of this model do not divide over {ways} tensor-parallel ranks"
        return message, f"set it to {' or '.join(fitting)}"

    def _rest(self, ways: int) -> list[str]:
        has_copies = self.copies_key_values and ways % self.kv_heads == 0
        parts = {
            "attention heads": self.heads,
            "key-value heads": ways if has_copies else self.kv_heads,
            "entries of the MLP's width": ways if self.width is None else self.width,
        }
        return [f"{size} {name}" for name, size in parts.items() if size % ways]


def tensor_parallel_problems(
    policy: PolicyConfig, ways: int, path: str, *, copies_key_values: bool = True
) -> Iterator[ConfigIssue]:
    """Parts of a model that tensor-parallel ranks cannot share evenly. Nothing of a model that is not known here.

    Args:
        policy: With the model's name and what overrides its config.
        ways: Ranks that share each layer.
        path: Of the setting in the config.
        copies_key_values: That of ``LayerSizes``.

    >>> from nemorl.config import PolicyConfig
    >>> list(tensor_parallel_problems(PolicyConfig(model_name="nobody/knows"), 4, "policy.tensor_parallel_size"))
    []
    """
    geometry = known_geometry(policy) if ways > 1 else None
    if geometry is None:
        return
    if problem := LayerSizes.of(geometry, copies_key_values=copies_key_values).problem(ways):
        yield ConfigIssue(path, *problem)


def known_geometry(policy: PolicyConfig) -> Geometry | None:
    """The sizes of a policy's model; ``None`` where its ``config.json`` is not on this machine, or describes no decoder
    of attention layers, of which a backend knows more.

    >>> from nemorl.config import PolicyConfig
    >>> known_geometry(PolicyConfig(model_name="nobody/knows")) is None
    True
    """
    stored = stored_config(policy.model_name)
    if stored is None:
        return None
    with suppress(UsageError):
        return Geometry.from_config({**stored, **policy.hf_config_overrides})
    return None
