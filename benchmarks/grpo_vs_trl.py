"""GRPO steps of TRL's GRPOTrainer and of nemorl, in turn, on the same model, prompts and reward.

    python benchmarks/grpo_vs_trl.py --steps 8 --cases 64,256 --json

8 prompts x 8 generations, one optimizer step per batch, no KL term, float32, the Hugging Face generation of each side.
Both sample the same distribution with natural stops: a random model ends a response with probability about 1/99 per
token. ``--learning`` trains both on a reward that can be learned and prints the two curves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from _common import WARMUP_STEPS, Summary, limit_threads, machine, print_table, start_side, write_model
from _turns import StepTime, Turn, take_turns

THREADS = limit_threads()
PROMPTS = ["3+4=", "12*5=", "abc+d=", "9-2=", "x*y=", "77+1=", "Hello:", "a,b,c"]
"""Eight prompts of 4 to 6 character tokens."""
NUM_GENERATIONS = 8
CASES = {"64": 64, "256": 256}


def distinct_characters(text: str) -> float:
    """The reward of the timed steps: how many different characters a response has."""
    return float(len(set(text)))


def digit_share(text: str) -> float:
    """The reward of the learning check: about 0.1 for a random model, at best 1."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


@dataclass(frozen=True)
class Task:
    """What both sides are asked to do."""

    new_tokens: int
    lr: float
    steps: int
    reward: Callable[[str], float]
    seed: int
    trl_gradient_checkpointing: bool


class Recorder:
    """Rewards of the running step, whichever side asks for them."""

    def __init__(self, function: Callable[[str], float]) -> None:
        self.function = function
        self.rewards: list[float] = []

    def __call__(self, text: str) -> float:
        reward = self.function(text)
        self.rewards.append(reward)
        return reward

    def take(self) -> float:
        """Mean reward since the last call."""
        mean = statistics.fmean(self.rewards)
        self.rewards.clear()
        return mean


def run_trl(model: Path, folder: Path, task: Task, turn: Turn) -> None:
    """TRL's own loop; a callback ends each turn."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    start_side(THREADS)
    recorder, tokens = Recorder(task.reward), [0]

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens[0] = sum(len(ids) for ids in completion_ids)
        return [recorder(text) for text in completions]

    class EndTurn(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            turn.step_done(tokens=tokens[0], reward=recorder.take())

    settings = GRPOConfig(
        output_dir=str(folder),
        max_steps=task.steps,
        per_device_train_batch_size=len(PROMPTS) * NUM_GENERATIONS,
        num_generations=NUM_GENERATIONS,
        max_completion_length=task.new_tokens,
        learning_rate=task.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=task.trl_gradient_checkpointing,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=task.seed,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )
    rows = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS] * task.steps)
    trainer = GRPOTrainer(str(model), reward, settings, train_dataset=rows, callbacks=[EndTurn()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def run_nemorl(model: Path, folder: Path, task: Task, turn: Turn) -> None:
    """nemorl's public path; a callback ends each turn."""
    from nemorl_commands.console import Console
    from nemorl_grpo.config import GRPOConfig
    from nemorl_rl.callbacks import Callback

    start_side(THREADS)
    recorder = Recorder(task.reward)

    def reward(prompt: str, response: str) -> float:
        return recorder(response)

    class EndTurn(Callback):
        essential = True

        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            tokens = metrics["mean_gen_tokens_per_sample"] * len(PROMPTS) * NUM_GENERATIONS
            turn.step_done(tokens=tokens, reward=recorder.take())

    config = GRPOConfig(
        model=str(model),
        num_prompts_per_step=len(PROMPTS),
        num_generations_per_prompt=NUM_GENERATIONS,
        kl_penalty=0.0,
        leave_one_out=False,
        policy={"optimizer": {"lr": task.lr, "weight_decay": 0.0}},
        generation={"max_new_tokens": task.new_tokens},
        validation={"every": 0, "at_end": False},
        checkpoint={"every": 0, "export": False},
        max_steps=task.steps,
        seed=task.seed,
        run_dir=folder,
    )
    rows = [{"prompt": prompt} for prompt in PROMPTS] * task.steps
    config.build().fit(dataset=rows, reward_fn=reward, callbacks=[EndTurn()], console=Console(quiet=True))


