"""Weights are exchanged in place: all of them, at once, from wherever they come."""

from __future__ import annotations

import subprocess
import sys
from statistics import mean
from typing import Any

import pytest
from nemorl.errors import BackendError, WeightsLostError
from nemorl.types import GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle
from nemorl_rl.transports.shared_memory import SharedMemory
from nemorl_testing.models import load_reference, tiny_model
from recorded_messages import Raises
from tiers import only
from vllm_engines import changed, gaps, handle_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SAMPLED = SamplingParams(max_new_tokens=24)
REQUESTS = [GenerationRequest(ids, SAMPLED, (1, 2, 3)) for ids in ((9, 18, 10), (11, 12, 13, 14), (30,))]
TOLERANCE = 1e-4


@pytest.mark.parametrize("tied", only(True, of=(True, False)))
def test_every_update_leaves_exactly_the_new_weights(build: Any, tied: bool) -> None:
    folder = tiny_model(tie_word_embeddings=tied)
    engine = build(folder)
    model, before = load_reference(folder), load_reference(folder)
    assert max(gaps(model, REQUESTS, engine.generate(REQUESTS))) < TOLERANCE
    for version in (1, 2, 3):
        changed(model, seed=version)
        engine.update_weights(handle_of(model, version), version)
        groups = engine.generate(REQUESTS)
        assert max(gaps(model, REQUESTS, groups)) < TOLERANCE
        assert mean(gaps(before, REQUESTS, groups)) > 0.1, "the change is too small to prove anything"
        assert {c.weight_versions for group in groups for c in group} == {(version,)}


def test_an_engine_can_start_from_the_trainers_weights(build: Any) -> None:
    model = changed(load_reference(tiny_model()), seed=1)
    engine = build(tiny_model(), handle_of(model, 7))
    groups = engine.generate(REQUESTS)
    assert max(gaps(model, REQUESTS, groups)) < TOLERANCE
    assert groups[0][0].weight_versions == (7,)


def test_a_prefix_cached_before_an_update_is_not_used_after_it(build: Any) -> None:
    # 160 tokens: more than a block of the cache (128 tokens on the CPU).
    request = GenerationRequest(tuple(range(8, 88)) * 2, SAMPLED, (1, 2))
    engine, model = build(tiny_model()), load_reference(tiny_model())
    engine.generate([request])
    changed(model, seed=1)
    engine.update_weights(handle_of(model, 1), 1)
    assert max(gaps(model, [request], engine.generate([request]))) < TOLERANCE


def test_the_trainers_tensors_are_only_read(build: Any) -> None:
    model = load_reference(tiny_model())
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    engine = build(tiny_model(), handle_of(model, 1))
    engine.generate(REQUESTS)
    assert all(parameter.equal(before[name]) for name, parameter in model.named_parameters())
    changed(model, seed=1)  # a trainer that goes on must not change what is generated
    original = load_reference(tiny_model())
    assert max(gaps(original, REQUESTS, engine.generate(REQUESTS))) < TOLERANCE


PUBLISHER = """
import pickle, sys
from nemorl_rl.transports.shared_memory import SharedMemory
from safetensors.torch import load_file
sender, tensors = SharedMemory(), load_file(sys.argv[1])
for version in (1, 2):
    tensors = {name: tensor * 1.2 for name, tensor in tensors.items()}
    payload = sender.publish(lambda: iter([tensors]))
    sys.stdout.buffer.write(pickle.dumps(payload)); sys.stdout.flush()
    sys.stdin.readline()
"""


def test_weights_come_from_another_process_through_shared_memory(build: Any) -> None:
    import pickle

    folder = tiny_model()
    engine, model = build(folder), load_reference(folder)
    command = [sys.executable, "-c", PUBLISHER, str(folder / "model.safetensors")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as publisher:
        assert publisher.stdin is not None
        for version in (1, 2):
            payload = pickle.load(publisher.stdout)  # type: ignore[arg-type]
            engine.update_weights(WeightHandle("shared_memory", version, payload), version)
            publisher.stdin.write(b"\n")
            for parameter in model.parameters():
                parameter.data *= 1.2
            groups = engine.generate(REQUESTS)
            assert max(gaps(model, REQUESTS, groups)) < TOLERANCE
            assert groups[0][0].weight_version == version


def test_weights_of_another_model_are_refused_and_good_ones_repair_it(build: Any, raises: Raises) -> None:
    folder = tiny_model()
    engine, model = build(folder), load_reference(folder)
    other = load_reference(tiny_model(num_hidden_layers=3))
    with raises(BackendError, varies=r"\{.*\}"):
        engine.update_weights(handle_of(other, 1), 1)
    with raises(BackendError):
        engine.generate(REQUESTS)
    engine.update_weights(handle_of(model, 2), 2)
    assert max(gaps(model, REQUESTS, engine.generate(REQUESTS))) < TOLERANCE


def test_missing_weights_are_named(build: Any, raises: Raises) -> None:
    folder = tiny_model()
    engine, model = build(folder), load_reference(folder)
    name = "model.layers.1.mlp.down_proj.weight"
    some = {key: value for key, value in model.named_parameters() if key != name}
    sender = SharedMemory()
    payload = sender.publish(lambda: iter([some]))
    with raises(BackendError, "down_proj"):
        engine.update_weights(WeightHandle("shared_memory", 1, payload), 1)
    sender.close()


def test_weights_of_a_dead_trainer_are_an_error_and_the_old_ones_stay(build: Any) -> None:
    engine, model = build(tiny_model()), load_reference(tiny_model())
    sender = SharedMemory()
    payload = sender.publish(lambda: iter([dict(changed(load_reference(tiny_model()), seed=1).named_parameters())]))
    sender.close()
    with pytest.raises(WeightsLostError):
        engine.update_weights(WeightHandle("shared_memory", 1, payload), 1)
    groups = engine.generate(REQUESTS)
    assert max(gaps(model, REQUESTS, groups)) < TOLERANCE
    assert groups[0][0].weight_versions == (0,)
