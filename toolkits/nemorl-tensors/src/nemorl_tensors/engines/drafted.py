"""The weights of a policy and of the draft that guesses for it, in one update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from nemorl.weights import WeightHandle

if TYPE_CHECKING:
    from torch import Tensor


class PolicyAndDraft(NamedTuple):
    """The payload: two handles, of models that are published apart.

    >>> PolicyAndDraft(WeightHandle("t", 3, None), WeightHandle("t", 3, None)).draft.version
    3
    """

    policy: WeightHandle
    draft: WeightHandle


@dataclass(frozen=True)
class DraftedHandle(WeightHandle):
    """One version of the policy's weights, and with it the draft's. Whoever knows no drafts fetches the policy's.

    >>> both = DraftedHandle.of(WeightHandle("t", 3, "policy's"), WeightHandle("t", 3, "draft's"))
    >>> both.version, both.payload.draft.payload
    (3, "draft's")
    """

    payload: PolicyAndDraft

    @classmethod
    def of(cls, policy: WeightHandle, draft: WeightHandle) -> Self:
        """The two as one update."""
        both = PolicyAndDraft(policy, draft)
        return cls(policy.transport, policy.version, both, policy.form, digests=policy.digests)

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        return self.payload.policy.buckets()


def parts_of(handle: WeightHandle) -> tuple[WeightHandle, WeightHandle | None]:
    """The policy's weights, and the draft's if they come with them.

    >>> parts_of(WeightHandle("t", 3, None))[1] is None
    True
    """
    return handle.payload if isinstance(handle, DraftedHandle) else (handle, None)
