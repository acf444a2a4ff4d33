"""``dtensor`` and ``hf`` on the simulated device: the CPU's numbers, few waits of the host, the planner's memory."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.test_every_loss import LOSSES, batch_for
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_testing.batches import WeightedNLL
from nemorl_testing.kit import run_checks
from nemorl_testing.simulated_device import waits
from nemorl_testing.simulated_device.tensors import allocator, races

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks/gpu"))
from _models import Shape, drawn_batch, generator, trainer, write_model  # noqa: E402
from part_offload import predicted_gib  # noqa: E402

TRAINING = (
    "logprobs_equal_transformers",
    "one_step_equals_transformers_and_adamw",
    "likeliest_tokens_are_those_of_transformers",
    "values_are_those_of_the_saved_model",
)
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "whole": ("dtensor", {}),
    "packed": ({"name": "dtensor", "layout": "packed"}, {}),
    "shared": ({"name": "dtensor", "layout": "shared"}, {}),
    "lora": ("dtensor", {"policy": {"lora": {"rank": 4}}}),
    "bfloat16": ("dtensor", {"policy": {"precision": "bfloat16"}, "tolerance": 0.2}),
    "recomputed": ("dtensor", {"policy": {"activation_checkpointing": True}}),
    "optimizer and activations on the host": (
        {"name": "dtensor", "offload": {"optimizer": True, "reference": True, "activations": True}},
        {},
    ),
}
SHAPE = Shape(2048, 256, 768, 6, 4, 2)
ROWS, LENGTH, BUDGET = 8, 256, 1024
STEP_WAITS, LOGPROB_WAITS = 2, 1
"""For what the driver is told, and for the gradient norm, which decides whether a step is taken. The masks of
transformers wait once more in each pass."""


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    yield
    assert not races


@pytest.mark.parametrize("loss", {type(loss): loss for loss in LOSSES}.values(), ids=lambda loss: type(loss).__name__)
def test_every_loss_stays_on_its_device(loss: Any, device: str) -> None:
    outputs, batch = batch_for(loss, 0)
    value, _ = loss(outputs.to(device).requires_grad_(), batch.to(device))
    value.backward()


@pytest.mark.parametrize("name", SETTINGS)
def test_training_is_what_transformers_computes(name: str, device: str) -> None:
    backend, settings = SETTINGS[name]
    found = run_checks("training_backends", backend, only=TRAINING, **{"device": device, "tolerance": 1e-3, **settings})
    assert not found.failed
    assert found.passed


def test_models_leave_the_device_and_come_back(device: str) -> None:
    found = run_checks(
        "training_backends", "dtensor", only=["what_leaves_the_device_comes_back_unchanged"], device=device
    )
    assert not found.failed


def test_generation_follows_its_weights(device: str) -> None:
    only = ("update_weights_takes_effect", "top_k_draws_from_the_k_most_likely")
    assert not run_checks("generation_backends", "hf", only=only, device=device, tolerance=1e-3).failed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), SHAPE, "cpu")


def test_the_host_waits_a_fixed_number_of_times_per_step_and_once_per_token(folder: Path, device: str) -> None:
    backend = trainer(folder, device, microbatch_tokens=512, precision="float32")
    for rows, passes in ((4, 1), (8, 2)):
        batch = drawn_batch(SHAPE, groups=rows // 2, group_size=2, prompt=16, response=112)
        backend.train_step(batch, WeightedNLL())
        for work, allowed in (
            (lambda: backend.train_step(batch, WeightedNLL()), STEP_WAITS),  # noqa: B023
            (lambda: backend.get_logprobs(batch), LOGPROB_WAITS),  # noqa: B023
        ):
            with waits.counted() as lines:
                work()
            assert sum(lines.values()) <= allowed + passes, lines
    engine, counts = generator(folder, device, "float32"), []
    for tokens in (8, 8, 24):  # the first call builds the decoder
        sampling = SamplingParams(max_new_tokens=tokens)
        asked = [GenerationRequest(tuple(range(9, 40)), sampling, (row,)) for row in range(4)]
        with waits.counted() as lines:
            engine.generate(asked)
        counts.append(sum(lines.values()))
    assert counts[2] - counts[1] == 24 - 8


@pytest.mark.parametrize("kind", [{}, {"optimizer": True}, {"activations": True}], ids=str)
def test_a_step_takes_the_memory_that_was_planned_and_leaves_none(
    kind: dict[str, bool], folder: Path, device: str
) -> None:
    gc.collect()
    batch = drawn_batch(SHAPE, groups=ROWS, group_size=1, prompt=1, response=LENGTH - 1)
    before = allocator.allocated
    allocator.reset_peak()
    host: Any = {"name": "dtensor", "layout": "padded", "offload": kind}
    backend = trainer(folder, device, microbatch_tokens=BUDGET, optimizer={"eps": 1e-3}, backend=host)
    backend.train_step(batch, WeightedNLL())
    after_one = allocator.allocated
    backend.train_step(batch, WeightedNLL())
    assert allocator.allocated == after_one
    measured = (allocator.peak - before) / 2**30
    assert measured == pytest.approx(predicted_gib(SHAPE, BUDGET, LENGTH, kind), rel=0.05)
    backend.shutdown()
    del backend
    gc.collect()
    assert allocator.allocated - before < 2**16


def test_a_gpu_checks_parity_part_passes(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import part_parity

    found = tmp_path / "parity.json"
    monkeypatch.setattr(sys, "argv", ["part_parity.py", "--device", device, "--json", str(found), "--small"])
    part_parity.main()
    assert not json.loads(found.read_text())["failures"]


def test_a_microbatch_that_does_not_fit_names_a_smaller_one(
    folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemorl.contracts.memory import DeviceMemoryError

    backend = trainer(folder, device, microbatch_tokens=8192, precision="float32")
    batch = drawn_batch(SHAPE, groups=16, group_size=1, prompt=1, response=LENGTH - 1)
    gc.collect()
    allocator.empty_cache()
    monkeypatch.setattr(allocator, "total", allocator.reserved + 30 * 2**20)
    with pytest.raises(DeviceMemoryError) as caught:
        backend.train_step(batch, WeightedNLL())
    assert "policy.microbatch_tokens" in (caught.value.fix or "")
    torch.accelerator.empty_cache()
