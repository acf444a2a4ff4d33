"""The scaling benchmark: it drives the real dispatch path and checks what comes back."""

from __future__ import annotations

import numpy
import pytest
import torch
from nemorl.resources.policies import TrainingPolicy


@pytest.fixture
def scale(load_benchmark):
    return load_benchmark("scale")


def test_a_batch_is_ragged_with_the_mean_asked_for(scale):
    batch = scale.make_batch(200, 50)
    assert len(batch) == 200
    assert batch.num_tokens == pytest.approx(200 * 50, rel=0.02)
    assert batch.lengths.max() > 2 * batch.lengths.float().mean()
    assert batch.loss_weights.sum() == pytest.approx(1.0, abs=1e-4)


def test_every_byte_of_a_step_is_sent_and_counted(scale):
    batch = scale.make_batch(16, 40)
    store = numpy.zeros(2 * scale.batch_bytes(batch), numpy.uint8)
    workers = scale.NothingWorkers(4, memoryview(store))
    metrics = TrainingPolicy(workers).train_step(batch, scale.LOSS)
    assert metrics["num_tokens"].value == batch.num_tokens
    # Names, shapes and the loss take a few kilobytes beside the tensors.
    assert scale.batch_bytes(batch) < workers.sent_bytes < scale.batch_bytes(batch) + 4 * 4096


def test_logprobs_return_in_order_through_the_simulated_ranks(scale):
    batch = scale.make_batch(16, 40)
    workers = scale.NothingWorkers(5, memoryview(bytearray(2 * scale.batch_bytes(batch))))
    assert torch.equal(TrainingPolicy(workers).get_logprobs(batch), -batch.token_ids.float())


def test_each_call_and_rank_count_has_a_row(scale):
    rows = [row.summary() for row in scale.simulate(scale.make_batch(16, 40), ranks=[2, 4], repeats=1)]
    assert [(row["method"], row["ranks"]) for row in rows] == [
        (method, ranks) for method in ("train_step", "get_logprobs") for ranks in (2, 4)
    ]
    assert all(row["driver_s"] > 0 and row["sent_mib"] > 0 for row in rows)
