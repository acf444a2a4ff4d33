"""Parts of a model that backend ``megatron``'s parallel sizes cannot divide, told from its ``config.json``.

Importing this imports neither torch nor megatron-core. Tensor parallelism is ``nemorl_rl.models.divisions``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemorl.errors import BackendError, ConfigIssue
from nemorl_rl.models.divisions import known_geometry

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig
    from nemorl_rl.models.model_geometry import Geometry

    from nemorl_megatron.config import MegatronConfig


def model_problems(policy: PolicyConfig, config: MegatronConfig) -> Iterator[ConfigIssue]:
    """Stages that do not divide the layers, and experts that are not there or do not divide. Nothing of a model that is
    not known here."""
    geometry = known_geometry(policy)
    if geometry is None:
        return
    try:
        config.split.counts(geometry.layers, config.pipeline_parallel_size, config.virtual_pipeline_parallel_size or 1)
    except BackendError as error:
        yield ConfigIssue("backend.pipeline_parallel_size", error.message, error.fix)
    yield from _expert_problems(geometry, policy, config)


def _expert_problems(geometry: Geometry, policy: PolicyConfig, config: MegatronConfig) -> Iterator[ConfigIssue]:
    if not geometry.experts:
        if config.expert_parallel_size > 1:
            yield ConfigIssue("backend.expert_parallel_size", "this model has no experts to divide", "set it to 1")
        return
    for key, what, size, ways in (
        ("expert_parallel_size", "experts", geometry.experts, config.expert_parallel_size),
        (
            "expert_tensor_parallel_size",
            "entries of an expert's width",
            geometry.expert_ffn,
            config.expert_tensor_parallel_size,
        ),
    ):
        if size % ways:
            fitting = " or ".join(str(fewer) for fewer in range(1, ways) if size % fewer == 0)
            message = f"{size} {what} of this model do not divide over {ways} ranks"
            yield ConfigIssue(f"backend.{key}", message, f"set it to {fitting}")
    if policy.tensor_parallel_size > 1 and not config.sequence_parallel:
        yield ConfigIssue(
            "backend.sequence_parallel",
            "mixtures of experts with tensor parallelism need the sequence divided too: their tokens are exchanged",
            "set it to true, or policy.tensor_parallel_size: 1",
        )
