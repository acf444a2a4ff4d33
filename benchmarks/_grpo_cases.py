"""The cases of ``grpo_vs_trl``: prompts, sizes, rewards.

``64`` and ``256``: eight prompts of 4 to 6 tokens, 8 generations of so many new tokens. ``p512r64g16``: prompts of 512
tokens, responses of at most 64, groups of 16, 64 responses a step. ``smollm2``: what
examples/smollm2/grpo_word_problems.yaml trains.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHORT_PROMPTS = ("3+4=", "12*5=", "abc+d=", "9-2=", "x*y=", "77+1=", "Hello:", "a,b,c")
"""Eight prompts of 4 to 6 character tokens."""
ROWS = 64
"""Responses per step."""
SIZES = re.compile(r"p(\d+)r(\d+)g(\d+)")
LETTERS = "abcdefghijklmnopqrstuvwxyz "


@dataclass(frozen=True)
class Case:
    """What both sides are asked to do in each step."""

    rows: tuple[dict[str, Any], ...]
    """The data, over and over: ``prompt``, and what the reward reads"""
    prompts_per_step: int
    group_size: int
    new_tokens: int
    lr: float
    reward: Any
    """text of a response, its row's answer -> float"""
    precision: str = "float32"
    temperature: float = 1.0


def distinct_characters(text: str, _answer: str | None) -> float:
    """The reward of the timed steps: how many different characters a response has."""
    return float(len(set(text)))


def digit_share(text: str, _answer: str | None) -> float:
    """The reward of the learning check: about 0.1 for a random model, at best 1."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


def last_number_is_right(text: str, answer: str | None) -> float:
    """1 where the last whole number of the response is the answer."""
    numbers = re.findall(r"-?\d+", text.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == answer)


def case_of(name: str, lr: float, model: Path | None) -> Case:
    """A case by its name.

    Raises:
        ValueError: There is none of this name, or it needs a model.
    """
    if name.isdecimal():
        return _of_texts(SHORT_PROMPTS, 8, int(name), lr, distinct_characters)
    if sizes := SIZES.fullmatch(name):
        prompt, response, group = map(int, sizes.groups())
        if not prompt or not response or not 0 < group <= ROWS or ROWS % group:
            raise ValueError(f"case {name!r}: groups of {group} do not divide {ROWS} responses; use e.g. p128r64g8")
        return _of_texts(_texts(ROWS // group, prompt), group, response, lr, distinct_characters)
    if name == "smollm2":
        if model is None or not (model / "config.json").is_file():
            raise ValueError(
                "case smollm2 needs --model FOLDER with SmolLM2: run python examples/smollm2/prepare.py FOLDER"
            )
        return _recipe()
    raise ValueError(f"there is no case {name!r}: use 64, 256, sizes such as p128r64g8, or smollm2")


def learning_case() -> Case:
    """16 new tokens at a rate of 1e-3: equal speed is worth nothing without equal learning."""
    return _of_texts(SHORT_PROMPTS, 8, 16, 1e-3, digit_share)


def _of_texts(prompts: Sequence[str], group: int, new_tokens: int, lr: float, reward: Any) -> Case:
    rows = tuple({"prompt": prompt, "answer": ""} for prompt in prompts)
    return Case(rows, len(prompts), group, new_tokens, lr, reward)


def _texts(count: int, length: int) -> tuple[str, ...]:
    """Random texts; a character is a token."""
    draw = random.Random(f"{count}/{length}")
    return tuple("".join(draw.choice(LETTERS) for _ in range(length)) for _ in range(count))


def _recipe() -> Case:
    from nemorl_math_env.config import WordProblemsConfig
    from nemorl_math_env.word_problems import build_rows

    rows = build_rows(WordProblemsConfig(instruction="Answer in one short sentence."), "train")
    kept = tuple({"prompt": rows[index]["prompt"], "answer": rows[index]["answer"]} for index in range(len(rows)))
    return Case(kept, 8, 8, 32, 2e-5, last_number_is_right, precision="bfloat16", temperature=0.6)
