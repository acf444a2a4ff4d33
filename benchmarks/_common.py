"""What the benchmarks share: the thread limit, the tiny model, medians and the table."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from _turns import StepTime
    from torch import Tensor

WARMUP_STEPS = 2
"""First steps of each side, not counted: they hold set-up, first allocations and kernel selection."""

LENGTH_SPREAD = 0.6
"""Standard deviation of the log of a length: half of the lengths lie within a factor of 1.5 of the median."""
PROMPT_FRAC = 0.1
"""Share of a sequence that is prompt."""
EXTRA_CHARACTERS = "@#$%&[]_|"
"""Bring the character vocabulary to 99 tokens."""


def limit_threads() -> int:
    """Apply ``--threads`` (default 1) to OpenMP and MKL. Call before anything imports torch or numpy."""
    arguments = sys.argv[1:]
    count = int(arguments[arguments.index("--threads") + 1]) if "--threads" in arguments else 1
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(count)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    return count


def start_side(threads: int) -> None:
    """Begin a process: the thread limit, and no progress bars and warnings of the libraries, which drown the tables."""
    import logging
    import warnings

    import torch
    from datasets.utils.logging import disable_progress_bar
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")
    disable_progress_bar()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)


def write_model(path: Path, *, seed: int = 0) -> Path:
    """A Qwen2 of 0.8 M parameters with saved random weights: both sides load exactly these.

    End-of-sequence is one of 99 near-equally likely tokens, so that natural stops give geometric lengths.
    """
    import torch
    from nemorl_rl.models.tiny import ALPHABET, write_tiny_model
    from transformers import AutoConfig, AutoModelForCausalLM

    write_tiny_model(path, alphabet=ALPHABET + EXTRA_CHARACTERS, num_hidden_layers=4, intermediate_size=384)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    model.save_pretrained(path)
    return path


def ragged(sequences: int, mean_tokens: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """``(lengths [B], mask [N])`` of a batch: log-normal lengths, and prompts that are not trained."""
    import torch

    raw = torch.exp(torch.randn(sequences, generator=rng) * LENGTH_SPREAD)
    lengths = (raw * (mean_tokens / raw.mean())).round().long().clamp(min=2)
    place = torch.arange(int(lengths.sum())) - torch.repeat_interleave(torch.cumsum(lengths, 0) - lengths, lengths)
    return lengths, place >= torch.repeat_interleave((lengths * PROMPT_FRAC).long().clamp(min=1), lengths)


@dataclass(frozen=True)
class Summary:
    """One side of one case."""

    cpu_s: float
    """Median process-CPU seconds per step."""
    wall_s: float
    """Median wall seconds per step."""
    tokens_per_s: float
    """All counted tokens over all counted CPU seconds."""
    tokens: float
    """Mean tokens per step."""
    reward: float
    """Mean reward."""

    @classmethod
    def of(cls, steps: Sequence[StepTime]) -> Summary:
        counted = steps[WARMUP_STEPS:]
        tokens = [step.facts["tokens"] for step in counted]
        return cls(
            cpu_s=statistics.median(step.cpu_s for step in counted),
            wall_s=statistics.median(step.wall_s for step in counted),
            tokens_per_s=sum(tokens) / sum(step.cpu_s for step in counted),
            tokens=statistics.mean(tokens),
            reward=statistics.mean(step.facts.get("reward", 0.0) for step in counted),
        )


def machine(threads: int) -> str:
    """One line about where and with what this ran."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("nemorl-core", "trl", "torch", "transformers"))
    cores = f"{os.cpu_count()} x {platform.machine()} cores, {threads} thread(s)"
    return f"{cores}, Python {platform.python_version()}, {packages}"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A plain table on stdout that is valid Markdown."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    print(f"\n{title}\n")
    for row in [columns, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    sys.stdout.flush()
