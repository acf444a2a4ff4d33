"""Agents that call the policy when they like teach a random model of 40,000 weights, on the CPU, in seconds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from nemorl.config.load import load_config
from nemorl.contracts.environment import Environment
from nemorl.types import Prompt, Score
from nemorl_cli.console import Console
from nemorl_rl.agents.contract import EpisodePolicy
from nemorl_rl.data.tokenizer import Tokenizer
from tiers import only

pytestmark = pytest.mark.slow

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"num_generations_per_prompt": 8, "loss_aggregation": "sequence", "num_minibatches": 2},
    "ppo": {"num_generations_per_prompt": 8, "credit": "turn", "critic": {"optimizer": {"lr": 5e-3}}},
}


class Drafts(Environment):
    """Asks twice at the same time, then goes on from the first answer: an episode of two sequences and three calls."""

    name = "drafts"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    async def rollout(self, prompt: Prompt, policy: EpisodePolicy) -> Score:
        first, other = await asyncio.gather(policy.complete(prompt.token_ids), policy.complete(prompt.token_ids))
        told = (*prompt.token_ids, *first.token_ids, *self.tokenizer.encode_observation("="))
        last = await policy.complete(told)
        earned = tuple(self.digits(answer.token_ids) / 3 for answer in (first, other, last))
        return Score(sum(earned), turn_rewards=earned)

    def digits(self, token_ids: tuple[int, ...]) -> float:
        text = self.tokenizer.decode(token_ids)
        return sum(letter.isdigit() for letter in text) / max(1, len(text))


@pytest.mark.parametrize("algorithm", only("grpo", of=ALGORITHMS))
def test_an_agent_that_forks_teaches_digits(algorithm: str, tiny_model: Path, tmp_path: Path) -> None:
    config = load_config(
        {
            "algorithm": algorithm,
            "model": str(tiny_model),
            "policy": {"init": "random", "max_sequence_tokens": 48, "optimizer": {"lr": 5e-3}},
            "generation": {"max_new_tokens": 6},
            "num_prompts_per_step": 4,
            "validation": {"every": 0, "at_end": False},
            "max_steps": 40,
            "run_dir": str(tmp_path / "run"),
            **ALGORITHMS[algorithm],
        }
    )
    rows = [{"prompt": f"{a}+{b}="} for a in range(2, 10) for b in range(2, 10)]
    agent = Drafts(Tokenizer.load(str(tiny_model)))
    history = config.build().fit(rows, agent, console=Console(quiet=True)).history
    first, last = history[0], history[-1]
    assert (first["train/environment/calls"], first["train/environment/sequences"]) == (3.0, 2.0)
    assert first["train/reward"] < 0.3
    assert last["train/reward"] > 0.75
    assert max(record["train/token_mult_prob_error"] for record in history) < 1.001  # trained is what was sampled
