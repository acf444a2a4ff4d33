"""Ranks that share the tokens of each sequence learn what one process learns: context parallelism."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from context_runs import Learnt, Way, batch_of, exchange, learn, refused
from nemorl_testing.models import tiny_model
from spawned import run_calls, run_ranks
from spread_cases import gap, together
from tiers import in_full
from torch import Tensor

pytestmark = pytest.mark.slow

MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "three heads": {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3},
    "one key-value head": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "three key-value heads": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
    "llama": {"architecture": "llama", "num_attention_heads": 4, "num_key_value_heads": 4},
    "qwen3": {"architecture": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "gpt2": {"architecture": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
    "mixtral": {"architecture": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None},
}
MLA: dict[str, Any] = {
    **{"architecture": "deepseek_v3", "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2},
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
}
MODELS["deepseek"] = MLA
ROPE = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mistral": ({"architecture": "mistral", "sliding_window": 6}, "sliding_window"),
    "gemma2": ({"architecture": "gemma2", "head_dim": 8}, "sliding_attention"),
    "bloom": ({"architecture": "bloom", "n_head": 4}, "eager"),
    "recurrences": ({"architecture": "recurrent_gemma", "attention_window_size": 64}, "off by"),
    "dynamic rope": ({}, "dynamic"),
}
LORA: dict[str, Any] = {"lora": {"rank": 3}}
RECOMPUTED: dict[str, Any] = {"activation_checkpointing": True}
WHOLE: dict[str, Any] = {"sequence_parallel": False}
LOW: dict[str, Any] = {"precision": "bfloat16"}
TP: dict[str, Any] = {"tensor_parallel_size": 2}
RING: dict[str, Any] = {"context_parallel_method": "ring"}
ULYSSES: dict[str, Any] = {"context_parallel_method": "ulysses"}
SAVED = ("one", "cp2", "cp4", "dp2 x cp2", "ring3")

WAYS = (
    Way("cp2", 2, 2, saves="cp2"),
    Way("cp2 shared", 2, 2, "shared", batch="branching"),
    Way("cp2 lora", 2, 2, policy=LORA),
    Way("cp2 deepseek", 2, 2, model="deepseek"),
    Way("one -> cp2", 2, 2, resumes="one"),
    Way("cp4", 4, 4, saves="cp4"),
    Way("cp4 short", 4, 4, batch="short"),
    Way("dp2 x cp2", 4, 2, saves="dp2 x cp2"),
    Way("dp2 x cp2 value, packed", 4, 2, "packed", head="value"),
    Way("cp2 x tp2", 4, 2, policy=TP),
    Way("cp2 -> dp2 x cp2", 4, 2, resumes="cp2"),
    # Heads that do not divide go round without being asked to: 4 on 3 ranks, 3 on 2, 6 on 4.
    Way("ring2 three heads", 2, 2, model="three heads"),
    Way("ring2 lora shared recomputed", 2, 2, "shared", "qwen2", "branching", {**LORA, **RECOMPUTED}, RING),
    Way("ring3", 3, 3, saves="ring3"),
    Way("cp2 -> ring3", 3, 3, resumes="cp2"),
    Way("dp2 x ring2 shared", 4, 2, "shared", batch="branching", options=RING),
    *in_full(
        [
            Way("cp2 packed", 2, 2, "packed"),
            Way("cp2 recomputed", 2, 2, policy=RECOMPUTED),
            Way("cp2 value", 2, 2, head="value"),
            Way("cp2 short", 2, 2, batch="short"),
            Way("cp2 three key-value heads", 2, 2, model="three key-value heads"),
            Way("cp2 gpt2", 2, 2, model="gpt2"),
            Way("cp2 mixtral", 2, 2, model="mixtral"),
            Way("cp4 one key-value head, shared", 4, 4, "shared", "one key-value head", "branching"),
            Way("ring2 packed", 2, 2, "packed", options=RING),
            Way("ring2 mixtral, value", 2, 2, model="mixtral", head="value", options=RING),
            Way("ring2 deepseek", 2, 2, model="deepseek", options=RING),
            Way("ring3 packed", 3, 3, "packed"),
            Way("ring3 shared", 3, 3, "shared", batch="branching"),
            Way("ring3 short", 3, 3, batch="short"),
            Way("ring4 six heads", 4, 4, model="three key-value heads"),
            Way("ring2 x tp2", 4, 2, policy=TP, options=RING),
            Way("ring2", 2, 2, options=RING),
            Way("ring2 gpt2", 2, 2, model="gpt2", options=RING),
            Way("ring2 value, packed", 2, 2, "packed", head="value", options=RING),
            Way("ring3 recomputed", 3, 3, policy=RECOMPUTED),
            Way("ring3 lora", 3, 3, policy=LORA),
            Way("ring3 value", 3, 3, head="value"),
            Way("ring3 one key-value head", 3, 3, model="one key-value head"),
            Way("ring4 short", 4, 4, batch="short", options=RING),
            Way("ring4 six heads, packed", 4, 4, "packed", model="three key-value heads"),
            Way("ring4 six heads, shared", 4, 4, "shared", "three key-value heads", "branching"),
            Way("ring2 x tp2, packed, whole sequences", 4, 2, "packed", policy=TP, options={**RING, **WHOLE}),
            Way("replicas2 x ring2", 4, 2, options={**RING, "data_parallel_replicas": 2}),
            Way("cp2 one key-value head", 2, 2, model="one key-value head"),
            Way("cp2 llama", 2, 2, model="llama"),
            Way("cp2 qwen3", 2, 2, model="qwen3"),
            Way(
                "cp2 lora shared recomputed",
                2,
                2,
                "shared",
                "qwen2",
                "branching",
                {**LORA, **RECOMPUTED},
            ),
            Way("cp4 packed", 4, 4, "packed"),
            Way("cp2 x tp2, whole sequences", 4, 2, policy=TP, options=WHOLE),
            Way("cp2 x tp2 lora shared", 4, 2, "shared", batch="branching", policy={**TP, **LORA}),
            Way("replicas2 x cp2", 4, 2, options={"data_parallel_replicas": 2}),
            Way("dp2 x cp2 shared", 4, 2, "shared", batch="branching"),
        ]
    ),
    *(Way(f"{name} -> one", resumes=name) for name in SAVED[1:]),
)
"""In an order in which a checkpoint exists before it is resumed from."""


def alone(way: Way) -> Way:
    """The same in one process, padded, resumed from the checkpoint of one process."""
    policy = {key: value for key, value in way.policy.items() if key not in TP}
    resumes = way.resumes and "one"
    name = f"one {way.model} {way.batch} {way.head} {policy} {resumes}"
    return Way(name, model=way.model, batch=way.batch, policy=policy, head=way.head, resumes=resumes)


class Runs:
    """What the ranks of all ways found, and what one process does in their place."""

    def __init__(self, folder: Path) -> None:
        self.folders = {name: str(tiny_model(**sizes)) for name, sizes in MODELS.items()}
        self.folders |= {name: str(folder / name) for name in SAVED}
        for name in SAVED:
            (folder / name).mkdir()
        first = replace(alone(WAYS[0]), saves="one")
        singles = {first.name: first, **{way.name: way for way in map(alone, WAYS) if way.name != first.name}}
        self._found: dict[str, list[Learnt]] = {}
        for size in (1, 2, 3, 4, 1):
            ways = [way for way in (*singles.values(), *WAYS) if way.world_size == size and self._is_due(way)]
            calls = [(learn, (way, self.folders)) for way in ways]
            self._found |= dict(zip([way.name for way in ways], run_calls(calls, size), strict=True))

    def _is_due(self, way: Way) -> bool:
        is_there = not way.resumes or way.resumes == "one" or way.resumes in self._found
        return is_there and way.name not in self._found

    def __getitem__(self, way: Way) -> list[Learnt]:
        return self._found[way.name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    return Runs(tmp_path_factory.mktemp("context"))


def heads(way: Way, found: list[Learnt]) -> list[Learnt]:
    """One rank of those that are given the same shard."""
    return found[:: way.together]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_what_is_scored_is_that_of_one_process_on_every_rank(way: Way, runs: Runs) -> None:
    found, (one,) = runs[way], runs[alone(way)]
    lengths = batch_of(way).lengths
    for name in ("before", "reference", "given", "after"):
        expected = together([one], name, lengths)
        assert gap(together(heads(way, found), name, lengths), expected) < 1e-5, name
        for index, rank in enumerate(found):  # ranks that share a shard answer alike
            assert torch.equal(getattr(rank, name), getattr(found[index // way.together * way.together], name))
    assert gap(one.after, one.before) > 1e-2, "the steps changed nothing: this proves nothing"
    if way.head == "language_model":
        likeliest = together(heads(way, found), "likeliest", lengths)
        assert torch.equal(likeliest, together([one], "likeliest", lengths))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_losses_and_steps_are_those_of_one_process(way: Way, runs: Runs) -> None:
    found, (one,) = runs[way], runs[alone(way)]
    for step, expected in enumerate(one.metrics):
        ours = [rank.metrics[step] for rank in heads(way, found)]
        assert sum(each["loss"] for each in ours) == pytest.approx(expected["loss"], rel=1e-6, abs=1e-6)
        for name in ("seen", "global_valid_toks", "global_valid_seqs"):
            assert sum(each[name] for each in ours if name in each) == expected.get(name, 0)
        assert all(each["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-6) for each in ours)
    worst = max((gap(found[0].weights[key], wanted), key) for key, wanted in one.weights.items())
    assert worst[0] < 1e-5, worst


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_the_gradient_is_that_of_one_process_on_every_rank(way: Way, runs: Runs) -> None:
    (one,) = runs[alone(way)]
    expected = flat(one.gradients)
    assert float(expected.norm()) > 1e-2, "a gradient of nothing proves nothing"
    for rank in runs[way]:
        assert rank.gradients.keys() == one.gradients.keys()
        assert float((flat(rank.gradients) - expected).norm() / expected.norm()) < 5e-6


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten().double() for name in sorted(gradients)])


def test_bfloat16_learns_like_one_process_up_to_its_rounding() -> None:
    folders = {"qwen2": str(tiny_model(**MODELS["qwen2"]))}
    (found,) = run_calls([(learn, (Way("cp2 bfloat16", 2, 2, policy=LOW), folders))], 2)
    (one,) = run_calls([(learn, (Way("bfloat16", policy=LOW), folders))], 1)[0]
    assert float((found[0].after - one.after).abs().mean()) < 0.02
    assert float((one.after - one.before).abs().mean()) > 0.02
    assert found[0].metrics[0]["grad_norm"] == pytest.approx(one.metrics[0]["grad_norm"], rel=0.05)


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_tokens_meet_elsewhere_are_refused_by_name(name: str) -> None:
    sizes, fact = REFUSED[name]
    folders = {name: str(tiny_model(**{"num_attention_heads": 4, **sizes}))}
    policy = {"hf_config_overrides": ROPE} if name == "dynamic rope" else {}
    for text in run_ranks(refused, 2, Way(name, 2, 2, model=name, policy=policy), folders):
        assert fact in text, text


def test_heads_that_do_not_divide_are_not_traded() -> None:
    folders = {"three heads": str(tiny_model(**MODELS["three heads"]))}
    way = Way("cp2 three heads", 2, 2, model="three heads", options=ULYSSES)
    for text in run_ranks(refused, 2, way, folders):
        assert "3 attention heads" in text, text


def test_slices_become_whole_rows_of_some_heads_and_go_back() -> None:
    first, second = run_ranks(exchange, 2)
    # Heads 0 and 1 of tokens 0 … 3 to rank 0, heads 2 and 3 to rank 1; the key's only head to both.
    assert first["queries"] == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert second["queries"] == [[20, 21, 22, 23], [30, 31, 32, 33]]
    assert first["keys"] == second["keys"] == [[100, 101, 102, 103]]
    assert first["returns"]
    assert second["returns"]
    # The loss of rank 0 counts its heads once, that of rank 1 twice; both see the key.
    assert first["query gradient"] == second["query gradient"] == [[1, 1], [1, 1], [2, 2], [2, 2]]
    assert first["key gradient"] == second["key gradient"] == [2, 2]
