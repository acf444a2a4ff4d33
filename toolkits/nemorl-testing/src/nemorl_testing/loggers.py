"""Checks of loggers: they take every number a run can produce, survive a resume, and close."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from nemorl_testing.kit import NotApplicable, Subject, expect

METRICS = {"train/reward": 0.5, "train/loss": -1.25e-7, "validation/pass@4": 1.0, "timing/train/total_step_time": 3.0}
LOGGED_STEPS = 47
"""Steps before a resume: enough to tell a file that goes on from one that begins anew."""


def check_metrics_are_written(subject: Subject) -> None:
    """What is logged is on disk under the run directory once the logger is closed. (DESIGN 5)"""
    logger, run_dir = _build(subject)
    for step in (1, 2, 3):
        logger.log(METRICS, step)
    logger.close()
    if not subject.settings.writes_files:
        raise NotApplicable("the author says that this logger writes no files (writes_files=False)")
    expect(_bytes_below(run_dir) > 0, f"nothing was written under {run_dir}")


def check_every_number_is_accepted(subject: Subject) -> None:
    """NaN, infinities, huge numbers, integers and an empty record do not end a run. (DESIGN 5)"""
    logger, _ = _build(subject)
    odd = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "huge": 1e300, "tiny": 5e-324, "whole": 7}
    logger.log({f"train/{name}": value for name, value in odd.items()}, 1)
    logger.log({}, 2)
    logger.log({f"train/metric_{number}": 0.5 for number in range(300)}, 3)
    logger.close()


def check_several_records_may_share_a_step(subject: Subject) -> None:
    """Training and validation metrics of one step arrive in two calls; step 0 is a step. (DESIGN 5)"""
    logger, _ = _build(subject)
    logger.log({"validation/accuracy": 0.0}, 0)
    logger.log({"train/reward": 0.5}, 1)
    logger.log({"validation/accuracy": 0.25}, 1)
    logger.close()


def check_resumed_run_goes_on(subject: Subject) -> None:
    """A logger built on a directory that was logged to goes on, repeats steps and keeps what was there. (DESIGN 8)"""
    logger, run_dir = _build(subject)
    for step in range(1, LOGGED_STEPS + 1):
        logger.log({name: value * step for name, value in METRICS.items()}, step)
    logger.close()
    before, size = _digest_below(run_dir), _bytes_below(run_dir)
    resumed = subject.own(subject.config.build(run_dir), "close")
    for step in (LOGGED_STEPS, LOGGED_STEPS + 1):  # after a crash, a run continues from its last checkpoint
        resumed.log(METRICS, step)
    resumed.close()
    if subject.settings.writes_files:
        expect(_digest_below(run_dir) != before, f"{size} bytes before the resume, and the same bytes after")
        # Files that are written in pages need not grow; what was begun anew is smaller, having two steps.
        expect(_bytes_below(run_dir) >= size, f"{size} bytes before the resume, {_bytes_below(run_dir)} after")


def check_close_twice_is_harmless(subject: Subject) -> None:
    """A logger closes unused, and twice. (DESIGN 5)"""
    logger, _ = _build(subject)
    logger.close()
    logger.close()


def _build(subject: Subject) -> tuple[Any, Path]:
    subject.require_modules()
    run_dir = subject.folder / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("algorithm: grpo\nseed: 1\n")
    logger = subject.config.build(run_dir)
    for verb in ("log", "close"):
        expect(callable(getattr(logger, verb, None)), f"{type(logger).__name__} has no {verb}()")
    (run_dir / "config.yaml").unlink()  # so that every byte below is the logger's
    return subject.own(logger, "close"), run_dir


def _digest_below(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
