"""Preference steps of TRL's DPOTrainer and of nemorl, in turn, on the same model and pairs.

    python benchmarks/dpo_vs_trl.py --steps 12 --json

Both compute the reference's log-probs before the first step (`trl-precomputed` and `nemorl`), or with a frozen model
in every step (`trl-model` and `nemorl-model`). TRL 1.16 has one layout on the CPU: a batch padded to its longest
sequence (its `padding_free` needs flash attention). `trl-grouped`, which has to be asked for, gives up random batches:
with a column of lengths added by hand, TRL forms them of pairs of similar length. Speed is real (non-pad) tokens per
process-CPU second.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from _common import WARMUP_STEPS, Summary, limit_threads, machine, print_table, start_side, write_model
from _matrices import cpu_model, matrices_line, matrix_speeds
from _turns import StepTime, Turn, at_step_end, take_turns

THREADS = limit_threads()
BATCH_PAIRS = 16
SPREAD = 0.9
CASES = {"mixed": (90, 480), "short": (60, 240)}
"""Median and longest characters of a prompt and of a response: log-normal, so that a few long ones decide how much
padding wastes. `mixed` has the texts of sft_vs_trl.py."""
EXACT = re.compile(r"p(\d+)r(\d+)")
"""Prompts and responses of exactly so many characters: nothing is padded. `p256r128` has long prompts, which the two of
a pair share."""
LEARNING_RATE, BETA = 1e-4, 0.05
TOLERANCE = 1e-4
"""Largest difference of losses. That of step 1 is log 2 for everyone; that of step 2 shows that the update was the
same."""


@dataclass(frozen=True)
class Task:
    """What all sides are asked to do."""

    model: Path
    rows: list[dict[str, str]]
    """In the order in which they are trained on, each once (but for `trl-grouped`)"""
    steps: int


def make_rows(case: str, count: int, seed: int) -> list[dict[str, str]]:
    """Chosen responses go on with the alphabet (a cycle with noise), rejected ones go through it backwards."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    exact = EXACT.fullmatch(case)

    def drawn_length() -> int:
        median, longest = CASES[case]
        return min(longest, max(2, round(rng.lognormvariate(0, SPREAD) * median)))

    def text(stride: int, part: int) -> str:
        length = int(exact[part]) if exact else drawn_length()
        position, found = rng.randrange(26), []
        for _ in range(length):
            position = rng.randrange(26) if rng.random() < 0.1 else position + stride
            found.append(letters[position % 26])
        return "".join(found)

    return [{"prompt": text(1, 1), "chosen": text(1, 2), "rejected": text(-1, 2)} for _ in range(count)]


def real_tokens(rows: Sequence[dict[str, Any]]) -> int:
    """Tokens of both sequences of each pair: a character is one, and so is the end."""
    return sum(2 * len(row["prompt"]) + len(row["chosen"]) + len(row["rejected"]) + 2 for row in rows)


TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "trl-precomputed": {"precompute_ref_log_probs": True, "train_sampling_strategy": "sequential"},
    "trl-model": {"train_sampling_strategy": "sequential"},
    "trl-grouped": {
        "precompute_ref_log_probs": True,
        "train_sampling_strategy": "group_by_length",
        "length_column_name": "length",
        "remove_unused_columns": False,
    },
}


def run_trl(name: str, folder: Path, task: Task, turn: Turn) -> None:
    """TRL's own loop; a callback ends each turn."""
    os.environ["TQDM_DISABLE"] = "1"
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    start_side(THREADS)

    batch_tokens: list[int] = []

    class EndTurn(TrainerCallback):
        loss = math.nan

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            turn.step_done(tokens=batch_tokens[state.global_step - 1], loss=self.loss)

    settings = DPOConfig(
        output_dir=str(folder),
        max_steps=task.steps,
        per_device_train_batch_size=BATCH_PAIRS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        beta=BETA,
        max_length=None,
        precompute_ref_batch_size=BATCH_PAIRS,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        **TRL_SETTINGS[name],
    )
    end_turn = EndTurn()
    pairs = Dataset.from_list([{**row, "length": real_tokens([row])} for row in task.rows])
    trainer = DPOTrainer(str(task.model), args=settings, train_dataset=pairs, callbacks=[end_turn])
    trainer.remove_callback(PrinterCallback)
    compute, collate = trainer.compute_loss, trainer.data_collator

    def noting_loss(*args: Any, **kwargs: Any) -> Any:
        found = compute(*args, **kwargs)
        end_turn.loss = float(found.detach())
        return found

    def counting_collate(examples: list[dict[str, Any]]) -> Any:
        found = collate(examples)
        batch_tokens.append(int(found["attention_mask"].sum()))
        return found

    trainer.compute_loss, trainer.data_collator = noting_loss, counting_collate
    trainer.train()


