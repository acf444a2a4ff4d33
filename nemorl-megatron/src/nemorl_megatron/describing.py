"""How the training backend describes itself to planners: layouts, rows, efficiency."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from nemorl_rl.planning.memory.describing import Spread
from nemorl_rl.planning.memory.models import HeldModel, tensor_sizes
from nemorl_rl.planning.memory.parts import Moments
from nemorl_rl.planning.memory.work import MIN_SHARING, RowLayout

from nemorl_megatron.stages import EVEN, Split
from nemorl_megatron.training_memory import memory

if TYPE_CHECKING:
    from nemorl_megatron.config import MegatronConfig


@dataclass(frozen=True)
class MegatronPlan:
    """Of models that ``megatron`` trains."""

    config: MegatronConfig
    gpu_frac: float = 0.42
    """Of Megatron-LM (arXiv:2104.04473, table 1: 0.44 to 0.52). Not measured on GPUs by us."""
    layer_start_s: float = 1e-3
    mixture_start_s: float = 12e-3
    """Of megatron-core's token dispatch without dropping, from NeMo RL's runs of Qwen3-30B-A3B, which need as many
    device seconds on GB200 as on H100 (``docs/results/planner.md``). Not measured by us."""

    def spread(self, model: HeldModel) -> Spread:
        config = self.config
        data = max(1, model.ranks // config.ranks_per_copy(model.policy))
        return Spread(
            data,
            model.tensor,
            config.pipeline_parallel_size,
            config.virtual_pipeline_parallel_size or 1,
            config.context_parallel_size,
            config.expert_parallel_size,
            shards=data,
            mtp_passes=0 if model.value_head or config.mtp is None else config.mtp.passes,
            mixture_start_s=self.mixture_start_s if model.geometry.experts else 0.0,
        )

    def row_layout(self, model: HeldModel, sharing: float) -> RowLayout:
        config, g = self.config, model.geometry
        if config.layout != "auto":
            return config.layout
        in_one_piece = config.context_parallel_size == 1 and config.virtual_pipeline_parallel_size is None
        attends_to_all = g.window is None and g.model_type != "gemma2"
        return "shared" if in_one_piece and attends_to_all and sharing > MIN_SHARING else "packed"

    def layouts(self, model: HeldModel, per_node: int) -> Iterator[Mapping[str, object]]:
        g, config, ranks = model.geometry, self.config, model.ranks
        # What the ends have is said for the pipeline of the config; stages of others have as many layers each.
        splits = {**dict.fromkeys((1, 2, 4, 8, 16), EVEN), config.pipeline_parallel_size: config.split}
        parts = config.virtual_pipeline_parallel_size or 1
        pipelines = [
            p for p, split in splits.items() if ranks % p == 0 and split.divides(g.layers, p, parts if p > 1 else 1)
        ]
        experts = [e for e in (1, 2, 4, 8, 16, 32, 64) if e == 1 or (g.experts and g.experts % e == 0)]
        for tensor, pipeline, expert in product(tensor_sizes(model, per_node), pipelines, experts):
            copies = tensor * pipeline * config.context_parallel_size
            if ranks % copies == 0 and ranks % (expert * config.expert_tensor_parallel_size * pipeline) == 0:
                yield {
                    "tensor_parallel_size": tensor,
                    "backend.pipeline_parallel_size": pipeline,
                    "backend.virtual_pipeline_parallel_size": parts if pipeline > 1 and parts > 1 else None,
                    "backend.expert_parallel_size": expert,
                    **({} if config.split == EVEN else _split_fields(splits[pipeline])),
                }

    def memory(self, model: HeldModel) -> Moments:
        return memory(model, self.config)


def _split_fields(split: Split) -> dict[str, object]:
    return {
        "backend.layers_in_first_stage": split.first,
        "backend.layers_in_last_stage": split.last,
        "backend.embedding_counts_as_layer": split.embedding,
        "backend.head_counts_as_layer": split.head,
    }
