"""``filtered_logprobs``: trainer and sampler agree on the truncated distribution, and what it excludes is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import nemorl
import pytest
import torch
from nemorl.errors import ConfigError
from nemorl_cli.console import Console
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_tensors import KLTerm, TokenBatch
from nemorl_tensors.filtering import TokenFilter

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]


def settings(model: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    return {
        "algorithm": "grpo",
        "model": str(model),
        "run_dir": str(run_dir),
        "max_steps": 2,
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
        "kl_penalty": 0.0,
        "filtered_logprobs": True,
        "generation": {"max_new_tokens": 4, "top_p": 0.5, "top_k": 20, "temperature": 0.8},
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 0, "export": False},
        "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 1e-5}},
        **changes,
    }


def reward(prompt: str, response: str) -> float:
    return float(sum(map(ord, response)) % 7)


def metrics_of(config: dict[str, Any]) -> dict[str, float]:
    result = nemorl.load_config(config).build().fit(ROWS, reward_fn=reward, console=Console(quiet=True))
    return dict(result.history[0])


@pytest.mark.slow
def test_trainer_and_sampler_agree_on_the_truncated_distribution(tiny_model: Path, tmp_path: Path) -> None:
    filtered = metrics_of(settings(tiny_model, tmp_path / "a", num_minibatches=2))
    whole = metrics_of(settings(tiny_model, tmp_path / "b", num_minibatches=2, filtered_logprobs=False))
    assert filtered["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    assert whole["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    assert filtered["train/filtered_out_frac"] < 0.02
    assert "train/filtered_out_frac" not in whole
    # Half of the probability is left out, so what is left is about twice as likely: the policy learns other steps.
    assert filtered["train/grad_norm"] != pytest.approx(whole["train/grad_norm"], rel=1e-3)


def test_the_kl_is_over_the_whole_vocabulary_and_of_every_trained_token(tiny_model: Path, tmp_path: Path) -> None:
    # At the first step policy and reference are one: under the filter alone the KL would be far from 0.
    found = metrics_of(settings(tiny_model, tmp_path / "run", kl_penalty=0.1))
    assert found["train/kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    assert found["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)

    # Two trained tokens of weight 1/2, one of which the filter leaves out; k2 of log-ratios -0.2 and 0.4 is 0.02 and
    # 0.08. The surrogate counts the first alone: loss = -1/2 + 0.5 * (0.02 + 0.08) / 2.
    batch = TokenBatch.from_sequences([[5, 6, 7]], [[False, True, True]])
    old = torch.tensor([0.0, -1.0, -1.0])
    reference = torch.tensor([0.0, -1.8, -2.6])
    batch = batch.with_tokens(
        advantages=torch.ones(3), old_logprobs=old, generation_logprobs=old, reference_logprobs=reference
    )
    batch = replace(batch, keep=TokenFilter(2, beside_whole=True))
    both = torch.tensor([[0.0, 0.0], [-1.0, -2.0], [-torch.inf, -2.2]], requires_grad=True)
    loss, metrics = ClippedPolicyGradientLoss(kl_penalty=0.5, kl=KLTerm("k2"))(both, batch)
    assert loss.item() == pytest.approx(-0.5 + 0.5 * 0.05, abs=1e-6)
    assert metrics["kl_penalty"].value == pytest.approx(0.05)
    loss.backward()
    assert both.grad is not None
    # d k2 / d policy = log-ratio policy - reference: -0.2 and 0.4, times 0.5 / 2.
    torch.testing.assert_close(both.grad, torch.tensor([[0.0, 0.0], [-0.5, -0.05], [0.0, 0.1]]))


def test_a_token_that_the_policy_would_not_keep_trains_nothing() -> None:
    # Log-ratios 0 and log 2 beside one token of probability 0. Of three tokens with weight 1/3 each, advantage 1 and a
    # ratio clipped at 1.2, two count: -(1 + 1.2) / 3.
    batch = TokenBatch.from_sequences([[5, 6, 7, 8]], [[False, True, True, True]])
    old = torch.tensor([0.0, -1.0, -1.0, -1.0])
    batch = batch.with_tokens(advantages=torch.ones(4), old_logprobs=old, generation_logprobs=old)
    batch = replace(batch, keep=TokenFilter(2))
    policy = torch.tensor([0.0, -1.0, -1.0 + 0.6931, -torch.inf], requires_grad=True)
    loss, metrics = ClippedPolicyGradientLoss()(policy, batch)
    assert loss.item() == pytest.approx(-(1 + 1.2) / 3, abs=1e-4)
    assert metrics["filtered_out_frac"].value == pytest.approx(1 / 3)
    loss.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, -1 / 3, 0.0, 0.0])


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"generation": {"max_new_tokens": 4}}, "filtered_logprobs"),
        ({"generation": {"max_new_tokens": 4, "top_p": 0.5, "min_p": 0.1}}, "generation.min_p"),
        ({"kl_penalty": 0.01, "kl_in": "reward"}, "kl_in"),
        ({"generation": {"max_new_tokens": 4, "top_p": 0.5, "backend": "megatron"}}, "generation.backend"),
    ],
)  # fmt: skip
def test_what_it_excludes_is_refused_by_name(
    changes: dict[str, Any], path: str, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        nemorl.load_config(settings(tiny_model, tmp_path, **changes))
    assert path in {problem.path for problem in refused.value.problems}
