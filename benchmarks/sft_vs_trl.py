"""Supervised steps of TRL's SFTTrainer and of nemorl, in turn, on the same model and texts.

    python benchmarks/sft_vs_trl.py --steps 10 --json

TRL runs in its settings that do not attend across samples: batches of 16 padded to the longest, the same with rows
grouped by length, and best-fit packing into 8 x 512 tokens. Speed is real (non-pad) tokens per process-CPU second.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from _common import WARMUP_STEPS, Summary, limit_threads, machine, print_table, start_side, write_model
from _matrices import cpu_model, matrices_line, matrix_speeds
from _turns import Turn, at_step_end, take_turns

THREADS = limit_threads()
BATCH_ROWS = 16
MEDIAN_LENGTH, SPREAD, MAX_LENGTH = 90, 0.9, 480
"""Characters of a text: log-normal, so that a few long ones decide how much a padded batch wastes."""
PACKED = {"packing": True, "packing_strategy": "bfd", "max_length": 512, "per_device_train_batch_size": 8}
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "trl-padding": {"per_device_train_batch_size": BATCH_ROWS},
    "trl-grouped": {"per_device_train_batch_size": BATCH_ROWS, "train_sampling_strategy": "group_by_length"},
    "trl-bfd": PACKED,
}
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Task:
    """What all sides are asked to do."""

    model: Path
    rows: list[dict[str, str]]
    steps: int


def make_rows(count: int, seed: int) -> list[dict[str, str]]:
    """Texts whose characters follow one another (a cycle with noise), so that there is something to learn."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    rows = []
    for _ in range(count):
        length = min(MAX_LENGTH, max(2, round(rng.lognormvariate(0, SPREAD) * MEDIAN_LENGTH)))
        position, text = rng.randrange(26), []
        for _ in range(length):
            position = rng.randrange(26) if rng.random() < 0.1 else position + 1
            text.append(letters[position % 26])
        # TRL learns all of `text` but its first token; nemorl learns `response`, given `prompt`: the same tokens.
        rows.append({"text": "".join(text), "prompt": text[0], "response": "".join(text[1:])})
    return rows


def run_trl(name: str, folder: Path, task: Task, turn: Turn) -> None:
    """TRL's own loop; a callback ends each turn."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    start_side(THREADS)
    batch_tokens: list[int] = []

    class EndTurn(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            turn.step_done(tokens=batch_tokens[state.global_step - 1])

    settings = SFTConfig(
        output_dir=str(folder),
        max_steps=task.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        dataset_text_field="text",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        **TRL_SETTINGS[name],
    )
    texts = Dataset.from_list([{"text": row["text"]} for row in task.rows])
    trainer = SFTTrainer(str(task.model), settings, train_dataset=texts, callbacks=[EndTurn()])
    trainer.remove_callback(PrinterCallback)
    collate = trainer.data_collator

    def counting_collate(examples: list[dict[str, Any]]) -> Any:
        batch_tokens.append(sum(len(example["input_ids"]) for example in examples))
        return collate(examples)

    trainer.data_collator = counting_collate
    trainer.train()


def run_nemorl(name: str, folder: Path, task: Task, turn: Turn) -> None:
    """nemorl's public path; a callback ends each turn."""
    from nemorl_cli.console import Console
    from nemorl_sft.config import SFTConfig

    start_side(THREADS)

    config = SFTConfig(
        model=str(task.model),
        batch_size=BATCH_ROWS,
        policy={"optimizer": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
        validation={"every": 0, "at_end": False},
        checkpoint={"every": 0, "export": False},
        max_steps=task.steps,
        run_dir=folder,
    )
    config.build().fit(dataset=task.rows, callbacks=[at_step_end(turn)], console=Console(quiet=True))


SIDES: dict[str, Callable[[str, Path, Task, Turn], None]] = {
    "nemorl": run_nemorl,
    **dict.fromkeys(TRL_SETTINGS, run_trl),
}


def measure(options: argparse.Namespace) -> dict[str, Summary]:
    """Every side, step by step in turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model", seed=options.seed)
        task = Task(model, make_rows(options.steps * 64, options.seed), options.steps)
        measured = take_turns({side: partial(SIDES[side], side, folder / side, task) for side in options.sides})
    return {side: Summary.of(steps) for side, steps in measured.items()}


def best_of_trl(results: dict[str, Summary], names: Sequence[str]) -> float:
    return max(results[name].tokens_per_s for name in names if name in results)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="steps per side, warm-up included")
    parser.add_argument("--cases", default="mixed", choices=["mixed"], help="length distribution")
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SIDES), help=",".join(SIDES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one last line of JSON")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    start_side(THREADS)
    speeds = matrix_speeds()
    print(machine(THREADS), cpu_model(), matrices_line(speeds), sep="\n")
    results = measure(options)
    ours = results["nemorl"].tokens_per_s if "nemorl" in results else float("nan")
    rows = [
        [side, f"{part.cpu_s:.3f}", f"{part.wall_s:.3f}", f"{part.tokens:,.0f}", f"{part.tokens_per_s:,.0f}",
         f"{ours / part.tokens_per_s:.2f}"]
        for side, part in results.items()
    ]  # fmt: skip
    columns = ["side", "CPU s/step", "wall s/step", "tokens/step", "tokens/s", "nemorl / this"]
    print_table(f"SFT, mixed lengths, {options.steps - WARMUP_STEPS} steps after {WARMUP_STEPS}", columns, rows)
    if options.json:
        against = {"mixed": ["trl-padding", "trl-bfd"], "mixed_grouped": ["trl-grouped"]}
        ratios = {
            case: round(ours / best_of_trl(results, names), 3)
            for case, names in against.items()
            if not results.keys().isdisjoint(names)
        }
        tokens_per_s = {side: part.tokens_per_s for side, part in results.items()}
        where = {"cpu": cpu_model(), "gflop_per_cpu_s": speeds}
        print(json.dumps({"ratios": ratios, "tokens_per_s": tokens_per_s, "machine": where}))


if __name__ == "__main__":
    main()
