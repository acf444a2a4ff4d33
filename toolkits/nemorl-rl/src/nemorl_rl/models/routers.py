"""Routers of mixtures of experts while they train: how their load is kept even, and the metrics of it.

# L = mixture layers, E = experts of a layer, K = experts that each token goes to, T = tokens of a sequence

Here: the options that training backends share, what they cannot mean for a model, the metrics that are made from
counts of tokens per expert, and which targets of LoRA are experts. Not here: routers themselves, which are each
backend's. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from nemorl.config.base import Config
from nemorl.errors import ConfigIssue
from nemorl.metrics import Max, MetricInfo, Metrics
from pydantic import Field

from nemorl_rl.models.divisions import known_geometry

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig

BIASED_TYPES = frozenset(
    {
        *("deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite"),
        *("glm4v_moe", "glm_moe_dsa", "kimi_linear", "longcat_flash", "mimo_v2_flash", "minimax_m2", "nemotron_h"),
        "solar_open",
    }
)
"""``model_type`` of architectures whose files have a bias for the choice of experts (``e_score_correction_bias``)."""


class RouterConfig(Config):
    """How routers of a mixture are trained, beside the gradient of the loss."""

    balance_loss: float = Field(0.0, ge=0)
    """Coefficient of the auxiliary load-balancing loss of Switch Transformers (arXiv:2101.03961, eq. 4), of each
    sequence by itself (DeepSeek-V3, arXiv:2412.19437, eq. 17), so that it does not depend on microbatches and ranks:
    ``E * sum_i f_i P_i``, where ``f_i`` is the share of the sequence's T * K choices that are expert i, without
    gradient, and ``P_i`` the mean over its tokens of the scores divided by their sum. 1 where all experts get the same.
    The mean over the tokens of all sequences that are trained on is added up over layers, times this."""
    bias_update_rate: float = Field(0.0, ge=0)
    """Step of the bias that is added to scores when experts are chosen, and to nothing else (DeepSeek-V3,
    arXiv:2412.19437, sec. 2.1.2): after each update it grows by this for experts with fewer tokens than the mean of
    their layer, and falls by this for those with more. DeepSeek-V3 was trained with 0.001. Models built as it or as
    GLM-4.5 have the bias."""
    dtype: Literal["model", "float32", "float64"] = "model"
    """In which routers score tokens, so that fewer ties are broken by rounding. ``model``: as the policy computes, or
    as the architecture asks for."""
    replay: bool = False
    """Tokens go to the experts that the sampler sent them to (arXiv:2510.11370), in the policy's log-probs and updates,
    not in the reference's. Routers weigh these experts by their own scores, and learn. Without it a token whose experts
    score almost alike goes to others in the trainer, which rounds otherwise, and its log-prob jumps. It takes 2 bytes
    per token, layer and chosen expert of each batch."""


def names_experts(target: str) -> bool:
    """A target of LoRA is a stack of experts.

    >>> [names_experts(target) for target in ("mlp.experts.down_proj", "mlp.shared_experts.down_proj", "down_proj")]
    [True, False, False]
    """
    return target.split(".")[-2:-1] == ["experts"]


def router_problems(policy: PolicyConfig, router: RouterConfig) -> Iterator[ConfigIssue]:
    """Options that mean nothing for the policy's model. Nothing of a model that is not known here.

    >>> from nemorl.config import PolicyConfig
    >>> list(router_problems(PolicyConfig(model_name="nobody/knows"), RouterConfig(balance_loss=0.01)))
    []
    """
    geometry = known_geometry(policy)
    if geometry is None:
        return
    for name in changed(router):
        if not geometry.experts:
            message = f"this model (model_type {geometry.model_type}) has no experts to route to"
            yield ConfigIssue(f"backend.router.{name}", message, f"remove router.{name}")
        elif name == "bias_update_rate" and geometry.model_type not in BIASED_TYPES:
            yield ConfigIssue(
                "backend.router.bias_update_rate",
                f"files of models of type {geometry.model_type} have no bias for the choice of experts, as those of "
                "deepseek_v3 and glm4_moe have",
                "set it to 0; router.balance_loss evens the load of any mixture",
            )


def changed(router: RouterConfig) -> list[str]:
    """Fields that are not as they are by default.

    >>> changed(RouterConfig(dtype="float32"))
    ['dtype']
    """
    usual = RouterConfig()
    return [name for name in RouterConfig.model_fields if getattr(router, name) != getattr(usual, name)]


def load_metrics(counts_LE: Sequence[Sequence[float]]) -> Metrics:
    """Metrics of one update, the same on every rank.

    Args:
        counts_LE: Tokens that each expert of each layer got, of all ranks and microbatches, padding not counted.

    >>> {name: metric.value for name, metric in load_metrics([[4, 4, 4, 0], [2, 2, 2, 6]]).items()}
    {'expert_load_max': 2.0, 'dead_experts': 1}
    """
    used_LE = [counts_E for counts_E in counts_LE if sum(counts_E)]
    if not used_LE:
        return {}
    # Ranks all say the same of the same update: a sum over them would count it again.
    return {
        "expert_load_max": Max(max(max(counts_E) * len(counts_E) / sum(counts_E) for counts_E in used_LE)),
        "dead_experts": Max(sum(not count for counts_E in used_LE for count in counts_E)),
    }


ROUTER_METRICS: Mapping[str, MetricInfo] = {
    **dict.fromkeys(
        ("train/expert_load_max", "train/<model>/expert_load_max"),
        MetricInfo(
            "Load of the busiest expert",
            meaning="tokens of the busiest expert over the mean of its layer, in the layer where that is largest: "
            "1 is even",
            watch_for="above 4: raise `policy.backend.router.balance_loss` or `bias_update_rate`; a rank with that "
            "expert computes that much longer",
            smooth=True,
        ),
    ),
    **dict.fromkeys(
        ("train/balance_loss", "train/<model>/balance_loss"),
        MetricInfo(
            "Imbalance of experts",
            meaning="mean over tokens and layers of the auxiliary loss without its coefficient, if it has one: 1 is "
            "even",
            watch_for="growth: raise `policy.backend.router.balance_loss`",
            smooth=True,
        ),
    ),
    **dict.fromkeys(
        ("train/dead_experts", "train/<model>/dead_experts"),
        MetricInfo(
            "Experts without tokens",
            "experts",
            meaning="experts that got no token in an update, of all layers together; the most of the step's updates",
            watch_for="above 0 for long: they learn nothing and serve nothing",
        ),
    ),
    **dict.fromkeys(
        ("train/routes_flipped", "train/<model>/routes_flipped"),
        MetricInfo(
            "Replayed choices that differ",
            meaning="`policy.backend.router.replay`: share of the sampler's choices of an expert, of tokens and layers "
            "that an update computes, that the trainer's router would not have made. It makes them all the same",
            watch_for="above 0.1: sampler and trainer compute otherwise in more than their rounding, or samples are "
            "many updates old",
            smooth=True,
        ),
    ),
}
"""Of backends that train mixtures of experts."""
