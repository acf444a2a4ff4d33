"""What keeping rollouts costs of a training step, in CPU seconds of all threads.

GRPO steps of a small model on a CPU. After each step its rollout is handed to a recorder that keeps all groups, and the
time until it is on disk is compared with that of its own step: one pair per step, of which the median is shown. The
step is timed without a recorder. The larger a model, the smaller the share: a record costs the same whatever the model.

    python benchmarks/records.py --json records.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _common import limit_threads, machine, print_table, start_side, write_model

SHAPES = ((8, 8, 64), (16, 16, 64), (16, 16, 256))
"""(prompts, responses per prompt, new tokens)"""
STEPS, WARMUP_STEPS = 7, 2


@dataclass(frozen=True)
class Cost:
    """The pairs of one shape."""

    prompts: int
    responses: int
    new_tokens: int
    step_s: list[float]
    """CPU seconds of each step."""
    record_s: list[float]
    """CPU seconds of its record."""
    trainer_s: list[float]
    """Of that, in the thread that trains; the rest is written beside the step."""
    record_bytes: float
    tokens: float
    """Mean per step, prompts included."""

    @property
    def share(self) -> float:
        return statistics.median(record / step for record, step in zip(self.record_s, self.step_s, strict=True))


class Pairs:
    """A callback that times steps, and a recorder beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step_s: list[float] = []
        self.record_s: list[float] = []
        self.trainer_s: list[float] = []
        self.tokens: list[int] = []
        self._kept: tuple[Any, Any] | None = None

    def on_fit_begin(self, trainer: Any) -> None:
        from nemorl_cli.report.records.writing import Recorder
        from nemorl_rl.rollouts.recording import RecordingConfig

        config = RecordingConfig(groups=10**6)
        options: dict[str, Any] = {"validation_every": 0, "decode": trainer.tokenizer.decode, "warn": print}
        self._recorder, trainer.recorder = Recorder(self.folder, config, **options), self

    def on_step_begin(self) -> None:
        self._began = time.process_time()

    def on_step_end(self, step: int) -> None:
        assert self._kept is not None
        step_s, began = time.process_time() - self._began, time.process_time()
        samples, minibatches = self._kept
        own_began = time.thread_time()
        self._recorder.rollout(samples, "train", step)
        self._recorder.batch(samples, minibatches)
        own_s = time.thread_time() - own_began
        self._recorder.truncate_after(step)  # waits until it is written
        if step > WARMUP_STEPS:
            self.step_s.append(step_s)
            self.record_s.append(time.process_time() - began)
            self.trainer_s.append(own_s)
            self.tokens.append(sum(sample.total_tokens for sample in samples))

    def on_fit_end(self) -> None:
        self._recorder.close()

    # What the trainer takes for its recorder

    def rollout(self, *_: Any) -> None: ...

    def rejected(self, *_: Any) -> None: ...

    def updated(self) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def batch(self, samples: Any, minibatches: Sequence[Any]) -> None:
        self._kept = samples, minibatches


def measure(model: Path, shape: tuple[int, int, int]) -> Cost:
    import nemorl
    from nemorl_cli.console import Console
    from nemorl_cli.report.records.reading import FOLDER, record_files

    prompts, responses, new_tokens = shape
    with tempfile.TemporaryDirectory() as folder:
        pairs = Pairs(Path(folder))
        data = {
            "algorithm": "grpo",
            "model": str(model),
            "run_dir": f"{folder}/run",
            "num_prompts_per_step": prompts,
            "num_generations_per_prompt": responses,
            "num_minibatches": 2,
            "kl_penalty": 0.01,
            "max_steps": STEPS,
            "validation": {"every": 0},
            "checkpoint": {"export": False},
            "records": {"max_gib": 0},
            "generation": {"max_new_tokens": new_tokens},
            "policy": {"max_sequence_tokens": new_tokens + 64},
            "plugins": {"hooks": [{"name": "efficiency", "enabled": False}]},
        }
        rows = [{"prompt": f"{i}+1="} for i in range(prompts)]
        trainer = nemorl.load_config(data).build()
        trainer.fit(
            rows, lambda prompt, response: float(len(set(response))), callbacks=[pairs], console=Console(quiet=True)
        )
        size = statistics.mean(file.path.stat().st_size for file in record_files(Path(folder) / FOLDER))
    return Cost(*shape, pairs.step_s, pairs.record_s, pairs.trainer_s, size, statistics.mean(pairs.tokens))


def main() -> None:
    limit_threads()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all numbers here")
    arguments = parser.parse_args()
    start_side(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        costs = [measure(model, shape) for shape in SHAPES]
    print_table(
        f"Records of all groups beside their steps ({machine(arguments.threads)})",
        ["responses", "tokens", "step s", "record s", "trainer's s", "record / step", "us / token", "bytes / token"],
        [
            [
                f"{cost.prompts} x {cost.responses}",
                f"{cost.tokens:,.0f}",
                f"{statistics.median(cost.step_s):.2f}",
                f"{statistics.median(cost.record_s):.4f}",
                f"{statistics.median(cost.trainer_s):.4f}",
                f"{cost.share:.2%}",
                f"{1e6 * statistics.median(cost.record_s) / cost.tokens:.2f}",
                f"{cost.record_bytes / cost.tokens:.1f}",
            ]
            for cost in costs
        ],
    )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": machine(arguments.threads), "costs": [asdict(cost) for cost in costs]}, indent=1)
        )


if __name__ == "__main__":
    main()
