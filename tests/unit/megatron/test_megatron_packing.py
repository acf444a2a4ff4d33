"""Rows of many sequences: boundaries and widths by hand, attention beside megatron-core's, and a model that fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl_rl.models.tiny import write_tiny_model
from recorded_messages import Raises

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from nemorl_megatron.attention import CoreAttention
from nemorl_megatron.bridge import bridge_for
from nemorl_megatron.layout import PACKED, PADDED, SHARED, choose
from nemorl_megatron.packing import Packing, Span
from nemorl_megatron.parallel import Parallel, Place, Sizes
from nemorl_megatron.pipeline import microbatches
from nemorl_megatron.rope import Rope, Rotary, rotate
from nemorl_tensors import TokenBatch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.megatron

LENGTHS = (5, 1, 8, 2)
TOKENS = sum(LENGTHS)
HEADS, GROUPS, SIZE = 4, 2, 8


@pytest.fixture
def parallel() -> Iterator[Parallel]:
    joined = Parallel.join(WorkerContext(), Sizes())
    yield joined
    joined.leave()


@pytest.fixture
def pieces(parallel: Parallel, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=32, intermediate_size=64)
    bridge = bridge_for(PolicyConfig(model_name=str(folder), init="random"))
    built = bridge.build(parallel, dtype=torch.float32, attention="auto", activation_checkpointing=False)
    bridge.load(built, parallel, seed=0)
    return built


def positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def batch(*lengths: int) -> TokenBatch:
    ids = [list(range(1, length + 1)) for length in lengths]
    return TokenBatch.from_sequences(ids, [[True] * length for length in lengths])


def place(sizes: Sizes) -> Parallel:
    """The first of two ranks, without process groups."""
    return Parallel(sizes, 0, "cpu", tuple(Place(rank, 0, 0, 0, 0, 0, 0) for rank in range(2)))


def test_a_sequence_begins_where_positions_restart() -> None:
    packing = Packing.of(torch.tensor([[0, 1, 2, 0, 0, 1]]))
    assert packing.qkv_format == "thd"
    assert packing.lengths == (3, 1, 2)
    assert packing.cu_seqlens_q.tolist() == packing.cu_seqlens_kv.tolist() == [0, 3, 4, 6]
    assert packing.cu_seqlens_q.dtype == torch.int32
    assert (packing.max_seqlen_q, packing.max_seqlen_kv) == (3, 3)


def test_a_part_of_a_row_has_the_rest_of_one_sequence_and_the_beginning_of_another() -> None:
    packing = Packing(lengths=(3, 1, 4))
    # tokens 2 ... 5 of | 0 1 2 | 3 | 4 5 6 7 |
    assert packing.spans(2, 6) == [Span(0, tokens=1, seen=3), Span(1, tokens=1, seen=1), Span(2, tokens=2, seen=2)]
    assert packing.spans(6, 8) == [Span(2, tokens=2, seen=4)]
    assert [span.tokens for span in packing.spans(0, 8)] == [3, 1, 4]


def test_a_microbatch_is_one_row_and_what_pads_it_is_a_sequence() -> None:
    # fed are 8, 2 and 4 tokens: the last one of each predicts nothing
    (part,) = microbatches(batch(9, 3, 5), 64, place(Sizes(tensor=4, sequence_parallel=True)), PACKED)
    assert part.rows.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 1, 2, 0, 0]]
    assert part.rows.position_ids is not None
    assert part.rows.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 0, 1]]
    assert part.packing is not None
    assert part.packing.lengths == (8, 4, 2, 2)
    states = part.rows.input_ids.t()[..., None]  # a token's state is itself here, and the next one is one more
    assert torch.equal(part.predicting(states).flatten() + 1, part.rows.target_ids)


def test_stages_with_parts_get_as_many_rows_as_they_ask_for_and_all_alike() -> None:
    stages = place(Sizes(pipeline=2, virtual_pipeline=2))
    sequences = batch(9, 3, 5, 2, 4, 6)  # fed 8 + 2 + 4 + 1 + 3 + 5 = 23 tokens: two rows of 12
    packed = microbatches(sequences, 16, stages, PACKED)
    assert [tuple(part.rows.input_ids.shape) for part in packed] == [(1, 12)] * 2
    assert [part.packing.lengths for part in packed if part.packing] == [(8, 4), (5, 3, 2, 1, 1)]
    padded = microbatches(sequences, 16, stages, PADDED)
    assert [tuple(part.rows.input_ids.shape) for part in padded] == [(2, 8)] * 4


def test_no_row_is_narrower_than_the_longest_sequence() -> None:
    stages = place(Sizes(pipeline=2, virtual_pipeline=2))
    # 30 tokens and 3 times 2: more than the budget of one row, and no reason for a third and a fourth
    packed = microbatches(batch(31, 3, 3, 3), 16, stages, PACKED)
    assert [tuple(part.rows.input_ids.shape) for part in packed] == [(1, 30)] * 2


def test_a_batch_with_nothing_to_score_is_one_row_of_padding() -> None:
    for sequences in (batch(), batch(1, 1)):
        (part,) = microbatches(sequences, 16, place(Sizes(tensor=2, sequence_parallel=True)), PACKED)
        assert part.rows.input_ids.tolist() == [[0, 0]]
        assert part.packing is not None
        assert part.packing.lengths == (2,)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_attention_over_a_packed_row_is_that_of_megatron_core_over_each_sequence(
    window: int | None, cap: float | None, parallel: Parallel
) -> None:
    ours = CoreAttention(config_of(window), 1, cap=cap, softmax_scale=None)
    query, key, value, upstream = drawn()
    found = ours(query, key, value, None, packed_seq_params=Packing.of(positions(*LENGTHS)))
    gradients = torch.autograd.grad(found, (query, key, value), upstream)
    parts = zip(*(tensor.split(LENGTHS) for tensor in (query, key, value)), strict=True)
    expected = torch.cat([attended(*part, window, cap) for part in parts])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    for one, other in zip(gradients, torch.autograd.grad(expected, (query, key, value), upstream), strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


def attended(query: Tensor, key: Tensor, value: Tensor, window: int | None, cap: float | None) -> Tensor:
    """[L, n * D] of one sequence: by megatron-core where it has such scores, else by the textbook's formula."""
    length = len(query)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (window or length))
    if cap is None:
        core = DotProductAttention(config_of(None), 1, AttnMaskType.arbitrary, "self")
        one_row = (tensor[:, None] for tensor in (query, key, value))
        return core(*one_row, hidden[None, None])[:, 0]
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, 1) for tensor in (key, value))
    scores = cap * torch.tanh(torch.einsum("qnd,knd->nqk", query, key) / SIZE**0.5 / cap)
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    return torch.einsum("nqk,knd->qnd", weights, value).flatten(1)


