"""PPO's knobs, and which model its critic is. Importing this module imports neither torch nor a backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from nemorl.config import RESUMABLE, Config, ModelName, OptimizerConfig, PolicyConfig, ScheduleConfig
from nemorl.config.models import TRAINING_BACKEND, AnyOptimizer, AuxiliaryModel, TokenizerConfig
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import TrainingBackendConfig
from nemorl_rl.policy_gradient.config import ClippedRatio, RewardShaping, SamplerCorrection
from nemorl_rl.policy_gradient.updates_config import UpdatesConfig
from pydantic import Field

from nemorl_ppo.declared_metrics import PPO_METRICS


class CriticConfig(Config):
    """The model that predicts rewards. What is unset is as the policy has it; the optimizer is its own."""

    model_name: ModelName | None = None
    """Hugging Face name or local folder; a reward model's brings a head that already judges text. It must read the
    policy's tokens. Unset: the policy's model under a new head."""
    backend: Annotated[TrainingBackendConfig, TRAINING_BACKEND] | None = None
    """Training backend: a name, or a mapping with ``name`` and the backend's own options. Unset: the policy's."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Compute and storage type of the weights. Unset: the policy's."""
    tensor_parallel_size: Annotated[int | None, RESUMABLE] = Field(None, ge=1)
    """Ranks that share each layer. Unset: as many as share those of the policy."""
    optimizer: AnyOptimizer = OptimizerConfig(lr=1e-5)
    """AdamW settings, or ``{name: muon, …}``. A critic usually wants a larger rate than the policy, whose every move it
    must follow."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule, over the critic's own optimizer steps, ``critic_warmup_steps`` included."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Global gradient norm is clipped to this; ``null`` clips nothing."""
    activation_checkpointing: Annotated[bool | None, RESUMABLE] = None
    """Recompute layer activations in the backward pass. Unset: as the policy does."""
    microbatch_tokens: Annotated[int | None, RESUMABLE] = Field(None, ge=1)
    """Padded tokens per forward/backward. Unset: the policy's. It does not change results."""

    def resolved(self, policy: PolicyConfig) -> PolicyConfig:
        """The whole description of the critic's model. A value head is trained whole, so adapters are left out."""
        own = {name: value for name, value in self if value is not None or name == "max_grad_norm"}
        if self.model_name:
            own |= {"init": "pretrained", "hf_config_overrides": {}, "tokenizer": TokenizerConfig()}
        return policy.model_copy(update={**own, "lora": None})


class PPOConfig(RewardShaping, ClippedRatio, SamplerCorrection, UpdatesConfig):
    """Proximal policy optimisation with a critic (arXiv:1707.06347), VAPO's refinements (arXiv:2504.05118) included."""

    summary: ClassVar[str] = "Proximal policy optimisation: a critic says what each token was worth"
    trainer: ClassVar[str] = "nemorl_ppo.trainer:PPOTrainer"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {**UpdatesConfig.metrics, **PPO_METRICS}

    algorithm: Literal["ppo"] = "ppo"
    """Name of the algorithm."""
    num_generations_per_prompt: int = Field(16, ge=1)
    """Responses per prompt. They are not compared with each other: many prompts with one response each work too."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass over the batch, of the critic and of the policy."""
    num_epochs_per_rollout: int = Field(4, ge=1)
    """Passes over each batch, of the critic and then of the policy."""
    overlong_filtering: bool = False
    """Responses cut by the token limit train neither the critic nor the policy."""

    critic: CriticConfig = CriticConfig()
    """The model that predicts rewards."""
    critic_warmup_steps: int = Field(0, ge=0)
    """Steps at the start in which only the critic learns, from responses of the initial policy. A new head predicts
    noise, and advantages against noise undo what the policy can do; VAPO takes 50 steps."""
    value_clip: float | None = Field(None, gt=0)
    """How far a value may move from what the critic said before the step and still gain from it. In units of reward.
    Unset: no bound."""

    gae_gamma: float = Field(1.0, gt=0, le=1)
    """Discount per trained token. Below 1, a reward counts for less the more tokens lead to it."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """1: the reward itself, unbiased and noisy. 0: the critic's word for the next token, biased by all it does not know
    yet. A reward fades by this factor per token, so long responses want it close to 1."""
    gae_lambda_value: float | None = Field(None, ge=0, le=1)
    """``gae_lambda`` of the critic's targets alone; VAPO takes 1. Unset: the same."""
    gae_lambda_policy: float | None = Field(None, ge=0, le=1)
    """``gae_lambda`` of the advantages alone. Unset: the same."""
    length_adaptive_alpha: float | None = Field(None, gt=0)
    """Choose the lambda of the advantages by length: 1 - 1 / (this * tokens of the response). VAPO takes 0.05.
    Excludes ``gae_lambda_policy``."""
    credit: Literal["episode", "turn"] = "episode"
    """Where an episode of several turns is paid. ``episode``: at its last token. ``turn``: what the environment gave
    for a turn at the turn's last token, so that later turns have no part in it; the rest at the end."""
    normalize_advantages: bool = True
    """Give the advantages mean 0 and standard deviation 1 over all trained tokens of the batch."""

    kl_penalty: float = Field(0.01, ge=0)
    """Weight of KL(policy || initial policy). 0 needs no reference model."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where it is charged. ``reward``: at the token that departs, so that the critic foresees it and the tokens before
    share the blame. ``loss``: as a term of its own, as in GRPO."""
    positive_nll_weight: float = Field(0.0, ge=0)
    """Weight of a further term that imitates the right responses (VAPO: 0.1). Right is what the environment calls so,
    or a reward above 0 where it does not say."""
    loss_aggregation: Literal["token", "sequence"] | None = None
    """Average over all response tokens, or over responses of their own averages. Unset: ``token``; for agents
    ``sequence``, where an episode counts once however often it forks."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.generation.temperature == 0:
            yield ConfigIssue("generation.temperature", "greedy responses explore nothing", "use 1.0")
        if self.length_adaptive_alpha is not None and self.gae_lambda_policy is not None:
            yield ConfigIssue("gae_lambda_policy", "excludes length_adaptive_alpha, which chooses it", "keep one")
        if self.max_steps is not None and self.critic_warmup_steps >= self.max_steps:
            yield ConfigIssue(
                "critic_warmup_steps",
                f"the policy would learn in none of max_steps = {self.max_steps}",
                "lower it, or raise max_steps",
            )
        set_here = {name for name, value in self.critic if value is not None}
        for problem in self.auxiliary_models["critic"].policy.problems():
            if problem.path.split(".")[0] in set_here:
                yield ConfigIssue(f"critic.{problem.path}", problem.message, problem.fix)

    @property
    def auxiliary_models(self) -> Mapping[str, AuxiliaryModel]:
        head_start = self.critic_warmup_steps * self.updates_per_step
        critic = self.critic.resolved(self.policy)
        own = AuxiliaryModel(critic, head="value", learns=True, extra_updates=head_start)
        return {**super().auxiliary_models, "critic": own}
