"""Weights of MTP layers on their way into the engine: vLLM's policy leaves them out, and its drafter is another model.

A trainer sends a version once, as a stream of buckets. What the drafter needs of it is kept until the policy has the
rest: with the policy's output head and embedding, which both share, it is of the same version then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from nemorl_rl.models.model_geometry import is_mtp_tensor
from torch import Tensor

SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Tensors that files hold again for each MTP layer: the policy's embedding and output head."""


class MtpTensors:
    """The tensors of a version that are of MTP layers, which files count after the policy's own."""

    def __init__(self, layers: int) -> None:
        """
        Args:
            layers: Of the policy.
        """
        self._layers = layers
        self.tensors: dict[str, Tensor] = {}
        """Copies, by stored name"""

    def passed_on(self, buckets: Iterable[Mapping[str, Tensor]]) -> Iterator[Mapping[str, Tensor]]:
        """The same buckets, of which those tensors are kept as they go by."""
        for bucket in buckets:
            for name, tensor in bucket.items():
                if self._is_kept(name):
                    self.tensors[name] = tensor.detach().clone()  # memory of a bucket is the next one's
            yield bucket

    def _is_kept(self, name: str) -> bool:
        return is_mtp_tensor(name, self._layers) and not name.endswith(SHARED)
