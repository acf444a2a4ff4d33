"""The peak memory of nemorl-dtensor's training step as PyTorch's trackers count it: allocations of every operation, on
fake tensors and ranks, where nothing is computed, or on real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from nemorl.config.models import OptimizerConfig, PolicyConfig, ScheduleConfig
from nemorl_dtensor import DTensorConfig, sharded_head
from nemorl_dtensor.context_parallel import OwnPart, share_rows
from nemorl_dtensor.describing import DTensorPlan
from nemorl_dtensor.model_head import Scorer
from nemorl_dtensor.optim import Optimizer
from nemorl_dtensor.ranks import AXES, Ranks
from nemorl_dtensor.recomputation import recompute_layers
from nemorl_dtensor.sharding import SCORE, shard
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.parts import Moments
from nemorl_tensors.engines.rows import Rows
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

SIZES = {
    **{"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"intermediate_size": 768, "vocab_size": 4096, "max_position_embeddings": 4096},
}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 64},
    "gemma": {"head_dim": 64},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"head_dim": 64, "num_experts": 8, "moe_intermediate_size": 128, "num_experts_per_tok": 2},
}


@dataclass(frozen=True)
class Case:
    """A training step to be tracked."""

    kind: str
    ranks: int = 1
    tensor: int = 1
    context: int = 1
    rows: int = 6
    width: int = 160
    dtype: str = "bfloat16"
    checkpointing: bool = False
    tied: bool = False
    microbatches: int = 2
    sizes: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        from transformers import AutoConfig

        sizes = {**SIZES, **OWN_SIZES.get(self.kind, {}), **self.sizes, "tie_word_embeddings": self.tied}
        return AutoConfig.for_model(self.kind, **sizes)

    def moments(self) -> Moments:
        """The same in closed form. Fake tensors take no functions of this package for the CPU."""
        config = DTensorConfig(context_parallel_size=self.context)
        policy = PolicyConfig(
            backend=config,
            precision=self.dtype,  # type: ignore[arg-type]
            activation_checkpointing=self.checkpointing,
            tensor_parallel_size=self.tensor,
            max_sequence_tokens=self.width,
        )
        model = HeldModel(
            "policy",
            policy,
            Geometry.from_config(self.config().to_dict()),
            self.ranks,
            on_cpu=True,
            microbatch_tokens=self.rows * self.width,
            accumulates=self.microbatches > 1,
        )
        return DTensorPlan(config, cpu_kernels=False).memory(model)


def tracked_peak(case: Case, *, fake: bool = True) -> float:
    """Bytes at the fullest moment of two steps."""
    with _ranks(case) as ranks, _plain_rows(), FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        return _peak(case, ranks)


def _peak(case: Case, ranks: Ranks | None) -> float:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_config(case.config(), dtype=getattr(torch, case.dtype)).eval()
    if case.checkpointing:
        recompute_layers(model)
    width = case.width // case.context
    scored = case.rows * (width - 1)
    places = torch.zeros(scored, dtype=torch.int64)
    rows = Rows(torch.zeros((case.rows, width), dtype=torch.int64), None, places, places, places)
    score = _scoring(model, ranks, rows)
    optimizer = Optimizer(dict(model.named_parameters()), OptimizerConfig(), ScheduleConfig(), None)
    inner = optimizer._rules[0].inner
    tracker: Any = MemTracker() if ranks is None else FSDPMemTracker(model, inner)
    if ranks is None:
        tracker.track_external(model, inner)
    masters = [master for name, master in optimizer._masters.items() if master is not optimizer._parameters[name]]
    apart = sum(master.nbytes for master in masters) if case.dtype == "bfloat16" else 0
    with tracker:
        for _ in range(2):
            for _ in range(case.microbatches):
                score().sum().backward()
                tracker.reset_mod_stats()
                optimizer.accumulate()
            for rule in optimizer._rules:
                rule.step(1.0, None)
            optimizer._publish()
            optimizer.clear_gradients()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    return float(found["Total"]) + apart  # the tracker was not there when masters were made


def _scoring(model: Any, ranks: Ranks | None, rows: Rows) -> Any:
    scorer = Scorer.find(model)
    if ranks is None:
        return lambda: scorer.score(rows, 1.0)

    own = None
    if ranks.context is not None:
        sharing = share_rows(model, ranks.context, tensor_parallel=ranks.tensor_parallel_size)
        shared = sharing.shared(
            None, rows.input_ids.shape[1] * ranks.context.size(), model.dtype, rows.input_ids.device
        )
        part = replace(rows, position_ids=rows.input_ids)
        own = OwnPart(part, shared, ranks.context, rows.targets, rows.targets.numel())

    def forward(_model: Any, read: Any) -> Any:
        states = sharded_head._states(scorer, rows, ranks, ranks.tensor_parallel_size, own)
        return read(sharded_head.predicting_states(states, rows), rows).clone()

    model.forward = MethodType(forward, model)  # the tracker follows calls of modules
    setattr(model, SCORE, model.forward)
    shard(model, ranks, sequence_parallel=True)
    return lambda: model(partial(sharded_head._head_output, scorer, ranks, 1.0, None))


@contextmanager
def _ranks(case: Case) -> Iterator[Ranks | None]:
    if case.ranks == 1:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    concatenate = DeviceMesh.__dict__["_concatenate"]

    def concatenated(*meshes: Any) -> Any:
        with unset_fake_temporarily():  # looks into its tensor of ranks
            return concatenate.__func__(*meshes)

    DeviceMesh._concatenate = staticmethod(concatenated)  # type: ignore[method-assign]
    try:
        mesh = init_device_mesh("cpu", (1, case.ranks // case.tensor, case.tensor), mesh_dim_names=AXES)
        context = dist.new_group([*range(case.context)]) if case.context > 1 else None
        yield Ranks(mesh, 0, context=context)
    finally:
        DeviceMesh._concatenate = concatenate  # type: ignore[method-assign]
        dist.destroy_process_group()


@contextmanager
def _plain_rows() -> Iterator[None]:
    """transformers takes fake tensors for a trace and prepares for several sequences in a row, which takes a mask."""
    from transformers import masking_utils

    looks = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = looks
