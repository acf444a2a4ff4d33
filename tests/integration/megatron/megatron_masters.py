"""What a rank reports of the masters that it begins with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl_megatron.training import MegatronBackend
from torch import Tensor

Fields = Mapping[str, Any]


def weights(context: WorkerContext, policy: Fields) -> list[Tensor]:
    """This rank's parameters, flat."""
    backend = _build(context, policy)
    found = [p.detach().reshape(-1).clone() for piece in backend._pieces for p in piece.parameters()]
    backend.shutdown()
    return found


def masters(context: WorkerContext, policy: Fields) -> list[tuple[int, Tensor] | None]:
    """Of each of these, the range that this rank updates: where it starts, and its master."""
    backend = _build(context, policy)
    backend._optimizer.refine()
    shares = [backend._optimizer.share(p) for piece in backend._pieces for p in piece.parameters()]
    found = [share and (share.start, share.master.detach().reshape(-1).clone()) for share in shares]
    backend.shutdown()
    return found


def _build(context: WorkerContext, policy: Fields) -> MegatronBackend:
    config = PolicyConfig.model_validate(policy)
    made = config.backend.build(config, context, reference=False)
    assert isinstance(made, MegatronBackend)
    return made