def config_of(window: int | None) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=SIZE,
        attention_dropout=0.0,
        window_size=None if window is None else (window - 1, 0),
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
    )


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values of a row, and a gradient of its context."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, HEADS, SIZE), (TOKENS, GROUPS, SIZE), (TOKENS, GROUPS, SIZE), (TOKENS, HEADS * SIZE))
    query, key, value, upstream = (torch.randn(shape, generator=generator) for shape in shapes)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), upstream


def test_tokens_of_a_packed_row_turn_as_megatron_core_turns_them(parallel: Parallel) -> None:
    packing, rope = Packing.of(positions(*LENGTHS)), Rope(100.0)
    states = torch.randn(TOKENS, HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    found = rotate(states[:, None], *Rotary([rope], SIZE, "cpu")(positions(*LENGTHS).t(), torch.float32))
    half = torch.outer(torch.arange(8.0), rope.frequencies(SIZE))
    angles = torch.cat((half, half), -1)[:, None, None]
    group = torch.distributed.group.WORLD
    expected = apply_rotary_pos_emb(states, angles, config_of(None), packing.cu_seqlens_q, cp_group=group)
    torch.testing.assert_close(found[:, 0], expected, atol=1e-6, rtol=1e-5)


def test_rows_are_packed_unless_padded_ones_are_asked_for(pieces: list[Any], parallel: Parallel) -> None:
    assert choose("packed", pieces, parallel, 80) is PACKED
    assert choose("padded", pieces, parallel, 80) is PADDED
    assert choose("shared", pieces, parallel, 80) is SHARED
    assert choose("auto", pieces, parallel, 80).is_packed


def test_a_model_whose_sequences_see_each_other_has_padded_rows(
    pieces: list[Any], parallel: Parallel, raises: Raises
) -> None:
    for layer in pieces[0].decoder.layers:
        layer.self_attention.core_attention = Leaking()
    layout = choose("auto", pieces, parallel, 80)
    assert not layout.is_packed
    assert "differ from theirs alone" in layout.remarks[0]
    with raises(BackendError):
        choose("packed", pieces, parallel, 80)


def test_a_kernel_that_refuses_packed_rows_is_named_with_its_reason(pieces: list[Any], parallel: Parallel) -> None:
    pieces[0].decoder.layers[1].self_attention.core_attention = Refusing()
    layout = choose("auto", pieces, parallel, 80)
    assert not layout.is_packed
    assert layout.remarks[0].endswith("RuntimeError: no kernel for head size 8")


def test_another_kernel_does_not_share_packed_rows_over_context_parallel_ranks(
    pieces: list[Any], parallel: Parallel, raises: Raises
) -> None:
    pieces[0].decoder.layers[0].self_attention.core_attention = Leaking()
    divided = replace(parallel, sizes=Sizes(context=2))
    with raises(BackendError):
        choose("packed", pieces, divided, 80)


def test_what_keeps_sequences_from_sharing_tokens_is_named(
    pieces: list[Any], parallel: Parallel, raises: Raises
) -> None:
    with raises(BackendError):
        choose("shared", pieces, replace(parallel, sizes=Sizes(virtual_pipeline=2)), 80)
    kernel = CoreAttention(config_of(3), 1, softmax_scale=None)
    pieces[0].decoder.layers[0].self_attention.core_attention = kernel
    with raises(BackendError):
        choose("shared", pieces, parallel, 80)
    assert choose("auto", pieces, parallel, 80).is_packed


def test_a_tree_in_one_row_has_its_common_tokens_once_and_predicts_each_branch(parallel: Parallel) -> None:
    # Two responses to one prompt, and a stranger: 1 2 3 4 5 | 1 2 3 6 | 7 8. Fed are all but the last of each.
    ids = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [7, 8]]
    sequences = TokenBatch.from_sequences(ids, [[False, False, False, True, True], [False] * 3 + [True], [False, True]])
    (part,) = microbatches(sequences, 64, parallel, SHARED)
    assert part.rows.input_ids.tolist() == [[1, 2, 3, 4, 7]]
    assert part.rows.position_ids is not None
    assert part.rows.position_ids.tolist() == [[0, 1, 2, 3, 0]]
    states = part.rows.input_ids.t()[..., None]
    # token 3 predicts 4 and 6, 4 predicts 5, 7 predicts 8
    pairs = zip(part.predicting(states).flatten().tolist(), part.rows.target_ids.tolist(), strict=True)
    assert sorted(pairs) == [(3, 4), (3, 6), (4, 5), (7, 8)]
    assert part.packing is not None
    assert part.packing.tree is not None
    assert part.packing.qkv_format == "thd"


class Leaking(torch.nn.Module):
    """Takes a packed row for one sequence."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        if query.ndim == 3:
            query, key, value = (tensor[:, None] for tensor in (query, key, value))
        queries, keys, values = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        context = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return context.permute(2, 0, 1, 3).flatten(2)


class Refusing(Leaking):
    """Knows rows of one sequence only."""

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.ndim == 3:
            raise RuntimeError("no kernel for head size 8")
        return super().forward(query, *args, **kwargs)
