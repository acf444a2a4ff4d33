"""Mixtures of experts as far as their ``config.json`` tells: which can be divided, and whose routers are known.

Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from nemorl.errors import ConfigIssue
from nemorl_rl.models.divisions import known_geometry
from nemorl_rl.models.routers import changed, names_experts

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig
    from nemorl_rl.models.model_geometry import Geometry

    from nemorl_dtensor.config import DTensorConfig

SCORES: dict[str, Literal["softmax", "sigmoid"]] = {
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"), "softmax"),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "dots1"), "sigmoid"),
}
"""How routers of a ``model_type`` turn logits into what they choose by. Those of transformers 5 return logits, weights
and choices of experts."""

SPLIT_AROUND_EXPERTS = frozenset({"mixtral", "qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3"})
"""Mixtures whose attention tensor-parallel ranks split (``sharded_mixtures``)."""
ADAPTED_EXPERTS = frozenset({"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe"})
"""Models whose experts take adapters: how they apply them is known."""


def mixture_problems(policy: PolicyConfig, config: DTensorConfig, world_size: int) -> Iterator[ConfigIssue]:
    """Experts that are not there or do not divide, and options of routers that are not known. Nothing of a model that
    is not known here."""
    ways, path = config.expert_parallel_size, "backend.expert_parallel_size"
    if ways > 1 and world_size % (config.data_parallel_replicas * ways):
        replicas = config.data_parallel_replicas
        message = f"{world_size} workers in {replicas} replicas do not divide experts {ways} ways"
        yield ConfigIssue(path, message, "make the workers of a replica a multiple of it")
    if ways > 1 and policy.tensor_parallel_size > 1:
        yield from _tensor_parallel_problems(config)
    if policy.lora is not None and config.router.bias_update_rate:
        yield ConfigIssue(
            "backend.router.bias_update_rate",
            "with adapters the base stays as it is, and the bias that chooses experts is a part of it",
            "set it to 0, or remove lora",
        )
    yield from _adapter_problems(policy)
    geometry = known_geometry(policy)
    if geometry is not None:
        yield from _model_problems(geometry, policy, config)


def _tensor_parallel_problems(config: DTensorConfig) -> Iterator[ConfigIssue]:
    """What does not go with attention that ranks split and experts that they divide."""
    if not config.sequence_parallel:
        message = "ranks that share the layers of a mixture cut its tokens, so that each is dispatched once"
        yield ConfigIssue("backend.sequence_parallel", message, "set it to true, or policy.tensor_parallel_size: 1")
    if config.context_parallel_size > 1:
        message = "tensor, expert and context parallelism of a mixture together are not tested"
        yield ConfigIssue("backend.context_parallel_size", message, "set it to 1, or policy.tensor_parallel_size: 1")


def _adapter_problems(policy: PolicyConfig) -> Iterator[ConfigIssue]:
    """What adapters of experts do not go with."""
    lora = policy.lora
    if lora is None or lora.target_modules == "all-linear" or not any(map(names_experts, lora.target_modules)):
        return
    if lora.dropout:
        message = "each expert's input is another, and peft reads no adapters of experts with dropout"
        yield ConfigIssue("lora.dropout", message, "set it to 0, or leave experts out of target_modules")
    if lora.base != "full":
        message = f"experts stay in full precision, and adapters of them on a base in {lora.base} are not tested"
        yield ConfigIssue("lora.base", message, "set base: full, or leave experts out of target_modules")
    geometry = known_geometry(policy)
    if geometry is not None and geometry.model_type not in ADAPTED_EXPERTS:
        yield ConfigIssue(
            "lora.target_modules",
            f"dtensor adapts no experts of models of type {geometry.model_type}, but of "
            f"{', '.join(sorted(ADAPTED_EXPERTS))}",
            "leave experts out of target_modules",
        )


def _model_problems(geometry: Geometry, policy: PolicyConfig, config: DTensorConfig) -> Iterator[ConfigIssue]:
    ways, path = config.expert_parallel_size, "backend.expert_parallel_size"
    if ways > 1 and not geometry.experts:
        yield ConfigIssue(path, "this model has no experts to divide", "set it to 1")
    elif geometry.experts % ways:
        fitting = " or ".join(str(fewer) for fewer in range(1, ways) if geometry.experts % fewer == 0)
        message = f"{geometry.experts} experts of this model do not divide over {ways} ranks"
        yield ConfigIssue(path, message, f"set it to {fitting}")
    tensor = policy.tensor_parallel_size
    if geometry.experts and tensor > 1 and geometry.model_type not in SPLIT_AROUND_EXPERTS:
        yield ConfigIssue(
            "tensor_parallel_size",
            f"dtensor does not split the attention of mixtures of type {geometry.model_type}, but of "
            f"{', '.join(sorted(SPLIT_AROUND_EXPERTS))}",
            "set it to 1 (backend.expert_parallel_size divides experts), or use backend: megatron",
        )
    elif geometry.experts and tensor > 1 and ways == 1:
        message = f"it splits the attention of this model, and its {geometry.experts} experts are not divided"
        yield ConfigIssue("tensor_parallel_size", message, f"set backend.expert_parallel_size: {tensor} with it, or 1")
    for name in changed(config.router) if geometry.experts and geometry.model_type not in SCORES else ():
        yield ConfigIssue(
            f"backend.router.{name}",
            f"routers of models of type {geometry.model_type} are trained by the gradient of the loss alone: "
            f"{', '.join(sorted(SCORES))} can",
            f"remove router.{name}",
        )
