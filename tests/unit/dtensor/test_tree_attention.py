"""Attention over a forest is attention over each of its sequences, forward and backward, in every kernel."""

from __future__ import annotations

import random

import pytest
import torch
from nemorl_dtensor import attention_cpu
from nemorl_dtensor.tree_attention import attend
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.rows import Rows, Tree
from nemorl_tensors.engines.tree_attention import TreePlan
from nemorl_tensors.engines.tree_rows import to_tree_rows
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HEADS, KV_HEADS, SIZE = 4, 2, 8


def forest() -> Rows:
    """Groups on prompts of 150, 20 and 3 tokens, responses of many lengths, branches within them, padding."""
    draw = random.Random(5)
    ids = []
    for prompt_tokens in (150, 20, 3):
        prompt = [draw.randrange(9**9) for _ in range(prompt_tokens)]
        for count in (70, 9, 1, 30):
            ids.append(prompt + [draw.randrange(9**9) for _ in range(count)])
        ids.append(ids[-1][: prompt_tokens + 20] + [draw.randrange(9**9) for _ in range(12)])
    batch = TokenBatch.from_sequences(ids, [[True] * len(row) for row in ids])
    return to_tree_rows(batch, width_multiple=8)


def alone(tree: Tree, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[W, H, E] by torch, from each sequence as a row of its own."""
    found = torch.zeros_like(query[0].transpose(0, 1))
    for slots, length, new in zip(tree.slots, tree.lengths, tree.new, strict=True):
        if new:
            mine = slots[:length]
            q, k, v = (states[:, :, mine] for states in (query, key, value))
            answer = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
            own = mine[length - new :]
            found = found.index_copy(0, own, answer[0].transpose(0, 1)[length - new :])
    return found


@pytest.mark.parametrize("min_common_scores", [None, 1, 4000])
@pytest.mark.parametrize("function", ["sdpa", attention_cpu.NAME])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 6e-2)], ids=str
)
def test_a_forest_attends_as_its_sequences_do(
    dtype: torch.dtype, tolerance: float, function: str, min_common_scores: int | None
) -> None:
    rows = forest()
    assert rows.tree is not None
    width = rows.input_ids.shape[1]
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn((1, heads, width, SIZE), generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    slopes = torch.randn((width, HEADS, SIZE), generator=generator, dtype=torch.float64)
    exact = [part.clone().requires_grad_() for part in states]
    wanted = alone(rows.tree, *exact)
    given = [part.to(dtype).requires_grad_() for part in states]
    plan = TreePlan.of(rows.tree, dtype, min_common_scores=min_common_scores)
    assert any(bucket.common_slots is not None for bucket in plan.buckets) == (min_common_scores is not None)
    found, _ = attend(function, None, *given, None, scaling=0.3, prefix_tree=plan)
    torch.testing.assert_close(found[0].double(), wanted, atol=tolerance, rtol=tolerance)
    wanted_gradients = torch.autograd.grad((wanted * slopes).sum(), exact)
    gradients = torch.autograd.grad((found[0].double() * slopes).sum(), given)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        assert float((one.double() - other).norm() / other.norm()) <= tolerance
