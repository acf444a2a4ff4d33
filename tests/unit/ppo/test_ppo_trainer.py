"""What a step of PPO does, on real models of 40,000 weights: who learns when, from what, starting from where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.contracts.environment import Environment
from nemorl.errors import BackendError
from nemorl.types import FinishReason, Prompt, Sample, Samples, Score, Step
from nemorl_cli.console import Console
from nemorl_ppo.config import PPOConfig
from nemorl_ppo.trainer import PPOTrainer, require_same_tokens
from nemorl_rl.callbacks import Callback
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors import TokenBatch
from recorded_messages import Raises

ROWS = [{"prompt": f"{a}+{b}="} for a in range(9) for b in range(9)]
PLAIN: dict[str, Any] = {"kl_penalty": 0, "gae_lambda": 1.0}


def digits(prompt: str, response: str) -> float:
    return sum(character.isdigit() for character in response) / 8


def train(
    model: Path, run_dir: Path, reward: Any = digits, *, callbacks: Sequence[object] = (), **knobs: Any
) -> list[dict[str, float]]:
    """The training metrics of each step."""
    config = PPOConfig(**{
        "model": str(model),
        "policy": {"init": "random", "optimizer": {"lr": 1e-2}, "max_sequence_tokens": 64},
        "critic": {"optimizer": {"lr": 3e-3}},
        "num_prompts_per_step": 3,
        "num_generations_per_prompt": 2,
        "num_epochs_per_rollout": 2,
        "generation": {"max_new_tokens": 8},
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 0},
        "max_steps": 1,
        "cluster": {"gpus_per_node": 0},
        "run_dir": run_dir,
        "seed": 3,
        **knobs,
    })  # fmt: skip
    history = config.build().fit(ROWS, reward, callbacks=callbacks, console=Console(quiet=True)).history
    return [record for record in history if "train/reward" in record]


class Opinions(Callback):
    """What the policy and the critic say of one text after each step."""

    def __init__(self) -> None:
        self.logprobs: list[list[float]] = []
        self.values: list[list[float]] = []

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        text = TokenBatch.from_sequences([[9, 10, 11, 12]], [[False, True, True, True]])
        self.logprobs.append(trainer.run.policy.get_logprobs(text).tolist())
        self.values.append(trainer.critic.get_values(text).tolist())


@pytest.mark.slow
def test_only_the_critic_learns_in_its_warmup(tiny_model: Path, tmp_path: Path) -> None:
    opinions, decaying = Opinions(), {"schedule": {"kind": "linear"}}
    steps = train(
        tiny_model,
        tmp_path / "run",
        callbacks=[opinions],
        max_steps=4,
        critic_warmup_steps=2,
        critic=decaying,
        policy={"init": "random", "max_sequence_tokens": 64, **decaying},
    )
    assert ["train/loss" in step for step in steps] == [False, False, True, True]
    assert all("train/critic/loss" in step for step in steps)
    assert opinions.logprobs[0] == opinions.logprobs[1] != opinions.logprobs[2]
    assert opinions.values[0] != opinions.values[1] != opinions.values[2]
    # Each decays over its own updates, two per step: the last is 1/8 of the critic's 1e-5 and 1/4 of the policy's 1e-6.
    assert steps[3]["train/critic/lr"] == pytest.approx(1e-5 / 8)
    assert steps[3]["train/lr"] == pytest.approx(1e-6 / 4)


def test_without_a_reference_no_log_probs_are_computed_that_nobody_reads(tiny_model: Path, tmp_path: Path) -> None:
    on_policy = {**PLAIN, "num_epochs_per_rollout": 1}
    (step,) = train(tiny_model, tmp_path / "run", **on_policy)
    assert "timing/train/policy_and_reference_logprobs" not in step
    assert (step["train/probs_ratio_min"], step["train/probs_ratio_max"]) == (1.0, 1.0)
    assert "train/kl_penalty" not in step


class _TwoTurns(Environment):
    """Every turn is worth 1."""

    def start(self, prompt: Prompt) -> Any:
        return _Talk()


class _Talk:
    turns = 0

    def step(self, response: str) -> Step:
        self.turns += 1
        return Step(Score(1.0), "go on", done=self.turns == 2)


@pytest.mark.slow
def test_samples_of_an_engine_that_is_not_the_policy_are_weighed(tiny_model: Path, tmp_path: Path) -> None:
    plain = train(tiny_model, tmp_path / "plain", **PLAIN)
    half = train(tiny_model, tmp_path / "half", importance_correction={"kind": "truncated", "cap": 0.5}, **PLAIN)
    # The sampler is the policy: every ratio is 1, which a cap of 0.5 halves, and the policy's gradient with it.
    assert half[0]["train/sampling_importance_ratio"] == pytest.approx(0.5)
    assert half[0]["train/is_oob_ratio"] == pytest.approx(1.0)
    assert "train/is_oob_ratio" not in plain[0]
    assert half[0]["train/grad_norm"] < plain[0]["train/grad_norm"]
    assert half[0]["train/critic/loss"] == pytest.approx(plain[0]["train/critic/loss"])


def test_the_rewards_of_all_turns_reach_the_first_token(tiny_model: Path, tmp_path: Path) -> None:
    # gamma = lambda = 1 and no KL: what follows every trained token is worth 1 + 1, whatever the critic said.
    (step,) = train(tiny_model, tmp_path / "run", _TwoTurns(), **PLAIN, max_turns=2)
    assert step["train/avg_turns_per_sample"] == 2
    assert step["train/critic/returns_min"] == pytest.approx(2.0, abs=1e-6)
    assert step["train/critic/returns_max"] == pytest.approx(2.0, abs=1e-6)


@pytest.mark.slow
def test_the_kl_is_charged_at_the_token_that_departs(tiny_model: Path, tmp_path: Path) -> None:
    # In step 2 the policy has moved. Rewards are 0, so with gamma = lambda = 1 a return is -weight * (KL to come).
    _, step = train(
        tiny_model, tmp_path / "run", lambda prompt, response: 0.0, max_steps=2, kl_penalty=10.0, gae_lambda=1.0
    )
    assert step["train/reward"] == 0.0
    assert abs(step["train/kl_penalty"]) > 1e-4
    assert step["train/critic/returns_min"] < -1e-3


def reward_model(folder: Path, **sizes: Any) -> Path:
    """A sequence classifier that finds every text worth exactly 0."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    write_tiny_model(folder, **{"hidden_size": 32, "intermediate_size": 64, **sizes})
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder, num_labels=1))
    torch.nn.init.zeros_(model.score.weight)
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_critic_may_start_from_a_reward_model(tiny_model: Path, tmp_path: Path) -> None:
    critic = {"model_name": str(reward_model(tmp_path / "rm"))}
    (step,) = train(tiny_model, tmp_path / "run", critic=critic)
    assert (step["train/critic/values_min"], step["train/critic/values_max"]) == (0.0, 0.0)
    (step,) = train(tiny_model, tmp_path / "other")
    assert step["train/critic/values_min"] < step["train/critic/values_max"]


