"""One engine over two processes: the same numbers, and weights that reach both."""

from __future__ import annotations

from typing import Any

import pytest
from nemorl.errors import WeightsLostError
from nemorl.types import GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle
from nemorl_rl.transports.broadcast import Broadcast
from nemorl_testing.models import load_reference, tiny_model
from recorded_messages import Raises
from vllm_engines import changed, gaps, handle_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.full]


def test_two_processes_hold_one_model_and_take_new_weights(build: Any, raises: Raises) -> None:
    folder = tiny_model(num_key_value_heads=2)
    model = load_reference(folder)
    params = SamplingParams(max_new_tokens=16, temperature=0.7)
    requests = [GenerationRequest(ids, params, (1, 2)) for ids in ((9, 18, 10), (30,))]
    engine = build(folder, tensor_parallel_size=2)
    assert max(gaps(model, requests, engine.generate(requests))) < 1e-4
    for version in (1, 2):
        changed(model, seed=version)
        engine.update_weights(handle_of(model, version), version)
        groups = engine.generate(requests)
        assert max(gaps(model, requests, groups)) < 1e-4
        assert groups[0][0].weight_versions == (version,)

    # Each process asks the trainer by itself. Over NCCL between GPUs; here over gloo, by the same code.
    sender = Broadcast(deadline_s=60.0)
    changed(model, seed=3)
    engine.update_weights(WeightHandle("nccl", 3, sender.publish(lambda: iter([dict(model.named_parameters())]))), 3)
    groups = engine.generate(requests)
    assert max(gaps(model, requests, groups)) < 1e-4
    assert groups[0][0].weight_versions == (3,)

    lost = WeightHandle("nccl", 4, sender.publish(lambda: iter([dict(load_reference(folder).named_parameters())])))
    assert not sender.failures
    sender.close()
    with raises(WeightsLostError):
        engine.update_weights(lost, 4)
    assert max(gaps(model, requests, engine.generate(requests))) < 1e-4  # those of version 3
