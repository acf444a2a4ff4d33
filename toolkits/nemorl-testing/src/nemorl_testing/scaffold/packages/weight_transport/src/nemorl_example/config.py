"""How far the transport reaches. Nothing heavy is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nemorl.plugins.kinds import WeightTransportConfig
from nemorl.weights import Distance

if TYPE_CHECKING:
    from nemorl.contracts import WeightTransport


class ExampleConfig(WeightTransportConfig):
    """Through safetensors files in a temporary folder of the trainer."""

    summary: ClassVar[str] = "safetensors files in a temporary folder (one node)"
    requires_modules: ClassVar[tuple[str, ...]] = ("torch", "safetensors")
    install_hint: ClassVar[str] = "pip install nemorl-example"
    reach: ClassVar[Distance] = "node"
    reaches_subprocesses: ClassVar[bool] = True

    def build(self) -> WeightTransport:
        from nemorl_example.transport import ExampleTransport

        return ExampleTransport()
