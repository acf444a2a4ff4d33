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
from nemorl_rl.agents.seats import Seated, seat_scores
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


class Cards(Environment):
    """Two seats put down a card each; the higher one wins what the other loses, and the first begins far ahead."""

    name = "cards"

    def __init__(self, tokenizer: Tokenizer, *, has_seats: bool) -> None:
        self.tokenizer, self.has_seats = tokenizer, has_seats

    async def rollout(self, prompt: Prompt, policy: EpisodePolicy) -> Score:
        cards = []
        for seat in ("first", "second"):
            answer = await Seated(policy, seat).complete(self.tokenizer.encode("1=" if seat == "first" else "2="))
            text = self.tokenizer.decode(answer.token_ids)
            cards.append(int(text) if text.isdigit() else -1)
        won = (27 + cards[0] - cards[1]) / 9
        metrics = {"card": sum(cards) / 2}
        both = seat_scores({"first": won, "second": -won}, metrics=metrics)
        return both if self.has_seats else Score(both.reward, metrics=metrics)


@pytest.mark.parametrize("has_seats", only(True, of=(True, False)))
def test_a_zero_sum_game_against_itself_is_learnt_seat_by_seat(
    has_seats: bool, tiny_model: Path, tmp_path: Path
) -> None:
    config = load_config(
        {
            "algorithm": "grpo",
            "model": str(tiny_model),
            "policy": {"init": "random", "max_sequence_tokens": 8, "optimizer": {"lr": 5e-3}},
            "generation": {"max_new_tokens": 1},
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 16,
            "kl_penalty": 0.0,
            "validation": {"every": 0, "at_end": False},
            "rollouts": {"breaker": {"equal_steps": 0}},
            "max_steps": 50,
            "run_dir": str(tmp_path / "run"),
        }
    )
    rows: list[dict[str, Any]] = [{"prompt": [], "game": game} for game in range(4)]
    game = Cards(Tokenizer.load(str(tiny_model)), has_seats=has_seats)
    history = config.build().fit(rows, game, console=Console(quiet=True)).history
    first, last = history[0], history[-1]
    assert first["train/environment/card"] < 3
    assert (last["train/environment/card"] > 8) == has_seats
    assert {record["train/reward"] for record in history} == {0.0}
    assert last["train/token_mult_prob_error"] < 1.001
    if not has_seats:
        assert {record["train/advantages/max"] for record in history} == {0.0}
