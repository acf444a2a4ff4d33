"""The weight-sync benchmark: the receiver binds what was sent, and says so for every step."""

from __future__ import annotations

import pytest


@pytest.fixture
def weight_sync(load_benchmark):
    return load_benchmark("weight_sync")


@pytest.fixture
def folder(tmp_path, weight_sync):
    from transformers import LlamaConfig

    LlamaConfig(**weight_sync.SMALL).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", ["in_process", "shared_memory"])
def test_each_sync_brings_the_weights_of_its_step(weight_sync, folder, transport, precision):
    trainer, generator = (part(folder, precision) for part in (weight_sync.Trainer, weight_sync.Generator))
    times = weight_sync.measure(transport, trainer, generator, repeats=2)
    assert len(times.sync) == len(times.copy) == 2
    assert times.summary()["copies"] > 0


def test_weights_of_another_step_are_noticed(weight_sync, folder, raises):
    trainer, generator = (part(folder, "float32") for part in (weight_sync.Trainer, weight_sync.Generator))
    weight_sync.measure("in_process", trainer, generator, repeats=1)
    with raises(AssertionError, 99):
        generator.read(99)


@pytest.mark.slow
@pytest.mark.full
def test_a_generator_in_another_process_is_synced(weight_sync, folder):
    found = weight_sync.run_case("shared_memory", "float32", folder, repeats=2)
    assert found["transport"] == "shared_memory"
    assert found["sync_s"] > found["publish_s"] > 0


def test_the_model_of_the_benchmark_has_smollm2s_size(weight_sync, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**weight_sync.SMOLLM2_135M))
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
