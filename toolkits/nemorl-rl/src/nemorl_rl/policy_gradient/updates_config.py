"""UpdatesConfig: what PPO, GRPO and their kin have in common. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from nemorl.errors import ConfigIssue
from pydantic import Field

from nemorl_rl.config import RolloutRunConfig

if TYPE_CHECKING:
    from nemorl_tensors import KLTerm

KLType = Literal["k1", "k2", "k3"]
KLWeights = Literal["generation", "old"]


class UpdatesConfig(RolloutRunConfig):
    """How much is sampled in a step, how often it is learnt from, and what it costs to leave the initial policy."""

    needs_columns: ClassVar[tuple[frozenset[str], ...]] = (frozenset({"prompt"}), frozenset({"messages"}))
    loss_estimator: ClassVar[KLType] = "k3"
    """The estimator of the loss where none is named."""

    num_prompts_per_step: int = Field(32, ge=1)
    """Prompts in a batch."""
    num_generations_per_prompt: int = Field(16, ge=1)
    """Responses per prompt."""
    max_turns: int = Field(1, ge=1)
    """Responses per episode at most, for environments that answer back."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass over the batch. Above 1 the later ones are off-policy and clipping matters."""
    num_epochs_per_rollout: int = Field(1, ge=1)
    """Passes over each batch."""
    overlong_filtering: bool = False
    """Responses cut by the token limit train nothing; they still count in their group's baseline."""

    kl_penalty: float = Field(0.0, ge=0)
    """Weight of KL(policy || initial policy). 0 needs no reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it is charged. ``loss``: a term of its own, each token for itself. ``reward``: taken off what a response
    earns, so that a token also answers for where it led; one more forward pass where there is one update per step."""
    kl_type: KLType | None = None
    """Estimator of the KL (http://joschu.net/blog/kl-approx.html). Unset: ``k1`` in the reward, which takes no other;
    in the loss ``k3``, or ``k2`` for rloo and reinforce_plus_plus_baseline. All have the same expected gradient."""
    kl_gradient: Literal["unbiased", "expectation", "estimator"] = "unbiased"
    """Gradient of the term in the loss. ``unbiased``: that of KL(policy || initial policy), by a score-function term
    for ``k1`` and ``k3``. ``estimator``: the derivative of the formula alone; for ``k3``, as in the GRPO paper, it is
    that of the forward KL(initial policy || policy). ``expectation``: that of the estimator's mean over what the policy
    says; it is ``unbiased`` but for ``k2``, to which it adds a score-function term, as NeMo RL does."""
    kl_importance_weights: bool | Literal["old"] = False
    """``true``: weigh the KL of a token in the loss by policy over sampler: unbiased also for tokens of older weights
    or of another engine, at the price of variance. ``old``: by policy over old policy, for older weights only (TRL)."""
    kl_input_clamp: float = Field(20.0, gt=0, le=40)
    """Nats between policy and initial policy that count at most; in the loss, a token beyond has no gradient."""
    kl_output_clamp: float | None = Field(10.0, gt=0)
    """Largest KL of a token, in nats; in the loss, one beyond has no gradient. null: no bound, and a single token far
    off can outweigh all others."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per batch."""
        return self.num_minibatches * self.num_epochs_per_rollout

    @property
    def needs_reference(self) -> bool:
        return self.kl_penalty > 0

    @property
    def charges_kl(self) -> bool:
        """The KL is part of the reward."""
        return self.kl_penalty > 0 and self.kl_in == "reward"

    @property
    def kl_estimator(self) -> KLType:
        """``kl_type``, decided."""
        return self.kl_type or ("k1" if self.kl_in == "reward" else self.loss_estimator)

    @property
    def reward_kl_penalty(self) -> float:
        """Weight of the KL in the reward."""
        return self.kl_penalty if self.charges_kl else 0.0

    @property
    def loss_kl_penalty(self) -> float:
        """Weight of the KL in the loss."""
        return 0.0 if self.charges_kl else self.kl_penalty

    def kl_term(self) -> KLTerm:
        """The KL of a token, as tensors compute it."""
        from nemorl_tensors import KLTerm

        bounds = self.kl_input_clamp, self.kl_output_clamp
        weights: Mapping[bool | str, KLWeights | None] = {False: None, True: "generation", "old": "old"}
        return KLTerm(self.kl_estimator, *bounds, self.kl_gradient, weights[self.kl_importance_weights])

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        responses = self.num_prompts_per_step * self.num_generations_per_prompt
        if self.num_minibatches > responses:
            yield ConfigIssue(
                "num_minibatches", f"{self.num_minibatches} minibatches of {responses} responses", "lower it"
            )
        if self.kl_in == "reward":
            if self.kl_estimator != "k1":
                yield ConfigIssue(
                    "kl_type",
                    f"as part of the reward, {self.kl_type} has next to no gradient near the initial policy",
                    "use k1, or kl_in: loss",
                )
            for name, neutral in (("kl_gradient", "unbiased"), ("kl_importance_weights", False)):
                if getattr(self, name) != neutral:
                    yield ConfigIssue(name, "has no effect with kl_in: reward", "leave it out, or set kl_in: loss")
        elif self.kl_estimator == "k1" and self.kl_gradient == "estimator":
            yield ConfigIssue(
                "kl_type",
                "the derivative of k1 is zero in expectation: the term would add noise and hold nothing back",
                "set kl_gradient: unbiased, or use k2 or k3",
            )
