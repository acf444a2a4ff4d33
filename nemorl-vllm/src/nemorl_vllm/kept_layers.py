"""The layers that keep the policy's precision where the others multiply in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nemorl.config.base import Config
from nemorl.errors import ConfigIssue
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig


class KeptLayers(Config):
    """Layers that are not rounded.

    Example:
        >>> KeptLayers(first=1, names=("o_proj",)).patterns(num_layers=4)
        ['*.layers.0.*', '*o_proj*']
    """

    first: int = Field(0, ge=0)
    """Blocks of the model from its first on."""
    last: int = Field(0, ge=0)
    """Blocks of the model up to its last."""
    names: tuple[str, ...] = ()
    """Parts of names of linear layers, as they stand in the stored model: ``o_proj``, ``mlp.down_proj``. vLLM
    multiplies some layers together (queries, keys and values; gate and up projection): of these name all or none."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if not (self.first or self.last or self.names):
            yield ConfigIssue("", "keeps no layer", "set first, last or names, or remove it")
        for place, name in enumerate(self.names):
            if not name or set(name) & set("*?[]:"):
                message = f"{name!r} is a part of a name, without wildcards"
                yield ConfigIssue(f"names.{place}", message, "write it as it stands in the names of the weights")

    def patterns(self, num_layers: int) -> list[str]:
        """What vLLM leaves alone of a model with so many blocks, in the syntax of ``fnmatch``."""
        kept = [block for block in range(num_layers) if block < self.first or block >= num_layers - self.last]
        return [*(f"*.layers.{block}.*" for block in kept), *(f"*{name}*" for name in self.names)]


def rounding(kind: str | None, kept: KeptLayers | None, policy: PolicyConfig) -> dict[str, Any]:
    """The arguments of ``vllm.EngineArgs`` by which weights are rounded as they are loaded.

    Args:
        kind: vLLM's name of it; ``None``: they are not.
        kept: Layers that are not.
        policy: The model.
    """
    if kept is None:
        return {"quantization": kind}
    from nemorl_tensors.engines.model_config import read_model_config

    num_layers = read_model_config(policy).get_text_config().num_hidden_layers
    return {"quantization": kind, "quantization_config": {"ignore": kept.patterns(num_layers)}}
