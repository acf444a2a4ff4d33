"""GRPO as other systems compute it: their numbers worked by hand, and what may stand beside a flavour."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from nemorl.config import load_config
from nemorl.errors import ConfigError
from nemorl_grpo.flavours import ADVANTAGES, LOSSES
from nemorl_grpo.trainer import GRPOTrainer
from nemorl_rl.policy_gradient.advantages import group_advantages
from nemorl_tensors import TokenBatch

MODEL = {"algorithm": "grpo", "model": "org/model"}


def advantages(flavour: str, rewards: list[float]) -> list[float]:
    config: Any = load_config({**MODEL, "advantage": {"name": "grpo", "flavour": flavour}})
    options = {"normalize_std": config.normalize_std, "leave_one_out": config.leave_one_out}
    return group_advantages(rewards, [0] * len(rewards), epsilon=config.std_epsilon, **options)


@pytest.mark.parametrize(
    ("flavour", "first", "others"),
    [
        # mean 1/4, unbiased std sqrt((9/16 + 3/16) / 3) = 1/2
        ("trl", 0.75 / 0.5001, -0.25 / 0.5001),  # 1.4997, -0.4999
        ("verl", 0.75 / 0.500001, -0.25 / 0.500001),  # 1.499997, -0.499999
        ("openrlhf", 0.75 / 0.500000001, -0.25 / 0.500000001),  # 1.5, -0.5
        # The first: the others are 0, and so is their spread. The rest: mean 1/3, std sqrt(1/3) = 0.57735.
        ("nemo_rl", 1.0, -(1 / 3) / (math.sqrt(1 / 3) + 1e-6)),
        ("prime_rl", 0.75, -0.25),
    ],
)
def test_one_right_answer_of_four_is_worth_what_each_system_says(flavour: str, first: float, others: float) -> None:
    assert advantages(flavour, [1, 0, 0, 0]) == pytest.approx([first, others, others, others], abs=1e-12)


@pytest.mark.parametrize("flavour", list(ADVANTAGES))
def test_equal_rewards_teach_nothing_in_any_flavour(flavour: str) -> None:
    assert advantages(flavour, [0.1] * 8) == [0.0] * 8


def loss_and_slope(
    flavour: str, policy: float, advantage: float, reference: float, **knobs: Any
) -> tuple[float, float]:
    """GRPO's loss of one trained token whose old log-prob is -1, and its derivative."""
    config: Any = load_config({**MODEL, "num_epochs_per_rollout": 2, "loss": flavour, **knobs})
    old = torch.tensor([0.0, -1.0])
    batch = TokenBatch.from_sequences([[5, 6]], [[False, True]]).with_tokens(
        advantages=torch.tensor([0.0, advantage]),
        old_logprobs=old,
        generation_logprobs=old,
        reference_logprobs=torch.tensor([0.0, reference]),
    )
    logprobs = torch.tensor([0.0, policy], requires_grad=True)
    trainer = GRPOTrainer(config)
    trainer.setup()
    loss, _ = trainer.loss(logprobs, batch)
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), float(logprobs.grad[1])


def test_verl_bounds_the_loss_of_a_bad_token_that_grew() -> None:
    # ratio e^2 = 7.389 at advantage -1: verl stops at 3 (clip_ratio_c), TRL goes on.
    assert loss_and_slope("verl", 1.0, -1.0, 0.0) == (pytest.approx(3.0), 0.0)
    assert loss_and_slope("trl", 1.0, -1.0, 0.0)[0] == pytest.approx(math.exp(2))


@pytest.mark.parametrize(
    ("flavour", "loss", "slope"),
    [
        # d = reference - policy = -1.5 - (-0.5) = -1; k3 = e^-1 - 1 + 1 = 0.367879; derivative 1 - e^d = 0.632121.
        # The policy is e^0.5 as likely as the old one: TRL weighs the KL by that, and differentiates the weight too.
        ("trl", math.exp(0.5) * math.exp(-1), math.exp(0.5) * (math.exp(-1) + 1 - math.exp(-1))),
        ("verl", math.exp(-1), 1 - math.exp(-1)),
        ("openrlhf", math.exp(-1), 1 - math.exp(-1)),
        ("nemo_rl", math.exp(-1), math.exp(-1) + 1 - math.exp(-1)),  # its gradient has the score-function term
    ],
)
def test_each_flavour_charges_the_kl_in_its_own_way(flavour: str, loss: float, slope: float) -> None:
    found = loss_and_slope(flavour, -0.5, 0.0, -1.5, kl_penalty=1.0)
    assert found == (pytest.approx(loss, rel=1e-5), pytest.approx(slope, rel=1e-5))


def test_one_absurd_token_is_bounded_where_the_system_bounds_it() -> None:
    # d = 10: k3 = e^10 - 11 = 22015.5, which verl, OpenRLHF and NeMo RL cut at 10.
    cut = [loss_and_slope(flavour, -11.0, 0.0, -1.0, kl_penalty=1.0)[0] for flavour in ("verl", "openrlhf", "nemo_rl")]
    assert cut == [10.0, 10.0, 10.0]
    # TRL has no bound; its weight is e^(-11 + 1).
    assert loss_and_slope("trl", -11.0, 0.0, -1.0, kl_penalty=1.0)[0] == pytest.approx(22015.466 * math.exp(-10))


@pytest.mark.parametrize("flavour", list(LOSSES))
def test_the_strength_of_the_kl_may_be_given_beside_a_flavour(flavour: str) -> None:
    config: Any = load_config({**MODEL, "loss": flavour, "kl_penalty": 0.04})
    assert (config.kl_penalty, config.loss.flavour) == (0.04, flavour)


@pytest.mark.parametrize(
    ("config", "path", "words"),
    [
        ({"advantage": "trl", "normalize_std": False}, "normalize_std", "contradicts `advantage: trl`"),
        ({"advantage": {"flavour": "verl"}, "std_epsilon": 1e-4}, "std_epsilon", "contradicts `advantage: verl`"),
        ({"loss": "trl", "clip_high": 0.28}, "clip_high", "contradicts `loss: trl`"),
        ({"loss": "verl", "dual_clip": None}, "dual_clip", "contradicts `loss: verl`"),
        ({"loss": "prime_rl"}, "loss.flavour", "no clipped surrogate"),
        ({"advantage": "trll"}, "advantage.flavour", "'trll' is not one of"),
        ({"advantage": {"name": "rloo", "flavour": "trl"}}, "advantage.name", "'rloo' is not one of"),
        ({"advantage": {"name": "grpo"}}, "advantage.flavour", "is required"),
    ],
)
def test_what_contradicts_a_flavour_is_refused(config: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigError) as found:
        load_config({**MODEL, **config})
    assert [issue.path for issue in found.value.problems] == [path]
    assert words in str(found.value)


def test_a_knob_that_agrees_with_the_flavour_may_stay_and_a_resolved_config_loads_again() -> None:
    config: Any = load_config({**MODEL, "advantage": "trl", "loss": "verl", "leave_one_out": False})
    assert load_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("algorithm", ["dapo", "gspo", "cispo"])
def test_variants_with_the_advantage_of_grpo_have_its_flavours(algorithm: str) -> None:
    config: Any = load_config({"algorithm": algorithm, "model": "org/model", "advantage": "trl"})
    assert (config.std_epsilon, config.leave_one_out) == (1e-4, False)
