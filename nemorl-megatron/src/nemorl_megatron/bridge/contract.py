"""The interface of a bridge, as the training backend uses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel
    from nemorl.config.models import LoraConfig
    from nemorl_tensors.engines.pieces import Piece
    from torch import Tensor

    from nemorl_megatron.config import AttentionName
    from nemorl_megatron.lora import Adapters
    from nemorl_megatron.parallel import Parallel


class Bridge(Protocol):
    """One model, from its Hugging Face config and weights to megatron-core and back."""

    @property
    def vocabulary(self) -> int:
        """Token ids are below this; what the model has beyond it is padding."""
        ...

    @property
    def logit_cap(self) -> float | None:
        """Logits l become cap * tanh(l / cap) ; ``None`` leaves them."""
        ...

    def build(
        self,
        parallel: Parallel,
        *,
        dtype: torch.dtype,
        attention: AttentionName,
        activation_checkpointing: bool,
        mtp: bool = True,
        **changes: Any,
    ) -> list[GPTModel]:
        """This rank's pieces of the model, without weights: one, or one for each virtual pipeline stage.

        ``piece(token_ids [B, S], position_ids, packing)`` gives hidden states as ``model.PolicyModel`` says.
        ``mtp``: with the MTP layers that the bridge was made for.
        ``changes`` are fields of megatron-core's ``TransformerConfig``.
        """
        ...

    def load(self, model: Sequence[GPTModel], parallel: Parallel, seed: int) -> None:
        """Give the pieces the policy's weights, from its files or random by ``seed``. Collective."""
        ...

    def stored(self, model: Sequence[GPTModel], parallel: Parallel, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with what ``load`` rounded to it, one after the other. Those that nobody can tell are left
        out."""
        ...

    def adapt(self, model: Sequence[GPTModel], parallel: Parallel, lora: LoraConfig, seed: int) -> Adapters:
        """Freeze pieces that have their weights and give them adapters, whose first values follow from ``seed``.

        Raises:
            BackendError: says why this model cannot have them.
        """
        ...

    def export(
        self, model: Sequence[GPTModel], parallel: Parallel, adapters: Adapters | None = None
    ) -> Iterator[Mapping[str, Tensor]]:
        """Buckets of whole tensors under Hugging Face names on rank 0, adapters merged; empty ones elsewhere.
        Collective."""
        ...

    def copies(self, name: str) -> Sequence[str]:
        """Further names under which files hold the tensor ``name`` again."""
        ...

    def pieces(
        self, model: Sequence[GPTModel], parallel: Parallel, adapters: Adapters | None = None
    ) -> Iterator[Piece]:
        """This rank's part of these tensors: in all ranks together, everything once. Collective."""
        ...
