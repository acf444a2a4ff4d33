"""Routes that the backend ``hf`` tells, and what a trainer of another precision gains by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, Prompt, Sample, Samples, SamplingParams, Score
from nemorl_dtensor import HFGenerationConfig
from nemorl_dtensor.decode_hf import HFDecoder
from nemorl_dtensor.generation import HFGeneration
from nemorl_dtensor.model import load_model
from nemorl_dtensor.routing import Routers
from nemorl_tensors import TokenBatch
from nemorl_tensors.batch import ROUTES
from nemorl_tensors.engines.decoding import BatchLimits, RunningBatch
from nemorl_tensors.engines.responses import ResponseLimits
from nemorl_tensors.engines.sampling import RowSampler
from nemorl_testing.models import load_reference
from recorded_messages import Raises
from routed_mixtures import CHOSEN, LAYERS, MIXTURES, mixture, own_routes, samples_of, trainer

ASKED = SamplingParams(max_new_tokens=12, ignore_eos=True, routes=True)
PROMPTS = ((9, 18, 10), (5, 6, 7, 8, 9, 11, 12), (4,))


def engine(folder: Path, precision: str = "float32") -> HFGeneration:
    policy = PolicyConfig(model_name=str(folder), precision=precision, max_sequence_tokens=128)
    return HFGeneration(GenerationConfig(), policy, WorkerContext(), None, HFGenerationConfig())


@pytest.mark.parametrize("architecture", MIXTURES)
def test_every_token_but_the_last_tells_the_experts_that_transformers_sends_it_to(
    architecture: str, tmp_path: Path
) -> None:
    folder = mixture(tmp_path, architecture)
    sampler, model = engine(folder), load_reference(folder)
    requests = [GenerationRequest(prompt, ASKED, (1, 2)) for prompt in PROMPTS]
    answers = sampler.generate(requests)
    for request, completions in zip(requests, answers, strict=True):
        for one in completions:
            ids = [*request.token_ids, *one.token_ids]
            assert one.routes is not None
            assert one.routes.dtype == numpy.int16
            assert one.routes.shape == (len(ids), LAYERS, CHOSEN)
            assert (one.routes[-1] == -1).all()
            wanted = own_routes(model, ids)[:-1]
            assert torch.equal(torch.from_numpy(one.routes[:-1]).long().sort(-1)[0], wanted.sort(-1)[0])
    silent = SamplingParams(max_new_tokens=12, ignore_eos=True)
    untold = sampler.generate([GenerationRequest(prompt, silent, (1, 2)) for prompt in PROMPTS])
    assert untold == answers, "what is told changes nothing that is sampled"
    assert all(one.routes is None for completions in untold for one in completions)
    sampler.shutdown()


def test_tokens_keep_the_routes_of_the_weights_that_computed_them_first(tmp_path: Path) -> None:
    folder = mixture(tmp_path, "qwen3_moe")
    old = load_reference(folder)
    new = load_model(PolicyConfig(model_name=str(folder), init="random"), seed=5)
    in_force = [(old, Routers.of(old))]
    batch = RunningBatch(
        lambda: HFDecoder(*in_force[0]), RowSampler(torch.device("cpu")), BatchLimits(8, 1000), lambda *_: [], 1
    )
    limits = ResponseLimits(20, 64, frozenset(), str, has_routes=True)
    rows = limits.begin(GenerationRequest((9, 18, 10), ASKED, (1, 2)))
    batch.add(rows)
    for _ in range(5):
        batch.step()
    in_force[0] = (new, Routers.of(new))
    batch.renew(2)
    while batch.is_busy:
        batch.step()
    # Five tokens were drawn and computed by the old weights: 3 + 5 tokens have their routes from them.
    for row in rows:
        found, ids = row.completion().routes, list(row.so_far)
        assert found is not None
        assert found.shape == (3 + 12, LAYERS, CHOSEN)
        wanted = torch.cat((own_routes(load_reference(folder), ids)[:8], own_routes(new, ids)[8:14]))
        assert torch.equal(torch.from_numpy(found[:14]).long().sort(-1)[0], wanted.sort(-1)[0])
        assert not torch.equal(own_routes(load_reference(folder), ids).sort(-1)[0][:14], wanted.sort(-1)[0])


def test_a_model_without_experts_is_refused_by_name(pretrained: Path, raises: Raises) -> None:
    sampler = engine(pretrained)
    with raises(BackendError, "routes", "experts"):
        sampler.generate([GenerationRequest((5, 6), ASKED)])
    sampler.shutdown()


@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_float32_trainer_agrees_with_a_bfloat16_sampler_on_every_expert(
    architecture: str, tmp_path: Path, weighted_nll: Any
) -> None:
    folder = mixture(tmp_path, architecture)
    sampler = engine(folder, "bfloat16")
    asked = SamplingParams(max_new_tokens=48, ignore_eos=True, routes=True)
    requests = [GenerationRequest(prompt, asked, tuple(range(8))) for prompt in PROMPTS]
    batch = TokenBatch.from_samples(samples_of(requests, sampler.generate(requests)), [1.0] * 24)
    sampler.shutdown()
    gaps = {}
    for replay in (False, True):
        backend = trainer(folder, replay=replay)
        error = (backend.get_logprobs(batch) - batch["generation_logprobs"])[batch.mask].abs()
        gaps[replay] = float(error.mean()), float(error.max())
        flipped = backend.train_step(batch, weighted_nll).get("routes_flipped")
    assert flipped is not None
    assert 0 < flipped.value < 0.1, "some tokens would have gone elsewhere"
    assert gaps[True][0] < gaps[False][0] / 1.5
    assert gaps[True][1] < gaps[False][1] / 3


def test_routes_are_bytes_in_a_batch_that_travels(tmp_path: Path) -> None:
    import pickle

    routes = numpy.arange(3 * 4 * 2, dtype=numpy.int16).reshape(3, 4, 2)
    sample = Sample(
        Prompt(0, "", (5,)), (5, 6, 7), (False, True, True), (0.0,) * 3, Score(0.0), "", "stop", routes=routes
    )
    other = Sample(Prompt(0, "", (5,)), (5, 8), (False, True), (0.0,) * 2, Score(0.0), "", "stop")
    batch = TokenBatch.from_samples(Samples([sample, other]))
    assert batch[ROUTES].dtype == torch.int16
    assert batch[ROUTES][3:].unique().tolist() == [-1], "one that tells nothing"
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert 5 * 4 * 2 * 2 in {len(buffer.raw()) for buffer in buffers}, "5 tokens of 4 layers of 2 experts of 2 bytes"
    copy = pickle.loads(text, buffers=buffers)
    assert torch.equal(copy[ROUTES], batch[ROUTES])
    assert torch.equal(copy.select([1, 0])[ROUTES][2:], torch.from_numpy(routes))
