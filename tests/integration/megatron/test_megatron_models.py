"""Every architecture over ranks in every way computes what transformers computes, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from megatron_models import Case, Found, compare, refuse, write_reference
from nemorl_megatron.parallel import Sizes
from nemorl_megatron.stages import Split
from spawned import run_calls
from tiers import in_full

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

COMMON: dict[str, Any] = {
    "vocab_size": 99,  # odd: padded over 2 ranks
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
LAYER_TYPES = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "one key-value head": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "layer_types": LAYER_TYPES,
        },
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 5, "rope_parameters": GEMMA3_ROPES, "layer_types": LAYER_TYPES}),
    "qwen3 moe": ("qwen3_moe", {**MIXTURE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3 moe as chosen": ("qwen3_moe", {**MIXTURE, "norm_topk_prob": False}),
    "mixtral": ("mixtral", {**MIXTURE, "sliding_window": 5}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": {**YARN, "beta_fast": 4}}),
    "glm4 moe": (
        "glm4_moe",
        {
            **MIXTURE,
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
}
DEEP = {"qwen2, six layers": ("qwen2", {"num_hidden_layers": 6, "tie_word_embeddings": True})}
MIXTURES = [name for name, (_, sizes) in MODELS.items() if "num_experts" in sizes]
FEW = ("one key-value head", "gemma2", "gemma3", "qwen3 moe", "mixtral")
"""Models that are divided in different ways: heads, windows, experts. The others differ in what one rank computes."""
SEVERAL = [name for name in MODELS if name not in FEW]


@dataclass(frozen=True)
class Way:
    """A layout, and what goes through it."""

    ranks: int
    sizes: Sizes
    models: Sequence[str]
    changes: Mapping[str, Any] = field(default_factory=dict)
    is_packed: bool = False


TP2 = Sizes(tensor=2, sequence_parallel=True)
TP2_PP2 = Sizes(tensor=2, pipeline=2, sequence_parallel=True)
ENDS = Split(embedding=True, head=True)
CHECKPOINTING = {"activation_checkpointing": True}
WAYS: dict[str, Way] = {
    "one": Way(1, Sizes(), [*MODELS]),
    "one, checkpointing": Way(1, Sizes(), ["gemma3", *in_full(["qwen2"])], CHECKPOINTING),
    "one, packed": Way(1, Sizes(), [*MODELS], is_packed=True),
    "one, packed, checkpointing": Way(1, Sizes(), ["gemma3"], CHECKPOINTING, is_packed=True),
    "tp2": Way(2, TP2, [*FEW, *in_full([*SEVERAL])]),
    "tp2, packed": Way(2, TP2, ["gemma3", "mixtral", *in_full(["llama", "mistral"])], is_packed=True),
    "pp2": Way(2, Sizes(pipeline=2), [*FEW, *in_full([*SEVERAL])]),
    "pp2, packed": Way(2, Sizes(pipeline=2), ["gemma2", *in_full(["llama 3.1", "qwen2"])], is_packed=True),
    "pp2 vpp2, packed": Way(2, Sizes(pipeline=2, virtual_pipeline=2), ["gemma3", *in_full(["qwen2"])], is_packed=True),
    "ep2": Way(2, Sizes(expert=2), MIXTURES),
    "tp2 ep2": Way(2, replace(TP2, expert=2), in_full(MIXTURES)),
    "tp2 etp2": Way(2, replace(TP2, expert_tensor=2), ["mixtral", *in_full(["qwen3 moe", "qwen3 moe as chosen"])]),
    "tp2, whole sequences": Way(2, Sizes(tensor=2), ["one key-value head", *in_full(["llama", "qwen2", "gemma2"])]),
    "tp2, checkpointing": Way(2, TP2, ["mixtral", *in_full(["qwen2"])], CHECKPOINTING),
    "pp2, three layers first": Way(2, Sizes(pipeline=2, split=Split(first=3)), ["gemma3", *in_full(["qwen3 moe"])]),
    "pp2 vpp2, two layers last": Way(2, Sizes(pipeline=2, virtual_pipeline=2, split=Split(last=2)), [*DEEP]),
    "pp3, one layer at both ends": Way(3, Sizes(pipeline=3, split=Split(first=1, last=1)), ["gemma2"], is_packed=True),
    "pp3, ends counted": Way(3, Sizes(pipeline=3, split=ENDS), in_full(["llama", "qwen2"])),
    "pp2 vpp2": Way(2, Sizes(pipeline=2, virtual_pipeline=2), ["llama", "qwen3 moe", *in_full(["qwen2", "gemma3"])]),
    "tp2 pp2": Way(4, TP2_PP2, ["gemma3", *in_full(["qwen2", "one key-value head"])]),
    "tp2 pp2 ep2, packed": Way(4, replace(TP2_PP2, expert=2), ["qwen3 moe"], is_packed=True),
    "tp2 pp2 ep2": Way(4, replace(TP2_PP2, expert=2), in_full(["qwen3 moe"])),
    "tp2 ep4": Way(4, replace(TP2, expert=4), in_full(["mixtral"])),
    "tp4": Way(4, replace(TP2, tensor=4), in_full(["llama"])),
}
CASES = [(model, name) for name, way in WAYS.items() for model in way.models]

Runs = dict[tuple[str, str], list[Found]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("models")
    models = {
        name: str(write_reference(folder / name, architecture, {**COMMON, **sizes}))
        for name, (architecture, sizes) in {**MODELS, **DEEP}.items()
    }
    found: Runs = {}
    for ranks in (1, 2, 3, 4):
        chosen = [(model, name) for model, name in CASES if WAYS[name].ranks == ranks]
        cases = [
            Case(models[model], WAYS[name].sizes, WAYS[name].changes, WAYS[name].is_packed) for model, name in chosen
        ]
        found |= dict(zip(chosen, run_calls([(compare, (case,)) for case in cases], ranks), strict=True))
    return found


@pytest.mark.parametrize(("model", "way"), CASES)
def test_logits_log_probs_and_gradients_are_those_of_transformers(model: str, way: str, runs: Runs) -> None:
    found = runs[model, way]
    assert max(rank.logits for rank in found if rank.logits is not None) < 1e-5
    assert max(rank.logprobs for rank in found if rank.logprobs is not None) < 1e-5
    wrong = {name: error for name, error in found[0].gradients.items() if error > 1e-4}
    assert not wrong


@pytest.mark.parametrize(("model", "way"), CASES)
def test_an_export_equals_the_files_byte_for_byte(model: str, way: str, runs: Runs) -> None:
    first, *others = runs[model, way]
    assert first.export_is_equal
    assert first.buckets > 1
    assert not any(rank.buckets for rank in others)


@pytest.mark.parametrize("way", [name for name, way in WAYS.items() if way.ranks > 1])
def test_a_rank_reads_no_more_than_it_holds(way: str, runs: Runs) -> None:
    sizes = WAYS[way].sizes
    for model in WAYS[way].models:
        largest = max(rank.read_frac for rank in runs[model, way])
        if model not in MIXTURES and sizes.pipeline == 1:
            # Norms are read by all; so is the block of a key-value head that takes two ranks.
            shared = model == "one key-value head" or sizes.tensor == 4
            assert largest < 1 / sizes.tensor + (0.1 if shared else 0.02), model
        elif model in MIXTURES and sizes.expert * sizes.expert_tensor > 1:
            # Experts are most of the model.
            assert largest < 0.8, model
        elif sizes.pipeline > 1:
            # Stages at both ends read the embedding where it is the head too.
            assert largest < 0.8 / sizes.tensor, model


def test_what_cannot_be_divided_is_refused_with_a_reason(tmp_path: Path) -> None:
    llama = str(write_reference(tmp_path / "llama", "llama", COMMON))
    mixtral = str(write_reference(tmp_path / "mixtral", "mixtral", {**COMMON, **MIXTURE}))
    expected = {
        "3 workers": (Case(llama, TP2), "3 workers cannot be divided"),
        "3 stages": (Case(llama, Sizes(pipeline=3)), "4 layers of this model do not divide"),
        "heads": (Case(llama, Sizes(tensor=3)), "4 attention heads of this model do not divide"),
        "experts": (Case(mixtral, Sizes(expert=3)), "4 experts of this model do not divide"),
        "no experts": (Case(llama, Sizes(expert=3)), "has no experts"),
        "mixture": (Case(mixtral, Sizes(tensor=3)), "do not divide"),
    }
    results = run_calls([(refuse, (case,)) for case, _ in expected.values()], 3)
    for (name, (_, wanted)), found in zip(expected.items(), results, strict=True):
        assert all(wanted in text for text in found), (name, found)
