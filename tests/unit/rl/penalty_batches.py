"""Random episodes of a few words, well and badly written, for penalties of rewards."""

from __future__ import annotations

import random

from nemorl.types import Prompt, Sample, Score

WORDS = (
    "?",
    "<think>",
    "</think>",
    "<eos>",
    "a",
    "b",
    " ",
    "<pad>",
    '<tool_call>{"name": "f"}</tool_call>',
    "<th",
    "ink>",
    "</th",
)
"""Token id -> text. Tags can be spelled by their pieces too."""
OPEN, CLOSE, EOS, UNWANTED, CALL = 1, 2, 3, 7, 8
BATCHES, EPISODES = 50, 8


def decode(ids: object) -> str:
    return "".join(WORDS[index] for index in ids)  # type: ignore[attr-defined]


def episode(draw: random.Random) -> Sample:
    """One to three messages. Each is thought, answer and call, some of which are missing; in a third of them a token is
    put somewhere where it does not belong."""
    tokens: list[int] = []
    mask: list[bool] = []
    for _ in range(draw.randint(1, 3)):
        is_open = draw.random() < 0.7
        context = [0, OPEN] if is_open else draw.choice([[0], [0, OPEN, CLOSE]])
        thought = draw.choice([[4], [5], [4, 5], [6]])
        answer = draw.choice([[], [4], [5], [6, 4, 6], [6]])
        message = [*(thought if is_open else ()), *([CLOSE] if is_open else ()), *answer]
        message += draw.choice([[], [], [CALL]])
        if draw.random() < 1 / 3:
            wrong = draw.choice([[OPEN], [CLOSE], [UNWANTED], [9, 10], [11, 10]])
            place = draw.randint(0, len(message))
            message[place:place] = wrong
        message += draw.choice([[EOS], [EOS], []]) or ([] if message else [EOS])
        tokens += [*context, *message]
        mask += [False] * len(context) + [True] * len(message)
    score = Score(draw.choice([1.0, 0.5, -1.0]))
    return Sample(Prompt(0, "?", (0,)), tuple(tokens), tuple(mask), (0.0,) * len(tokens), score, "", "stop")


def batch(number: int) -> list[Sample]:
    draw = random.Random(number)
    return [episode(draw) for _ in range(EPISODES)]