SIDES: dict[str, Callable[[Path, Path, Task, Turn], None]] = {"nemorl": run_nemorl, "trl": run_trl}


def measure(sides: Sequence[str], task: Task) -> dict[str, list[StepTime]]:
    """Run the chosen sides to their end, step by step in turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model", seed=task.seed)
        return take_turns({side: partial(SIDES[side], model, folder / side, task) for side in sides})


def speed(options: argparse.Namespace) -> dict[str, dict[str, Summary]]:
    """Every case, both sides; prints one table."""
    results: dict[str, dict[str, Summary]] = {}
    rows = []
    for case in options.cases:
        measured = measure(options.sides, task_of(options, CASES[case], options.lr, options.steps, distinct_characters))
        sides = results[case] = {side: Summary.of(steps) for side, steps in measured.items()}
        for side, part in sides.items():
            ratio = f"{sides['trl'].cpu_s / part.cpu_s:.2f}" if "trl" in sides else "-"
            rows.append([
                case, side, f"{part.cpu_s:.3f}", f"{part.wall_s:.3f}", ratio, f"{part.tokens_per_s:,.0f}",
                f"{part.reward:.2f}", f"{part.tokens / len(PROMPTS) / NUM_GENERATIONS:.1f}",
            ])  # fmt: skip
    columns = ["case", "side", "CPU s/step", "wall s/step", "TRL / this", "tokens/s", "reward", "response tokens"]
    print_table(f"GRPO, medians of {options.steps - WARMUP_STEPS} steps after {WARMUP_STEPS}", columns, rows)
    return results


def learning(options: argparse.Namespace) -> dict[str, list[float]]:
    """Reward curves on 16 new tokens at a rate of 1e-3: equal speed is worth nothing without equal learning."""
    measured = measure(options.sides, task_of(options, 16, 1e-3, options.learning_steps, digit_share))
    curves = {side: [step.facts["reward"] for step in steps] for side, steps in measured.items()}
    columns = ["step", *curves]
    rows = [
        [str(step), *(f"{reward:.2f}" for reward in rewards)]
        for step, rewards in enumerate(zip(*curves.values(), strict=True), start=1)
    ]
    print_table("Learning: share of digits among 16 tokens, lr 1e-3", columns, rows)
    return curves


def task_of(
    options: argparse.Namespace, new_tokens: int, lr: float, steps: int, reward: Callable[[str], float]
) -> Task:
    return Task(new_tokens, lr, steps, reward, options.seed, options.trl_gradient_checkpointing)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="steps per side, warm-up included")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES), help="64,256")
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SIDES), help="nemorl,trl")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-6, help="of the timed steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning", action=argparse.BooleanOptionalAction, default=True, help="print reward curves")
    parser.add_argument("--learning-steps", type=int, default=15)
    parser.add_argument(
        "--trl-gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True, help="TRL's own default"
    )
    parser.add_argument("--json", action="store_true", help="print one last line of JSON")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    start_side(THREADS)
    print(machine(THREADS))
    results = speed(options)
    curves = learning(options) if options.learning else {}
    if options.json:
        ratios = {
            case: round(sides["trl"].cpu_s / sides["nemorl"].cpu_s, 3)
            for case, sides in results.items()
            if len(sides) == len(SIDES)
        }
        seconds = {
            case: {name: round(part.cpu_s, 4) for name, part in sides.items()} for case, sides in results.items()
        }
        print(json.dumps({"ratios": ratios, "cpu_s": seconds, "learning": curves}))


if __name__ == "__main__":
    main()
