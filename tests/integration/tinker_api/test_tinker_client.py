"""The client of the package ``tinker``, unmodified, against a server of toy models."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from nemorl.resources.ports import free_port
from tinker_toy import BASE, BROKEN, VOCABULARY
from toy_server import KEYS, Keeper

tinker = pytest.importorskip("tinker", reason="the package tinker is not installed")
from tinker import types  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs/tinker.md"
ADAM = types.AdamParams(learning_rate=0.05)
TEXT = [1, 2, 3, 4, 5, 6, 0]


_opened: list[tinker.ServiceClient] = []


def service(address: str, owner: str = "ada") -> tinker.ServiceClient:
    _opened.append(tinker.ServiceClient(base_url=address, api_key=KEYS[owner]))
    return _opened[-1]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Clients whose server goes would warn about it until the end."""
    yield
    while _opened:
        with suppress(Exception):
            _opened.pop().close("success").result(10)


def rest_of(address: str, owner: str = "ada") -> tinker.RestClient:
    return tinker.RestClient(base_url=address, api_key=KEYS[owner])


def datum(token_ids: Sequence[int], weights: Sequence[float] | None = None) -> types.Datum:
    weights = [1.0] * (len(token_ids) - 1) if weights is None else weights
    fields = {"target_tokens": list(token_ids[1:]), "weights": list(weights)}
    return types.Datum(model_input=types.ModelInput.from_ints(list(token_ids[:-1])), loss_fn_inputs=fields)


def trainer(address: str, *, seed: int = 1, owner: str = "ada") -> tinker.TrainingClient:
    return service(address, owner).create_lora_training_client(BASE, rank=4, seed=seed).result()


def logprobs_of(output: types.ForwardBackwardOutput) -> list[list[float]]:
    return [each["logprobs"].tolist() for each in output.loss_fn_outputs]


def learned(client: tinker.TrainingClient, steps: int) -> list[float]:
    """Losses of some steps on TEXT, each pass sent together with its optimizer step."""
    losses = []
    for _ in range(steps):
        passed, stepped = client.forward_backward([datum(TEXT)], "cross_entropy"), client.optim_step(ADAM)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def test_a_client_learns_and_samples_what_it_learned(address: str) -> None:
    client = trainer(address)
    losses = learned(client, 30)
    assert losses[-1] < 0.1 * losses[0]
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=16, temperature=0)
    answer = sampler.sample(types.ModelInput.from_ints([1]), num_samples=2, sampling_params=params).result()
    assert [each.tokens for each in answer.sequences] == [[2, 3, 4, 5, 6, 0]] * 2
    assert {each.stop_reason for each in answer.sequences} == {"stop"}
    assert len({each.sequence_id for each in answer.sequences}) == 2
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()
    assert scored[0] is None
    now = client.forward([datum(TEXT)], "cross_entropy").result()
    assert scored[1:] == pytest.approx(logprobs_of(now)[0], abs=1e-6)


def test_an_empty_stop_goes_on_beyond_the_end_token(address: str) -> None:
    client = trainer(address)
    learned(client, 30)
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=9, temperature=0, stop=[])
    (found,) = sampler.sample(types.ModelInput.from_ints([1]), 1, params).result().sequences
    assert found.tokens[:6] == [2, 3, 4, 5, 6, 0]
    assert (len(found.tokens), found.stop_reason) == (9, "length")
    params = types.SamplingParams(max_tokens=9, temperature=0, stop=[4])
    (found,) = sampler.sample(types.ModelInput.from_ints([1]), 1, params).result().sequences
    assert (found.tokens, found.stop_reason) == ([2, 3, 4], "stop")


def test_topk_and_the_last_prompt_logprobs(address: str) -> None:
    sampler = service(address).create_sampling_client(base_model=BASE).result()
    answer = sampler.sample(
        types.ModelInput.from_ints([1, 2, 3]), 1, types.SamplingParams(max_tokens=2, seed=3),
        include_prompt_logprobs=True, topk_prompt_logprobs=VOCABULARY, topk_sample_logprobs=2,
    ).result()  # fmt: skip
    assert answer.prompt_logprobs is not None
    assert answer.topk_prompt_logprobs is not None
    assert answer.topk_prompt_logprobs[0] is None
    for token_id, scored, row in zip([2, 3], answer.prompt_logprobs[1:], answer.topk_prompt_logprobs[1:], strict=True):
        assert row is not None
        assert dict(row)[token_id] == pytest.approx(scored)
        assert sum(math.exp(score) for _, score in row) == pytest.approx(1.0, abs=1e-5)
    assert [len(row or ()) for row in answer.sequences[0].topk_logprobs or ()] == [2, 2]
    last = sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, 3]), prompt_logprobs_last_n=1).result()
    assert last == [None, None, answer.prompt_logprobs[2]]