def run_nemorl(name: str, folder: Path, task: Task, turn: Turn) -> None:
    """nemorl's public path; a callback ends each turn."""
    from nemorl_cli.console import Console
    from nemorl_preference.dpo.config import DPOConfig
    from nemorl_rl.data.rows import RowDataModule

    start_side(THREADS)

    config = DPOConfig(
        model=str(task.model),
        batch_size=BATCH_PAIRS,
        beta=BETA,
        reference="model" if name == "nemorl-model" else "precomputed",
        policy={"optimizer": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
        validation={"every": 0, "at_end": False},
        checkpoint={"every": 0, "export": False},
        max_steps=task.steps,
        run_dir=folder,
    )
    in_order = RowDataModule(task.rows, BATCH_PAIRS, seed=0, shuffle=False)
    config.build().fit(dataset=in_order, callbacks=[at_step_end(turn)], console=Console(quiet=True))


SIDES: dict[str, Callable[[str, Path, Task, Turn], None]] = {
    "nemorl": run_nemorl,
    "nemorl-model": run_nemorl,
    **dict.fromkeys(TRL_SETTINGS, run_trl),
}
DEFAULT_SIDES = [side for side in SIDES if side != "trl-grouped"]


def measure(case: str, options: argparse.Namespace) -> dict[str, list[StepTime]]:
    """Every side, step by step in turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model", seed=options.seed)
        task = Task(model, make_rows(case, options.steps * BATCH_PAIRS, options.seed), options.steps)
        return take_turns({side: partial(SIDES[side], side, folder / side, task) for side in options.sides})


def check_equal_work(measured: dict[str, list[StepTime]]) -> None:
    """All sides with the same batches trained on the same tokens, and lost the same.

    Raises:
        RuntimeError: they did not, so that their times do not compare.
    """
    found = {
        side: [(step.facts["tokens"], step.facts["loss"]) for step in steps]
        for side, steps in measured.items()
        if side != "trl-grouped"
    }
    for number in range(2):
        tokens, losses = zip(*(steps[number] for steps in found.values()), strict=True)
        if len(set(tokens)) > 1 or max(losses) - min(losses) > TOLERANCE:
            told = {side: steps[number] for side, steps in found.items()}
            raise RuntimeError(f"the sides do not do the same work; (tokens, loss) of step {number + 1}: {told}")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="steps per side, warm-up included")
    parser.add_argument(
        "--cases", type=lambda text: text.split(","), default=["mixed"], help=f"{','.join(CASES)},p256r128"
    )
    parser.add_argument("--sides", type=lambda text: text.split(","), default=DEFAULT_SIDES, help=",".join(SIDES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one last line of JSON")
    options = parser.parse_args(arguments)
    for case in options.cases:
        if case not in CASES and not EXACT.fullmatch(case):
            parser.error(f"there is no case {case!r}: use {', '.join(CASES)}, or sizes such as p256r128")
    return options


def report(case: str, measured: dict[str, list[StepTime]]) -> dict[str, float]:
    """Print the table of a case; tokens per CPU second of each side."""
    results = {side: Summary.of(steps) for side, steps in measured.items()}
    ours = results["nemorl"].tokens_per_s if "nemorl" in results else float("nan")
    rows = []
    for side, part in results.items():
        losses = [measured[side][number].facts["loss"] for number in (1, -1)]
        times = [f"{part.cpu_s:.3f}", f"{part.wall_s:.3f}", f"{part.tokens:,.0f}", f"{part.tokens_per_s:,.0f}"]
        rows.append([side, *times, f"{ours / part.tokens_per_s:.2f}", *(f"{loss:.5f}" for loss in losses)])
    columns = ["side", "CPU s/step", "wall s/step", "tokens/step", "tokens/s", "nemorl / this", "loss 2", "last loss"]
    steps = len(next(iter(measured.values())))
    print_table(f"DPO, {case} lengths, {steps - WARMUP_STEPS} steps after {WARMUP_STEPS}", columns, rows)
    return {side: part.tokens_per_s for side, part in results.items()}


def main() -> None:
    options = parse()
    start_side(THREADS)
    speeds_of_products = matrix_speeds()
    print(machine(THREADS), cpu_model(), matrices_line(speeds_of_products), sep="\n")
    # "mixed" is against TRL's faster setting; "mixed_model" compares both with a reference model in every step.
    against = {
        "": ("nemorl", "trl-precomputed"),
        "_model": ("nemorl-model", "trl-model"),
        "_grouped": ("nemorl", "trl-grouped"),
    }
    ratios, speeds = {}, {}
    for case in options.cases:
        measured = measure(case, options)
        check_equal_work(measured)
        speed = speeds[case] = report(case, measured)
        for suffix, (mine, theirs) in against.items():
            if {mine, theirs} <= speed.keys():
                ratios[case + suffix] = round(speed[mine] / speed[theirs], 3)
    if options.json:
        where = {"cpu": cpu_model(), "gflop_per_cpu_s": speeds_of_products}
        print(json.dumps({"ratios": ratios, "tokens_per_s": speeds, "machine": where}))


if __name__ == "__main__":
    main()