def test_a_critic_that_reads_other_tokens_is_refused(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    tokenizer = Tokenizer.load(str(tiny_model))
    require_same_tokens(tokenizer, str(write_tiny_model(tmp_path / "same")))
    stranger = write_tiny_model(tmp_path / "stranger", alphabet="9876543210+=")
    with raises(BackendError):
        require_same_tokens(tokenizer, str(stranger))


def test_rewards_are_shaped_and_cut_responses_left_out_before_anybody_learns() -> None:
    """Scaled from [0, 1] to [-1, 1]; then 3 tokens, with a buffer of 2 before 4, cost half of the penalty of 1."""
    config = PPOConfig(
        model="org/model",
        reward_scaling={"target_min": -1.0},
        overlong_penalty={"max_response_tokens": 4, "buffer_tokens": 2},
        overlong_filtering=True,
    )

    def response(ids: tuple[int, ...], reward: float, end: FinishReason) -> Sample:
        mask = (False, *[True] * len(ids))
        return Sample(Prompt(0, "1+1=", (5,)), (5, *ids), mask, (0.0, *[-1.0] * len(ids)), Score(reward), "2", end)

    samples = [response((6, 7, 8), 1.0, "stop"), response((6, 7, 8, 9), 0.0, "length")]
    batch = PPOTrainer(config).to_batch(Samples(samples))
    assert batch["episode_rewards"].tolist() == [0.5, -2.0]  # 1 - 1/2; -1 - 2/2
    assert batch.mask.tolist() == [False, True, True, True, *[False] * 5]
    assert batch.loss_weights.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, *[0] * 5])


@pytest.mark.slow
def test_a_step_whose_responses_were_all_cut_changes_nothing_and_ends_no_run(tiny_model: Path, tmp_path: Path) -> None:
    opinions = Opinions()
    generation = {"max_new_tokens": 1}
    [step, _] = train(
        tiny_model, tmp_path / "run", callbacks=[opinions], overlong_filtering=True, generation=generation, max_steps=2
    )
    assert opinions.logprobs[0] == opinions.logprobs[1]
    assert all(math.isfinite(value) for value in step.values())
