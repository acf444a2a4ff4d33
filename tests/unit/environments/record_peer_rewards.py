"""Records what NeMo RL's reward functions say of our drawn answers: its own code, run from its repository.

    python tests/unit/environments/record_peer_rewards.py REPOSITORY

REPOSITORY is a git repository of NVIDIA-NeMo/RL, with or without a work tree; the functions are taken from its HEAD by
name. Its formulas are compared by math-verify, which grades as ``docs/results/math-grading.md`` tells. Here numbers are
compared instead, so that what is recorded is NeMo RL's part: the text that it takes for the answer, and what it pays.
Writes ``peer_rewards.json`` beside this file: rewards in units of ``SCALE``, as 32-bit integers, packed.
"""

from __future__ import annotations

import ast
import base64
import json
import re
import subprocess
import sys
import zlib
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from drawn_answers import COUNT, Drawn, boxed_numbers, boxes, numbers, value_of, words

RECORD = Path(__file__).with_name("peer_rewards.json")
SCALE = 1e-6
"""Unit of the recorded rewards. GIoUs of drawn boxes lie below 1000."""
PATH = "nemo_rl/environments/rewards.py"


def packed(rewards: list[float]) -> str:
    """Rewards as text."""
    units = array("i", (round(reward / SCALE) for reward in rewards))
    return base64.b85encode(zlib.compress(units.tobytes(), 9)).decode()


def unpacked(text: str) -> list[float]:
    """The rewards again, to half a unit."""
    units = array("i", zlib.decompress(base64.b85decode(text)))
    return [unit * SCALE for unit in units]


def recorded() -> dict[str, list[float]]:
    """The recorded rewards by case; of answer number i, the i-th."""
    return {name: unpacked(text) for name, text in json.loads(RECORD.read_text())["rewards"].items()}


def same_number(golds: list[str], answers: list[str]) -> tuple[float, None]:
    """In place of math-verify: the boxes, or boxes in them, hold one number."""
    gold, answer = (value_of(_opened(_opened(text))) for text in (*golds, *answers))
    return float(gold is not None and gold == answer), None


def _opened(text: str) -> str:
    found = re.fullmatch(r"\s*\\boxed\{(.*)\}\.?\s*", text, re.DOTALL)
    return found[1] if found else text


def functions(source: str) -> dict[str, Callable[..., Any]]:
    """The functions of NeMo RL's file, with ``boxed``; what it imports and builds of math-verify is replaced."""
    scope: dict[str, Any] = {"re": re, "np": np, "math_verify_func": same_number, "TimeoutException": TimeoutError}
    kept = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.ImportFrom) and node.module == "typing")
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "boxed")
    ]
    exec(compile(ast.Module(kept, []), PATH, "exec"), scope)
    return scope


def main(repository: str) -> None:
    """Write the record."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", repository, *arguments], check=True, capture_output=True, text=True).stdout

    theirs = functions(git("show", f"HEAD:{PATH}"))
    clevr = theirs["combine_reward_functions"](
        [(theirs["format_reward"], 0.2), (theirs["exact_answer_alphanumeric_reward"], 0.8)]
    )
    giou = theirs["bbox_giou_reward"]
    cases: dict[str, tuple[Callable[..., Any], Callable[[int], Drawn]]] = {
        "format": (theirs["format_reward"], words),
        "exact_alnum": (theirs["exact_answer_alphanumeric_reward"], words),
        "format 0.2 and exact_alnum 0.8": (clevr, words),
        "bbox_giou": (giou, boxes),
        "bbox_giou, plain from 0.5": (partial(giou, giou_penalty_thres=0.5), boxes),
        "math_expr": (theirs["math_expression_reward"], numbers),
        "geo3k": (theirs["geo3k_reward"], boxed_numbers),
    }
    rewards = {name: [paid(function, *draw(seed)) for seed in range(COUNT)] for name, (function, draw) in cases.items()}
    found = {
        "repository": "NVIDIA-NeMo/RL",
        "commit": git("rev-parse", "HEAD").strip(),
        "path": PATH,
        "rewards": {name: packed(values) for name, values in rewards.items()},
    }
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


def paid(function: Callable[..., Any], truth: str, response: str) -> float:
    """The reward, with 0 for what is not finite, which no unit can hold: both answers are boxes that we refuse."""
    reward = float(function(truth, response)[0])
    return reward if np.isfinite(reward) else 0.0


if __name__ == "__main__":
    main(sys.argv[1])
