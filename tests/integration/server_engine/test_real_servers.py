"""Real vLLM servers: one of two is killed while it works, weights change meanwhile, a flaw of vLLM is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_server_engine.folders import WeightFolders, WrittenWeights
from nemorl_server_engine.roster import Roster
from nemorl_testing.models import load_reference, response_logprobs, tiny_model
from vllm_server import PLAIN, VLLMServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
UNTIED = tiny_model(tie_word_embeddings=False)
Pair = tuple[VLLMServer, VLLMServer]
Build = Callable[..., Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two servers of a model with an output head of its own. A start takes half a minute."""
    with ExitStack() as stack:
        logs = tmp_path_factory.mktemp("servers")
        servers = VLLMServer(UNTIED, logs / "0", options=PLAIN), VLLMServer(UNTIED, logs / "1", options=PLAIN)
        for server in servers:
            stack.callback(server.kill)
        for server in servers:
            server.wait()
        yield servers


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    from nemorl_server_engine import ServerConfig

    with ExitStack() as stack:

        def make(model: Path, weights: WeightHandle | None, *servers: VLLMServer) -> Any:
            backend = ServerConfig(urls=tuple(server.url for server in servers))
            policy = PolicyConfig(model_name=str(model), max_sequence_tokens=128)
            context = WorkerContext(scratch=tmp_path / "scratch")
            generator = backend.build(GenerationConfig(backend=backend), policy, context, weights)
            stack.callback(generator.shutdown)
            return generator

        yield make


def test_weights_that_change_while_a_server_answers_draw_the_tokens_that_follow(pair: Pair, build: Build) -> None:
    models = changed(load_reference(UNTIED)), load_reference(UNTIED)  # of even and odd versions
    engine = build(UNTIED, handle_of(models[1], 1), pair[1])
    request = GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=120), tuple(range(32)))
    short = replace(request, sampling=SamplingParams(max_new_tokens=2), seeds=(0,))
    for version in range(2, 12):  # a busy machine may begin, or end, all of them on one side of the update
        running = engine.submit(request)
        engine.submit(short).result(60)
        engine.update_weights(handle_of(models[version % 2], version), version)
        both = [found for found in running.result(120) if found.weight_versions == (version - 1, version)]
        if both:
            break
    assert both
    for completion in both[:8]:
        by_age = models[(version - 1) % 2], models[version % 2]
        true = [response_logprobs(weights, request.token_ids, completion.token_ids) for weights in by_age]
        by = [min((0, 1), key=lambda which: abs(true[which][at] - p)) for at, p in enumerate(completion.logprobs)]
        assert by == sorted(by)  # first those of the old weights, then those of the new ones
        assert max(abs(true[which][at] - completion.logprobs[at]) for at, which in enumerate(by)) < 1e-4


def test_one_of_two_servers_is_killed_while_it_works_and_every_token_is_as_if_it_had_lived(
    pair: Pair, build: Build, tmp_path: Path
) -> None:
    engine = build(UNTIED, handle_of(load_reference(UNTIED), 1), *pair)
    sampling = SamplingParams(max_new_tokens=100)
    requests = [GenerationRequest((9, 18, 10 + number), sampling, tuple(range(8))) for number in range(32)]
    wanted = engine.generate(requests)
    killer = threading.Timer(0.3, pair[0].kill)  # 256 responses take seconds
    killer.start()
    found = engine.generate(requests)
    killer.join()
    assert tokens(found) == tokens(wanted)
    gaps = [
        abs(one - other)
        for group, same in zip(found, wanted, strict=True)
        for left, right in zip(group, same, strict=True)
        for one, other in zip(left.logprobs, right.logprobs, strict=True)
    ]
    assert max(gaps) < 1e-4  # another batch: other shapes, other rounding
    assert tokens(engine.generate(requests[:2])) == tokens(wanted[:2])  # the one that is left
    engine.shutdown()
    state = Roster(tmp_path / "scratch" / "engines").state()
    assert state is not None
    assert [server["lost"] for server in state["servers"]] == [1, 0]


def test_a_folder_that_the_server_does_not_see_is_explained(
    pair: Pair, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = WeightFolders.write

    def elsewhere(self: WeightFolders, *args: Any) -> WrittenWeights:
        found = written(self, *args)
        found.folder.rename(found.folder.with_name("not-shared"))
        return found

    monkeypatch.setattr(WeightFolders, "write", elsewhere)
    with pytest.raises(BackendError) as caught:
        build(UNTIED, handle_of(load_reference(UNTIED), 1), pair[1])
    assert "cannot load weights 1" in caught.value.message
    assert "weights_folder" in str(caught.value.fix)


@pytest.mark.full
def test_a_server_that_keeps_a_stale_output_head_is_refused(build: Build, tmp_path: Path) -> None:
    """vLLM 0.32 on the CPU, a model with tied embeddings, and no extension of ours."""
    model = tiny_model()
    server = VLLMServer(model, tmp_path / "log", options=PLAIN)
    try:
        server.wait()
        trained = load_reference(model)
        engine = build(model, handle_of(trained, 1), server)  # the weights that it was started with
        with pytest.raises(BackendError) as caught:
            engine.update_weights(handle_of(changed(trained), 2), 2)
    finally:
        server.kill()
    assert "probe tokens" in caught.value.message
    assert "tied embeddings" in str(caught.value.fix)


def tokens(groups: Any) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def handle_of(model: Any, version: int) -> WeightHandle:
    return in_process_handle(lambda: iter([dict(model.named_parameters())]), version)


def changed(model: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.1 if parameter.ndim > 1 else 0.05))
    return model
