"""What lies in the host's memory is none of the device's, and takes the bus when it is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from nemorl.config import PolicyConfig
from nemorl_dtensor import DTensorConfig
from nemorl_insight.plan.seconds import step_time
from nemorl_megatron import MegatronConfig
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.planning.devices import parse_fleet
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.parts import Moments, Part, rested, total
from nemorl_rl.planning.memory.scene import Scene
from nemorl_rl.planning.memory.work import Work

LLAMA = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
}


def held(offload: dict[str, bool], *, backend: Any = DTensorConfig, ranks: int = 8, **policy: Any) -> HeldModel:
    fields = {"backend": backend(offload=offload), "precision": "bfloat16", "max_sequence_tokens": 4096, **policy}
    config = PolicyConfig.model_validate(fields)
    model = HeldModel("policy", config, Geometry.from_config(LLAMA), ranks, has_reference=True)
    return model.fed(Work(512, 256, 1024, 3840))


def sizes(model: HeldModel) -> dict[str, float]:
    return {part.name: part.size for part in model.moments.lasting}


def test_a_part_that_rests_is_there_for_its_work_alone() -> None:
    lasting = (
        Part("weights", 2, "", "weights"),
        Part("moments", 8, "", "optimizer"),
        Part("reference weights", 2, "", "reference"),
    )
    backward, forward = Part("activations", 5, ""), Part("activations", 1, "")
    found = rested(Moments(lasting, {"backward": (backward,)}, (forward,)), ("optimizer", "reference"))
    assert total(found.lasting) == 2
    assert {name: total(parts) for name, parts in found.training.items()} == {"backward": 5, "update": 8}
    assert total(found.scoring) == 3
    # There and back.
    assert (found.moved.on_host, found.moved.per_update, found.moved.per_scoring) == (10, 16, 4)


@pytest.mark.parametrize("backend", [DTensorConfig, MegatronConfig])
def test_masters_and_moments_leave_the_backward_pass_and_return_for_the_update(backend: Any) -> None:
    plain, resting = held({}, backend=backend), held({"optimizer": True}, backend=backend)
    state = sizes(plain)["masters"] + sizes(plain)["moments"]
    assert state == pytest.approx(12 * plain.parameters / 8)  # 4 + 8 B of each, over 8 ranks
    assert total(plain.moments.lasting) - total(resting.moments.lasting) == pytest.approx(state)
    assert total(resting.moments.training["update"]) >= state
    assert resting.moments.moved.per_update == pytest.approx(2 * state)


def test_parameters_on_the_host_leave_gathered_layers_and_a_microbatch() -> None:
    moments = held({"parameters": True}, ranks=1).moments
    assert not moments.lasting
    gathered = {part.name for parts in moments.training.values() for part in parts}
    assert "gathered layers" in gathered
    parameters = held({}, ranks=1).parameters
    # Weights and their copy, masters, moments, and gradient sums where there are some: 2 + 2 + 4 + 8 (+ 4) B.
    assert moments.moved.on_host == pytest.approx((16 + 4) * parameters)
    # Gathered for the forward pass and the backward pass, and gradients: 3 x 2 B.
    assert moments.moved.per_microbatch == pytest.approx(6 * parameters)


def test_activations_on_the_host_keep_two_layers_of_32() -> None:
    plain, hosted = held({}), held({"activations": True})
    kept = {
        name: next(part.size for part in model.moments.training["output head"] if part.name == "activations")
        for name, model in (("plain", plain), ("hosted", hosted))
    }
    moved = hosted.moments.moved.per_microbatch
    assert kept["plain"] - kept["hosted"] == pytest.approx(moved * 30 / 32)
    assert moved == hosted.moments.moved.on_host


def test_on_a_processor_the_host_s_memory_is_the_device_s() -> None:
    everything = {"parameters": True, "optimizer": True, "reference": True, "activations": True}
    assert replace(held(everything), on_cpu=True).moments == replace(held({}), on_cpu=True).moments


def test_what_crosses_the_bus_takes_its_time() -> None:
    def seconds(offload: dict[str, bool]) -> dict[str, float]:
        scene = Scene(parse_fleet(1, "8xH100"), held(offload), (), None, Work(512, 256, 1024, 3840, updates=2))
        return {phase.name: phase.seconds for phase in step_time(scene).phases}

    plain, resting = seconds({}), seconds({"optimizer": True, "reference": True})
    model = held({})
    device = parse_fleet(1, "8xH100").device
    state = 12 * model.parameters / 8
    share = (resting["training"] - plain["training"]) * device.host_gb_s * 1e9 / (2 * 2 * state)
    assert 1.0 < share < 2.0, "two updates, there and back, at less than the bus's peak"
    assert resting["reference log-probs"] > plain["reference log-probs"]
