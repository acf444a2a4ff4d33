"""The transport ``object_store``: buckets in Ray's object store, between any nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nemorl.errors import ResourceError, WeightsLostError
from nemorl.weights import Export

from nemorl_rl.transports.layout import bytes_of, slot_of

if TYPE_CHECKING:
    from torch import Tensor


class ObjectStore:
    """One stored object per bucket. Objects live as long as the handle does."""

    def publish(self, export: Export) -> list[Any]:
        import ray

        if not ray.is_initialized():
            raise ResourceError("object_store needs Ray, which is not running here", fix="set cluster.launcher=ray")
        return [
            ray.put({name: (slot_of(tensor), bytes_of(tensor)) for name, tensor in bucket.items()})
            for bucket in export()
        ]

    def fetch(self, payload: list[Any]) -> Iterator[Mapping[str, Tensor]]:
        import warnings

        import ray

        for reference in payload:
            try:
                stored = ray.get(reference)
            except ray.exceptions.ObjectLostError as error:
                raise WeightsLostError(
                    f"the trainer's weights left the object store: {error}", fix="the trainer or its node has ended"
                ) from error
            with warnings.catch_warnings():  # about read-only memory: receivers only read
                warnings.simplefilter("ignore", UserWarning)
                yield {name: slot.view(data) for name, (slot, data) in stored.items()}

    def close(self) -> None:
        pass
