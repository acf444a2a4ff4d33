"""NVIDIA's Megatron-Bridge as a bridge: more architectures, for CUDA with Transformer Engine.

Not tested here: it cannot be installed without CUDA. It builds models of its own, with other parameter names, so
``exchange`` does not apply to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

from nemorl.errors import BackendError, boundary
from nemorl_tensors.engines.buckets import in_buckets
from nemorl_tensors.engines.pieces import Piece

from nemorl_megatron.model import PolicyModel

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel
    from nemorl.config.models import LoraConfig, TrainingOptions
    from torch import Tensor

    from nemorl_megatron.config import AttentionName
    from nemorl_megatron.lora import Adapters
    from nemorl_megatron.parallel import Parallel

OWNER = "megatron.bridge"


def is_supported(config: Any) -> bool:
    """Whether Megatron-Bridge knows the architecture of a transformers config."""
    from megatron.bridge import AutoBridge

    with boundary(OWNER):
        return bool(AutoBridge.supports(config))


class MegatronBridge:
    """``contract.Bridge`` over ``megatron.bridge.AutoBridge``."""

    def __init__(self, policy: TrainingOptions, config: Any) -> None:
        """
        Args:
            policy: Where the weights are.
            config: The model's transformers config.
        """
        from megatron.bridge import AutoBridge

        if policy.init == "random":
            raise BackendError(
                "random weights that are the same in every layout are not to be had from Megatron-Bridge",
                fix="use init: pretrained",
            )
        if policy.hf_config_overrides:
            raise BackendError(
                "Megatron-Bridge reads the model's config itself, without policy.hf_config_overrides",
                fix="edit config.json in a copy of the model's folder, or use policy.backend: dtensor",
            )
        with boundary(OWNER):
            self._bridge = AutoBridge.from_hf_pretrained(policy.model_name)
        self.vocabulary: int = config.vocab_size
        self.logit_cap: float | None = config.to_dict().get("final_logit_softcapping")

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
        if attention == "sdpa":
            raise BackendError("Megatron-Bridge's models use Transformer Engine", fix="set attention: auto")
        fields = {
            **parallel.sizes.fields(),
            "sequence_parallel": parallel.sizes.sequence_parallel,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "variable_seq_lengths": True,
            "recompute_granularity": "full" if activation_checkpointing else None,
            "recompute_method": "uniform" if activation_checkpointing else None,
            "recompute_num_layers": 1 if activation_checkpointing else None,
            **changes,
        }
        with boundary(OWNER):
            provider = self._bridge.to_megatron_provider(load_weights=False)
            for name, value in fields.items():
                setattr(provider, name, value)
            provider.finalize()
            pieces = provider.provide_distributed_model(wrap_with_ddp=False)
        return [_states_only(piece).eval() for piece in pieces]

    def load(self, model: Sequence[GPTModel], parallel: Parallel, seed: int) -> None:
        with boundary(OWNER):
            self._bridge.load_hf_weights([*model])

    def stored(self, model: Sequence[GPTModel], parallel: Parallel, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(())  # it fills models, and nothing else

    def adapt(self, model: Sequence[GPTModel], parallel: Parallel, lora: LoraConfig, seed: int) -> Adapters:
        raise BackendError(
            "models that Megatron-Bridge built have no adapters here: their linear layers are Transformer Engine's",
            fix="uninstall megatron-bridge if nemorl-megatron knows the model itself, or use policy.backend: dtensor",
        )

    def export(
        self, model: Sequence[GPTModel], parallel: Parallel, adapters: Adapters | None = None
    ) -> Iterator[Mapping[str, Tensor]]:
        # Every rank is given every tensor, one at a time.
        found = self._bridge.export_hf_weights([*model], cpu=False, show_progress=False)
        yield from in_buckets(({name: t} if parallel.rank == 0 else {}, t.nbytes) for name, t in found)

    def copies(self, name: str) -> Sequence[str]:
        return ()

    def pieces(
        self, model: Sequence[GPTModel], parallel: Parallel, adapters: Adapters | None = None
    ) -> Iterator[Piece]:
        # Megatron-Bridge gathers in any case.
        found = self.export(model, parallel, adapters)
        return (Piece.whole(name, tensor) for bucket in found for name, tensor in bucket.items())


def _states_only(piece: GPTModel) -> GPTModel:
    """A model that is called with token ids and returns hidden states, as ``model.PolicyModel``."""
    forward = piece.forward
    piece.forward = lambda token_ids, position_ids=None, packing=None: forward(
        token_ids, position_ids, None, packed_seq_params=packing
    )
    piece._postprocess = MethodType(PolicyModel._postprocess, piece)
    return piece
