"""The answer pairs of the tests, through the ``math`` environment and through math-verify alone, side by side.

    pip install math-verify
    python benchmarks/math_grading.py
    python benchmarks/math_grading.py --show 20

math-verify is called as NeMo RL calls it: the truth in a box and read as LaTeX, the response read as LaTeX and as a
plain expression. Both graders run in this process, one pair after the other; math-verify has 5 s for a pair.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _common import limit_threads, print_table

limit_threads()
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "math_env"))

from answer_pairs import Pair, changed_truths, generated_pairs, written_pairs  # noqa: E402
from nemorl_math_env import worker  # noqa: E402
from nemorl_math_env.answers import decide, final_answer, is_number, reference_answer  # noqa: E402

Accepts = Callable[[str, str], bool]


def ours(truth: str, response: str) -> bool:
    """The ``math`` environment's verdict, with the worker's part in this process."""
    truth = reference_answer(truth)
    given = final_answer(response, numeric=is_number(truth))
    if given is None:
        return False
    decided = decide(truth, given)
    return worker.grade(truth, given) == "right" if decided is None else decided


def math_verify_alone() -> Accepts:
    """math-verify's verdict, configured as in NeMo RL's math environment."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def accepts(truth: str, response: str) -> bool:
        expected = parse(rf"\boxed{{{truth}}}", [LatexExtractionConfig()])
        given = parse(response, [ExprExtractionConfig(), LatexExtractionConfig()])
        return bool(verify(expected, given))

    return accepts


def measure(accepts: Accepts, pairs: list[Pair]) -> tuple[list[bool], list[float]]:
    verdicts, times_s = [], []
    for pair in pairs:
        started = time.perf_counter()
        try:
            verdicts.append(accepts(pair.truth, pair.response))
        except Exception:  # no verdict is no reward
            verdicts.append(False)
        times_s.append(time.perf_counter() - started)
    return verdicts, times_s


def peer_pairs(tests: Path) -> list[Pair]:
    """What math-verify's own tests say of a truth and a response: their tuples of two texts and a verdict, with or
    without a flag behind it."""
    found = []
    for node in ast.walk(ast.parse(tests.read_text(encoding="utf-8"))):
        match node:
            case ast.Tuple(elts=[ast.Constant(str() as truth), ast.Constant(str() as response), verdict, *flags]):
                values = [item.value for item in (verdict, *flags) if isinstance(item, ast.Constant)]
                if len(values) == 1 or (len(values) == 2 and isinstance(values[1], bool)):
                    found.append(Pair(truth, response, bool(values[0]), "math-verify's tests"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", type=int, default=0, help="print so many wrong verdicts of each grader and kind")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON too")
    parser.add_argument("--peer-tests", type=Path, help="math-verify's tests/test_all.py: its pairs instead of ours")
    options = parser.parse_args()
    pairs = [*written_pairs(), *generated_pairs(), *changed_truths()]
    if options.peer_tests is not None:
        pairs = peer_pairs(options.peer_tests)
    by_category: dict[str, list[int]] = defaultdict(list)
    for index, pair in enumerate(pairs):
        by_category[pair.category.partition(" ")[0] if "generated" in pair.category else pair.category].append(index)
    print(f"{len(pairs)} pairs, math-verify {version('math-verify')}, Python {platform.python_version()}")
    figures: dict[str, Any] = {}
    for name, accepts in (("nemorl", ours), ("math-verify", math_verify_alone())):
        accepts("x+1", r"\boxed{1+x}")  # imports and tables
        verdicts, times_s = measure(accepts, pairs)
        rows = []
        for category, indices in [*by_category.items(), ("all but unevaluated", None)]:
            chosen = [i for i in indices or range(len(pairs)) if indices or pairs[i].category != "unevaluated"]
            wrong = [i for i in chosen if not pairs[i].is_right]
            right = [i for i in chosen if pairs[i].is_right]
            rows.append(
                [
                    category,
                    f"{sum(verdicts[i] for i in wrong)} of {len(wrong)}",
                    f"{sum(not verdicts[i] for i in right)} of {len(right)}",
                ]
            )
        print_table(name, ["pairs", "wrong, accepted", "right, rejected"], rows)
        median_ms, longest_ms = 1e3 * statistics.median(times_s), 1e3 * max(times_s)
        print(f"{name}: median {median_ms:.2f} ms, longest {longest_ms:.0f} ms, total {sum(times_s):.1f} s\n")
        figures[name] = {"rows": rows, "median_ms": median_ms, "longest_ms": longest_ms}
        for is_right in (False, True):
            mistakes = [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict != pair.is_right]
            for pair in [pair for pair in mistakes if pair.is_right == is_right][: options.show]:
                print("rejects" if is_right else "accepts", repr(pair.truth), "<-", repr(pair.response))
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
