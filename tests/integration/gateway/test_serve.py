"""``nemorl serve``: a model folder behind the gateway, its answers held against transformers' own."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anthropic
import openai
import pytest
from attacks import HALF
from nemorl.errors import UsageError
from nemorl_agents.gateway.access import Access
from nemorl_agents.gateway.gateway import GatewayOptions
from nemorl_agents.gateway.model_server import model_folder, served
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_testing.models import greedy_continuation, load_reference, tiny_model
from recorded_messages import Raises

STRANGERS = 1100
FILES = 1024
"""Descriptors that the command may have: fewer than there are strangers."""
GREEDY = {"backend": "hf", "temperature": 0.0, "max_new_tokens": 16}


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model()


@pytest.fixture(scope="module")
def access(folder: Path) -> Iterator[Access]:
    with served(str(folder), GatewayOptions(models=("tiny",)), GREEDY, max_sequence_tokens=128, seed=3) as found:
        yield found


@pytest.fixture(scope="module")
def client(access: Access) -> openai.OpenAI:
    return openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key)


def test_a_completion_is_what_transformers_says(folder: Path, client: openai.OpenAI) -> None:
    tokenizer = Tokenizer.load(str(folder))
    prompt = tokenizer.encode("12+7=")
    expected = greedy_continuation(load_reference(folder), prompt, 8, tokenizer.stop_token_ids)
    answer = client.completions.create(model="tiny", prompt="12+7=", max_tokens=8, logprobs=0)
    assert answer.choices[0].text == tokenizer.decode(expected)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == [tokenizer.inner.decode([one]) for one in expected]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(expected))


def test_a_chat_is_the_models_template_and_clients_choose_their_sampling(folder: Path, client: openai.OpenAI) -> None:
    tokenizer = Tokenizer.load(str(folder))
    question = {"role": "user", "content": "12+7="}
    prompt = tokenizer.inner.apply_chat_template([question], add_generation_prompt=True, return_dict=False)
    expected = greedy_continuation(load_reference(folder), prompt, 16, tokenizer.stop_token_ids)

    def ask(**options: float) -> str:
        answer = client.chat.completions.create(model="tiny", messages=[question], **options)  # type: ignore
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(prompt)
        return str(answer.choices[0].message.content)

    assert ask() == tokenizer.decode(expected)
    warm = [ask(temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert warm[0] == warm[1]
    assert len({*warm, ask()}) == 3


def test_tokens_are_counted_as_the_answer_counts_them(access: Access) -> None:
    client = anthropic.Anthropic(base_url=access.base_url, api_key=access.api_key)
    question = [{"role": "user", "content": "12+7="}]
    counted = client.messages.count_tokens(model="tiny", messages=question)  # type: ignore
    answer = client.messages.create(model="tiny", messages=question, max_tokens=4)  # type: ignore
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_prompt_without_room_is_too_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="1" * 200)
    assert "maximum context length is 128 tokens" in str(caught.value)


def test_a_run_stands_for_its_exported_model(folder: Path, tmp_path: Path, raises: Raises) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "model").symlink_to(folder)
    with model_folder(str(tmp_path)) as found:
        assert found == str(tmp_path / "model")
    with model_folder(str(folder)) as found:
        assert found == str(folder)
    with raises(UsageError, "step"), model_folder(str(folder), 3):
        pass


def test_an_address_that_is_taken_is_refused_before_anything_is_loaded(raises: Raises) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        serving = served("no such model", GatewayOptions(port=port), GREEDY, max_sequence_tokens=128)
        with raises(UsageError, "127.0.0.1", port, varies=rf"port {port}"), serving:
            pass


def test_the_command_says_where_and_ends_on_ctrl_c(folder: Path) -> None:
    command = [sys.executable, "-c", "from nemorl_cli import main; main()", "serve", str(folder), "--json"]
    with subprocess.Popen([*command, "--key", "k", "--name", "gpt-4o"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        client = openai.OpenAI(base_url=told["openai_base_url"], api_key=told["api_key"])
        assert [model.id for model in client.models.list()] == [folder.name, str(folder), "gpt-4o"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process may open as many sockets as there are strangers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * STRANGERS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.usefixtures("many_files")
def test_the_command_answers_and_ends_as_ever_under_half_open_connections(folder: Path, tmp_path: Path) -> None:
    script = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}));"
        "from nemorl_cli import main; main()"
    )
    command = [sys.executable, "-c", script, "serve", str(folder), "--json", "--key", "k", "--name", "tiny"]
    log = tmp_path / "log"
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as process,
        ExitStack() as strangers,
    ):
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        place = ("127.0.0.1", int(told["base_url"].rpartition(":")[2]))
        for _ in range(STRANGERS):
            strangers.enter_context(socket.create_connection(place, timeout=30)).send(HALF)
        client = openai.OpenAI(base_url=told["openai_base_url"], api_key="k", max_retries=0, timeout=30)
        for _ in range(3):
            answer = client.completions.create(model="tiny", prompt="12+7=", max_tokens=4)
            assert answer.usage is not None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    said = log.read_text()
    assert "too many connections" in said
    assert "Traceback" not in said
    assert len(said.splitlines()) < 20
