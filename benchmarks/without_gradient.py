"""What it saves to compute responses without advantage forward only: CPU seconds with and without, in one run.

    python benchmarks/without_gradient.py --repeats 9 --json
    python benchmarks/without_gradient.py --cases 27m --shares 0.34
    python benchmarks/without_gradient.py --recipe --steps 60

A case is a model and a batch of groups; of a share of the groups all responses have an advantage, of the others none.
The same ``train_step`` is timed with GRPO's loss and with one that hides what it knows about its gradient, in turn.
``floor`` is the time if the other responses cost nothing but a forward pass: time of all * (1 - 2 / 3 of their share).

``--recipe`` runs the quickstart without its KL penalty and hides it in every other step: whole steps, rollout included.

Times are medians, in CPU seconds of the process; ratios are medians of those of neighbours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import limit_threads, machine, print_table, start_side

THREADS = limit_threads()

import torch  # noqa: E402  after the thread limit
from nemorl import Callback, Console  # noqa: E402
from nemorl.config import PolicyConfig, load_config  # noqa: E402
from nemorl.resources.worker import WorkerContext  # noqa: E402
from nemorl_dtensor import DTensorConfig  # noqa: E402
from nemorl_rl.data.rows import rows_of  # noqa: E402
from nemorl_rl.models.tiny import write_tiny_model  # noqa: E402
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss  # noqa: E402
from nemorl_tasks.quickstart import recipe  # noqa: E402
from nemorl_tensors import TokenBatch  # noqa: E402

SHARES = (0.95, 0.53, 0.34)
"""Of groups with different rewards in the quickstart: in its first steps, on average, and at its end."""


@dataclass(frozen=True)
class Case:
    """A model, and groups of responses to it."""

    model: Mapping[str, Any]
    groups: int
    responses: int
    prompt_tokens: int
    response_tokens: int


CASES = {
    "quickstart": Case(recipe.MODEL_SIZE, 64, 8, 6, 3),
    "27m": Case(
        {
            "architecture": "llama",
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
        },
        8,
        8,
        32,
        32,
    ),
}


class Hides:
    """A loss that says nothing about its gradient."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires

    def __call__(self, logprobs: torch.Tensor, batch: TokenBatch) -> Any:
        return self.inner(logprobs, batch)


def batch_of(case: Case, share: float, seed: int = 0) -> TokenBatch:
    """Random tokens; ``share`` of the groups have advantages."""
    draw = torch.Generator().manual_seed(seed)
    count, length = case.groups * case.responses, case.prompt_tokens + case.response_tokens
    prompts = torch.randint(8, 80, (case.groups, case.prompt_tokens), generator=draw).repeat_interleave(
        case.responses, 0
    )
    answers = torch.randint(8, 80, (count, case.response_tokens), generator=draw)
    batch = TokenBatch.from_sequences(
        torch.cat((prompts, answers), 1).tolist(),
        [[False] * case.prompt_tokens + [True] * case.response_tokens] * count,
    )
    teaches = torch.arange(case.groups) < round(share * case.groups)
    advantages = torch.randn(count, generator=draw) * teaches.repeat_interleave(case.responses)
    sampled = -torch.rand(batch.num_tokens, generator=draw)
    return batch.with_tokens(advantages=advantages.repeat_interleave(length), generation_logprobs=sampled)


