"""Weight transports with a mistake each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from nemorl.plugins.kinds import WeightTransportConfig
from nemorl.weights import Distance, Export


class AnyTransport(WeightTransportConfig):
    """``mistake`` chooses what is wrong."""

    summary: ClassVar[str] = "a transport with a mistake"
    reach: ClassVar[Distance] = "cluster"
    mistake: str = ""
    """What is wrong."""

    def build(self) -> Any:
        return Copies(self.mistake)


class Copies:
    """Its payload is the weights."""

    shelf: ClassVar[dict[str, Any]] = {}

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake

    def publish(self, export: Export) -> Any:
        buckets = [{name: tensor.clone() for name, tensor in bucket.items()} for bucket in export()]
        if self.mistake == "widens":
            buckets = [{n: t.float() if t.is_floating_point() else t for n, t in b.items()} for b in buckets]
        buckets = [damaged(self.mistake, bucket, self.shelf) for bucket in buckets]
        if self.mistake == "one place for all versions":
            self.shelf["weights"] = buckets
            return "weights"
        return (lambda: buckets) if self.mistake == "sends a function" else buckets

    def fetch(self, payload: Any) -> Iterator[Mapping[str, Any]]:
        if isinstance(payload, str):
            payload = self.shelf[payload]
        yield from payload() if isinstance(payload, Callable) else payload  # type: ignore[arg-type]

    def close(self) -> None:
        pass


def damaged(mistake: str, bucket: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """A bucket of the model of receipts as it is after a mistake; others have none of its names."""
    found = dict(bucket)
    if mistake == "drops a tensor":
        found.pop("layers.1.q", None)
    if mistake == "swaps a pair" and "layers.0.q" in found:
        found["layers.0.q"], found["layers.1.q"] = found["layers.1.q"], found["layers.0.q"]
    if mistake == "cuts a bucket short" and "lm_head" in found:
        found["lm_head"][2:] = 0
    if mistake == "ties a head that is not" and "lm_head" in found:
        found["lm_head"] = found["base"]
    for mistaken, name in (("keeps an expert", "experts.1"), ("sends adapters over an old base", "base")):
        if mistake == mistaken and name in found:
            found[name] = kept.setdefault(name, found[name])
    return found
