"""Mixtures of experts for tests of expert parallelism: tiny models, and what ranks and one process do with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor.model import load_model
from nemorl_dtensor.ranks import like, whole
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors.engines.model_folder import save_tokenizer
from nemorl_testing.batches import WeightedNLL, ragged_batch
from sharded_runs import TEMPERATURE, Case, Found, build, shard_of, train
from spawned import Call, run_calls
from torch import Tensor

ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
GPT_OSS = {
    "architecture": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "layer_types": ["full_attention"] * 2,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"architecture": "qwen3_moe", **ROUTED, "num_experts": 4, "head_dim": 8},
    "six experts": {"architecture": "qwen3_moe", **ROUTED, "num_experts": 6, "head_dim": 8},
    "four heads": {
        **{"architecture": "qwen3_moe", **ROUTED, "num_experts": 4, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 4},
    },
    "mixtral": {"architecture": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **{"architecture": "deepseek_v3", **ROUTED, "n_routed_experts": 4, "n_shared_experts": 1},
        **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "q_lora_rank": 16},
        **{"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    },
    "latent keys": {
        **{"architecture": "deepseek_v3", **ROUTED, "n_routed_experts": 4, "n_shared_experts": 1},
        **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "q_lora_rank": None},
        **{"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    },
    "gpt_oss": GPT_OSS,
    "one-sided": GPT_OSS,
    "glm4_moe": {
        **{"architecture": "glm4_moe", **ROUTED, "n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 8},
        **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_hidden_layers": 3},
    },
    "qwen3_5_moe": {
        **{"architecture": "qwen3_5_moe_text", **ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 16},
        **{"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    },
    "nemotron_h": {
        **{"architecture": "nemotron_h", **ROUTED, "n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 8},
        **{"moe_shared_expert_intermediate_size": 16, "num_hidden_layers": 4, "n_group": 1, "topk_group": 1},
        **{"layers_block_type": ["mamba", "moe", "attention", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 8},
        **{"ssm_state_size": 8, "n_groups": 2},
    },
}
"""``one-sided``: its routers send every token to the first two experts."""


@dataclass(frozen=True)
class Gradients:
    """Of one rank."""

    sequences: list[int]
    whole: dict[str, Tensor]
    """Put together from all ranks; the same on each"""


def write_mixture(folder: Path, name: str) -> str:
    """A folder with weights, spread out so that log-probs are far from uniform."""
    write_tiny_model(folder / "tiny", **{**SIZES, **MIXTURES[name]})
    model = load_model(PolicyConfig(model_name=str(folder / "tiny"), init="random"), seed=7)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.1 * noise)
            if name == "one-sided" and key.endswith("router.bias"):
                parameter.copy_(torch.tensor([1e3, 1e3, 0.0, 0.0]))
    model.save_pretrained(folder)
    save_tokenizer(folder, str(folder / "tiny"))
    return str(folder)


def gradients(context: WorkerContext, case: Case) -> Gradients:
    """Those of a batch, before the optimizer clips them."""
    backend = build(context, case)
    batch = ragged_batch(temperature=TEMPERATURE)
    width = case.policy.get("tensor_parallel_size", 1)
    sequences = shard_of(batch, context.rank // width, context.world_size // width, all_on_first=case.all_on_first)
    backend.forward_backward(batch.select(sequences), WeightedNLL())
    parts: Mapping[str, Tensor] = backend._optimizer.gathered()
    found = {name: whole(like(backend._trainable[name], part)).clone() for name, part in parts.items()}
    backend.shutdown()
    return Gradients(sequences, found)


class Runs:
    """Results of all cases, and of each in one process."""

    def __init__(
        self,
        folder: Path,
        cases: Sequence[Case],
        single: Callable[[Case], Case],
        *,
        saved_alone: Sequence[Case],
        with_gradients: Collection[str],
    ) -> None:
        """
        Args:
            folder: For models and checkpoints.
            cases: In an order in which a checkpoint exists before it is resumed from.
            single: The case of one process that must find the same. It resumes from its own checkpoint.
            saved_alone: Cases of one process that save what others resume from.
            with_gradients: Names of the cases whose gradients are compared.
        """
        self._folder, self._single = folder, single
        self.models = {name: write_mixture(folder / name, name) for name in {case.model for case in cases}}
        self._alone: dict[str, Found] = {}
        for case in saved_alone:
            self._trained(case)
        self.ranks: dict[str, list[Found]] = {}
        self.gradients: dict[str, list[Gradients]] = {}
        for layout in dict.fromkeys(map(_layout, cases)):
            chosen = [case for case in cases if _layout(case) == layout]
            compared = [case for case in chosen if case.name in with_gradients]
            calls: list[Call] = [(train, (self.placed(case),)) for case in chosen]
            calls += [(gradients, (self.placed(replace(case, saves="")),)) for case in compared]
            results = run_calls(calls, layout[0])
            self.ranks |= {case.name: found for case, found in zip(chosen, results, strict=False)}
            self.gradients |= {case.name: found for case, found in zip(compared, results[len(chosen) :], strict=True)}

    def saved(self, name: str) -> Path:
        return self._folder / f"saved {name}"

    def placed(self, case: Case) -> Case:
        """With its folders, which exist."""
        saves, resumes = (str(self.saved(name)) if name else "" for name in (case.saves, case.resumes))
        if saves:
            Path(saves).mkdir(exist_ok=True)
        return replace(case, model=self.models[case.model], saves=saves, resumes=resumes)

    def alone(self, case: Case) -> Found:
        """What one process finds."""
        return self._trained(self._single(case))

    def gradients_alone(self, case: Case) -> dict[str, Tensor]:
        return gradients(WorkerContext(), self.placed(self._single(case))).whole

    def _trained(self, single: Case) -> Found:
        key = repr(replace(single, name="", saves=""))
        if key not in self._alone:
            self._alone[key] = train(WorkerContext(), self.placed(single))
        return self._alone[key]


def _layout(case: Case) -> tuple[int, int, int]:
    """Cases of one layout share processes: torch takes meshes of equal shape for the same, also of dead groups."""
    options = case.options
    return case.world_size, options.get("data_parallel_replicas", 1), options.get("expert_parallel_size", 1)
