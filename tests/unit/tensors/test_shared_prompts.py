"""Prompts kept once: a row attends to its prompt and its own columns as if they were one sequence of keys."""

from __future__ import annotations

import pytest
import torch
from nemorl_tensors.engines.kv_cache import KVCache
from nemorl_tensors.engines.shared_prompts import MIN_SHARED_TOKENS
from nemorl_tensors.engines.turns import Turns
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

LAYERS, HEADS, GROUPS, SIZE, VOCABULARY = 2, 2, 3, 8, 50
LONG, LONGER = tuple(range(1, 31)), tuple(range(5, 46))  # 30 and 41 tokens
SHORT, ALONE = (7, 8, 9), tuple(range(100, 128))


def states(tokens: tuple[int, ...], seed: int) -> Tensor:
    """[L, H, len(tokens), d] that depend on the token alone."""
    draw = torch.Generator().manual_seed(seed)
    table = torch.randn(200, LAYERS, HEADS, SIZE, generator=draw)
    return table[list(tokens)].permute(1, 2, 0, 3)


class Rows:
    """A cache, and beside it what each row has said, token by token."""

    def __init__(self, dtype: torch.dtype, *, shares: bool = True) -> None:
        self.dtype, self.said = dtype, list[tuple[int, ...]]()
        self.cache = KVCache(LAYERS, HEADS, SIZE, dtype, torch.device("cpu"), shares_prompts=shares)
        self.prefilled: list[tuple[int, ...]] = []

    def admit(self, *prompts: tuple[int, ...], reserve: int = 8) -> None:
        def prefill(whole: list[tuple[int, ...]]) -> tuple[Tensor, Tensor, Tensor]:
            self.prefilled += whole
            width = max(map(len, whole))
            padded = [(*prompt, *[0] * (width - len(prompt))) for prompt in whole]
            keys, values = (torch.stack([states(p, seed) for p in padded], 1).to(self.dtype) for seed in (0, 1))
            return torch.tensor([[float(len(prompt))] for prompt in whole]).expand(-1, VOCABULARY), keys, values

        logits = self.cache.admit(prompts, reserve, prefill, lambda *_: torch.empty(0), Turns(100))
        assert logits[:, 0].tolist() == [len(prompt) for prompt in prompts]
        self.said += prompts

    def step(self) -> None:
        """A new token in every row; what it attends to is compared with torch's attention over the row alone."""
        self.said = [(*tokens, 60 + index) for index, tokens in enumerate(self.said)]
        at = self.cache.positions()
        expected_at = torch.tensor([len(tokens) - 1 for tokens in self.said])
        assert torch.equal(torch.as_tensor(at).expand(len(self.said)), expected_at)
        keys, values, mask = self.cache.append()
        newest = [(tokens[-1],) for tokens in self.said]
        q = torch.randn(len(self.said), HEADS, GROUPS, SIZE, generator=torch.Generator().manual_seed(3)).to(self.dtype)
        for layer in range(LAYERS):
            for block, seed in ((keys, 0), (values, 1)):
                block[layer][:, :, -1] = torch.stack([states(token, seed)[layer, :, 0] for token in newest])
            found = self.cache.attend(layer, q, keys[layer], values[layer], mask, 0.3).view_as(q)
            for row, tokens in enumerate(self.said):
                whole = [states(tokens, seed)[layer].to(self.dtype).double() for seed in (0, 1)]
                expected = scaled_dot_product_attention(q[row].double(), *whole, scale=0.3)
                close = 1e-6 if self.dtype == torch.float32 else 2e-2
                torch.testing.assert_close(found[row].double(), expected, atol=close, rtol=close)

    def keep(self, *order: int) -> None:
        self.cache.keep(order)
        self.said = [self.said[row] for row in order]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_attend_to_their_prompt_and_their_columns_as_to_one_sequence(dtype: torch.dtype) -> None:
    rows = Rows(dtype)
    rows.admit(LONG, LONGER, LONG, LONGER, LONG)  # groups of 3 and 2, prompts of different lengths
    rows.step()
    rows.step()
    rows.keep(0, 4, 2)  # the longer prompt has no row any more
    rows.step()
    rows.admit(SHORT, ALONE, LONGER, LONGER)  # beside them: rows that share nothing, and a new group
    rows.step()
    rows.keep(0, 6, 2, 3, 4, 5)
    rows.step()
    assert rows.prefilled.count(LONG) == 1


def test_rows_that_join_where_there_is_room() -> None:
    rows = Rows(torch.float32)
    rows.admit(LONG, ALONE, LONG, LONG)
    rows.step()
    rows.keep(0, 1)
    block = rows.cache.keys
    rows.admit(SHORT, reserve=2)  # two rows have left, and 6 of 8 steps are ahead
    assert rows.cache.keys is block
    rows.step()
    rows.keep(0, 2)
    rows.admit(LONGER, LONGER, reserve=2)
    rows.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_shared_prompts_nothing_is_different(dtype: torch.dtype) -> None:
    rows = Rows(dtype, shares=False)
    rows.admit(LONG, LONGER, LONG, SHORT)
    rows.step()
    rows.keep(0, 3, 2)
    rows.step()


def test_a_prompt_of_several_rows_is_no_column_of_theirs() -> None:
    rows, apart = Rows(torch.float32), Rows(torch.float32, shares=False)
    for each in (rows, apart):
        each.admit(*[LONG] * 8)
    # 8 steps are reserved: 8 columns, and 30 + 8 where each row has the prompt.
    assert (rows.cache.keys.shape[3], apart.cache.keys.shape[3]) == (8, 38)


def test_short_prompts_and_those_of_one_row_are_columns() -> None:
    rows = Rows(torch.float32)
    brief = tuple(range(1, MIN_SHARED_TOKENS))
    rows.admit(brief, brief, LONG)
    assert rows.cache.keys.shape[3] == len(LONG) + 8
    rows.step()


def test_a_turn_of_a_row_begins_with_the_shared_prompt() -> None:
    rows = Rows(torch.float32)
    rows.admit(LONG, LONG)
    rows.step()
    rows.step()
    turn = rows.cache.turn(1, rows.said[1])
    assert torch.equal(turn.keys, states(rows.said[1], 0))
    assert torch.equal(turn.values, states(rows.said[1], 1))
    first = rows.cache.turn(1, rows.said[1][:-1])
    assert torch.equal(first.keys, states(rows.said[1][:-1], 0))
