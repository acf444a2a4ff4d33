"""Options of multi-token prediction (MTP), its metrics, and what it cannot be combined with.

Importing this imports neither torch nor megatron-core.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from nemorl.config.base import Config
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl_rl.models.model_files import stored_config
from nemorl_rl.models.model_geometry import mtp_layers
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig

    from nemorl_megatron.config import MegatronConfig

MTP_ARCHITECTURES = ("glm4_moe",)
"""transformers' ``model_type`` of models whose MTP layers are known here."""

MTP_METRICS: Mapping[str, MetricInfo] = {
    "train/mtp_loss": MetricInfo(
        "Loss of the MTP layers",
        "nats",
        "`mtp`: mean over trained tokens and depths of the negative log-prob that MTP layers give the token, without "
        "its factor",
        watch_for="growth: the layers fall behind the policy; raise `policy.backend.mtp.loss_scaling_factor`",
        smooth=True,
    ),
    "train/mtp_acceptance": MetricInfo(
        "Acceptance that MTP layers would have",
        "share",
        "`mtp`: mean over trained tokens and depths of min(1, q / p), where q is the probability that MTP layers give "
        "the token and p the policy's. Over tokens drawn from p that is the share of drafts drawn from q that "
        "speculative sampling accepts (arXiv:2211.17192, theorem 3.5)",
        watch_for="a fall: speculation with these layers slows down",
        smooth=True,
    ),
    "train/mtp_grad_norm": MetricInfo(
        "Gradient norm of the MTP layers",
        meaning="`mtp.detach_heads`: norm of their gradients before clipping; `grad_norm` is that of the policy alone",
        smooth=True,
    ),
}


class MtpConfig(Config):
    """Train the model's MTP layers, each of which predicts one token further ahead (DeepSeek-V3, arXiv:2412.19437).

    Example:
        >>> MtpConfig(num_layers=3, use_repeated_layer=True).stored_layers
        1
    """

    num_layers: int = Field(1, ge=1, le=16)
    """Tokens that are predicted beyond the next one: the depth D of the paper, a layer for each."""
    loss_scaling_factor: float = Field(0.1, ge=0)
    """Factor of the mean over depths of their losses (lambda in eq. 25), each weighed token by token as the policy's.
    0: the layers are measured, exported and not trained."""
    detach_heads: bool = True
    """The loss reaches the MTP layers alone: embedding, output head and the layers of the policy get no gradient of it,
    and the two norms of gradients are clipped apart. The policy learns as it would without MTP. ``false``: everything
    learns of it, as in pretraining."""
    use_repeated_layer: bool = False
    """The model has one MTP layer, which is used at every depth."""

    @property
    def stored_layers(self) -> int:
        """MTP layers that the model has."""
        return 1 if self.use_repeated_layer else self.num_layers

    @property
    def trains(self) -> bool:
        """MTP layers learn; else they are measured."""
        return self.loss_scaling_factor > 0

    @property
    def is_apart(self) -> bool:
        """The rest of the model learns nothing of their loss."""
        return self.detach_heads or not self.trains

    @property
    def passes(self) -> int:
        """Forward passes of one depth in a training step, backward passes counting as two."""
        return self.num_layers * (3 if self.trains else 1)


def mtp_problems(policy: PolicyConfig, config: MegatronConfig) -> Iterator[ConfigIssue]:
    """What MTP layers are not proven with, and models that have none."""
    mtp = config.mtp
    if mtp is None:
        return
    if config.virtual_pipeline_parallel_size is not None:
        message = "stages in parts have not been seen to work with MTP layers, and mtp is set"
        yield ConfigIssue("backend.virtual_pipeline_parallel_size", message, "remove it, or mtp")
    if config.layout == "shared":
        message = "a token that sequences share is followed by others in each of them, and mtp is set"
        yield ConfigIssue("backend.layout", message, "set it to auto, which packs sequences, or remove mtp")
    if config.router.replay:
        message = "recorded routes are of the model's own layers, and mtp is set"
        yield ConfigIssue("backend.router.replay", message, "set it to false, or remove mtp")
    if policy.lora is not None:
        yield ConfigIssue("backend.mtp", "with adapters MTP layers stay as they are", "remove mtp, or lora")
    stored = stored_config(policy.model_name)
    if stored is not None:
        yield from _model_problems({**stored, **policy.hf_config_overrides}, mtp, config)


def _model_problems(stored: Mapping[str, object], mtp: MtpConfig, config: MegatronConfig) -> Iterator[ConfigIssue]:
    kind, has = str(stored.get("model_type")), mtp_layers(stored)
    if kind not in MTP_ARCHITECTURES:
        known = ", ".join(MTP_ARCHITECTURES)
        message = f"backend megatron trains the MTP layers of {known}; this model is {kind}"
        yield ConfigIssue("backend.mtp", message, "remove mtp")
        return
    if has != mtp.stored_layers:
        message = f"this model has {has} MTP layers (num_nextn_predict_layers), and mtp asks for {mtp.stored_layers}"
        fix = "remove mtp" if has == 0 else f"set num_layers: {has}, or use_repeated_layer: true of a single layer"
        yield ConfigIssue("backend.mtp.num_layers", message, fix)
    if stored.get("tie_word_embeddings") and config.pipeline_parallel_size > 1:
        message = "the last stage would hold an output head that is the embedding twice, and mtp is set"
        yield ConfigIssue("backend.pipeline_parallel_size", message, "set it to 1, or remove mtp")
