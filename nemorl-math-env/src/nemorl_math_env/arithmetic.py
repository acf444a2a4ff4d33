"""The ``arithmetic`` dataset: ``12+7=`` -> ``19``, generated.

A problem is an operation and two operands. ``3+4`` and ``4+3`` are one problem, of which one order is generated:
otherwise the validation split would ask for what was trained on, the other way round.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from nemorl.types import Row

from nemorl_math_env.splits import GeneratedRows, choose

if TYPE_CHECKING:
    from nemorl_math_env.config import ArithmeticConfig

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def num_problems(config: ArithmeticConfig) -> int:
    """How many distinct problems the options allow."""
    return sum(_num_pairs(config, operation) for operation in config.operations)


def build_rows(config: ArithmeticConfig, split: str) -> GeneratedRows:
    seed = f"arithmetic/{config.seed}"
    train, validation = choose(num_problems(config), config.num_train, config.num_validation, seed)
    return GeneratedRows(train if split == "train" else validation, partial(write, config))


def write(config: ArithmeticConfig, number: int) -> Row:
    """Problem ``number`` of the config's space as a row."""
    operation, left, right = _operands(config, number)
    expression = f"{left}{operation}{right}"
    answer = str(OPERATIONS[operation](left, right))
    prompt: object = f"{expression}="
    if config.chat:
        prompt = [{"role": "user", "content": config.instruction.replace("{problem}", expression)}]
    return {"prompt": prompt, "answer": answer, "response": answer, "problem": expression}


def _num_pairs(config: ArithmeticConfig, operation: str) -> int:
    values = config.largest - config.min_value + 1
    if operation == "-" and config.allow_negative:
        return values * values
    return values * (values + 1) // 2


def _operands(config: ArithmeticConfig, number: int) -> tuple[str, int, int]:
    """Number -> (operation, left, right): operations one after the other, pairs row by row of a triangle."""
    seed = number
    for operation in config.operations:
        pairs = _num_pairs(config, operation)
        if number < pairs:
            break
        number -= pairs
    if operation == "-" and config.allow_negative:
        high, low = divmod(number, config.largest - config.min_value + 1)
    else:
        high = (math.isqrt(8 * number + 1) - 1) // 2  # row h of the triangle starts at h(h+1)/2
        low = number - high * (high + 1) // 2
    left, right = high + config.min_value, low + config.min_value
    if operation != "-" and random.Random(f"order/{config.seed}/{seed}").random() < 0.5:
        left, right = right, left
    return operation, left, right
