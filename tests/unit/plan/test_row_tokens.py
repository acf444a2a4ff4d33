"""Tokens that a plan counts for each layout of rows, beside what real steps compute."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl_cli.console import Console
from nemorl_dtensor import DTensorConfig
from nemorl_megatron import MegatronConfig
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_rl.planning.devices import parse_fleet
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.parts import total
from nemorl_rl.planning.memory.reading import Lengths, Sizes, scene_of
from nemorl_rl.planning.memory.work import RowLayout, Work
from nemorl_sft.loss import NLLLoss
from nemorl_tensors import TokenBatch

PROMPT, RESPONSE, GROUP, GROUPS = 24, 9, 4, 3
WORK = Work(GROUP * GROUPS, PROMPT, RESPONSE, RESPONSE, group=GROUP)


def drawn_groups() -> TokenBatch:
    """Groups of responses that part at their first token."""
    draw = random.Random(0)
    sequences = []
    for _ in range(GROUPS):
        prompt = [draw.randrange(1, 40) for _ in range(PROMPT)]
        sequences += [
            [*prompt, 40 + number, *(draw.randrange(1, 40) for _ in range(RESPONSE - 1))] for number in range(GROUP)
        ]
    masks = [[False] * PROMPT + [True] * RESPONSE for _ in sequences]
    return TokenBatch.from_sequences(sequences, masks)


def test_tokens_of_each_layout_by_hand() -> None:
    # Each of 12 sequences of 33 tokens feeds all but its last: 384. Shared, a group has 24 + 4 x 8 = 56: 168.
    assert WORK.computed_tokens("packed") == WORK.computed_tokens("padded") == 12 * 32
    assert WORK.computed_tokens("shared") == pytest.approx(3 * 56)
    assert WORK.sharing == pytest.approx(384 / 168)
    # Pairs, doubled: the prompt of a group once, 24^2; of each response what 33^2 has more than that.
    assert WORK.squares("shared") == 3 * (24**2 + 4 * (33**2 - 24**2))


def stepped(backend: Any, folder: Path) -> dict[str, float]:
    policy = PolicyConfig(model_name=str(folder), init="random", microbatch_tokens=4096, backend=backend)
    policy = policy.model_copy(update={"schedule": policy.schedule.model_copy(update={"decay_steps": 10})})
    built = backend.build(policy, WorkerContext(), reference=False)
    try:
        return {name: metric.value for name, metric in built.train_step(drawn_groups(), NLLLoss()).items()}
    finally:
        built.shutdown()


MEGATRON = pytest.param(
    MegatronConfig,
    marks=[pytest.mark.megatron, pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is missing")],
    id="megatron",
)


@pytest.mark.parametrize("make", [pytest.param(DTensorConfig, id="dtensor"), MEGATRON])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared", "auto"])
def test_a_real_step_computes_the_tokens_that_a_plan_counts(
    make: Callable[..., Any], layout: Any, tmp_path: Path
) -> None:
    if make is DTensorConfig and layout == "packed":
        pytest.skip("packed rows take flash attention there")
    backend = make(layout=layout)
    folder = write_tiny_model(tmp_path)
    measured = stepped(backend, folder)
    policy = PolicyConfig(model_name=str(folder), backend=backend, microbatch_tokens=4096)
    geometry = Geometry.from_config(json.loads((folder / "config.json").read_text()))
    model = HeldModel("policy", policy, geometry, ranks=1, on_cpu=True).fed(WORK)
    assert model.layout == ("shared" if layout == "auto" else layout)
    assert measured["performance/computed_tokens"] == pytest.approx(WORK.computed_tokens(model.layout), rel=0.01)
    assert measured["tree_ratio"] == pytest.approx(WORK.sharing if model.layout == "shared" else 1.0)


def test_a_run_shares_as_much_as_its_plan_says(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    knobs: dict[str, Any] = {"num_prompts_per_step": 3, "num_generations_per_prompt": 4, "max_steps": 1}
    policy = {"init": "random", "max_sequence_tokens": 64}
    config = nemorl.load_config(
        {
            **{"algorithm": "grpo", "model": str(model), "run_dir": str(tmp_path / "run"), "policy": policy},
            **{"generation": {"max_new_tokens": 6}, **knobs},
        }
    )
    rows = [{"prompt": f"{number} and {number} and {number} is what?"} for number in range(3)]
    config.build().fit(rows, lambda prompt, response: float(len(response) % 3), console=Console(quiet=True))
    (record,) = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    response = record["train/mean_gen_tokens_per_sample"]
    prompt = record["train/total_num_tokens"] / 12 - response
    scene = scene_of(config, parse_fleet(1, "CPU"), Sizes(), Lengths(prompt, response, response))
    assert scene.policy.layout == "shared"
    # Responses that begin alike share a little more than their prompt.
    assert record["train/tree_ratio"] == pytest.approx(scene.work.sharing, rel=0.1)
    assert record["performance/computed_tokens"] == pytest.approx(scene.work.computed_tokens("shared"), rel=0.1)


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_a_group_that_shares_its_prompt_takes_less_memory_and_time(backend: str) -> None:
    geometry = Geometry.from_config(
        {
            **{"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16},
            **{"num_key_value_heads": 8, "intermediate_size": 4096, "vocab_size": 32768},
        }
    )
    work = Work(64, 512, 64, 64, group=16)

    def model(layout: RowLayout) -> HeldModel:
        policy = PolicyConfig(backend={"name": backend, "layout": layout}, microbatch_tokens=65536)  # type: ignore[arg-type]
        return HeldModel("policy", policy, geometry, ranks=1).fed(work)

    shared, padded = model("shared"), model("padded")
    # 64 sequences of 576 tokens at most; 4 trees of 512 + 16 x 63 distinct tokens.
    assert padded.microbatch_tokens == 64 * 576
    assert shared.microbatch_tokens == pytest.approx(4 * (512 + 16 * 63))
    assert total(shared.moments.peak) < total(padded.moments.peak)
    assert replace(shared, microbatch_tokens=padded.microbatch_tokens).moments == padded.moments