def pairs(calls: Mapping[str, Any], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each call, all of them in turn, after one round that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if round_:
                found[name].append(time.process_time() - start)
    return found


def measure(name: str, share: float, repeats: int) -> dict[str, Any]:
    """One case at one share of groups that teach."""
    case, loss = CASES[name], ClippedPolicyGradientLoss(on_policy=True)
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_model(Path(folder), **case.model)
        policy = PolicyConfig(model_name=str(path), init="random", optimizer={"lr": 1e-9})
        backend = DTensorConfig().build(policy, WorkerContext(seed=0), reference=False)
        batch = batch_of(case, share)
        later = batch.select(range(len(batch) // 4, len(batch)))
        found = pairs(
            {
                "all": lambda: backend.train_step(batch, Hides(loss)),
                "some": lambda: backend.train_step(batch, loss),
                "old": lambda: backend.get_logprobs(batch),
                "later": lambda: backend.get_logprobs(later),
            },
            repeats,
        )
        skipped = float(backend.train_step(batch, loss)["skipped_backward_frac"].value)
        backend.shutdown()
    middle = {part: statistics.median(times) for part, times in found.items()}
    return {
        "case": name,
        "share": share,
        "tokens": batch.num_tokens,
        "skipped_backward_frac": skipped,
        "all_s": middle["all"],
        "some_s": middle["some"],
        "floor_s": middle["all"] * (1 - 2 / 3 * skipped),
        "ratio": statistics.median(a / s for a, s in zip(found["all"], found["some"], strict=True)),
        "old_logprobs_s": middle["old"],
        "later_old_logprobs_s": middle["later"],
    }


class Alternates(Callback):
    """Hides the gradient's zeros from the backend in every other step, and notes the CPU seconds of each."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, float]] = []
        """Seconds of the step, of its update, and the share of groups that teach"""
        self.update_s = 0.0

    def on_fit_begin(self, trainer: Any) -> None:
        train_step = trainer.run.policy.train_step

        def timed(minibatch: TokenBatch, loss: Any) -> Any:
            start = time.process_time()
            metrics = train_step(minibatch, loss if len(self.steps) % 2 else Hides(loss))
            self.update_s = time.process_time() - start
            return metrics

        trainer.run.policy.train_step = timed
        self.start = time.process_time()

    def on_step_end(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        now = time.process_time()
        self.steps.append((now - self.start, self.update_s, metrics["baseline_reward/pct_mixed"]))
        self.start = time.process_time()


def run_recipe(steps: int) -> dict[str, Any]:
    """The quickstart's GRPO from its SFT on, without KL penalty, validation and checkpoints."""
    seen, plain = Alternates(), {"validation": {"every": 0, "at_start": False, "at_end": False}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = write_tiny_model(folder / "base", **recipe.MODEL_SIZE)
        rows = recipe.sloppy_rows(rows_of(recipe.problems(0), "train") or [])
        load_config(recipe.sft_config(base, folder / "sft", 0)).build().fit(rows, console=Console(quiet=True))
        config = recipe.grpo_config(folder / "sft" / "model", folder / "grpo", 0)
        changes = {"kl_penalty": 0.0, "max_steps": steps, "checkpoint": {"every": 0, "export": False}, **plain}
        given: dict[str, Any] = {"callbacks": [seen], "console": Console(quiet=True)}
        load_config({**config, **changes}).build().fit(**given)
    counted = seen.steps[2 : 2 + (steps - 2) // 2 * 2]
    hidden, shown = counted[::2], counted[1::2]
    return {
        "steps": len(counted),
        "pct_mixed": statistics.mean(mixed for _, _, mixed in counted),
        **{
            f"{what}_{part}_s": statistics.median(step[place] for step in found)
            for place, part in enumerate(("step", "update"))
            for what, found in (("all", hidden), ("some", shown))
        },
        "step_ratio": statistics.median(a[0] / s[0] for a, s in zip(hidden, shown, strict=True)),
        "update_ratio": statistics.median(a[1] / s[1] for a, s in zip(hidden, shown, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", default="quickstart,27m", help=f"of {', '.join(CASES)}")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="of groups that teach")
    parser.add_argument("--repeats", type=int, default=9, help="pairs of a case")
    parser.add_argument("--recipe", action="store_true", help="whole steps of the quickstart instead")
    parser.add_argument("--steps", type=int, default=60, help="of the quickstart")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    arguments = parser.parse_args()
    start_side(THREADS)
    if arguments.recipe:
        result = run_recipe(arguments.steps)
    else:
        shares, cases = map(float, arguments.shares.split(",")), arguments.cases.split(",")
        rows = [measure(*each, arguments.repeats) for each in ((c, s) for s in shares for c in cases)]
        result = {"rows": rows, "ratios": {f"{row['case']}@{row['share']}": row["ratio"] for row in rows}}
    if arguments.json:
        print(json.dumps({"machine": machine(THREADS), **result}, indent=2))
        return
    print(machine(THREADS))
    found = result.get("rows", [result])
    table = [[f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()] for row in found]
    print_table("With and without", [*found[0]], table)


if __name__ == "__main__":
    main()
