"""How `nemorl view` does with many records: the index, the first answers, searches, and the page in Chromium.

Records are made by the writer that runs use: 100,000 responses of 100 tokens in steps of 1,000, with log-probs of
sampler and trainer. Measured are seconds of the first index, of the questions that the page asks (medians of 5), and,
where playwright and Chromium are installed, from opening the page to its headline numbers and to its first response.
Each as time on the wall and as CPU time of this process, which other jobs on the machine do not lengthen.

    python benchmarks/view.py --json view.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _common import limit_threads, machine, print_table

PER_STEP, GROUP, TOKENS = 1000, 8, 100
WORDS = [
    "the",
    "sum",
    "of",
    "seven",
    "apples",
    "and",
    "nine",
    "pears",
    "is",
    "first",
    "then",
    "because",
    "therefore",
    "wait",
    "check",
    "again",
    "answer",
    "box",
    "so",
]
CHROMIUM = "/usr/bin/chromium"
REPEATS = 5
Pair = tuple[float, float]
"""(seconds on the wall, CPU seconds)"""


def write_run(folder: Path, records: int) -> None:
    """A run of as many records."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("algorithm: grpo\nmodel: tiny\ndata: arithmetic\nenvironment: math\n")
    (folder / "events.jsonl").write_text('{"time": 1000.0, "event": "started"}\n')
    steps = records // PER_STEP
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            numbers = {f"train/metric_{number}": step * number / 7 for number in range(40)}
            file.write(
                json.dumps({"step": step, "time": 1000.0 + step, "train/reward": step / steps, **numbers}) + "\n"
            )
    for step in range(1, steps + 1):
        _write_step(folder, step)


def _write_step(folder: Path, step: int) -> None:
    import pyarrow.parquet as pq
    from nemorl.types import Prompt, Sample, Score
    from nemorl_cli.report.records.schema import WRITING
    from nemorl_cli.report.records.table import Group, Rollout, table_of
    from nemorl_cli.report.records.tokens import Trained

    rng = np.random.default_rng(step)
    groups, trained = [], []
    for number in range(PER_STEP // GROUP):
        prompt = Prompt(number, f"problem {step} {number}", (1, 2, 3))
        samples = []
        for _ in range(GROUP):
            logprobs = -rng.exponential(size=TOKENS).astype(np.float32)
            right = bool(rng.integers(0, 2))
            text = " ".join(rng.choice(WORDS, TOKENS)) + (f" rare{step:05}" if right else "")
            samples.append(
                Sample(
                    prompt,
                    token_ids=(*prompt.token_ids, *rng.integers(4, 4000, TOKENS).tolist()),
                    response_mask=(False,) * 3 + (True,) * TOKENS,
                    generation_logprobs=(0.0,) * 3 + tuple(logprobs.tolist()),
                    response=text,
                    score=Score(float(right), correct=right),
                    finish_reason="stop",
                )
            )
            whole = np.concatenate([np.zeros(3, np.float32), logprobs])
            noise = rng.normal(0, 1e-3, len(whole)).astype(np.float32)
            weights = np.full(len(whole), 1e-5, np.float32)
            fields = {"old_logprobs": whole + noise, "advantages": np.ones_like(whole), "loss_weights": weights}
            trained.append(Trained(1, fields))
        groups.append(Group(number, samples))
    rollout = Rollout("big", "train", step, 1000.0 + step, groups, trained=trained)
    path = folder / f"records/train/step_{step:06}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table_of(rollout, lambda tokens: " ".join(map(str, tokens))), path, **WRITING)


class Clock:
    """Seconds on the wall and of this process since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> Pair:
        return time.perf_counter() - self._wall, time.process_time() - self._cpu


def median_of(pairs: Sequence[Pair]) -> Pair:
    return statistics.median(wall for wall, _ in pairs), statistics.median(cpu for _, cpu in pairs)


def taken(call: Callable[[], Any]) -> Pair:
    """Of a few calls, after one that nobody counts."""
    call()
    found = []
    for _ in range(REPEATS):
        clock = Clock()
        call()
        found.append(clock.read())
    return median_of(found)


def questions(run: Any, steps: int) -> dict[str, Callable[[], Any]]:
    """What the page asks, by what it is asked for."""
    from nemorl_cli.report.viewing.queries import Wanted

    middle = steps // 2
    first = run.responses(Wanted(split="train", step=middle, limit=1))["rows"][0]
    every = {"split": "train", "limit": 200}
    return {
        "overview (curves, metrics, settings)": run.overview,
        "steps": run.steps,
        "all responses of a step": lambda: run.responses(Wanted(split="train", step=middle)),
        "one response, whole": lambda: run.response(first["sample_id"], "train", middle),
        "search of a rare word, all steps": lambda: run.responses(Wanted(**every, search=f"rare{middle:05}")),
        "search of two common words, all steps": lambda: run.responses(Wanted(**every, search="apples pears")),
        "search of a phrase, all steps": lambda: run.responses(Wanted(**every, search='"seven nine therefore"')),
        "largest mismatch of all steps": lambda: run.responses(Wanted(**every, sort="mismatch")),
        "all wrong, largest gradient, all steps": lambda: run.responses(
            Wanted(**every, only=["all_wrong"], sort="gradient")
        ),
    }


def paints(url: str) -> dict[str, Pair]:
    """Seconds from opening the page to its headline numbers, and to the first response of the samples."""
    from playwright.sync_api import sync_playwright

    found: dict[str, list[Pair]] = {"page: headline numbers": [], "page: first response": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(REPEATS + 1):
            for name, view, wanted in (
                ("page: headline numbers", "overview", ".tile"),
                ("page: first response", "samples", ".turn"),
            ):
                page = browser.new_page()
                clock = Clock()
                page.goto(f"{url}#{view}", wait_until="commit")
                page.wait_for_selector(wanted)
                found[name].append(clock.read())
                page.close()
        browser.close()
    return {name: median_of(times[1:]) for name, times in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    limit_threads()
    from nemorl_insight.view.serving import Viewer
    from nemorl_insight.view.watched import WatchedRun

    with tempfile.TemporaryDirectory() as folder:
        run_dir, cache = Path(folder) / "big", Path(folder) / "cache"
        write_run(run_dir, options.records)
        run = WatchedRun(run_dir, cache)
        clock = Clock()
        run.follow()
        seconds = {"first 8 files indexed": clock.read()}
        while run.follow():
            pass
        seconds["all indexed, once"] = clock.read()
        seconds |= {name: taken(call) for name, call in questions(run, options.records // PER_STEP).items()}
        sizes = {
            "records_mib": sum(path.stat().st_size for path in run_dir.rglob("*.parquet")) / 2**20,
            "index_mib": sum(path.stat().st_size for path in cache.iterdir()) / 2**20,
        }
        if Path(CHROMIUM).exists():
            with Viewer([run_dir], cache) as viewer:
                seconds |= paints(viewer.url)
    rows = [(name, f"{wall:.3f}", f"{cpu:.3f}") for name, (wall, cpu) in seconds.items()]
    print_table(f"{options.records:,} records", ("what", "seconds", "CPU seconds"), rows)
    if options.json is not None:
        facts = {"machine": machine(1), "records": options.records, **sizes, "seconds": seconds}
        options.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