def test_many_chunks_are_one_gradient(address: str) -> None:
    data = [datum([1, 2 + number % 20, 3]) for number in range(2500)]  # three chunks of 1024 at most
    whole, parts = trainer(address), trainer(address)
    passed = whole.forward_backward(data, "cross_entropy")
    stepped = whole.optim_step(ADAM)
    assert len(passed.result().loss_fn_outputs) == 2500
    for number in range(0, 2500, 1024):
        parts.forward_backward(data[number : number + 1024], "cross_entropy")
    assert parts.optim_step(ADAM).result().metrics == stepped.result().metrics
    checks = [client.forward([datum(TEXT)], "cross_entropy").result() for client in (whole, parts)]
    assert logprobs_of(checks[0]) == logprobs_of(checks[1])


def test_a_custom_loss_of_the_client_has_its_gradient(address: str) -> None:
    """-sum(logprobs) by the client is cross-entropy with weights of 1."""

    def negated(data: Any, logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -sum(each.sum() for each in logprobs), {"seen": float(len(logprobs))}  # type: ignore[return-value]

    custom, plain = trainer(address), trainer(address)
    found = custom.forward_backward_custom([datum(TEXT)] * 3, negated).result()
    plainly = plain.forward_backward([datum(TEXT)] * 3, "cross_entropy").result()
    assert found.metrics["loss:sum"] == pytest.approx(plainly.metrics["loss:sum"])
    norms = [client.optim_step(ADAM).result().metrics or {} for client in (custom, plain)]
    assert norms[0]["grad_norm"] == pytest.approx(norms[1]["grad_norm"])


def test_two_targets_at_a_position_come_back_as_two(address: str) -> None:
    targets = types.TensorData(data=[2, 9, 3, 9], dtype="int64", shape=[2, 2])
    weights = types.TensorData(data=[0.5, 0.5, 1.0, 0.0], dtype="float32", shape=[2, 2])
    fields = {"target_tokens": targets, "weights": weights}
    wide = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=fields)
    client = trainer(address)
    both = client.forward([wide, datum([1, 2, 3])], "cross_entropy").result().loss_fn_outputs
    assert [each["logprobs"].shape for each in both] == [[2, 2], [2]]
    wide_rows = torch.tensor(both[0]["logprobs"].tolist()).reshape(2, 2)
    assert wide_rows[:, 0].tolist() == pytest.approx(both[1]["logprobs"].tolist())


def test_a_state_with_optimizer_goes_on_as_if_it_had_not_stopped(address: str) -> None:
    client = trainer(address)
    learned(client, 3)
    path = client.save_state("third").result().path
    assert path == f"tinker://{client.model_id}/weights/third"
    expected = learned(client, 3)
    resumed = service(address).create_training_client_from_state_with_optimizer(path).result()
    assert learned(resumed, 3) == expected
    fresh = service(address).create_training_client_from_state(path).result()
    assert learned(fresh, 3)[0] == expected[0]  # the same weights, …
    assert learned(fresh, 1) != expected[:1]
    sampled = client.save_weights_for_sampler("kept").result().path
    sampler = service(address).create_sampling_client(model_path=sampled).result()
    assert sampler.get_base_model() == BASE


def test_rest_calls_tell_what_there_is(address: str) -> None:
    client = trainer(address)
    client.save_state("one", ttl_seconds=7200, user_metadata={"why": "test"}).result()
    client.save_weights_for_sampler("two").result()
    rest = rest_of(address)
    (run,) = rest.list_training_runs().result().training_runs
    assert (run.training_run_id, run.base_model, run.lora_rank) == (client.model_id, BASE, 4)
    assert run.last_checkpoint is not None
    saved = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [(each.checkpoint_id, each.checkpoint_type) for each in saved] == [
        ("weights/one", "training"),
        ("sampler_weights/two", "sampler"),
    ]
    assert saved[0].expires_at is not None
    assert saved[0].user_metadata == {"why": "test"}
    info = rest.get_weights_info_by_tinker_path(saved[0].tinker_path).result()
    assert (info.base_model, info.lora_rank) == (BASE, 4)
    rest.set_checkpoint_ttl_from_tinker_path(saved[1].tinker_path, 3600).result()
    rest.delete_checkpoint_from_tinker_path(saved[0].tinker_path).result()
    left = rest.list_user_checkpoints().result().checkpoints
    assert [each.checkpoint_id for each in left] == ["sampler_weights/two"]
    assert left[0].expires_at is not None
    (session_id,) = rest.list_sessions().result().sessions
    assert rest.get_session(session_id).result().training_run_ids == [client.model_id]
    models = rest.get_server_capabilities().result().supported_models
    assert [(each.model_name, each.trainable) for each in models] == [(BASE, True), ("toy/frozen", False)]


