"""Where the lives of tiny runs are forked from: a process that has lived one of them in peace."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from faulty_files import build
from nemorl_rl.models.tiny import write_tiny_model
from subjects import SUBJECTS
from warm import Warm

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@contextmanager
def warm(folder: Path, subjects: Sequence[str] = ("grpo",)) -> Iterator[Warm]:
    """What forks the lives of these subjects. Its own life was in one process, and it has their imports."""
    folder.mkdir(parents=True, exist_ok=True)
    first = folder / "first"
    shutil.rmtree(first, ignore_errors=True)
    arguments = {
        "model": str(write_tiny_model(folder / "tiny", **SIZES)),
        "run_dir": str(first),
        "imports": [name for subject in subjects for name in SUBJECTS[subject].imports],
        **files(folder),
    }
    with Warm("tiny_runs:train", arguments, preload=build(folder)) as found:
        yield found


def files(folder: Path) -> dict[str, str]:
    """Where a life is traced, and says how it ended."""
    return {name: str(folder / name) for name in ("trace", "outcome")}
