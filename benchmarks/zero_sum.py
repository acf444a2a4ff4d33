"""A zero-sum game that a policy plays against itself: one reward per episode, a shared baseline, and one per role.

    python benchmarks/zero_sum.py --seeds 3

Two seats, ``first`` and ``second``, each put down a card from 0 to 9, unseen by the other. The first seat earns
``(edge + its card - the other's) / 9``, the second the opposite, so an episode's rewards add up to 0; what is no card
counts as -1. The best card is a 9 whatever the other does. A random model of two layers plays both seats. ``card`` is
the mean card of the last five steps, ``steps`` the first step from which the mean of five is at least 8 (``-``: none).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from _common import limit_threads, machine, print_table

THREADS = limit_threads()

STEPS = 60
BEST = 9
GOAL = 8.0
WINDOW = 5


class Case(NamedTuple):
    """How a game is learnt from."""

    has_seats: bool
    baseline: str
    edge: int


CASES: Mapping[str, Case] = {
    "one reward per episode": Case(False, "role", 0),
    "seats, shared baseline": Case(True, "shared", 0),
    "seats, baseline per role": Case(True, "role", 0),
    "edge of 27, shared baseline": Case(True, "shared", 27),
    "edge of 27, baseline per role": Case(True, "role", 27),
}


def value_of(card: str) -> int:
    return int(card) if card in map(str, range(BEST + 1)) else -1


def card_game(tokenizer: Any, edge: int, *, has_seats: bool) -> Any:
    """The environment."""
    from nemorl.contracts.environment import Environment
    from nemorl.types import Score
    from nemorl_rl.agents.seats import Seated, seat_scores

    class Cards(Environment):
        name = "cards"

        async def rollout(self, prompt: Any, policy: Any) -> Any:
            cards = []
            for number, seat in enumerate(("first", "second"), start=1):
                answer = await Seated(policy, seat).complete(tokenizer.encode(f"{number}="))
                cards.append(value_of(tokenizer.decode(answer.token_ids)))
            won = (edge + cards[0] - cards[1]) / BEST
            metrics = {"card": fmean(cards)}
            if not has_seats:
                return Score(0.0, {}, metrics)
            return seat_scores({"first": won, "second": -won}, metrics=metrics)

    return Cards()


def learn(case: Case, base: Path, folder: Path, seed: int, steps: int) -> list[float]:
    """One run: the mean card of each step."""
    import nemorl
    from nemorl_cli.console import Console
    from nemorl_rl.data.tokenizer import Tokenizer

    config = nemorl.load_config(
        {
            "algorithm": "grpo",
            "model": str(base),
            "seed": seed,
            "policy": {"init": "random", "max_sequence_tokens": 8, "optimizer": {"lr": 3e-3}},
            "generation": {"max_new_tokens": 1},
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 16,
            "kl_penalty": 0.0,
            "seat_baseline": case.baseline,
            "max_steps": steps,
            "validation": {"every": 0, "at_end": False},
            "checkpoint": {"every": 0},
            "records": {"max_gib": 0},
            "rollouts": {"breaker": {"equal_steps": 0}},
            "run_dir": str(folder),
        }
    )
    rows = [{"prompt": [], "game": game} for game in range(4)]
    environment = card_game(Tokenizer.load(str(base)), case.edge, has_seats=case.has_seats)
    history = config.build().fit(rows, environment, console=Console(quiet=True)).history
    return [record["train/environment/card"] for record in history if "train/environment/card" in record]


def summary(cards: list[float]) -> dict[str, float | None]:
    means = [fmean(cards[start : start + WINDOW]) for start in range(len(cards) - WINDOW + 1)]
    reached = next((start + 1 for start, mean in enumerate(means) if mean >= GOAL), None)
    return {"card": round(means[-1], 2), "steps": reached}


def results(base: Path, folder: Path, seeds: int, steps: int) -> Iterator[tuple[str, list[dict[str, float | None]]]]:
    for number, (name, case) in enumerate(CASES.items()):
        runs = [learn(case, base, folder / f"{number}-{seed}", seed, steps) for seed in range(seeds)]
        yield name, [summary(cards) for cards in runs]


def span(numbers: list[float | None]) -> str:
    found = sorted(number for number in numbers if number is not None)
    if len(found) < len(numbers):
        return f"- in {len(numbers) - len(found)} of {len(numbers)}" + (f", else {found}" if found else "")
    return f"{median(found):g} ({found[0]:g} to {found[-1]:g})"


def main() -> None:
    from nemorl_rl.models.tiny import write_tiny_model

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args()
    found: dict[str, dict[str, list[float | None]]] = {}
    with tempfile.TemporaryDirectory() as name:
        base = write_tiny_model(Path(name) / "base")
        for case, runs in results(base, Path(name), options.seeds, options.steps):
            found[case] = {key: [one[key] for one in runs] for key in ("card", "steps")}
            print(f"{case}: {found[case]}", flush=True)
    if options.json:
        print(json.dumps({"machine": machine(THREADS), "steps": options.steps, **found}, indent=1))
        return
    rows = [[case, span(numbers["card"]), span(numbers["steps"])] for case, numbers in found.items()]
    print_table(f"cards, {options.steps} steps", ["case", "card", "steps"], rows)


if __name__ == "__main__":
    main()
