"""The flight recorder: the loop of the real client is a run, and is made again bit for bit without the client."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, command
from nemorl_testing.models import tiny_model
from safetensors.torch import load_file

tinker = pytest.importorskip("tinker", reason="the package tinker is not installed")
from tinker import types  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.slow]

BASE = "tiny/model"
ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture
def nemorl(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command(monkeypatch, capfd)


class Server:
    """``nemorl serve --tinker`` as a process that can be killed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, "0"
        self.begin()

    def begin(self) -> None:
        words = [str(tiny_model()), "--name", BASE, "--tinker", "--json", "--directory", str(self._folder)]
        line = [sys.executable, "-c", "from nemorl_cli import main; main()", "serve", *words]
        line += ["--largest-rank", "8", "--port", self._port, "--max-sequence-tokens", "64"]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = json.loads(self.process.stdout.readline())
        self.address, (self.key,) = found["base_url"], found["api_keys"].values()
        self._port = self.address.rpartition(":")[2]

    def end(self, number: int = signal.SIGINT) -> None:
        self.process.send_signal(number)
        self.process.wait(300)


def loop(server: Server, *, steps: int, resume: str | None = None, between: Callable[[int], None] | None = None) -> str:
    """A client's loop: samples, advantages from their length, two passes and an update each; returns a saved state."""
    service = tinker.ServiceClient(base_url=server.address, api_key=server.key)
    if resume is None:
        training = service.create_lora_training_client(BASE, rank=4, seed=3).result()
    else:
        training = service.create_training_client_from_state_with_optimizer(resume).result()
    path = ""
    for step in range(steps):
        sampler = training.save_weights_and_get_sampling_client().result()
        data = []
        for prompt in ([5, 6, 7], [8, 9]):
            params = types.SamplingParams(max_tokens=6, seed=step, stop=[])
            found = sampler.sample(types.ModelInput.from_ints(prompt), 3, params).result()
            for number, sequence in enumerate(found.sequences):
                data.append(datum(prompt, sequence, number - 1.0))
        training.forward(data, "cross_entropy" if step < 0 else "importance_sampling").result()
        half = len(data) // 2
        training.forward_backward(data[:half], "importance_sampling").result()
        training.forward_backward(data[half:], "importance_sampling").result()
        training.optim_step(ADAM).result()
        if between is not None:
            between(step)
        if step == steps - 2:
            path = training.save_state("late").result().path
    service.close("success").result(300)
    return path


def datum(prompt: list[int], sequence: Any, advantage: float) -> types.Datum:
    tokens, start = [*prompt, *sequence.tokens], len(prompt) - 1
    fields = {
        "target_tokens": tokens[1:],
        "logprobs": [0.0] * start + [*sequence.logprobs],
        "advantages": [0.0] * start + [advantage] * len(sequence.tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=fields)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of: a loop; the same one, with a server that is killed; one that goes on from a state of the first."""
    folder = tmp_path_factory.mktemp("served")
    server = Server(folder)

    def kill(step: int) -> None:
        if step == 2:
            server.end(signal.SIGKILL)
            server.begin()

    try:
        path = loop(server, steps=5)
        loop(server, steps=5, between=kill)
        loop(server, steps=2, resume=path)
    finally:
        server.end()
    runs = sorted((folder / "runs").iterdir(), key=lambda each: (each / "config.yaml").stat().st_mtime)
    return [each for each in runs if not each.name.startswith(".")]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def numbers(run: Path) -> list[dict[str, Any]]:
    """Metrics of the steps without what tells the time."""
    timed = ("time", "timing/", "performance/")
    return [
        {name: value for name, value in line.items() if not name.startswith(timed)}
        for line in lines(run / "metrics.jsonl")
    ]


PARTS = ("data", "tokens", "rewards", "advantages", "logprobs", "loss", "gradient", "weights")


def replayed(nemorl: Command, run: Path, *words: object) -> dict[int, dict[str, str]]:
    """By step: what each of its parts is known by, all of them equal bit for bit."""
    done = nemorl("compare", "replay", run, *words, "--json")
    assert done.code == 0, done.err + done.out
    assert not done.json["differs"]
    found: dict[int, dict[str, str]] = {}
    for each in done.json["steps"]:
        found.setdefault(each["step"], {})[each["part"]] = each["known_by"]
    return found


def test_a_loop_is_made_again_bit_for_bit_without_its_client(served: list[Path], nemorl: Command) -> None:
    run = served[0]
    assert [line["step"] for line in numbers(run)] == [1, 2, 3, 4, 5]
    assert all(line["train/sampled_sequences"] == 6 for line in numbers(run))
    whole = replayed(nemorl, run, "--from-start")
    assert list(whole) == [1, 2, 3, 4, 5]
    assert whole[5] == dict(
        zip(PARTS, [*["records"] * 5, "metrics", "metrics", "checkpoint"], strict=True)
    )  # its state was saved as the client ended
    assert list(replayed(nemorl, run)) == [5]  # from the state that the client saved after step 4


def test_another_loop_is_told_from_it(served: list[Path], nemorl: Command) -> None:
    """Other first weights: what is sampled first is the base's, since B is 0, and so is the loss; the gradient of B is
    by A, which is another."""
    done = nemorl("compare", "replay", served[0], "--step", 1, "--set", "adapter.seed=4", "--json")
    assert done.code == 1
    assert (done.json["parting"]["step"], done.json["parting"]["part"]) == (1, "gradient")


def test_a_kill_leaves_the_same_run(served: list[Path], nemorl: Command) -> None:
    first, second = served[:2]
    assert numbers(first) == numbers(second)
    done = nemorl("compare", "steps", first, second, "--json")
    assert done.json["parting"] is None
    assert [each["key"] for each in done.json["settings"] if each["counts"]] == ["data.path"]
    assert list(replayed(nemorl, second, "--from-start")) == [1, 2, 3, 4, 5]


def test_a_loop_that_went_on_from_a_saved_state_is_made_again_too(served: list[Path], nemorl: Command) -> None:
    assert list(replayed(nemorl, served[2], "--from-start")) == [1, 2]


def test_its_files_are_those_of_a_run(served: list[Path], nemorl: Command, tmp_path: Path) -> None:
    run = served[0]
    assert (run / "report.html").stat().st_size > 100_000
    events = [each["event"] for each in lines(run / "events.jsonl")]
    assert events == ["started", "client", "checkpoint", "checkpoint", "finished"]
    shown = nemorl("view", "samples", run, "--step", 2, "--best", 9, "--json").json
    assert len(shown) == 6
    assert nemorl("runs", "verify", run).code == 0
    (listed,) = [each for each in nemorl("runs", "list", run.parent, "--json").json if each["name"] == run.name]
    assert (listed["status"], listed["step"]) == ("finished", 5)


def test_its_adapter_is_exported_in_its_own_shape(served: list[Path], nemorl: Command, tmp_path: Path) -> None:
    """Rank 4 on a server whose largest is 8: what the client has from the server is what ``nemorl export`` writes."""
    run, output = served[0], tmp_path / "adapter"
    done = nemorl("export", run, output, "--adapter", "--step", 4)
    assert done.code == 0, done.err
    settings = json.loads((output / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 32.0)
    (saved,) = (run.parents[1] / "checkpoints").glob(f"{run.name}/training/late-*/adapter")
    files = [load_file(folder / "adapter_model.safetensors") for folder in (output, saved)]
    assert files[0].keys() == files[1].keys()
    assert all(files[0][name].equal(files[1][name]) for name in files[0])
