"""Failures of the environment and a run: what it learns, what its validation says, and a policy that stalls.

    python benchmarks/outcomes.py --seeds 5 --json

A tiny model that adds sloppily (the quickstart's) learns by GRPO. Its environment fails in 30 % of the episodes of
training and validation alike. ``default`` is the table ``rollouts.on_outcome`` as it comes, ``zero`` scores failures 0,
as was common, ``refill`` asks for others. ``true`` is the accuracy afterwards, asked without failures; ``said`` is the
last validation's.

In the second table nothing fails at random. Every answer is wrong and costs 1, but one that ends with 7 makes the
environment hang. A policy that can dodge the cost so does where that pays.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from _common import limit_threads, machine, print_table

THREADS = limit_threads()

FAILED_FRAC = 0.3
STEPS = 60
TABLES: Mapping[str, dict[str, Any]] = {
    "default": {},
    "zero": {"environment_timeout": 0.0, "infrastructure": 0.0},
    "refill": {"environment_timeout": "refill", "infrastructure": "refill"},
}
STALLING: Mapping[str, dict[str, Any]] = {
    "lowest (default)": {},
    "zero": {"policy_timeout": 0.0},
    "drop": {"policy_timeout": "drop"},
}


def right(response: str, answer: str) -> float:
    return float(response.strip() == answer)


class Failing:
    """The environment, which fails in some of its calls."""

    def __init__(self, kind: str, seed: int) -> None:
        self._kind, self._draw = kind, random.Random(seed)

    def __call__(self, prompt: str, response: str, answer: str) -> Any:
        from nemorl.types import Score

        if self._kind != "none" and self._draw.random() < FAILED_FRAC:
            if self._kind == "infrastructure":
                raise ConnectionError("node3 refused")
            return Score(0.0, valid=False, outcome="environment_timeout")
        return right(response, answer)


def stalls(response: str, answer: str) -> bool:
    return response.strip().endswith("7")


def dodging(prompt: str, response: str, answer: str) -> Any:
    """Every answer costs 1; some hang the environment instead."""
    from nemorl.types import Score

    return Score(0.0, outcome="policy_timeout") if stalls(response, answer) else -1.0


def learn(base: Path, folder: Path, seed: int, reward: Any, table: dict[str, Any]) -> dict[str, float]:
    """One run, and what its model then does without failures."""
    import nemorl
    from nemorl.base.files.jsonl import read_jsonl
    from nemorl_cli.console import Console
    from nemorl_rl.data.rows import rows_of
    from nemorl_rl.evaluation.evaluation import Evaluator
    from nemorl_tasks.quickstart import recipe

    config = recipe.grpo_config(base, folder, seed)
    changes: dict[str, Any] = {
        "max_steps": STEPS,
        "num_prompts_per_step": 32,
        "environment": None,
        "rollouts": {"on_outcome": table, "breaker": {"failed_steps": 0, "equal_steps": 0}},
        "validation": {"every": STEPS, "at_start": False},
        "checkpoint": {"every": 0},
        "records": {"max_gib": 0},
    }
    run = nemorl.load_config({**config, **changes})
    run.build().fit(reward_fn=reward, console=Console(quiet=True))
    (said,) = [r["validation/accuracy"] for r in read_jsonl(folder / "metrics.jsonl") if "validation/accuracy" in r]
    rows = rows_of(run.data, "validation") or []
    asked = nemorl.load_config({**config, **changes, "model": str(folder / "model")})
    with Evaluator(
        asked, environment=nemorl.FunctionalRewardWrapper(lambda p, r, answer: right(r, answer))
    ) as evaluator:
        samples = evaluator.evaluate(rows).samples
    true = statistics.fmean(sample.reward for sample in samples)
    stalled = statistics.fmean(stalls(sample.response, sample.prompt.answer or "") for sample in samples)
    return {"said": said, "true": true, "stalls": stalled}


def base_model(folder: Path) -> Path:
    """The model after supervised steps."""
    import nemorl
    from nemorl_cli.console import Console
    from nemorl_rl.data.rows import rows_of
    from nemorl_rl.models.tiny import write_tiny_model
    from nemorl_tasks.quickstart import recipe

    base = write_tiny_model(folder / "base", **recipe.MODEL_SIZE)
    rows = recipe.sloppy_rows(rows_of(recipe.problems(0), "train") or [])
    nemorl.load_config(recipe.sft_config(base, folder / "sft", 0)).build().fit(rows, console=Console(quiet=True))
    return folder / "sft" / "model"


def cases(base: Path, folder: Path, seeds: int, parts: str) -> Iterator[tuple[str, str, list[dict[str, float]]]]:
    """(table, case, results by seed)."""
    settings: list[tuple[str, str, Callable[[int], Any], dict[str, Any]]] = [
        ("failing", "no failures", lambda seed: Failing("none", seed), {})
    ]
    for kind in ("environment_timeout", "infrastructure"):
        for name, table in TABLES.items():
            settings.append(("failing", f"{kind}, {name}", lambda seed, kind=kind: Failing(kind, seed), table))
    settings += [("stalling", name, lambda _: dodging, table) for name, table in STALLING.items()]
    for place, (part, case, reward, table) in enumerate(settings):
        if part not in parts:
            continue
        found = [learn(base, folder / f"{place}-{seed}", seed, reward(seed), table) for seed in range(seeds)]
        yield part, case, found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parts", default="failing,stalling", help="failing, stalling")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {"failing": {}, "stalling": {}}
    with tempfile.TemporaryDirectory() as name:
        base = base_model(Path(name))
        for part, case, results in cases(base, Path(name), options.seeds, options.parts):
            found[part][case] = {key: sorted(round(one[key], 3) for one in results) for key in results[0]}
            print(f"{part}, {case}: {found[part][case]}", flush=True)
    if options.json:
        print(json.dumps({"machine": machine(THREADS), "steps": STEPS, **found}, indent=1))
        return
    for part, columns in (("failing", ("true", "said")), ("stalling", ("stalls",))):
        rows = [[case, *(span(numbers[key]) for key in columns)] for case, numbers in found[part].items()]
        print_table(part, ["case", *columns], rows)


def span(numbers: list[float]) -> str:
    return f"{statistics.median(numbers):.2f} ({numbers[0]:.2f} to {numbers[-1]:.2f})"


if __name__ == "__main__":
    main()
