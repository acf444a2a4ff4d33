"""Layers over pipeline stages of unequal size: by hand, and by megatron-core's own arithmetic."""

from __future__ import annotations

from itertools import product

import pytest
from nemorl.errors import BackendError
from nemorl_megatron.stages import Split
from recorded_messages import Raises


@pytest.mark.parametrize(
    ("split", "layers", "stages", "parts", "expected"),
    [
        (Split(), 4, 2, 1, ((2, 2),)),
        (Split(), 8, 2, 2, ((2, 2), (2, 2))),
        # NeMo RL's recipes. DeepSeek-V3 over 8 stages and over 16: 61 = 7 + 6 * 8 + 6 = 3 + 14 * 4 + 2 + 0.
        (Split(7, 6), 61, 8, 1, ((7, 8, 8, 8, 8, 8, 8, 6),)),
        (Split(3, 2), 61, 16, 1, ((3, *[4] * 14, 2),)),
        # Qwen3-235B: 94 = 11 + 6 * 12 + 11 = 23 + 2 * 24 + 23.
        (Split(11, 11), 94, 8, 1, ((11, *[12] * 6, 11),)),
        (Split(23, 23), 94, 4, 1, ((23, 24, 24, 23),)),
        # Moonlight: 27 = 14 + 13.
        (Split(14, 13), 27, 2, 1, ((14, 13),)),
        (Split(first=3), 4, 2, 1, ((3, 1),)),
        (Split(last=2), 6, 2, 2, ((2, 1), (2, 1))),
        (Split(embedding=True, head=True), 4, 3, 1, ((1, 2, 1),)),
        (Split(embedding=True), 7, 2, 2, ((1, 2), (2, 2))),
    ],
)
def test_layers_by_part_and_stage(
    split: Split, layers: int, stages: int, parts: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert split.counts(layers, stages, parts) == expected
    assert sum(map(sum, expected)) == layers


@pytest.mark.parametrize(
    ("split", "layers", "stages", "parts", "facts"),
    [
        (Split(), 5, 2, 1, [5, 2]),
        (Split(first=3, last=3), 5, 2, 1, [5, 3]),
        (Split(first=3, last=3), 7, 3, 2, [7, 2]),
        (Split(first=5), 5, 2, 1, [5]),
        (Split(embedding=True), 4, 2, 1, [4]),
        (Split(first=3), 8, 3, 1, [8, 3]),
    ],
)
def test_what_leaves_a_rest_or_a_stage_without_layers_is_refused(
    split: Split, layers: int, stages: int, parts: int, facts: list[object], raises: Raises
) -> None:
    with raises(BackendError, *facts):
        split.counts(layers, stages, parts)


@pytest.mark.megatron
def test_megatron_core_divides_layers_in_the_same_way() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    ends = [*product((None, 1, 2, 4), repeat=2)]
    splits = [Split(first, last) for first, last in ends] + [Split(embedding=True, head=h) for h in (False, True)]
    compared = 0
    for split, layers, stages, parts in product(splits, (6, 7, 8, 10, 12), (2, 3, 4), (1, 2)):
        try:
            counts = split.counts(layers, stages, parts)
        except BackendError:
            continue
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=parts if parts > 1 else None,
            pipeline_dtype=torch.float32,
            **split.fields(stages),
        )
        first = 0
        for part, stage in product(range(parts), range(stages)):
            virtual = part if parts > 1 else None
            assert get_num_layers_to_build(config, virtual, stage) == counts[part][stage]
            assert get_transformer_layer_offset(config, virtual, stage) == first, (split, layers, stages, parts)
            first += counts[part][stage]
        compared += 1
    assert compared > 50