def test_external_weights_are_files_to_fetch(address: str) -> None:
    client = trainer(address)
    path = client.save_weights_external("away").result().path
    rest = rest_of(address)
    urls = rest.get_external_weights_urls(path).result().urls
    assert list(urls) == ["adapter.pt"]
    assert httpx.get(urls["adapter.pt"]).content[:2] == b"PK"  # torch.save writes a zip
    assert httpx.get(urls["adapter.pt"].replace("sign=", "sign=0")).status_code == 404


def test_clients_cannot_see_each_other(address: str) -> None:
    client = trainer(address)
    path = client.save_state("mine").result().path
    theirs = service(address, "bob")
    rest = rest_of(address, "bob")
    assert rest.list_training_runs().result().training_runs == []
    with pytest.raises(tinker.NotFoundError):
        rest.get_training_run(client.model_id).result()
    with pytest.raises(tinker.RequestFailedError):
        theirs.create_training_client_from_state(path).result()
    rest_of(address).publish_checkpoint_from_tinker_path(path).result()
    assert theirs.create_training_client_from_state(path).result()
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=address, api_key="tml-nobody-0123").create_sampling_client(
            base_model=BASE
        ).result()


def test_tenants_at_the_same_time_have_what_each_has_alone(address: str) -> None:
    """Two that learn, and a third whose passes fail."""

    def fails(client: tinker.TrainingClient) -> list[float]:
        for _ in range(4):
            with pytest.raises(tinker.RequestFailedError):
                client.forward_backward([datum([1, BROKEN, 2])], "cross_entropy").result()
        return []

    alone = [learned(trainer(address, seed=seed), 6) for seed in (1, 2)]
    clients = [trainer(address, seed=seed, owner=owner) for seed, owner in ((1, "ada"), (2, "bob"), (3, "ada"))]
    with ThreadPoolExecutor(3) as pool:
        third = pool.submit(fails, clients[2])
        together = [pool.submit(learned, client, 6) for client in clients[:2]]
        assert [each.result() for each in together] == alone
        assert third.result() == []
    assert alone[0] != alone[1]


@pytest.mark.parametrize(
    ("loss", "token_ids", "category"),
    [("stable_reinforce", TEXT, "user"), ("cross_entropy", [1, BROKEN, 2], "server")],
)
def test_a_pass_that_fails_changes_nothing(address: str, loss: Any, token_ids: list[int], category: str) -> None:
    whole, other = trainer(address), trainer(address)
    whole.forward_backward([datum(TEXT)], "cross_entropy").result()
    other.forward_backward([datum(TEXT)], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError) as caught:
        other.forward_backward([datum(token_ids)], loss).result()
    assert caught.value.category.value == category
    assert whole.optim_step(ADAM).result().metrics == other.optim_step(ADAM).result().metrics
    assert learned(whole, 2) == learned(other, 2)


@pytest.mark.full
def test_the_page_does_what_it_says(address: str, tiny_model: Path, tmp_path: Path) -> None:
    """With the toy for a model, and a tokenizer in a folder below the client's own."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / BASE).parent.mkdir()
    (tmp_path / BASE).symlink_to(tiny_model)
    (tmp_path / "loop.py").write_text(code.replace("Qwen/Qwen3-0.6B", BASE))
    env = {**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": KEYS["ada"], "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "loop.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()[:20]]
    assert losses[-1] < losses[0]
    assert done.stdout.splitlines()[-1] == str(["6"] * 4)


@pytest.mark.full
def test_a_client_outlives_its_server(keeper: Keeper, tmp_path: Path) -> None:
    """Kills while requests run and between them: results are those of a server that was left alone."""

    def loop(address: str, kills: Sequence[int]) -> list[Any]:
        client = trainer(address)
        found: list[Any] = []
        for step in range(4):
            passed, stepped = client.forward_backward([datum(TEXT)] * 2, "cross_entropy"), client.optim_step(ADAM)
            if step in kills:
                keeper.kill()
                keeper.again()
            found += [passed.result().metrics, logprobs_of(passed.result()), stepped.result().metrics]
        path = client.save_state("end").result().path
        resumed = service(address).create_training_client_from_state_with_optimizer(path).result()
        return [*found, learned(resumed, 2)]

    alone = loop(keeper.begin(tmp_path / "alone", free_port()), [])
    killed = loop(keeper.begin(tmp_path / "killed", free_port(), models={"slow_s": 0.02}), [0, 2, 3])
    assert killed == alone
