"""The bridge of this package: its own tables, for the architectures of ``settings.ARCHITECTURES``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemorl_megatron.bridge.exchange import Exchange, global_names
from nemorl_megatron.bridge.sources import NewValueHead, RandomWeights, SafetensorsFolder, Source, weights_folder
from nemorl_megatron.bridge.tables import mtp_copies
from nemorl_megatron.lora import Adapters
from nemorl_megatron.model import PolicyModel, build_model
from nemorl_megatron.settings import settings_of

if TYPE_CHECKING:
    from nemorl.config.models import LoraConfig, TrainingOptions
    from nemorl.contracts import Head
    from nemorl_tensors.engines.pieces import Piece
    from torch import Tensor

    from nemorl_megatron.parallel import Parallel


class OwnBridge:
    """``contract.Bridge`` over ``exchange``, which see for tensors other than weights."""

    def __init__(
        self, policy: TrainingOptions, config: Any, head: Head = "language_model", *, mtp_layers: int = 0
    ) -> None:
        """
        Args:
            policy: Where the weights are, or that they are random.
            config: The model's transformers config.
            head: What stands on top of the decoder.
            mtp_layers: MTP layers of the files that are read too.
        """
        self._policy = policy
        self.settings = replace(settings_of(config), value_head=head == "value", mtp_layers=mtp_layers)

    @property
    def vocabulary(self) -> int:
        return self.settings.vocabulary

    @property
    def logit_cap(self) -> float | None:
        return self.settings.logit_cap

    def build(self, parallel: Parallel, *, mtp: bool = True, **options: Any) -> list[PolicyModel]:
        settings = self.settings if mtp else replace(self.settings, mtp_layers=0)
        return build_model(settings, parallel, **options)

    def load(self, model: Sequence[PolicyModel], parallel: Parallel, seed: int) -> None:
        with self._source(seed) as source:
            Exchange(self.settings, parallel).fill(global_names(model, self.settings, parallel), source)

    def stored(self, model: Sequence[PolicyModel], parallel: Parallel, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        parameters = global_names(model, self.settings, parallel)
        with self._source(seed) as source:
            for name, values in Exchange(self.settings, parallel).read(parameters, source):
                yield parameters[name], values

    @contextmanager
    def _source(self, seed: int) -> Iterator[Source]:
        drawn = RandomWeights(self.settings, seed)
        if self._policy.init == "random":
            yield drawn
            return
        with SafetensorsFolder(weights_folder(self._policy.model_name)) as folder:
            yield NewValueHead(folder, drawn)

    def adapt(self, model: Sequence[PolicyModel], parallel: Parallel, lora: LoraConfig, seed: int) -> Adapters:
        return Adapters(model, self.settings, parallel, lora, seed)

    def export(
        self, model: Sequence[PolicyModel], parallel: Parallel, adapters: Adapters | None = None
    ) -> Iterator[Mapping[str, Tensor]]:
        dtype = model[0].config.params_dtype
        parts = self._parts(model, parallel, adapters)
        yield from Exchange(self.settings, parallel).whole(parts, dtype)

    def copies(self, name: str) -> Sequence[str]:
        return mtp_copies(self.settings, name)

    def pieces(
        self, model: Sequence[PolicyModel], parallel: Parallel, adapters: Adapters | None = None
    ) -> Iterator[Piece]:
        yield from Exchange(self.settings, parallel).pieces(self._parts(model, parallel, adapters))

    def _parts(
        self, model: Sequence[PolicyModel], parallel: Parallel, adapters: Adapters | None
    ) -> Mapping[str, Tensor]:
        parts: Mapping[str, Tensor] = global_names(model, self.settings, parallel)
        return parts if adapters is None else adapters.merged(parts)
