"""How the layers of a model are divided over pipeline stages, and over the parts of each.

The arithmetic is that of megatron-core's ``get_num_layers_to_build``. Layers are counted part by part: first the first
part of every stage, then the second part of every stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemorl.errors import BackendError


@dataclass(frozen=True)
class Split:
    """Layers of the first and the last stage, where stages do not have as many each.

    Example:
        >>> Split(first=3).counts(7, stages=3)
        ((3, 2, 2),)
    """

    first: int | None = None
    """Layers of the first stage."""
    last: int | None = None
    """Layers of the last stage."""
    embedding: bool = False
    """The embedding counts as a layer of the first stage, which has one layer less."""
    head: bool = False
    """The output head counts as a layer of the last stage."""

    def counts(self, layers: int, stages: int, parts: int = 1) -> tuple[tuple[int, ...], ...]:
        """[parts][stages] layers of each part of each stage.

        Args:
            layers: Of the whole model.
            stages: Pipeline-parallel ranks.
            parts: Of each stage.

        Raises:
            BackendError: they do not divide like this.
        """
        sizes = self._sizes(layers, stages, parts)
        if sizes is None:
            counted = f"{layers} layers" + " and the embedding" * self.embedding + " and the output head" * self.head
            said = {"first": self.first, "last": self.last}
            given = [f"{size} on the {name}" for name, size in said.items() if size is not None]
            raise BackendError(
                f"{counted} of this model do not divide over {stages} pipeline stages"
                + (f" with {' and '.join(given)}" if given else "")
                + (f", each of {parts} parts" if parts > 1 else ""),
                fix="choose another pipeline_parallel_size, or say with layers_in_first_stage and layers_in_last_stage "
                "how many layers these have",
            )
        found = [[size // parts for size in sizes] for _ in range(parts)]
        found[0][0] -= self.embedding
        found[-1][-1] -= self.head
        return tuple(map(tuple, found))

    def fields(self, stages: int) -> dict[str, Any]:
        """The same in the words of megatron-core's ``TransformerConfig``."""
        # Of two stages the last has what the first leaves. Given both, megatron-core 0.16 divides by zero where stages
        # have parts (get_transformer_layer_offset: no stage is between them).
        last = None if stages == 2 and self.first is not None else self.last
        return {
            "num_layers_in_first_pipeline_stage": self.first,
            "num_layers_in_last_pipeline_stage": last,
            "account_for_embedding_in_pipeline_split": self.embedding,
            "account_for_loss_in_pipeline_split": self.head,
        }

    def divides(self, layers: int, stages: int, parts: int = 1) -> bool:
        """Whether layers can be divided like this."""
        return self._sizes(layers, stages, parts) is not None

    def _sizes(self, layers: int, stages: int, parts: int) -> list[int] | None:
        """Layers of each stage, the embedding and the head among them; ``None`` where a rest is left."""
        ends = [size for size in (self.first, self.last) if size is not None]
        rest, between = layers + self.embedding + self.head - sum(ends), stages - len(ends)
        if rest < between or (rest % between if between else rest):
            return None
        middle = [rest // between] * between if between else []
        sizes = [*([] if self.first is None else [self.first]), *middle, *([] if self.last is None else [self.last])]
        return None if any(size % parts for size in sizes) else sizes


EVEN = Split()
"""Every stage has as many layers as the others."""
