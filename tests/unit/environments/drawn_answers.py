"""Drawn answers for comparing rewards with those of other systems: the same seed gives the same truth and response."""

from __future__ import annotations

import random
import re
from fractions import Fraction

COUNT = 10_000
"""Answers that each function is compared on."""

Drawn = tuple[str, str]
"""Ground truth and response."""
NAMES = ("yes", "no", "12", "7.5", "Paris", "São Paulo", "Zoë 3", "北京", "x_1", "grand piano", "ǅ", "Straße")
CIRCLE = r"^\circ"


def words(seed: int) -> Drawn:
    """Short answers, for ``exact_alnum`` and ``format``."""
    chance = random.Random(f"words/{seed}")
    truth, other = chance.choice(NAMES), chance.choice(NAMES)
    said = chance.choice([truth, truth.upper(), truth.casefold(), f" {truth}. ", truth.replace(" ", "-"), other, ""])
    return truth, _written(chance, said, other)


def boxes(seed: int) -> Drawn:
    """Boxes of integers, of fractions, disordered ones, and what is no box, for ``bbox_giou``."""
    chance = random.Random(f"boxes/{seed}")
    truth = _box(chance, 1000)
    near = [max(0, number + chance.randint(-40, 40)) for number in truth]
    kinds = ([*truth], near, near, _box(chance, 1000), [number / 1000 for number in truth], _box(chance, 1), near[::-1])
    said = str(chance.choice(kinds))
    if chance.random() < 0.2:
        broken = (said[1:-1], said.replace(", ", ","), said.replace(",", " "), said[:-1] + ", 3]", "no box", "[]")
        said = chance.choice((*broken, "[nan, 0, 1, 1]", "[0, 0, inf, 1]", "[1e1, 2_0, 3e2, 400.5]"))
    return str(truth), _written(chance, said, str(_box(chance, 1000)))


def numbers(seed: int) -> Drawn:
    """Numbers, spelt in several ways and at times in a box, for ``math_expr``; never two elements, of which a grader of
    formulas would have to choose one."""
    truth, said, other, chance = _two_numbers(f"numbers/{seed}")
    said = chance.choice(["%s", "%s", r"\boxed{%s}", r"\boxed{%s}."]) % said
    while (response := _written(chance, said, other)).count("answer>") > 2:
        pass
    return truth, response


def boxed_numbers(seed: int) -> Drawn:
    """Numbers in a box that is whole, missing, cut off or one of several, for ``geo3k``."""
    truth, said, other, chance = _two_numbers(f"boxed/{seed}")
    box = (
        chance.choice([r"\boxed{%s}", r"\boxed{ %s }.", r"$\boxed{%s}$"] * 3 + [r"\boxed{%s", "%s", r"\boxed{%s}}"])
        % said
    )
    box = chance.choice(["", "", rf"\boxed{{{other}}}, no, "]) + box
    return truth, _written(chance, box, rf"\boxed{{{other}}}")


def value_of(spelling: str) -> Fraction | None:
    r"""The number that ``numbers`` spelt so; ``None`` of anything else.

    >>> value_of(r"-\frac{1}{2}"), value_of("90^\circ"), value_of("3 4")
    (Fraction(-1, 2), Fraction(90, 1), None)
    """
    plain = spelling.strip().strip("$").removesuffix(CIRCLE)
    plain = re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", plain)
    return Fraction(plain) if re.fullmatch(r"-?\d+(\.\d+|/\d+)?", plain) else None


def _box(chance: random.Random, size: int) -> list[float]:
    draw = (lambda: chance.randint(0, size)) if size > 1 else chance.random
    (x1, x2), (y1, y2) = (sorted((draw(), draw())) for _ in range(2))
    return [x1, y1, x2, y2]


def _two_numbers(seed: str) -> tuple[str, str, str, random.Random]:
    """The truth, what is said, another number, and what draws the rest."""
    chance = random.Random(seed)
    value, other = (Fraction(chance.randint(-60, 60), chance.choice((1, 1, 2, 4, 5))) for _ in range(2))
    said = _spelt(chance, value if chance.random() < 0.7 else other)
    return _spelt(chance, value), said, _spelt(chance, other), chance


def _spelt(chance: random.Random, value: Fraction) -> str:
    sign, size = "-" if value < 0 else "", abs(value)
    ways = [str(value), str(float(value)), f"${value}$", f"{value}{CIRCLE}"]
    if size.denominator > 1:
        ways = [*ways[:3], rf"{sign}\frac{{{size.numerator}}}{{{size.denominator}}}"]
    return chance.choice(ways)


def _written(chance: random.Random, said: str, other: str) -> str:
    """A response around an answer: elements that are whole, missing, cut off, twice there or in the wrong order."""
    before = chance.choice(
        ["", "<think>because</think>", "<think>\nlong\n</think>\n", "<think>", "so</think> ", "Well. "]
    )
    answer = chance.choice(
        ["<answer>{}</answer>"] * 14
        + ["<answer>{}", "{}</answer>", "{}", "<Answer>{}</Answer>", "</answer>{}<answer>", "<answer></answer>{}"]
        + ["<answer>{}</answer> <answer>" + other + "</answer>", "<answer>" + other + "</answer><answer>{}</answer>"]
        + ["<answer>\n{}\n</answer>\n", "<think>{}</think>", "<answer><answer>{}</answer></answer>"]
    ).replace("{}", said)
    return chance.choice([before + answer] * 4 + [answer + before])
