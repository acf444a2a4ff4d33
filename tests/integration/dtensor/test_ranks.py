"""What ranks do together besides training: a vocabulary in parts, a loss among them, configs that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from nemorl_rl.models.tiny import write_tiny_model
from sharded_runs import Case, compare_heads, die_midway, go_back, refuse
from spawned import RankError, gather, run_calls

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 32, "intermediate_size": 64}


def test_a_head_spread_over_two_ranks_gives_the_log_probs_and_gradients_of_the_whole() -> None:
    (found,) = run_calls([(compare_heads, ())], 2)
    for differences in found:
        assert len(differences) == 51  # 3 heads, each whole and under 3 filters, 4 tensors each; the likeliest of each
        assert max(differences) < 1e-5


def test_a_checkpoint_that_is_loaded_after_scoring_replaces_all_weights(tmp_path: Path) -> None:
    # FSDP2 keeps the root's parameters gathered after a forward pass: they must not outlive the load.
    case = Case("", str(write_tiny_model(tmp_path / "model", **SIZES)), 2, {"init": "random"}, saves=str(tmp_path))
    assert run_calls([(go_back, (case,))], 2) == [[0.0, 0.0]]


def test_a_rank_that_dies_makes_the_others_fail(tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path, **SIZES))
    case = Case("dies", model, 3, {"init": "random"})
    ((first, killed, third),) = gather([(die_midway, (case,))], 3)
    assert first
    assert isinstance(killed, RankError)
    assert third


def test_what_cannot_be_spread_is_refused_with_a_reason(tmp_path: Path) -> None:
    qwen = str(write_tiny_model(tmp_path / "qwen2", **SIZES))
    gpt2 = str(write_tiny_model(tmp_path / "gpt2", architecture="gpt2", n_embd=32, n_layer=2, n_head=4))
    olmo2 = str(write_tiny_model(tmp_path / "olmo2", architecture="olmo2", **SIZES))
    tensor_parallel = {"tensor_parallel_size": 2, "init": "random"}
    expected = {
        "replicas": (Case("", qwen, 2, {"init": "random"}, {"data_parallel_replicas": 3}), "cannot form 3 replicas"),
        "architecture": (Case("", gpt2, 2, tensor_parallel), "not built like Llama's layer"),
        "norms across heads": (Case("", olmo2, 2, tensor_parallel), "self_attn.q_norm"),
    }
    for (name, (_, wanted)), found in zip(
        expected.items(), run_calls([(refuse, (case,)) for case, _ in expected.values()], 2), strict=True
    ):
        assert all(wanted in text for text in found), (name, found)
