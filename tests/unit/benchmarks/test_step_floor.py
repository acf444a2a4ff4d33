"""The floor of a step: which products it counts, and what its result says."""

from __future__ import annotations

import json

import pytest
import torch
from nemorl_rl.models.tiny import write_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM


@pytest.fixture
def floor(load_benchmark):
    return load_benchmark("step_floor")


def test_the_products_are_those_of_every_linear_layer_and_the_head(floor, tmp_path):
    folder = write_tiny_model(tmp_path, architecture="llama", hidden_size=16, intermediate_size=40, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    run, flops = floor.step_products(model, 30, 10, torch.float32)
    run()
    # Heads of 4 x 4 and 2 x 4: q and o 16 x 16, k and v 8 x 16, gate, up and down 40 x 16; twice. Forward and both
    # gradients are three products of 2 FLOPs per weight and token.
    layer = 2 * 16 * 16 + 2 * 8 * 16 + 3 * 40 * 16
    assert flops == 6 * 30 * 2 * layer + 6 * 10 * model.config.vocab_size * 16


def test_a_bound_is_the_larger_of_arithmetic_and_memory(floor):
    assert floor.DecodeFloor("float32", 1, 0.04, 0.01, 0.03).bound_frac == pytest.approx(0.75)
    assert floor.DecodeFloor("float32", 32, 0.04, 0.02, 0.01).bound_frac == pytest.approx(0.5)
    assert floor.StepFloor("float32", 1, 2, 4.2, 3.0, 1.0).ratio == pytest.approx(1.4)


def test_half_of_each_sequence_is_scored(floor):
    batch = floor.make_batch(3, 8, 50)
    assert batch.lengths.tolist() == [8, 8, 8]
    assert batch.mask.view(3, 8).sum(1).tolist() == [4, 4, 4]


def test_it_measures_a_tiny_model_from_end_to_end(floor, monkeypatch, capsys):
    monkeypatch.setattr(floor, "STEP_SHAPES", ((2, 8),))
    monkeypatch.setattr(floor, "DECODE_ROWS", (2,))
    sizes = {"num_hidden_layers": 1, "vocab_size": 200, "hidden_size": 18, "head_dim": 2, "intermediate_size": 20}
    result = floor.measure(["bfloat16"], 1, 1, sizes)
    floor.report(result)
    assert "| bfloat16" in capsys.readouterr().out
    json.dumps(result)
    assert {"machine", "cpu", "load", "libraries", "bandwidth_gb_s", "steps", "decode"} <= result.keys()
    assert "MKL float32" in result["libraries"]
