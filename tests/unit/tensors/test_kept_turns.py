"""Conversations between their turns: which is found, which gives way."""

from __future__ import annotations

import random

import torch
from nemorl_tensors.engines.kv_cache import KVCache
from nemorl_tensors.engines.turns import Turn, Turns


def turn(*tokens: int, value: float = 0.0) -> Turn:
    block = torch.full((1, 1, len(tokens), 2), value)
    return Turn(tokens, block, block)


def found(turns: Turns, *prompt: int) -> tuple[int, ...] | None:
    before = turns.before(prompt)
    return None if before is None else before.tokens


def test_the_longest_turn_that_a_prompt_begins_with_is_found() -> None:
    turns = Turns(100)
    for tokens in ((1,), (1, 2, 3), (1, 2, 3, 9), (1, 2, 4), (2,)):
        turns.put(turn(*tokens))
    assert found(turns, 1, 2, 3, 5) == (1, 2, 3)
    assert found(turns, 1, 2, 3, 9, 9) == (1, 2, 3, 9)
    assert found(turns, 1, 2, 3, 9) == (1, 2, 3)  # at least one token is new
    assert found(turns, 1, 3) == (1,)
    assert found(turns, 3, 1) is None
    assert found(turns, 1) is None


def test_what_is_found_is_what_a_search_through_all_finds() -> None:
    draw = random.Random(0)
    for _ in range(200):
        kept = {tuple(draw.choices((1, 2), k=draw.randint(1, 6))) for _ in range(12)}
        turns = Turns(1000)
        for tokens in kept:
            turns.put(turn(*tokens))
        prompt = tuple(draw.choices((1, 2), k=draw.randint(1, 8)))
        prefixes = [tokens for tokens in kept if len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens]
        assert found(turns, *prompt) == max(prefixes, key=len, default=None)


def test_the_oldest_give_way_and_what_is_too_long_is_not_kept() -> None:
    turns = Turns(7)
    for tokens in ((1, 1, 1), (2, 2, 2), (3, 3)):  # 3 + 3 + 2 = 8 tokens: the first leaves
        turns.put(turn(*tokens))
    assert [found(turns, *[token] * 4) for token in (1, 2, 3)] == [None, (2, 2, 2), (3, 3)]
    turns.put(turn(*[4] * 8))
    assert found(turns, *[4] * 9) is None
    assert found(turns, 2, 2, 2, 2) == (2, 2, 2)


def test_the_newer_of_two_equal_turns_stays_and_counts_once() -> None:
    turns = Turns(6)
    turns.put(turn(1, 1, 1, value=1.0))
    turns.put(turn(2, 2, 2))
    turns.put(turn(1, 1, 1, value=2.0))
    before = turns.before((1, 1, 1, 1))
    assert before is not None
    assert float(before.keys.max()) == 2.0
    assert found(turns, 2, 2, 2, 2) == (2, 2, 2)
    turns.drop(before)
    assert found(turns, 1, 1, 1, 1) is None


def test_a_row_of_the_cache_leaves_with_its_own_columns() -> None:
    """Prompts of 3 and 1 tokens and two steps: row 1 has two pads at its left."""
    cache = KVCache(1, 1, 2, torch.float32, torch.device("cpu"))
    cache.extend([3, 1], 2)
    cache.write([0], torch.full((1, 1, 1, 3, 2), 7.0), torch.full((1, 1, 1, 3, 2), 7.0))
    cache.write([1], torch.full((1, 1, 1, 1, 2), 5.0), torch.full((1, 1, 1, 1, 2), 5.0))
    for step in (1.0, 2.0):
        keys, values, _ = cache.append()
        keys[:, :, :, -1] = values[:, :, :, -1] = step
    assert cache.turn(1, (8, 9, 9)).keys[0, 0, :, 0].tolist() == [5.0, 1.0, 2.0]
    assert cache.turn(1, (8, 9)).values[0, 0, :, 0].tolist() == [5.0, 1.0]
    assert cache.turn(0, (8, 8, 8, 9, 9)).keys[0, 0, :, 0].tolist() == [7.0, 7.0, 7.0, 1.0, 2.0]
