"""Programs that the ``code`` environment grades per second.

    python benchmarks/code_programs.py --rounds 7 --other /path/to/another/nemorl-tasks/src

Correct programs of one line, two at a time: with three assert statements, with one pair of input and output, and with
ten. With ``--other`` the sources of another version take turns with the installed one, round by round, each in a
process of its own, so that other jobs on the machine meet both. Medians over the rounds, and the range.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from _common import print_table

SUM = "print(sum(map(int, input().split())))"
TASKS: dict[str, tuple[Any, str, int]] = {
    "three asserts": ([f"assert add({n}, 2) == {n + 2}" for n in range(3)], "add = lambda a, b: a + b", 24),
    "one pair": ([{"input": "1 2\n", "output": "3\n"}], SUM, 24),
    "ten pairs": ([{"input": f"{n} 2\n", "output": f"{n + 2}\n"} for n in range(10)], SUM, 4),
}
"""Name -> tests, program, responses per round."""


def work() -> None:
    """Grade what standard input asks for; tell programs per second."""
    from nemorl.types import Prompt
    from nemorl_tasks.code import CodeConfig
    from nemorl_tasks.code.environment import CodeEnvironment

    environment = CodeEnvironment(CodeConfig(timeout_s=20.0, workers=2))

    async def grade(name: str) -> int:
        tests, program, count = TASKS[name]
        prompt = Prompt(0, name, (1,), row={"tests": tests})
        scores = [environment.score(prompt, f"```python\n{program}\n```") for _ in range(count)]
        assert all(score.reward == 1.0 for score in await asyncio.gather(*scores))
        return count

    for line in sys.stdin:
        start = time.perf_counter()
        count = asyncio.run(grade(line.strip()))
        print(count / (time.perf_counter() - start), flush=True)
    environment.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--other", help="src folder of another version")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return
    versions: dict[str, dict[str, str]] = {"installed": {}} | (
        {"other": {"PYTHONPATH": options.other}} if options.other else {}
    )
    workers = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **paths},
        )
        for name, paths in versions.items()
    }

    def ask(worker: subprocess.Popen[str], task: str) -> float:
        assert worker.stdin is not None
        assert worker.stdout is not None
        print(task, file=worker.stdin, flush=True)
        return float(worker.stdout.readline())

    rows = []
    for task in TASKS:
        for worker in workers.values():
            ask(worker, task)
        rates = [{name: ask(worker, task) for name, worker in workers.items()} for _ in range(options.rounds)]
        for name in workers:
            found = [each[name] for each in rates]
            rows.append([task, name, f"{statistics.median(found):.1f}", f"{min(found):.1f} to {max(found):.1f}"])
    for worker in workers.values():
        worker.communicate()
    print_table("Programs graded per second", ["tests", "version", "median", "range"], rows)


if __name__ == "__main__":
    main()
