"""One row of many sequences computes what padded rows compute, also where they share tokens, however it is spread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from layouts import CP, EP, PP, RECOMPUTED, TP, VPP, WHOLE
from megatron_packed import Case, Found, compute
from nemorl.resources.worker import WorkerContext
from spawned import run_calls
from spread_cases import gap
from test_megatron_training import MODELS, write_model
from tiers import in_full

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

LOGPROB_TOLERANCE = 5e-6
GRADIENT_TOLERANCE = 5e-6
"""Of the norm of all gradients."""
CASES = (
    Case("one", "qwen2"),
    Case("one dpo", "llama", loss="dpo"),
    Case("one, windows and capped scores", "gemma2"),
    Case("dp2, one rank without data", "qwen2", 2, all_on_first=True),
    Case("tp2", "qwen2", 2, TP),
    Case("pp2", "qwen2", 2, {}, PP),
    Case("ep2, one rank without data", "moe", 2, {}, EP, all_on_first=True),
    *in_full(
        [
            Case("one moe", "moe"),
            Case("cp2", "qwen2", 2, {}, CP),
            Case("pp2 ep2", "moe", 4, {}, PP | EP),
            Case("one sft, recomputed", "qwen2", 1, RECOMPUTED, loss="sft"),
            Case("tp2 dpo, recomputed", "llama", 2, {**TP, **RECOMPUTED}, loss="dpo"),
            Case("tp2, whole sequences", "qwen3", 2, TP, WHOLE),
            Case("pp2 sft, recomputed", "qwen3", 2, RECOMPUTED, PP, "sft"),
            Case("pp2 vpp2 dpo", "llama", 2, {}, VPP, "dpo"),
            Case("tp2 ep2", "moe", 2, TP, EP),
            Case("cp2, windows and capped scores", "gemma2", 2, {}, CP),
            Case("tp2 pp2", "qwen2", 4, TP, PP),
            Case("tp2 cp2", "qwen3", 4, TP, CP),
            Case("pp2 vpp2 cp2", "qwen2", 4, {}, VPP | CP),
        ]
    ),
)
TREES = (
    Case("one, trees", "qwen2", branches=True),
    Case("dp2, trees", "qwen2", 2, branches=True),
    Case("pp2, trees", "qwen2", 2, {}, PP, branches=True),
    *in_full(
        [
            Case("one, trees, sft, recomputed", "qwen3", 1, RECOMPUTED, loss="sft", branches=True),
            Case("tp2, trees", "qwen2", 2, TP, branches=True),
            Case("ep2, trees, one rank without data", "moe", 2, {}, EP, all_on_first=True, branches=True),
            Case("one, trees, dpo", "llama", loss="dpo", branches=True),
            Case("one, trees, moe", "moe", branches=True),
            Case("tp2, trees, whole sequences, recomputed", "llama", 2, {**TP, **RECOMPUTED}, WHOLE, branches=True),
            Case("tp2 pp2, trees", "qwen3", 4, TP, PP, branches=True),
        ]
    ),
)
"""Whose other layout is ``shared``."""
NAMES = [case.name for case in (*CASES, *TREES)]

Runs = dict[str, list[tuple[Found, Found]]]
"""By case and rank: padded, and packed or shared"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("packed")
    models = {name: str(write_model(folder / name, MODELS[name])) for name in {case.model for case in (*CASES, *TREES)}}
    found: Runs = {}
    for size in (1, 2, 4):
        placed = [replace(case, model=models[case.model]) for case in (*CASES, *TREES) if case.world_size == size]
        calls = [
            (compute, (case, layout))
            for case in placed
            for layout in ("padded", "shared" if case.branches else "packed")
        ]
        if size == 1:
            results = [[compute(WorkerContext(), *arguments)] for _, arguments in calls]
        else:
            results = run_calls(calls, size)
        for case, padded, packed in zip(placed, results[::2], results[1::2], strict=True):
            found[case.name] = [*zip(padded, packed, strict=True)]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_of_one_row_are_those_of_padded_rows(name: str, runs: Runs) -> None:
    for padded, packed in runs[name]:
        assert gap(packed.logprobs, padded.logprobs) < LOGPROB_TOLERANCE
        assert gap(packed.topk_logprobs, padded.topk_logprobs) < LOGPROB_TOLERANCE
        assert torch.equal(packed.topk_ids, padded.topk_ids)
        assert packed.loss == pytest.approx(padded.loss, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_one_row_are_those_of_padded_rows(name: str, runs: Runs) -> None:
    padded, packed = (found.gradients for found in runs[name][0])
    assert padded.keys() == packed.keys()
    total = sum(float(gradient.square().sum()) for gradient in padded.values()) ** 0.5
    off = sum(float((packed[key] - padded[key]).square().sum()) for key in padded) ** 0.5
    assert off / total < GRADIENT_TOLERANCE
    assert total > 1e-3, "without a gradient this proves nothing"


@pytest.mark.parametrize("name", NAMES)
def test_auto_packs_whatever_the_model_and_however_it_is_spread(name: str, runs: Runs) -> None:
    assert all(found.packs_by_itself for rank in runs[name] for found in rank)


@pytest.mark.parametrize("name", [case.name for case in TREES])
def test_tokens_in_common_are_computed_once_where_that_is_asked_for(name: str, runs: Runs) -> None:
    padded, shared = runs[name][0]
    assert padded.tree_ratio == 1.0
    assert shared.tree_ratio > 1.0
