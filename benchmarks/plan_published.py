"""Step times of published pretraining beside the planner's, from 32 to 8,192 GPUs. Starts nothing and needs no GPU.

    python benchmarks/plan_published.py

The published times follow from a report's TFLOP/s per GPU and its formula for the FLOPs of a step. Runs of GRPO:
``nemo_rl_runs.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemorl.config import PolicyConfig
from nemorl_insight.plan.seconds import step_time
from nemorl_megatron import MegatronConfig
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.planning.devices import parse_fleet
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.scene import Scene
from nemorl_rl.planning.memory.work import Work


@dataclass(frozen=True)
class Published:
    """A step of somebody's run."""

    name: str
    source: str
    seconds: float
    scene: Scene


def trained(
    geometry: Geometry,
    backend: MegatronConfig,
    gpus: int,
    *,
    tensor: int,
    row: int,
    checkpointing: bool = False,
) -> HeldModel:
    """A policy whose microbatches are full rows."""
    policy = PolicyConfig(
        backend=backend,
        precision="bfloat16",
        tensor_parallel_size=tensor,
        activation_checkpointing=checkpointing,
        max_sequence_tokens=row,
        microbatch_tokens=row,
    )
    return HeldModel("policy", policy, geometry, gpus, microbatch_tokens=row)


def megatron_gpt(
    layers: int, hidden: int, heads: int, tensor: int, pipeline: int, gpus: int, batch: int, tf: float
) -> Published:
    """A row of table 1 of arXiv:2104.04473: GPT of 2,048 tokens on A100, all activations computed again.

    A step takes 96 B s l h^2 (1 + s / 6h + V / 16 l h) FLOPs (its equation 3), at ``tf`` TFLOP/s per GPU.
    """
    s, v = 2048, 51200
    geometry = Geometry.from_config(
        {"model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": s, "vocab_size": v}
    )
    flops = 96 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (16 * layers * hidden))
    backend = MegatronConfig(pipeline_parallel_size=pipeline, sequence_parallel=False)
    held = trained(geometry, backend, gpus, tensor=tensor, row=s, checkpointing=True)
    work = Work(batch, 0, s, s)
    scene = Scene(parse_fleet(gpus // 8, "8xA100"), held, (), None, work)
    name = f"GPT {geometry.parameters() / 1e9:.0f} B, {gpus} A100"
    return Published(name, "2104.04473, table 1", flops / gpus / (tf * 1e12), scene)


def llama_405b(gpus: int, tf: float) -> Published:
    """A row of table 4 of arXiv:2407.21783: 2,048 sequences of 8,192 tokens, tensor 8, pipeline 16. It does not say in
    how many parts a stage is: 8 is our guess."""
    geometry = Geometry.from_config(
        {
            **{"model_type": "llama", "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128},
            **{"num_key_value_heads": 8, "intermediate_size": 53248, "vocab_size": 128256},
        }
    )
    batch = 2048
    # The first and the last stage have one layer less (its section 3.3.2), as 126 do not divide by 16.
    backend = MegatronConfig(
        pipeline_parallel_size=16,
        virtual_pipeline_parallel_size=8,
        embedding_counts_as_layer=True,
        head_counts_as_layer=True,
    )
    held = trained(geometry, backend, gpus, tensor=8, row=8192)
    scene = Scene(parse_fleet(gpus // 8, "8xH100"), held, (), None, Work(batch, 0, 8192, 8192))
    flops = geometry.training_flops(batch * 8192, batch * 8192, batch * 8192**2)
    return Published(f"Llama 3 405 B, {gpus} H100", "2407.21783, table 4", flops / gpus / (tf * 1e12), scene)


RUNS = (
    megatron_gpt(24, 2304, 24, 1, 1, 32, 512, 137),
    megatron_gpt(40, 6144, 48, 8, 1, 256, 1024, 135),
    megatron_gpt(60, 10240, 80, 8, 4, 1024, 1792, 140),
    megatron_gpt(128, 25600, 160, 8, 64, 3072, 3072, 163),
    llama_405b(8192, 430),
)


def main() -> None:
    print("| run | source | published s | planned s | deviation | phases |")
    print("|---|---|---|---|---|---|")
    for run in RUNS:
        time = step_time(run.scene)
        phases = ", ".join(f"{phase.name} {phase.seconds:.2g}" for phase in time.phases)
        deviation = time.seconds / run.seconds - 1
        print(f"| {run.name} | {run.source} | {run.seconds:.3g} | {time.seconds:.3g} | {deviation:+.0%} | {phases} |")


if __name__ == "__main__":
    main()
