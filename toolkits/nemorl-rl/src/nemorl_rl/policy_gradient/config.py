"""The knobs of policy-gradient algorithms, in blocks that a config is made of. Importing this imports no torch.

    PolicyGradientConfig    groups of responses                                 every algorithm
    SamplerCorrection       importance correction                               part of it, and PPO's
    UpdatesConfig           its base, and PPO's: prompts, minibatches, the KL   in ``updates_config``
    RewardShaping           rewards scaled, and lowered for length              a block
    ClippedRatio            PPO's clipped surrogate                             a block
    ClippedConfig           ``ClippedRatio`` and ``loss_aggregation``           what most algorithms start from

An algorithm takes the blocks whose knobs mean something to it, so that none exists which would be ignored. Blocks stand
before ``PolicyGradientConfig`` in the list of bases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nemorl.config import Config
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl.types import Samples
from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from nemorl_rl.policy_gradient.declared_metrics import POLICY_GRADIENT_METRICS
from nemorl_rl.policy_gradient.penalties import LowEffort, MessagePenalties
from nemorl_rl.policy_gradient.updates_config import UpdatesConfig
from nemorl_rl.serving.sampler_precision import lower_precision

if TYPE_CHECKING:
    from nemorl_tensors import LossAggregation
    from nemorl_tensors.filtering import TokenFilter

    from nemorl_rl.policy_gradient.loss import PolicyGradientLoss
    from nemorl_rl.policy_gradient.updates import BatchTransform

SeatBaseline = Literal["role", "hierarchical", "shared"]
"""The others that a seat is compared with (``PolicyGradientConfig.seat_baseline``)."""


class RewardScaling(Config):
    """Clamp rewards to a source range, then map it linearly onto a target range.

    Example:
        >>> RewardScaling(source_max=10.0).target_max  # a reward of 10 becomes 1
        1.0
    """

    source_min: float = 0.0
    """Rewards below are raised to this."""
    source_max: float = 1.0
    """Rewards above are lowered to this."""
    target_min: float = 0.0
    """The reward that ``source_min`` becomes."""
    target_max: float = 1.0
    """The reward that ``source_max`` becomes."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.source_max <= self.source_min:
            yield ConfigIssue("source_max", f"must be above source_min = {self.source_min}", "widen the source range")


