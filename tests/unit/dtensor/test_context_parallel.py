"""Sequences that ranks share: what each has of them, what a config may ask for, and what a plan makes of it.

``integration/dtensor/test_sharded_context.py`` has the ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.config.load import load_config
from nemorl.errors import ConfigError
from nemorl_dtensor import DTensorConfig
from nemorl_dtensor.context_parallel import _tree
from nemorl_dtensor.tree_attention import tree_plan
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.parts import total
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.context_rows import own_columns
from nemorl_tensors.engines.rows import to_rows
from recorded_messages import Raises

LLAMA = {
    **{"model_type": "llama", "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12},
    **{"num_key_value_heads": 4, "intermediate_size": 256, "vocab_size": 512, "tie_word_embeddings": False},
}


ULYSSES = {"context_parallel_method": "ulysses"}


def batch(*lengths: int) -> TokenBatch:
    ids = [list(range(1, length + 1)) for length in lengths]
    return TokenBatch.from_sequences(ids, [[True] * length for length in lengths])


@pytest.mark.parametrize("packed", [False, True])
def test_each_rank_scores_what_its_slice_predicts(packed: bool) -> None:
    # Fed are 5 and 2 tokens: rows of 5 padded to 6, or one row of 7 padded to 8.
    rows = to_rows(batch(6, 3), packed=packed, width_multiple=2)
    width = rows.input_ids.shape[1]
    assert width == (8 if packed else 6)
    slices = [torch.arange(width // 2) + rank * (width // 2) for rank in range(2)]
    (first, of_first), (second, of_second) = (own_columns(rows, columns) for columns in slices)
    if packed:
        assert first.position_ids.tolist() == [[0, 1, 2, 3]]
        assert second.position_ids.tolist() == [[4, 0, 1, 0]]  # the last one pads
    else:
        assert first.position_ids.tolist() == [[0, 1, 2]] * 2
        assert second.position_ids.tolist() == [[3, 4, 5]] * 2
    for part in (first, second):
        # The token before a target has its number less one: the last of one slice predicts the first of the next.
        assert (part.input_ids.flatten()[part.predictors] + 1).tolist() == part.target_ids.tolist()
    assert sorted([*of_first.tolist(), *of_second.tolist()]) == list(range(7))
    assert torch.equal(torch.cat((rows.targets[of_first], rows.targets[of_second])).sort().values, rows.targets)


def test_a_packed_row_is_planned_as_sequences_that_share_nothing() -> None:
    tree = _tree(to_rows(batch(6, 3), packed=True, width_multiple=4))
    assert tree is not None
    plan = tree_plan(tree, torch.float32, torch.device("cpu"))
    assert all(bucket.mask is None and bucket.common_slots is None for bucket in plan.buckets)
    # Queries are the tokens themselves: 5, 2, and 1 that pads.
    assert sorted(plan.query_slots[plan.places].tolist()) == list(range(8))
    assert sum(int(bucket.real.sum()) for bucket in plan.buckets) == 8
    assert _tree(to_rows(batch(6, 3), packed=False)) is None


def load(folder: Path, backend: dict[str, Any], policy: dict[str, Any], sizes: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **sizes}))
    chosen = {"backend": {"name": "dtensor", **backend}, **policy}
    cluster = {"launcher": "ray", "workers_per_node": 8}
    load_config({"algorithm": "grpo", "model": str(folder), "policy": chosen, "cluster": cluster})


@pytest.mark.parametrize(
    ("backend", "policy", "sizes", "path", "facts"),
    [
        (
            ULYSSES,
            {},
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            "policy.backend.context_parallel_size",
            [6, 4, 3],
        ),
        (ULYSSES, {"tensor_parallel_size": 2}, {}, "policy.backend.context_parallel_size", [6, 4]),
        ({"data_parallel_replicas": 4}, {}, {}, "policy.backend.context_parallel_size", [8, 4]),
        ({"context_parallel_size": 3}, {}, {}, "policy.tensor_parallel_size", [3, 8]),
        ({}, {}, {"model_type": "mistral", "sliding_window": 64}, "policy.backend.context_parallel_size", [64]),
        ({"attn_implementation": "eager"}, {}, {}, "policy.backend.attn_implementation", ["eager"]),
        ({"attn_implementation": "flash_attention_2"}, {}, {}, "policy.backend.attn_implementation", []),
    ],
)
def test_what_ranks_cannot_share_is_refused_when_the_config_loads(
    backend: dict[str, Any],
    policy: dict[str, Any],
    sizes: dict[str, Any],
    path: str,
    facts: list[object],
    tmp_path: Path,
    raises: Raises,
) -> None:
    with raises(ConfigError, *facts, path=path):
        load(tmp_path, {"context_parallel_size": 4, **backend}, policy, sizes)


def test_sizes_that_divide_are_accepted(tmp_path: Path) -> None:
    load(tmp_path, {"context_parallel_size": 4, "data_parallel_replicas": 2}, {}, {})
    load(tmp_path, {"context_parallel_size": 2}, {"tensor_parallel_size": 2}, {})
    # 12 heads on 2 * 4 ranks, and on 8: keys go round.
    load(tmp_path, {"context_parallel_size": 4}, {"tensor_parallel_size": 2}, {})
    load(tmp_path, {"context_parallel_size": 8}, {}, {})
    # A window that no layer has
    load(tmp_path, {"context_parallel_size": 2}, {}, {"sliding_window": 64, "use_sliding_window": False})


def test_ranks_that_share_sequences_get_the_same_data() -> None:
    config, policy = DTensorConfig(context_parallel_size=2), PolicyConfig(tensor_parallel_size=2)
    assert config.ranks_per_copy(policy) == 4
    assert config.data_shards(policy, 8) == (0, 0, 0, 0, 1, 1, 1, 1)


def held(context: int, tokens: int, *, heads: int = 12, kv_heads: int = 4, method: str = "auto") -> HeldModel:
    config = DTensorConfig(context_parallel_size=context, context_parallel_method=method)  # type: ignore[arg-type]
    geometry = Geometry.from_config({**LLAMA, "num_attention_heads": heads, "num_key_value_heads": kv_heads})
    policy = PolicyConfig(backend=config, max_sequence_tokens=tokens)
    return HeldModel("policy", policy, geometry, ranks=4, microbatch_tokens=tokens)


def test_a_plan_divides_activations_over_the_ranks_that_share_sequences() -> None:
    whole, halves = held(1, 4096), held(2, 8192)
    assert (whole.spread.data, halves.spread.data) == (4, 2)
    assert (whole.spread.shards, halves.spread.shards) == (4, 4)  # weights are cut over all ranks as before
    weights = [next(part.size for part in each.moments.lasting if part.name == "weights") for each in (whole, halves)]
    assert weights[0] == weights[1]
    # As many tokens on each rank. Attention's output is kept once more: 96 float32 numbers in 2 layers of 4,096 tokens.
    kept = [total(each.moments.training["output head"]) for each in (whole, halves)]
    assert kept[1] - kept[0] == pytest.approx(4096 * 2 * 96 * 4)


def test_a_plan_counts_key_value_heads_that_ranks_have_copies_of() -> None:
    # One key-value head of 8 numbers on 2 ranks: keys and values twice, in 2 layers of 4,096 tokens each.
    whole, halves = held(1, 4096, kv_heads=1), held(2, 8192, kv_heads=1)
    kept = [total(each.moments.training["output head"]) for each in (whole, halves)]
    assert kept[1] - kept[0] == pytest.approx(4096 * 2 * 4 * (96 + 2 * 8))


def test_a_ring_keeps_what_one_process_keeps() -> None:
    # Six heads on 4 ranks: keys and values travel, and the output is that of this rank's tokens.
    whole, quarters = held(1, 4096, heads=6, kv_heads=1), held(4, 16384, heads=6, kv_heads=1)
    kept = [total(each.moments.training["output head"]) for each in (whole, quarters)]
    assert kept[1] == pytest.approx(kept[0])


@pytest.mark.parametrize(("method", "sizes"), [("ulysses", [1]), ("auto", [1, 2]), ("ring", [1, 2])])
def test_layouts_of_a_plan_divide_the_heads(method: str, sizes: list[int]) -> None:
    # Of 6 heads two tensor-parallel ranks have 3 each, which two ranks that share rows cannot trade.
    model = held(2, 1024, heads=6, kv_heads=2, method=method)
    assert [dict(layout)["tensor_parallel_size"] for layout in model.plan.layouts(model, 4)] == sizes
