"""A reward model learns what pairs have in common, and GRPO improves what it rewards. CPU, seconds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from nemorl_cli.console import Console
from nemorl_grpo import GRPOConfig
from nemorl_preference.rm import RewardModelConfig, RMConfig
from nemorl_rl.models.tiny import write_tiny_model

pytestmark = pytest.mark.slow

LETTERS = "abcdefgx"
RUN = {"validation": {"every": 0}, "cluster": {"gpus_per_node": 0}}


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Two texts of one length; the one with more x is the chosen one."""
    rng = random.Random(seed)
    rows = []
    while len(rows) < count:
        texts = ["".join(rng.choices(LETTERS, weights=[1] * 7 + [3], k=8)) for _ in range(2)]
        rejected, chosen = sorted(texts, key=lambda text: text.count("x"))
        if chosen.count("x") > rejected.count("x"):
            rows.append({"prompt": rng.choice(LETTERS), "chosen": chosen, "rejected": rejected})
    return rows


def test_a_reward_model_learns_and_a_policy_learns_from_it(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = str(write_tiny_model(tmp_path / "tiny", alphabet=LETTERS, **sizes))
    policy = {"init": "random", "optimizer": {"lr": 2e-3}}

    # 1. Pairs that differ in how often they hold an x: a held-out pair is ranked right more than 9 times in 10.
    judge = RMConfig(model=model, policy=policy, batch_size=32, max_steps=60, run_dir=tmp_path / "rm", **RUN)
    data = {"train": pairs(1024, 0), "validation": pairs(128, 1)}
    result = judge.build().fit(dataset=data, console=Console(quiet=True))
    assert result.metrics["validation/accuracy"] > 0.9

    # 2. A policy that is rewarded by it says x more and more.
    pupil = GRPOConfig(
        model=model,
        policy=policy,
        environment=RewardModelConfig(model=str(tmp_path / "rm" / "model"), device="cpu"),
        generation={"max_new_tokens": 8},
        num_prompts_per_step=4,
        num_generations_per_prompt=8,
        max_steps=25,
        run_dir=tmp_path / "grpo",
        **RUN,
    )
    prompts = [{"prompt": letter} for letter in LETTERS]
    said: list[float] = []

    class Listen:
        def on_rollout_end(self, trainer: object, step: int, samples: object) -> None:
            texts = [sample.response for sample in samples]  # type: ignore[attr-defined]
            said.append(sum(text.count("x") for text in texts) / max(1, sum(map(len, texts))))

    rewards = [
        record["train/reward"]
        for record in pupil.build().fit(dataset=prompts, callbacks=[Listen()], console=Console(quiet=True)).history
    ]
    assert rewards[-1] > rewards[0] + 1.0
    assert said[-1] > said[0] + 0.3
