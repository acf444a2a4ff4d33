"""Step times of NeMo RL's published GRPO runs (``nemo_rl_runs.json``) beside those of the planner.

    python benchmarks/nemo_rl_runs.py [--places]

The file has the rows of its performance summary for 0.4, 0.5 and 0.6 in bfloat16; layouts, recomputation, devices of
training and lengths are those of the page and of its recipes (``examples/configs/recipes/llm/performance``). Where a
row does not say otherwise: 64 prompts x 32 responses, four updates, rows packed to 4,096 tokens, vLLM at 0.6 of a
shared device or 0.8 of its own, log-probs of the policy and of a reference.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from nemorl.config.load import load_config
from nemorl_insight.plan.candidates import SIZES, Candidate, distinct
from nemorl_insight.plan.efficiencies import Efficiencies, starting_efficiencies
from nemorl_insight.plan.plan import Plan, words
from nemorl_insight.plan.seconds import step_time
from nemorl_rl.planning.devices import parse_fleet
from nemorl_rl.planning.memory.budgets import settled
from nemorl_rl.planning.memory.layouts import keeps_learning
from nemorl_rl.planning.memory.reading import Lengths, Sizes, scene_of
from nemorl_rl.planning.memory.scene import Scene

MODELS: Mapping[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
    },
    "qwen3-32b": {
        **{"model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64},
        **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936},
    },
    "qwen3-30b-a3b": {
        **{"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32},
        **{"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    },
    "qwen3-235b-a22b": {
        **{"model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64},
        **{"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
    },
    "deepseek-v3": {
        **{"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128},
        **{"num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "first_k_dense_replace": 3},
        **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
        **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
        **{"v_head_dim": 128},
    },
}
BOUND = 1.5


@dataclass(frozen=True)
class Run:
    """A row of the table."""

    release: str
    model: str
    device: str
    gpus: int
    per_node: int
    seconds: float
    response_tokens: float
    """Mean"""
    tokens_per_gpu_s: float
    tensor: int
    pipeline: int
    expert: int
    engine_tensor: int
    training_gpus: int | None
    """Unset: all, which engines share"""
    max_staleness: int | None
    """Unset: sampling and training one after the other"""
    checkpointing: bool
    prompts: int = 64
    responses: int = 32
    """Of each prompt"""
    updates: int = 4
    row: int = 4096
    """Tokens of the longest sequence, and of a microbatch"""
    context: int = 1
    ends: tuple[int, int] | None = None
    """Layers of the first and of the last stage; unset: as many as the others"""
    share: float | None = None
    """Of a device, for vLLM; unset: 0.6 of a shared one, 0.8 of its own"""

    @property
    def name(self) -> str:
        mode = "on policy" if self.max_staleness is None else f"{self.max_staleness} off"
        return f"{self.release} {self.model}, {self.gpus} {self.device}, {mode}"

    @property
    def prompt_tokens(self) -> float:
        """The page's tokens per second are of prompts and responses, its mean length is of responses."""
        sequences = self.prompts * self.responses
        return round(self.tokens_per_gpu_s * self.seconds * self.gpus / sequences - self.response_tokens)

    def scene(self, *, open_microbatch: bool = False, offload: Mapping[str, bool] | None = None) -> Scene:
        """The run as the planner sees it, with the page's layout.

        Args:
            open_microbatch: Microbatches of as many tokens as fit.
            offload: What lies in the host's memory.
        """
        apart = self.training_gpus is not None
        in_node = min(self.engine_tensor, self.per_node)
        samplers = (self.gpus - (self.training_gpus or 0)) // in_node
        backend: dict[str, Any] = {
            **{"pipeline_parallel_size": self.pipeline, "expert_parallel_size": self.expert, "layout": "packed"},
            **({} if self.context == 1 else {"context_parallel_size": self.context}),
            **({} if offload is None else {"offload": offload}),
        }
        if self.ends is not None:
            backend |= {"layers_in_first_stage": self.ends[0], "layers_in_last_stage": self.ends[1]}
        share = self.share or (0.8 if apart else 0.6)
        engine = {"tensor_parallel_size": in_node, "max_num_seqs": 1024, "gpu_memory_utilization": share}
        config: dict[str, Any] = {
            **{"algorithm": "grpo", "model": "org/model", "data": "arithmetic", "environment": "math"},
            **{"num_prompts_per_step": self.prompts, "num_generations_per_prompt": self.responses},
            **{"num_minibatches": self.updates, "kl_penalty": 0.01},
            "policy": {
                "backend": {"name": "megatron", **backend},
                "precision": "bfloat16",
                "tensor_parallel_size": self.tensor,
                "activation_checkpointing": self.checkpointing,
                "max_sequence_tokens": self.row,
                "microbatch_tokens": None if open_microbatch else self.row,
            },
            "generation": {"backend": {"name": "vllm", **engine}, "max_new_tokens": self.row - 256},
            "cluster": {
                **{"num_nodes": self.gpus // self.per_node, "gpus_per_node": self.per_node, "address": "auto"},
                **({"colocated": False, "generation_workers": samplers} if apart else {}),
            },
        }
        if self.max_staleness is not None:
            config["rollouts"] = {"mode": "async", "max_staleness": self.max_staleness}
        fleet = parse_fleet(self.gpus // self.per_node, f"{self.per_node}x{self.device}")
        # Some responses of so many reach the limit.
        lengths = Lengths(self.prompt_tokens, self.response_tokens, float(self.row - 256))
        scene = scene_of(load_config(config, for_cluster=True), fleet, Sizes(MODELS[self.model]), lengths)
        return self._as_published(scene)

    def _as_published(self, scene: Scene) -> Scene:
        """With engines as wide as theirs, also beyond a node, and log-probs of the policy before its update, which NeMo
        RL computes also where there is one update alone."""
        engines = scene.engines
        assert engines is not None
        backend = engines.backend.model_copy(update={"tensor_parallel_size": self.engine_tensor})
        replicas = engines.devices // self.engine_tensor
        wide = replace(engines, backend=backend, replicas=replicas)
        policy = replace(scene.policy, default_budget=None).fed(scene.work)
        return settled(replace(scene, policy=policy, engines=wide, work=replace(scene.work, old_frac=1.0)))


def runs() -> Iterator[Run]:
    """All of the file."""
    for row in json.loads(Path(__file__).with_suffix(".json").read_text()):
        yield Run(**{**row, "ends": tuple(row["ends"]) if "ends" in row else None})


def ratio(run: Run, scene: Scene, efficiencies: Efficiencies | None = None) -> float:
    """Planned seconds over published ones."""
    return step_time(scene, efficiencies).seconds / run.seconds


GRID = tuple(product((0.001, 0.003, 0.005, 0.007), (0.0, 2e-5, 4e-5, 6e-5, 8e-5), (0.0, 0.006, 0.009, 0.012, 0.015)))
"""Seconds of the host: of a decoding step, of each of its rows, of a mixture layer forward and backward"""


def left_out(scenes: Mapping[Run, Scene]) -> dict[Run, tuple[float, tuple[float, float, float]]]:
    """The three constants that rest on this table, refitted each time without the runs of one model on one kind of
    device, and the ratio that they give for these."""
    logs = {
        (run, number): math.log(ratio(run, scene, _with(scene, *constants)))
        for run, scene in scenes.items()
        for number, constants in enumerate(GRID)
    }
    found = {}
    for run in scenes:
        others = [other for other in scenes if (other.model, other.device) != (run.model, run.device)]
        best = min(range(len(GRID)), key=lambda number: sum(abs(logs[other, number]) for other in others))
        found[run] = (math.exp(logs[run, best]), GRID[best])
    return found


def _with(scene: Scene, step_s: float, row_s: float, mixture_s: float) -> Efficiencies:
    return replace(starting_efficiencies(scene), decode_step_s=step_s, decode_row_s=row_s, mixture_s=mixture_s)


def place(run: Run) -> str:
    """That of the published layout among those that the planner has for the run."""
    scene = run.scene(open_microbatch=True)
    plan = Plan.of(scene)
    equal = [one for one in distinct(plan.ranked) if one.fits and keeps_learning(scene, one.choice)]
    layout = next((number for number, one in enumerate(equal, 1) if _is_published(one)), None)
    best = " ".join(words(scene, equal[0])) if equal else "nothing fits"
    return f"{layout or '-'} of {len(equal)}; best ({equal[0].time.seconds:.3g} s): {best or 'as published'}"


def _is_published(one: Candidate) -> bool:
    """But for sizes."""
    return not {key for key, _ in (*one.choice.training, *one.choice.sampling)} - SIZES


def main() -> None:
    scenes = {run: run.scene() for run in runs()}
    others = left_out(scenes)
    print("| run | published s | planned s | planned / published | fitted without it | MFU | phases |")
    print("|---|---|---|---|---|---|---|")
    for run, scene in scenes.items():
        time = step_time(scene)
        phases = ", ".join(f"{phase.name} {phase.seconds:.2g}" for phase in time.phases if phase.seconds >= 0.05)
        print(
            f"| {run.name} | {run.seconds:g} | {time.seconds:.3g} | {time.seconds / run.seconds:.2f} "
            f"| {others[run][0]:.2f} | {time.mfu:.0%} | {phases} |"
        )
    for what, ratios in (
        ("planned", [ratio(run, scene) for run, scene in scenes.items()]),
        ("fitted without the model on the device", [found for found, _ in others.values()]),
    ):
        near = sum(1 / BOUND <= one <= BOUND for one in ratios)
        spread = math.exp(sum(abs(math.log(one)) for one in ratios) / len(ratios))
        print(f"\n{what}: {near} of {len(ratios)} within a factor of {BOUND}; a factor of {spread:.2f} off in the mean")
    print("\nconstants fitted without each:", sorted({constants for _, constants in others.values()}))
    if "--places" in sys.argv:
        for run in scenes:
            print(f"- {run.name}: published layout is {place(run)}")


if __name__ == "__main__":
    main()
