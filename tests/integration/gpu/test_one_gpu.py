"""What one GPU can show: the parts of ``dtensor`` and ``hf`` on it, beside the CPU. Most runs on the CPU as well."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.contracts import Head
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle, transport
from nemorl_dtensor.training import DTensorBackend
from nemorl_tensors.engines.sampling import RowSampler, uniforms
from nemorl_testing import conformance
from nemorl_testing.backends import difference, norm, weights_of
from nemorl_testing.batches import WeightedNLL, ragged_batch
from nemorl_testing.models import load_reference, response_logprobs, tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

on_gpu = pytest.mark.gpu
GPU = "cuda:0"
DEVICES = ["cpu", pytest.param(GPU, marks=on_gpu)]
PATIENCE_S = 120.0
ORDINARY = (0.3, -0.3, 1.0, -2.0)
"""Log ratios of a sane run. Of those of 20 and more a loss is what the order of its sums makes of it (seen on an H200:
0 beside 0.019, of terms of 1e9), and at 0 a ratio that is not exactly 1 changes the side of a clip."""

test_lora = on_gpu(
    conformance("training_backends", "dtensor", device=GPU, tolerance=1e-3, policy={"lora": {"rank": 4}})
)
test_bfloat16 = on_gpu(
    conformance(
        "training_backends", "dtensor", device=GPU, tolerance=0.3, policy={"precision": "bfloat16"},
        only=["logprobs_equal_transformers", "likeliest_tokens_are_those_of_transformers", "export_is_the_model"],
    )
)  # fmt: skip


def policy_of(**more: Any) -> PolicyConfig:
    return PolicyConfig.model_validate({"model_name": str(tiny_model()), "max_grad_norm": 1e6, **more})


def trainer(device: str, *, head: Head = "language_model", **more: Any) -> Any:
    policy = policy_of(**more)
    return policy.backend.build(policy, WorkerContext(device=device), reference=False, head=head)


def engine(device: str, weights: WeightHandle | None = None, **more: Any) -> Any:
    generation, policy = GenerationConfig(), policy_of(**more)
    return generation.backend.build(generation, policy, WorkerContext(device=device), weights)


# Sampling


@pytest.mark.parametrize("device", DEVICES)
def test_draws_are_the_same_on_every_device(device: str) -> None:
    seeds, positions = torch.arange(-50, 50), torch.arange(7)[:, None]
    assert torch.equal(uniforms(seeds.to(device), positions.to(device)).cpu(), uniforms(seeds, positions))
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    asked = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=5), SamplingParams(top_p=0.4)]
    drawn = []
    for place in ("cpu", device):
        sampler = RowSampler(torch.device(place))
        sampler.add(asked, [3, 4, 5, 6], [0, 0, 0, 0])
        drawn.append([sampler.sample(logits.to(place))[0].tolist() for _ in range(70)])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_leave_and_join_keep_their_logprobs(device: str, precision: str) -> None:
    """Prompts of all lengths, some responses that end early: masks, re-aligned caches, their kernels."""
    prompts = [tuple(range(9, 9 + length)) for length in (3, 40, 17, 1, 29, 8)]
    asked = [
        GenerationRequest(prompt, SamplingParams(max_new_tokens=4 + 9 * (row % 3)), (row, row + 100))
        for row, prompt in enumerate(prompts)
    ]
    built = engine(device, precision=precision, max_sequence_tokens=128)
    model, found = load_reference(tiny_model()), built.generate(asked)
    built.shutdown()
    limit = 1e-3 if precision == "float32" else 0.3
    for request, completions in zip(asked, found, strict=True):
        for one in completions:
            wanted = response_logprobs(model, request.token_ids, one.token_ids)
            assert max(abs(a - b) for a, b in zip(one.logprobs, wanted, strict=True)) < limit


# Training


@pytest.mark.parametrize("device", DEVICES)
def test_a_sharded_model_trains_as_a_whole_one(device: str) -> None:
    """FSDP2 over a mesh of one rank: everything that sharding does but the transfer."""
    # In a process of its own: other tests leave a process group in this one.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as elsewhere:
        elsewhere.submit(compare_sharded_with_whole, device).result()


def compare_sharded_with_whole(device: str) -> None:
    from nemorl_dtensor.ranks import AXES, Ranks

    kind = torch.device(device).type
    whole = trainer(device)
    torch.distributed.init_process_group(
        "nccl" if kind == "cuda" else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    alone = Ranks(init_device_mesh(kind, (1, 1, 1), mesh_dim_names=AXES), 0)
    Ranks.join = lambda *_, **__: alone  # type: ignore[method-assign, assignment]
    Ranks.data_parallel_size = 2  # type: ignore[method-assign, assignment]  # or nothing would be sharded
    policy = policy_of()
    sharded = DTensorBackend(
        policy, WorkerContext(device=device, world_size=2), policy.backend, reference=False, head="language_model"
    )
    try:
        batch = ragged_batch()
        torch.testing.assert_close(sharded.get_logprobs(batch), whole.get_logprobs(batch), atol=1e-4, rtol=0)
        steps = [backend.train_step(batch, WeightedNLL()) for backend in (whole, sharded)]
        assert steps[0]["grad_norm"].value == pytest.approx(steps[1]["grad_norm"].value, rel=1e-4)
        gap = difference(weights_of(sharded), weights_of(whole))
        assert norm(gap) < 1e-4 * norm(weights_of(whole))
    finally:
        sharded.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_weights_follow_float32_masters(device: str) -> None:
    """Steps of 1e-4 are lost on bfloat16 weights near 0.15, whose neighbours are 1e-3 apart; ten of them are not."""
    backend, batch = trainer(device, precision="bfloat16", optimizer={"lr": 1e-4, "weight_decay": 0.0}), ragged_batch()
    before = weights_of(backend)
    for _ in range(20):
        backend.train_step(batch, WeightedNLL())
    after = weights_of(backend)
    name = max(before, key=lambda key: before[key].numel())
    moved = (after[name] - before[name]).abs()
    backend.shutdown()
    assert 0.2e-3 < float(moved.mean()) < 4e-3


@pytest.mark.parametrize("device", DEVICES)
def test_building_a_model_leaves_the_generators_alone(device: str) -> None:
    states = [torch.get_rng_state(), torch.cuda.get_rng_state(device) if device == GPU else torch.empty(0)]
    trainer(device, init="random").shutdown()
    after = [torch.get_rng_state(), torch.cuda.get_rng_state(device) if device == GPU else torch.empty(0)]
    assert all(map(torch.equal, states, after))


@on_gpu
def test_a_microbatch_that_does_not_fit_names_a_smaller_one() -> None:
    backend = trainer(GPU, microbatch_tokens=8192)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    try:
        many = ragged_batch().select([3] * 200)
        with pytest.raises(BackendError, match="cuda:0") as caught:
            backend.train_step(many, WeightedNLL())
        assert "policy.microbatch_tokens: 4096" in (caught.value.fix or "")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        backend.shutdown()


@on_gpu
@pytest.mark.parametrize("seed", range(3))
def test_every_loss_is_what_it_is_on_the_cpu(seed: int) -> None:
    from conformance.test_every_loss import LOSSES, batch_for

    for loss in LOSSES:
        outputs, batch = batch_for(loss, seed, log_ratios=ORDINARY, sampler=(-1.0, -0.5))
        if "teacher_uncommon" in loss.requires:  # equal ones are kinks of a sorted L1: roundings make the slope
            batch = batch.with_tokens(teacher_uncommon=batch["teacher_uncommon"] - 0.1)
            outputs = outputs - 0.01 * torch.arange(outputs.shape[1])
        found = []
        for device in ("cpu", GPU):
            leaf = outputs.detach().to(device).requires_grad_()
            value, _ = loss(leaf, batch.to(device))
            value.backward()
            assert leaf.grad is not None
            found.append((value.detach().cpu(), leaf.grad.cpu()))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-3, atol=1e-5, equal_nan=True, msg=lambda text, loss=loss: f"{loss}: {text}"
            )


# Weights on their way to another process


def generate_elsewhere(handle: WeightHandle, device: str, requests: list[GenerationRequest], pipe: Any) -> None:
    try:
        pipe.send(engine(device, handle).generate(requests))
    except BaseException as error:
        pipe.send(repr(error))
        raise


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("cpu", "shared_memory"),
        pytest.param(GPU, "shared_memory", marks=on_gpu),
        pytest.param(GPU, "cuda_ipc", marks=on_gpu),
    ],
)
def test_a_generator_in_another_process_samples_from_the_trainers_weights(device: str, name: str) -> None:
    requests = [GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=12), (1, 2, 3))]
    backend = trainer(device, optimizer={"lr": 1e-2})
    backend.train_step(ragged_batch(), WeightedNLL())
    sender = transport(name)
    handle = WeightHandle(name, 7, sender.publish(backend.export_weights))
    found = ask_process(handle, device, requests)
    here = engine(device, WeightHandle("nemorl-core:in_process", 7, live(backend))).generate(requests)
    sender.close()
    backend.shutdown()
    assert [c.token_ids for c in found[0]] == [c.token_ids for c in here[0]]
    assert {c.weight_version for c in found[0]} == {7}


def live(backend: Any) -> Any:
    def export() -> Iterator[dict[str, Tensor]]:
        yield from backend.export_weights()

    return export


def ask_process(handle: WeightHandle, device: str, requests: list[GenerationRequest]) -> list[list[Completion]]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=generate_elsewhere, args=(handle, device, requests, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(PATIENCE_S)
        found = ours.recv()
        assert not isinstance(found, str), found
        return list(found)
    finally:
        process.kill()
