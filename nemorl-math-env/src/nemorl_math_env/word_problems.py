"""The ``word_problems`` dataset: short stories with whole-number answers, generated from ``templates.py``.

A problem is a template and its numbers; the name in it is decoration, derived from the problem. So no problem of the
validation split occurs in training, under whatever name.
"""

from __future__ import annotations

import random
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from nemorl.types import Row

from nemorl_math_env.splits import GeneratedRows, choose, share
from nemorl_math_env.templates import FACTORS, NAMES, TEMPLATES, Template

if TYPE_CHECKING:
    from nemorl_math_env.config import WordProblemsConfig

LARGEST = {1: (12, 6), 2: (20, 9), 3: (100, 12)}
"""Difficulty -> (largest count, largest factor). All numbers start at 2, which also keeps plurals right."""
SMALLEST = 2


def num_problems(config: WordProblemsConfig) -> int:
    """How many distinct problems the difficulty holds."""
    return sum(_size(template, config) for template in _templates(config))


def build_rows(config: WordProblemsConfig, split: str) -> GeneratedRows:
    """An even mix of all templates of the difficulty, as far as each has enough problems."""
    sizes = [_size(template, config) for template in _templates(config)]
    totals = share(config.num_train + config.num_validation, sizes)
    held_out = share(config.num_validation, totals)
    problems: list[tuple[int, int]] = []
    for index, size in enumerate(sizes):
        seed = f"word_problems/{config.seed}/{config.difficulty}/{index}"
        train, validation = choose(size, totals[index] - held_out[index], held_out[index], seed)
        problems += [(index, number) for number in (train if split == "train" else validation)]
    random.Random(f"mix/{config.seed}/{split}").shuffle(problems)
    return GeneratedRows(problems, partial(write, config))


def write(config: WordProblemsConfig, problem: tuple[int, int]) -> Row:
    """Problem (template index, number within it) as a row."""
    index, number = problem
    template = _templates(config)[index]
    numbers = _numbers(template, number, config)
    values = {**numbers, **template.solve(**numbers)}
    name = NAMES[random.Random(f"name/{config.seed}/{index}/{number}").randrange(len(NAMES))]
    text = template.text.format(name=name, **values)
    answer = str(values["answer"])
    content = f"{text} {config.instruction}".strip()
    prompt: object = [{"role": "user", "content": content}] if config.chat else f"{content}\n"
    response = f"{template.working.format(**values)}\nAnswer: {answer}"
    return {"prompt": prompt, "answer": answer, "response": response, "problem": text, "difficulty": config.difficulty}


def _templates(config: WordProblemsConfig) -> tuple[Template, ...]:
    return tuple(template for template in TEMPLATES if template.steps == config.difficulty)


def _ranges(template: Template, config: WordProblemsConfig) -> list[int]:
    """How many values each variable has."""
    count, factor = LARGEST[config.difficulty]
    return [(factor if name in FACTORS else count) - SMALLEST + 1 for name in template.variables]


def _size(template: Template, config: WordProblemsConfig) -> int:
    return prod(_ranges(template, config))


def _numbers(template: Template, number: int, config: WordProblemsConfig) -> dict[str, int]:
    """Number -> one value per variable, as the digits of a number in a mixed base."""
    values = {}
    for name, base in zip(template.variables, _ranges(template, config), strict=True):
        number, digit = divmod(number, base)
        values[name] = digit + SMALLEST
    return values