class OverlongPenalty(Config):
    """DAPO's soft punishment of long responses (arXiv:2503.14476, eq. 13).

    Example:
        >>> OverlongPenalty(max_response_tokens=512, buffer_tokens=128).penalty
        1.0
    """

    max_response_tokens: int = Field(ge=1)
    """Length at which the full penalty applies."""
    buffer_tokens: int = Field(128, ge=1)
    """The penalty grows linearly over this many tokens before ``max_response_tokens``."""
    penalty: float = Field(1.0, gt=0)
    """Subtracted from the reward at ``max_response_tokens``."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.buffer_tokens > self.max_response_tokens:
            yield ConfigIssue("buffer_tokens", f"exceeds max_response_tokens = {self.max_response_tokens}", "lower it")


CorrectionKind = Literal["plain", "truncated", "icepop", "sequence_mask", "kpop"]
CORRECTION_BOUNDS: Mapping[CorrectionKind, Mapping[str, float]] = {
    "plain": {},
    "truncated": {"cap": 2.0, "low": 0.0},
    "icepop": {"low": 0.5, "high": 5.0},
    "sequence_mask": {"low": 0.999, "high": 1.002},
    "kpop": {"divergence": 2.0},
}
"""The bounds that each kind has, with the values published for it."""


class ImportanceCorrection(Config):
    """Weigh each token by how likely the trainer finds it, relative to the engine that sampled it.

    Example:
        >>> ImportanceCorrection(kind="icepop").high
        5.0
    """

    kind: CorrectionKind = "truncated"
    """``plain``: the ratio itself. ``truncated``: at most ``cap``. ``icepop``: tokens with a ratio out of bounds train
    nothing. ``sequence_mask``: responses whose geometric mean ratio is out of bounds train nothing. ``kpop``: tokens
    train nothing on which trainer and sampler are further apart than ``divergence``, in either direction."""
    cap: float | None = Field(None, gt=0)
    """Largest weight of a token, for ``truncated``. Unset: 2. Below 1, tokens of an exact sampler weigh less too."""
    low: float | None = Field(None, ge=0, le=1)
    """Smallest ratio that trains. Unset: 0.5 for ``icepop``, 0.999 for ``sequence_mask``. For ``truncated``: the
    smallest weight, to which smaller ratios are raised. Unset: 0."""
    high: float | None = Field(None, ge=1)
    """Largest ratio that trains. Unset: 5 for ``icepop``, 1.002 for ``sequence_mask``."""
    divergence: float | None = Field(None, gt=0)
    """Largest KL, in nats, of the token against all others, for ``kpop``. Unset: 2."""
    per: Literal["token", "sequence"] = "token"
    """``token``: each token by its own ratio. ``sequence``: all tokens of a response by the product of their ratios,
    which is the ratio of the response: exact, and soon far from 1 where responses are long."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        """``icepop`` for ``{kind: icepop}``, with the bounds of the kind."""
        if isinstance(data, str):
            data = {"kind": data}
        if isinstance(data, Mapping):
            given = {key: value for key, value in data.items() if value is not None}
            kind = given.get("kind", cls.model_fields["kind"].default)
            bounds = [bounds for known, bounds in CORRECTION_BOUNDS.items() if known == kind]
            data = {**(bounds[0] if bounds else {}), **given}
        return data

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string", "enum": list(CORRECTION_BOUNDS)}, handler(schema)]}

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        bounds = CORRECTION_BOUNDS[self.kind]
        for name in ("cap", "low", "high", "divergence"):
            if getattr(self, name) is not None and name not in bounds:
                yield ConfigIssue(name, f"{self.kind} has no {name}", f"its bounds: {', '.join(bounds) or 'none'}")
        top = "cap" if self.kind == "truncated" else "high"
        low, high = self.low, getattr(self, top)
        if low is not None and high is not None and low > high:
            yield ConfigIssue("low", f"{low:g} is above {top} = {high:g}", "swap or widen them")
        if self.kind == "sequence_mask" and self.per == "sequence":
            yield ConfigIssue("per", "sequence_mask keeps or drops responses and weighs tokens", "leave it out")
        if self.kind == "kpop" and self.per == "sequence":
            yield ConfigIssue("per", "kpop judges tokens by their probability", "leave it out")


def _correction_of_sampler(fields: dict[str, Any]) -> ImportanceCorrection | None:
    """The correction of a config that names none, given its other fields."""
    generation = fields.get("generation")
    if generation is None or lower_precision(generation.backend) is None:
        return None
    return ImportanceCorrection(kind="truncated")


class SamplerCorrection(Config):
    """A block of knobs: what the samples of an engine that is not quite the policy are worth.

    Example:
        >>> SamplerCorrection(importance_correction="truncated").importance_correction.cap
        2.0
    """

    importance_correction: ImportanceCorrection | None = Field(default_factory=_correction_of_sampler)
    """Correct for a sampler that is not quite the policy (another engine or precision, older weights in asynchronous
    rollouts): the name of a kind, or a mapping. Unset: ``truncated`` where the sampler computes in a lower precision
    than the policy (``generation.backend.precision: fp8``). ``null``: treat its samples as the policy's own."""


class RewardShaping(Config):
    """A block of knobs: what happens to a reward before it is compared with others.

    Example:
        >>> RewardShaping(truncation_reward_factor=0.5).overlong_penalty is None
        True
    """

    reward_scaling: RewardScaling | None = None
    """Map rewards to another range before anything else."""
    overlong_penalty: OverlongPenalty | None = None
    """Punish responses that come close to the token limit."""
    low_effort: LowEffort | None = None
    """Prefer short answers where the prompt asks for little effort. Unset: effort is not asked for."""
    truncation_reward_factor: float | None = Field(None, ge=0, le=1)
    """Multiply the reward of responses cut by the token limit. Excludes ``overlong_penalty``."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.overlong_penalty is not None and self.truncation_reward_factor is not None:
            yield ConfigIssue("overlong_penalty", "excludes truncation_reward_factor: both punish length", "keep one")


class ClippedRatio(Config):
    """A block of knobs: PPO's clipped surrogate, token by token (arXiv:1707.06347).

    Example:
        >>> ClippedRatio(clip_high=0.28).ratio_options
        {'clip_low': 0.2, 'clip_high': 0.28, 'dual_clip': None}
    """

    clip_low: float = Field(0.2, ge=0, lt=1)
    """The probability ratio is clipped below at 1 - this."""
    clip_high: float = Field(0.2, ge=0)
    """The probability ratio is clipped above at 1 + this. DAPO and VAPO use 0.28."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound on the loss of negative advantages, as a multiple of the advantage (arXiv:1912.09729; 3 is typical)."""

    @property
    def ratio_options(self) -> dict[str, Any]:
        return {"clip_low": self.clip_low, "clip_high": self.clip_high, "dual_clip": self.dual_clip}


