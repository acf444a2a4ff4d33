"""A policy's model from Hugging Face to megatron-core and back: which bridge builds, fills and reads it.

NVIDIA's Megatron-Bridge where it is installed and knows the model (``megatron_bridge``), else the tables of this
package (``own``). Both are a :class:`Bridge`, and this is the only place that chooses.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from nemorl.errors import BackendError
from nemorl_rl.models.model_geometry import mtp_layers
from nemorl_tensors.engines.model_config import read_model_config

from nemorl_megatron.mtp_config import MTP_ARCHITECTURES
from nemorl_megatron.settings import ARCHITECTURES

if TYPE_CHECKING:
    from nemorl.config.models import TrainingOptions
    from nemorl.contracts import Head

    from nemorl_megatron.bridge.contract import Bridge
    from nemorl_megatron.mtp_config import MtpConfig

Maker = Literal["nemorl", "megatron_bridge"]


def bridge_for(policy: TrainingOptions, head: Head = "language_model", mtp: MtpConfig | None = None) -> Bridge:
    """The bridge for a policy's model.

    Args:
        policy: The model.
        head: What stands on top of the decoder.
        mtp: How its MTP layers are trained; ``None``: the model is built without them.

    Raises:
        BackendError: there is no such model, neither bridge knows its architecture, or the one that does has no such
            head or no MTP layers.
    """
    config = read_model_config(policy)
    layers = 0 if mtp is None else mtp.stored_layers
    if choose(config.model_type, megatron_bridge=_known_to_megatron_bridge(config)) == "megatron_bridge":
        from nemorl_megatron.bridge.megatron_bridge import MegatronBridge

        if head == "value":
            raise BackendError(
                "models that Megatron-Bridge built have no value head here",
                fix="uninstall megatron-bridge if nemorl-megatron knows the model itself, or use backend: dtensor",
            )
        if layers:
            raise BackendError("MTP layers of models that Megatron-Bridge built are not trained here", fix="remove mtp")
        return MegatronBridge(policy, config)
    from nemorl_megatron.bridge.own import OwnBridge

    if layers:
        _require_mtp_layers(config, layers)
    return OwnBridge(policy, config, head, mtp_layers=layers)


def _require_mtp_layers(config: Any, layers: int) -> None:
    if config.model_type not in MTP_ARCHITECTURES:
        raise BackendError(
            f"architecture {config.model_type!r} has no MTP layers here ({', '.join(MTP_ARCHITECTURES)} has)",
            fix="remove mtp",
        )
    if (stored := mtp_layers(config.to_dict())) != layers:
        raise BackendError(
            f"this model has {stored} MTP layers (num_nextn_predict_layers), and mtp asks for {layers}",
            fix="set mtp.num_layers to what the model has, or remove mtp",
        )


def choose(architecture: str, *, megatron_bridge: bool) -> Maker:
    """The bridge that maps an architecture (transformers' ``model_type``).

    Args:
        architecture: Of the policy's model.
        megatron_bridge: Whether Megatron-Bridge is installed and knows it.

    Raises:
        BackendError: nobody does.
    """
    if megatron_bridge:
        return "megatron_bridge"
    if architecture in ARCHITECTURES:
        return "nemorl"
    raise BackendError(
        f"architecture {architecture!r} has no megatron-core model here (there are: {', '.join(ARCHITECTURES)})",
        fix="install megatron-bridge, which knows more, or use policy.backend: dtensor",
    )


def _known_to_megatron_bridge(config: Any) -> bool:
    if find_spec("megatron.bridge") is None:
        return False
    from nemorl_megatron.bridge.megatron_bridge import is_supported

    return is_supported(config)
