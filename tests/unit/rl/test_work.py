"""What a training step computed: FLOPs worked out by hand, and those of NeMo RL's formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.metrics import Metric, average, merge
from nemorl_rl.planning.device_peaks import device_peak
from nemorl_rl.planning.devices import Device, named_by_driver
from nemorl_rl.planning.work import Model, WorkMeter
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.rows import Rows, to_rows

TINY = {
    **{"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1},
    **{"num_key_value_heads": 1, "intermediate_size": 8, "vocab_size": 10},
}
"""Matrices of its layer: 4 * 4 * 4 + 3 * 4 * 8 = 160 elements; of its head: 40. A pair of tokens: 2 * (4 + 4) FLOPs."""


def batch_of(*lengths: int) -> TokenBatch:
    return TokenBatch.from_sequences([[5] * n for n in lengths], [[True] * n for n in lengths])


def meter(model: Model | None = None, *, seconds: float = 2.0, **facts: Any) -> WorkMeter:
    return WorkMeter(model or Model.of(TINY), peak=1e4, clock=iter([0.0, seconds]).__next__, **facts)


def measured(work: WorkMeter, batch: TokenBatch, *rows: Rows, backward: bool = True) -> dict[str, Metric]:
    work.begin()
    for part in rows:
        work.add(part, backward=backward)
    return {name.removeprefix("performance/"): metric for name, metric in work.metrics(batch).items()}


def values(metrics: dict[str, Metric]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def test_a_step_is_counted_as_by_hand() -> None:
    # Lengths 4 and 3: fed 3 and 2 tokens, as two rows of 3. One position of 6 is padding, 3 + 2 are scored.
    batch = batch_of(4, 3)
    found = values(measured(meter(), batch, to_rows(batch, packed=False)))
    # Needed: 3 * (2 * 160 * 7 + 2 * 40 * 7 + 16 * (16 + 9) / 2) = 3 * (2240 + 560 + 200)
    needed = 9000
    # Computed: 3 * 2 * 160 * 6 + 3 * 16 * 2 * (1 + 2 + 3) + 4 * 2 * 40 * 5 = 5760 + 576 + 1600
    computed = 7936
    assert found == pytest.approx(
        {
            "computed_tokens": 6,
            "padding_frac": 1 / 6,
            "rank_wait_frac": 0,
            "train_flops_per_gpu": needed / 1e12 / 2,
            "train_fp_utilization": needed / 2e4,
            "computed_flops_per_gpu": computed / 1e12 / 2,
            "computed_fp_utilization": computed / 2e4,
        }
    )


@pytest.mark.parametrize(
    ("facts", "backward", "computed"),
    [
        ({}, False, 1920 + 192 + 400),  # a pass of each
        ({"recomputes_layers": True}, True, 4 * 1920 + 4 * 192 + 4 * 400),
        ({"is_frozen": True}, True, 2 * 1920 + 3 * 192 + 3 * 400),
        ({"has_vocabulary_head": False}, True, 3 * 1920 + 3 * 192),
    ],
)
def test_what_is_computed_depends_on_how_the_model_is_trained(
    facts: dict[str, bool], backward: bool, computed: int
) -> None:
    batch = batch_of(4, 3)
    found = measured(meter(Model.of(TINY, **facts)), batch, to_rows(batch, packed=False), backward=backward)
    assert found["computed_fp_utilization"].value == pytest.approx(computed / 2e4)


def test_a_packed_row_has_the_pairs_of_its_sequences_and_no_padding() -> None:
    batch = batch_of(4, 3)
    found = values(measured(meter(), batch, to_rows(batch, packed=True)))
    # 5 tokens; pairs (1 + 2 + 3) + (1 + 2) = 9
    assert found["computed_tokens"] == 5
    assert found["padding_frac"] == 0
    assert found["computed_fp_utilization"] == pytest.approx((3 * 2 * 160 * 5 + 3 * 16 * 9 + 4 * 2 * 40 * 5) / 2e4)


def test_logits_that_fit_are_made_once() -> None:
    batch = batch_of(4, 3)
    found = measured(meter(logit_bytes=4), batch, to_rows(batch, packed=False))
    assert found["computed_fp_utilization"].value == pytest.approx((5760 + 576 + 3 * 2 * 40 * 5) / 2e4)


def test_tokens_that_sequences_share_are_computed_once_and_needed_by_each() -> None:
    # Two sequences of 4 with the first 2 in common: a row of 2 + 1 + 1 fed tokens, each child at position 2.
    positions = torch.tensor([[0, 1, 2, 2]])
    targets = torch.tensor([1, 2, 3, 5, 6, 7])
    tree = Rows(torch.zeros(1, 4, dtype=torch.int64), positions, targets, targets, targets, real_tokens=4)
    found = values(measured(meter(), batch_of(4, 4), tree))
    assert found["computed_tokens"] == 4
    # Needed: 3 * (2 * 160 * 8 + 2 * 40 * 8 + 16 * 2 * 16 / 2) = 3 * (2560 + 640 + 256); pairs: 1 + 2 + 3 + 3
    assert found["train_fp_utilization"] == pytest.approx(3 * 3456 / 2e4)
    assert found["computed_fp_utilization"] == pytest.approx((3 * 2 * 160 * 4 + 3 * 16 * 9 + 4 * 2 * 40 * 6) / 2e4)


def test_ranks_and_updates_merge_exactly() -> None:
    def rank(length: int, seconds: float, most: int) -> dict[str, Metric]:
        batch = batch_of(length)
        return measured(meter(seconds=seconds, largest=lambda _: most), batch, to_rows(batch, packed=False))

    # Two updates on two ranks: 100 and 60 fed tokens in 2 s, then 50 and 50 in 1 s.
    updates = [merge([rank(101, 2, 100), rank(61, 2, 100)]), merge([rank(51, 1, 50), rank(51, 1, 50)])]
    found = values(average(updates))
    assert found["computed_tokens"] == (160 + 100) / 2
    assert found["rank_wait_frac"] == pytest.approx(40 / 300)  # of 2 * (100 + 50) places for tokens
    needed = [3 * (400 * n + 16 * n * n / 2) for n in (101, 61, 51, 51)]
    assert found["train_fp_utilization"] == pytest.approx(sum(needed) / (6 * 1e4))  # 2 + 2 + 1 + 1 s


def test_ranks_that_hold_one_copy_share_its_flops() -> None:
    batch = batch_of(4, 3)
    found = measured(meter(ranks_per_copy=4), batch, to_rows(batch, packed=False))
    assert found["train_fp_utilization"].value == pytest.approx(9000 / (4 * 2e4))


def test_context_parallel_ranks_count_the_whole_rows() -> None:
    batch = batch_of(9)
    rows = to_rows(batch, packed=False)
    part = Rows(rows.input_ids[:, :4], None, rows.predictors, rows.targets[:4], rows.target_ids, real_tokens=8)
    half, whole = meter(), meter()
    half.begin()
    half.add(part, backward=True, parts=2)
    assert half.metrics(batch) == whole_metrics(whole, batch, rows)


def whole_metrics(work: WorkMeter, batch: TokenBatch, rows: Rows) -> dict[str, Metric]:
    work.begin()
    work.add(rows, backward=True)
    return work.metrics(batch)


def test_an_architecture_of_unknown_sizes_has_token_counts_alone() -> None:
    batch = batch_of(4, 3)
    found = measured(meter(Model.of({"model_type": "mamba"})), batch, to_rows(batch, packed=False))
    assert sorted(found) == ["computed_tokens", "padding_frac", "rank_wait_frac"]


LLAMA_8B = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
}
QWEN2_7B = {
    **{"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28},
    **{"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064},
}
QWEN3_32B = {
    **{"model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64},
    **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936},
}
MIXTRAL = {
    **{"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2},
    "vocab_size": 32000,
}
DEEPSEEK_V3 = {
    **{"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128},
    **{"num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_shared_experts": 1},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
}
GEMMA2_2B = {
    **{"model_type": "gemma2", "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "vocab_size": 256000},
    "sliding_window": 4096,
}
S = 4096
"""Tokens of one sequence."""


@pytest.mark.parametrize(
    ("config", "of_nemo_rl", "difference"),
    [
        # What nemo_rl/utils/flops_formulas.py (7ea279abf) returns for these sizes, one sequence of 4096 tokens.
        (LLAMA_8B, 1.9762862e14, 0.0),
        (QWEN3_32B, 8.388039e14, 0.0),
        # It takes keys and values for as wide as queries: 2 * 3584 * (3584 - 512) elements per layer too many.
        (QWEN2_7B, 1.9901381e14, -6 * S * 28 * 2 * 3584 * (3584 - 512)),
        # It counts pairs that the causal mask removes, half of 12 * S^2 * D per layer, and no router.
        (MIXTRAL, 3.3967178e14, 32 * (-6 * S * S * 4096 + 6 * S * 4096 * 8)),
        # It counts no router: 58 of 7168 x 256.
        (DEEPSEEK_V3, 1.0232272e15, 6 * S * 58 * 7168 * 256),
    ],
)
def test_needed_flops_are_those_of_nemo_rl(config: dict[str, Any], of_nemo_rl: float, difference: float) -> None:
    assert Model.of(config).needed_flops(S, S * S) == pytest.approx(of_nemo_rl + difference, rel=1e-5)


def test_gemma_2_is_counted_as_by_hand() -> None:
    # Layer: attention 2304 * (2 * 2048 + 2 * 1024) = 14,155,776 and MLP 3 * 2304 * 9216 = 63,700,992 elements.
    layers = 6 * S * 26 * (14_155_776 + 63_700_992)
    head = 6 * S * 256_000 * 2304
    attention = 26 * 3 * 2 * 8 * (256 + 256) * S * S / 2  # its window of 4096 holds the whole sequence
    assert Model.of(GEMMA2_2B).needed_flops(S, S * S) == pytest.approx(layers + head + attention)


def device_of(name: str) -> Device:
    found = named_by_driver(name)
    assert found is not None
    return found


def test_peaks_are_those_of_data_sheets() -> None:
    assert device_of("NVIDIA H100 80GB HBM3").speed.bfloat16 == 1979 / 2  # sheets give the rate with 2:4 sparsity
    assert device_of("NVIDIA H100 PCIe").speed.bfloat16 == 1513 / 2
    assert device_of("NVIDIA A100-SXM4-80GB").speed.bfloat16 == 624 / 2
    assert device_of("NVIDIA B200").speed.bfloat16 == 4500 / 2


def test_a_cpus_peak_is_measured_once() -> None:
    assert device_peak("cpu", torch.float32) == device_peak("cpu", torch.float32) > 1e7


@pytest.mark.parametrize(("recompute", "chunk"), [(False, None), (True, None), (False, 5)])
def test_a_backends_step_makes_the_products_that_torch_counts(
    tiny_model: Path, recompute: bool, chunk: int | None
) -> None:
    from nemorl.config import PolicyConfig
    from nemorl.resources.worker import WorkerContext
    from nemorl_dtensor import DTensorConfig
    from nemorl_testing.batches import WeightedNLL
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig

    # bfloat16: torch does not count oneDNN's products. Eager attention makes all pairs, those of the future included.
    policy = PolicyConfig(
        model_name=str(tiny_model),
        init="random",
        precision="bfloat16",
        activation_checkpointing=recompute,
        schedule={"decay_steps": 1},
    )
    config = DTensorConfig(attn_implementation="eager", logprob_chunk_tokens=chunk)
    backend = config.build(policy, WorkerContext(), reference=False)
    batch = batch_of(9, 9).with_tokens(advantages=torch.ones(18))
    with FlopCounterMode(display=False) as counter:
        found = backend.train_step(batch, WeightedNLL())
    model = Model.of(AutoConfig.from_pretrained(tiny_model).to_dict(), recomputes_layers=recompute)
    pairs = 2 * 8 * 8
    # Recomputation ends with the last tensor that is missing: the second matrix of the MLP, 32 x 64, is not reached.
    spared = recompute * 2 * 16 * 2 * (32 * 64)
    computed = model.computed_flops(16, 16, pairs, backward=True, kept=0 if chunk else 16)
    assert computed - spared == counter.get_total_flops()
    assert found["performance/computed_tokens"].value == 16
    # The backend's own figure has the pairs of causal attention alone: 1 + … + 8 = 36 of 64 in each of two sequences.
    ratio = found["performance/computed_flops_per_gpu"].value / found["performance/train_flops_per_gpu"].value
    causal = model.computed_flops(16, 16, 2 * 36, backward=True, kept=0 if chunk else 16)
    assert ratio == pytest.approx(causal / model.needed_flops(18, 2 * 81))
