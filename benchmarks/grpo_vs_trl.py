"""GRPO steps of TRL's GRPOTrainer and of nemorl, in turn, on the same model, prompts and reward.

    python benchmarks/grpo_vs_trl.py --steps 8 --cases 64,256,p128r64g8,p512r64g16 --json
    python benchmarks/grpo_vs_trl.py --steps 5 --cases smollm2 --model models/SmolLM2-135M-Instruct --no-learning

One optimizer step per batch of 64 responses, no KL term, float32, the Hugging Face generation of each side. Cases are
in ``_grpo_cases``. Both sample the same distribution with natural stops: a random model ends a response with
probability about 1/99 per token. ``--learning`` trains both on a reward that can be learned and prints the two curves.

TRL runs as it does by default (``trl``, which recomputes activations) and in the fastest way that its documentation
has for a CPU (``trl-fast``: no recomputation); ratios are against the faster of the two. Its other ways need a GPU:
vLLM, Liger's kernels, padding-free batches (flash attention). ``trl-batching`` adds transformers' continuous batching,
on request.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from _common import WARMUP_STEPS, Summary, limit_threads, machine, print_table, start_side, write_model
from _grpo_cases import Case, case_of, learning_case
from _matrices import cpu_model, matrices_line, matrix_speeds
from _turns import StepTime, Turn, take_turns

THREADS = limit_threads()
CASES = ("64", "256", "p128r64g8", "p512r64g16")
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl-fast": {"gradient_checkpointing": False},
    "trl-batching": {"gradient_checkpointing": False, "use_transformers_continuous_batching": True},
}


@dataclass(frozen=True)
class Task:
    """A case, for so many steps."""

    case: Case
    steps: int
    seed: int

    @property
    def rows(self) -> list[dict[str, Any]]:
        """As many as the steps need."""
        count = self.steps * self.case.prompts_per_step
        return list(itertools.islice(itertools.cycle(self.case.rows), count))


class Recorder:
    """Rewards of the running step, whichever side asks for them: in TRL's convention, which both know."""

    def __init__(self, function: Callable[[str, str | None], float]) -> None:
        self.function = function
        self.rewards: list[float] = []
        self.tokens = 0
        """Of TRL's last step"""

    def __call__(self, completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        self.tokens = sum(len(ids) for ids in columns.get("completion_ids") or [])
        texts = [part if isinstance(part, str) else part[0]["content"] for part in completions]
        found = [self.function(text, right) for text, right in zip(texts, answer, strict=True)]
        self.rewards += found
        return found

    def take(self) -> float:
        """Mean reward since the last call."""
        mean = statistics.fmean(self.rewards)
        self.rewards.clear()
        return mean


def run_trl(side: str, model: Path, folder: Path, task: Task, turn: Turn) -> None:
    """TRL's own loop; a callback ends each turn."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    start_side(THREADS)
    case, recorder = task.case, Recorder(task.case.reward)

    def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        return recorder(completions, answer, **columns)

    class EndTurn(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            turn.step_done(tokens=recorder.tokens, reward=recorder.take())

    settings = GRPOConfig(
        output_dir=str(folder),
        max_steps=task.steps,
        per_device_train_batch_size=case.prompts_per_step * case.group_size,
        num_generations=case.group_size,
        max_completion_length=case.new_tokens,
        temperature=case.temperature,
        learning_rate=case.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        use_cpu=True,
        bf16=case.precision == "bfloat16",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=task.seed,
        model_init_kwargs={"dtype": case.precision, "attn_implementation": "sdpa"},
        **TRL_SETTINGS[side],
    )
    rows = Dataset.from_list(task.rows)
    trainer = GRPOTrainer(str(model), reward, settings, train_dataset=rows, callbacks=[EndTurn()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def run_nemorl(_side: str, model: Path, folder: Path, task: Task, turn: Turn) -> None:
    """nemorl's public path; a callback ends each turn."""
    from nemorl_cli.console import Console
    from nemorl_grpo.config import GRPOConfig
    from nemorl_rl.callbacks import Callback

    start_side(THREADS)
    case, recorder = task.case, Recorder(task.case.reward)

    def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        return recorder(completions, answer)

    class EndTurn(Callback):
        essential = True

        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            tokens = metrics["mean_gen_tokens_per_sample"] * case.prompts_per_step * case.group_size
            turn.step_done(tokens=tokens, reward=recorder.take())

    config = GRPOConfig(
        model=str(model),
        num_prompts_per_step=case.prompts_per_step,
        num_generations_per_prompt=case.group_size,
        kl_penalty=0.0,
        leave_one_out=False,
        policy={"optimizer": {"lr": case.lr, "weight_decay": 0.0}, "precision": case.precision},
        generation={"max_new_tokens": case.new_tokens, "temperature": case.temperature},
        validation={"every": 0, "at_end": False},
        checkpoint={"every": 0, "export": False},
        max_steps=task.steps,
        seed=task.seed,
        run_dir=folder,
    )
    config.build().fit(dataset=task.rows, reward_fn=reward, callbacks=[EndTurn()], console=Console(quiet=True))


SIDES: dict[str, Callable[[str, Path, Path, Task, Turn], None]] = {
    "nemorl": run_nemorl,
    **dict.fromkeys(TRL_SETTINGS, run_trl),
}
DEFAULT_SIDES = ("nemorl", "trl", "trl-fast")


def measure(sides: Sequence[str], task: Task, model: Path | None) -> dict[str, list[StepTime]]:
    """Run the chosen sides to their end, step by step in turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        used = model or write_model(folder / "model", seed=task.seed)
        return take_turns({side: partial(SIDES[side], side, used, folder / side, task) for side in sides})


def fastest_trl(sides: dict[str, Summary]) -> float:
    """CPU seconds per step of TRL's best; NaN where it did not run."""
    return min((part.cpu_s for side, part in sides.items() if side in TRL_SETTINGS), default=float("nan"))


def speed(options: argparse.Namespace) -> dict[str, dict[str, Summary]]:
    """Every case, all sides; prints one table."""
    results: dict[str, dict[str, Summary]] = {}
    rows = []
    for name in options.cases:
        case = case_of(name, options.lr, options.model)
        model = options.model if name == "smollm2" else None
        measured = measure(options.sides, Task(case, options.steps, options.seed), model)
        sides = results[name] = {side: Summary.of(steps) for side, steps in measured.items()}
        for side, part in sides.items():
            mean_tokens = part.tokens / case.prompts_per_step / case.group_size
            rows.append([
                name, side, f"{part.cpu_s:.3f}", f"{part.wall_s:.3f}", f"{fastest_trl(sides) / part.cpu_s:.2f}",
                f"{part.tokens_per_s:,.0f}", f"{part.reward:.2f}", f"{mean_tokens:.1f}",
            ])  # fmt: skip
    columns = ["case", "side", "CPU s/step", "wall s/step", "best TRL / this", "tokens/s", "reward", "response tokens"]
    print_table(f"GRPO, medians of {options.steps - WARMUP_STEPS} steps after {WARMUP_STEPS}", columns, rows)
    return results


def learning(options: argparse.Namespace) -> dict[str, list[float]]:
    """Reward curves of a case that can be learned."""
    sides = [side for side in options.sides if side in ("nemorl", "trl")]
    measured = measure(sides, Task(learning_case(), options.learning_steps, options.seed), None)
    curves = {side: [step.facts["reward"] for step in steps] for side, steps in measured.items()}
    columns = ["step", *curves]
    rows = [
        [str(step), *(f"{reward:.2f}" for reward in rewards)]
        for step, rewards in enumerate(zip(*curves.values(), strict=True), start=1)
    ]
    print_table("Learning: share of digits among 16 tokens, lr 1e-3", columns, rows)
    return curves


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="steps per side, warm-up included")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=["64", "256"], help=",".join(CASES))
    parser.add_argument("--sides", type=lambda text: text.split(","), default=DEFAULT_SIDES, help=",".join(SIDES))
    parser.add_argument("--model", type=Path, help="of the case smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-6, help="of the timed steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning", action=argparse.BooleanOptionalAction, default=True, help="print reward curves")
    parser.add_argument("--learning-steps", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print one last line of JSON")
    options = parser.parse_args(arguments)
    try:
        for name in options.cases:
            case_of(name, options.lr, options.model)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> None:
    options = parse()
    start_side(THREADS)
    speeds = matrix_speeds()
    print(machine(THREADS), cpu_model(), matrices_line(speeds), sep="\n")
    results = speed(options)
    curves = learning(options) if options.learning else {}
    if options.json:
        ratios = {
            case: round(fastest_trl(sides) / sides["nemorl"].cpu_s, 3)
            for case, sides in results.items()
            if "nemorl" in sides and sides.keys() & TRL_SETTINGS.keys()
        }
        seconds = {
            case: {name: round(part.cpu_s, 4) for name, part in sides.items()} for case, sides in results.items()
        }
        where = {"cpu": cpu_model(), "gflop_per_cpu_s": speeds}
        print(json.dumps({"ratios": ratios, "cpu_s": seconds, "learning": curves, "machine": where}))


if __name__ == "__main__":
    main()