class PolicyGradientConfig(SamplerCorrection, UpdatesConfig):
    """Fields of every policy-gradient algorithm whose loss is made of advantages. Its trainer heeds all of them.

    Example:
        >>> class MeanBaselineConfig(PolicyGradientConfig):
        ...     "REINFORCE against the mean reward of each prompt."
        ...     trainer: ClassVar[str] = "acme.trainer:MeanBaselineTrainer"
        ...     algorithm: Literal["mean_baseline"] = "mean_baseline"
        >>> MeanBaselineConfig(model="some/model", num_minibatches=2, num_epochs_per_rollout=3).updates_per_step
        6
    """

    metrics: ClassVar[Mapping[str, MetricInfo]] = {**UpdatesConfig.metrics, **POLICY_GRADIENT_METRICS}

    num_generations_per_prompt: int = Field(16, ge=2)
    """Responses per prompt, the group size G. Larger groups give better baselines."""
    dynamic_sampling: bool = False
    """Train only on groups whose rewards differ, and sample more prompts until there are enough (DAPO,
    arXiv:2503.14476). ``rollouts.max_batches_per_step`` bounds how many."""
    seat_baseline: SeatBaseline = "role"
    """Where the policy plays several seats, the others that one is compared with. ``role``: those of its role in all
    episodes of the prompt. ``hierarchical``: those of its role in its own episode where there are several, else in all.
    ``shared``: all seats of the prompt."""
    advantage_clip_low: float | None = None
    """Advantages below are raised to this."""
    advantage_clip_high: float | None = None
    """Advantages above are lowered to this."""
    filtered_logprobs: bool = False
    """Log-probs of the policy, the old policy and the sampler are those of what ``generation.top_p`` and ``top_k``
    leave of the vocabulary, renormalised, as NeMo RL has it. A token that the trainer would not have kept trains
    nothing. Off: they are of the whole vocabulary, whatever the sampler leaves out."""
    max_sequence_error: float | None = Field(None, ge=1)
    """Responses train nothing on which trainer and sampler disagree too much: their mean of exp(|old - generation
    log-prob|), 1 where both agree exactly, is above this. 1.05 is typical. Costs a forward pass where there is one
    update per step."""
    off_policy_mask: float | None = Field(None, gt=0)
    """Responses of negative advantage train nothing once the policy has left them: where the mean of generation -
    policy log-prob over their tokens is above this, in nats. 0.5 is typical. Unset: all train."""
    max_token_staleness: int | None = Field(None, ge=0)
    """Asynchronous runs: tokens train nothing whose weights are more than this many updates older than those that
    learn. The rest of their response does: a bound on each token, where ``rollouts.max_staleness`` is one on groups.
    Unset: all train."""
    high_entropy_frac: float | None = Field(None, gt=0, lt=1)
    """Share of the batch's tokens that train: those where the policy was least sure (arXiv:2506.01939, which takes
    0.2). Costs a forward pass where there is one update per step. Unset: all train."""
    entropy_bonus: float = Field(0.0, ge=0)
    """Weight of the policy's entropy in the loss, which rewards it for staying unsure. 0.001 is a start."""
    message_penalties: MessagePenalties | None = None
    """Advantages of messages with broken tool calls or think tags, in place of their own. Unset: none."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.generation.temperature == 0:
            yield ConfigIssue(
                "generation.temperature",
                "greedy responses of a group are all the same, so nothing is learnt",
                "use 1.0",
            )
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and low >= high:
            yield ConfigIssue(
                "advantage_clip_low", f"{low} is not below advantage_clip_high = {high}", "swap or widen them"
            )
        if self.dynamic_sampling and self.num_generations_per_prompt == 1:
            yield ConfigIssue(
                "dynamic_sampling", "groups of one response never differ", "sample more, or set it to false"
            )
        yield from self._staleness_problems()
        if self.filtered_logprobs:
            yield from self._filter_problems()
        for name in self.moment_options:
            if self.filtered_logprobs:
                yield ConfigIssue(name, "entropies are of the whole vocabulary", "set filtered_logprobs: false")
            if "moments" not in self.policy.backend.supports:
                yield ConfigIssue(name, "policy.backend knows no entropies", "use policy.backend: dtensor or megatron")

    @property
    def moment_options(self) -> tuple[str, ...]:
        """Options that are set and read the whole distribution at each token."""
        asked = {"high_entropy_frac": self.high_entropy_frac, "entropy_bonus": self.entropy_bonus}
        return tuple(name for name, value in asked.items() if value)

    def _staleness_problems(self) -> Iterator[ConfigIssue]:
        """A bound on tokens that no token exceeds."""
        limit, rollouts = self.max_token_staleness, self.rollouts
        if limit is None:
            return
        if rollouts.mode == "sync":
            yield ConfigIssue("max_token_staleness", "no token of a synchronous run is stale", "leave it out")
        elif rollouts.on_stale != "train" and limit >= rollouts.max_staleness:
            yield ConfigIssue(
                "max_token_staleness",
                f"no token is older than rollouts.max_staleness = {rollouts.max_staleness} updates",
                "lower it, or set rollouts.on_stale: train",
            )

    def _filter_problems(self) -> Iterator[ConfigIssue]:
        """Options that cannot be combined with log-probs of a truncated distribution."""
        generation = self.generation
        if generation.top_p == 1 and generation.top_k is None:
            message = "generation.top_p and top_k keep every token: nothing is filtered"
            yield ConfigIssue("filtered_logprobs", message, "set one of them, or remove this")
        if generation.min_p > 0:
            yield ConfigIssue("generation.min_p", "training filters by top-k and top-p alone", "set it to 0")
        if self.reward_kl_penalty > 0:
            message = "the KL to the reference is over the whole vocabulary, and the old policy's log-probs are not"
            yield ConfigIssue("kl_in", message, "set it to loss, or filtered_logprobs: false")
        for path, backend in (("policy.backend", self.policy.backend), ("generation.backend", generation.backend)):
            if "filtered_logprobs" not in backend.supports:
                yield ConfigIssue(path, "it has log-probs of the whole vocabulary only", "use policy.backend: dtensor")

    @property
    def averages_over(self) -> LossAggregation | None:
        """The units that the loss averages over; ``None``: tokens, or episodes of agents."""
        return None

    @property
    def ratio_options(self) -> dict[str, Any]:
        """Keywords of the clipped loss: its bounds. Without ``ClippedRatio``: the loss's own."""
        return {}

    @property
    def token_filter(self) -> TokenFilter | None:
        """What a loss is given beside plain log-probs, or restricts them; None is nothing."""
        if not self.filtered_logprobs and self.entropy_bonus == 0:
            return None
        from nemorl_tensors.filtering import TokenFilter

        if not self.filtered_logprobs:
            return TokenFilter(beside_moments=True)
        needs_whole = self.loss_kl_penalty > 0
        return TokenFilter(self.generation.top_k, self.generation.top_p, beside_whole=needs_whole)

    # An algorithm's formulas

    def advantages(self, samples: Samples) -> list[float]:
        """How much better each response is than expected, as ``PolicyGradientTrainer.compute_advantages`` asks."""
        raise NotImplementedError(
            f"{type(self).__name__} must define advantages(), or its trainer compute_advantages()"
        )

    def turn_credit(self, low: float | None, high: float | None, min_group: int) -> list[BatchTransform]:
        """The transform that credits turns, with these bounds of advantages, where the config asks for it."""
        return []

    def build_loss(self, **options: Any) -> PolicyGradientLoss:
        """The loss, given the keywords that every loss of the family takes."""
        from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss

        return ClippedPolicyGradientLoss(**self.ratio_options, **options)


class ClippedConfig(ClippedRatio, PolicyGradientConfig):
    """GRPO's knobs but for how a reward becomes an advantage: group, clipped loss and KL penalty.

    Example:
        >>> ClippedConfig(model="org/model", clip_high=0.28, loss_aggregation="sequence").dynamic_sampling
        False
    """

    kl_penalty: float = Field(0.01, ge=0)
    """Weight of KL(policy || initial policy). 0 needs no reference model."""
    loss_aggregation: Literal["token", "sequence", "sequence_sum"] | None = None
    """Average over all response tokens, over responses of their own averages, or over responses of their sums (a long
    response then counts as often as it has tokens; lower the learning rate by about its length). Unset: ``token``; for
    agents ``sequence``, where an episode counts once however often it forks."""

    @property
    def averages_over(self) -> LossAggregation | None:
        return self.loss_aggregation
