"""An engine that sleeps on a CPU: what it says it holds, packed weights included, and what it really gives back."""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import pytest
from nemorl.contracts.memory import WeightsForgottenError
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.planning.memory.engines import Engines
from nemorl_testing.models import load_reference, tiny_model
from recorded_messages import Raises
from vllm_engines import changed, gaps, handle_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REQUESTS = [GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=12), (1, 2, 3))]
LARGE = {"hidden_size": 1024, "intermediate_size": 4096}
"""Linear layers of 126 MB, so that they are seen in the memory of a process in which other things come and go."""


def resident_bytes() -> int:
    """Of this process, where trainers of other tests may have told glibc to keep what is freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def linear_bytes(model: Any) -> int:
    return sum(4 * p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)


def planned_bytes(folder: Path) -> float:
    from nemorl_vllm.config import VLLMConfig
    from nemorl_vllm.describing import VLLMPlan

    config, geometry = VLLMConfig(), Geometry.from_config(json.loads((folder / "config.json").read_text()))
    plan = VLLMPlan(config).memory(Engines(config, geometry, 4, 1, 256, on_cpu=True), 1e12, 1)
    return sum(part.size for part in plan.lasting if part.held == "weights")


def test_packed_weights_are_counted(build: Any) -> None:
    model = load_reference(tiny_model())
    engine = build(tiny_model())
    everything = sum(4 * p.numel() for p in model.parameters())
    embedding = 4 * model.get_input_embeddings().weight.numel()
    # The embedding is packed twice besides: as itself, and as the head that is tied to it. Rows are rounded up to 64.
    padded = embedding * 128 // 89
    assert engine.held_bytes()["weights"] == everything - embedding + 3 * padded
    engine.sleep(1)
    assert engine.held_bytes() == {"weights": linear_bytes(model) + 2 * padded, "cache": 0}
    engine.sleep(2)
    assert engine.held_bytes() == {"weights": 0, "cache": 0}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory of a process is read from /proc")
def test_the_second_level_gives_packed_weights_back_and_an_update_brings_them(build: Any, raises: Raises) -> None:
    folder = tiny_model(**LARGE)
    model = load_reference(folder)
    engine = build(folder)
    before = engine.generate(REQUESTS)
    assert engine.held_bytes()["weights"] == pytest.approx(planned_bytes(folder), rel=0.02)  # but for rounded-up rows
    engine.sleep(1)  # the cache goes
    asleep = resident_bytes()
    engine.sleep(2)
    # Alone nine tenths come back; in a process that has trained before, three quarters.
    assert asleep - resident_bytes() > 0.5 * linear_bytes(model) > 60e6
    engine.wake(["weights", "cache"])
    with raises(WeightsForgottenError, "update"):
        engine.generate(REQUESTS)
    engine.update_weights(handle_of(model, 1), 1)
    again = engine.generate(REQUESTS)
    assert [(c.token_ids, c.logprobs) for c in again[0]] == [(c.token_ids, c.logprobs) for c in before[0]]
    engine.sleep(1)
    engine.wake(["weights", "cache"])
    assert engine.generate(REQUESTS) == again
    engine.sleep(2)
    engine.wake(["weights"])
    changed(model, seed=1)
    engine.update_weights(handle_of(model, 2), 2)
    engine.wake(["cache"])
    assert max(gaps(model, REQUESTS, engine.generate(REQUESTS))) < 1e-3
