"""What a hostile or broken isolated plugin can do to its driver: nothing but fail, with its name.

The plugin's interpreter is a script that speaks to the driver's socket as it likes. It starts without site-packages, so
a test takes a tenth of a second.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import random
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hostile_plugins import ANSWERS, STEP, Plugin, answering
from nemorl.errors import PluginError
from nemorl.types import Score, Step
from nemorl_trust.isolation import process as isolated_process
from nemorl_trust.isolation import wire as isolated_wire
from nemorl_trust.isolation.server import Server
from nemorl_trust.isolation.stand_ins import _made
from nemorl_trust.isolation.venvs import PluginVenv
from nemorl_trust.isolation.wire import ERROR, MAX_MESSAGE_BYTES, REPLIES, RESULT, Description, WireError, result_of
from recorded_messages import Raises


class Attack:
    """Unpickled, it runs a program and reads a secret."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"echo $ACME_TOKEN > {self.trace}",)


def test_an_honest_answer_arrives(plugin: Plugin) -> None:
    process = answering(plugin, repr(STEP))
    assert process.call("step", 1, "x") == Step(Score(1.0))


@pytest.mark.parametrize("verb", ["step", "describe", "rows", "check", "environment"])
@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_a_pickle_is_not_unpickled(
    plugin: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int, verb: str, raises: Raises
) -> None:
    monkeypatch.setenv("ACME_TOKEN", "secret")
    process = answering(plugin, repr(pickle.dumps(Attack(tmp_path / "trace"), protocol)))
    with raises(PluginError, "acme-evil", verb):
        process.call(verb, 1)
    assert not (tmp_path / "trace").exists()


def test_a_pickle_in_the_frames_of_multiprocessing_is_no_greeting(
    plugin: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    monkeypatch.setattr(isolated_process, "START_S", 0.5)
    reply = pickle.dumps((0, True, Attack(tmp_path / "trace")))
    process = plugin(f"connection.sendall({struct.pack('!i', len(reply)) + reply!r}); time.sleep(60)")
    with raises(PluginError, "acme-evil"):
        process.call("describe", "a:B")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("length", [MAX_MESSAGE_BYTES + 1, 2**32 - 1])
def test_an_oversized_reply_is_not_even_read(plugin: Plugin, length: int, raises: Raises) -> None:
    process = plugin(f"greet(); number, _ = hear(); say(number, b'', length={length}); time.sleep(60)")
    with raises(PluginError, "16,777,216"):
        process.call("describe", "a:B")


def test_an_oversized_question_is_not_sent(plugin: Plugin, raises: Raises) -> None:
    with raises(PluginError, 16, "MiB", 17):
        answering(plugin, "None").call("check", "a:B", {"text": "x" * (17 << 20)})


@pytest.mark.parametrize(
    ("verb", "answer"),
    [
        ("step", "1.0"),
        ("step", "{}"),
        ("step", '{"score": {"reward": "1.0"}, "observation": None, "done": True}'),
        ("step", '{"score": {"reward": 1.0, "metrics": {"a": [1]}}, "observation": None, "done": True}'),
        ("step", '{"score": {"reward": 1.0}, "observation": 3, "done": True}'),
        ("step", '{"score": {"reward": 1.0}, "observation": None, "done": "yes"}'),
        ("start", '"1"'),
        ("start", "True"),
        ("start", "1.5"),
        ("start", "None"),
        ("environment", "[1, 2, 3]"),
        ("environment", '[1, "name"]'),
        ("rows", '["row"]'),
        ("rows", '{"prompt": "x"}'),
        ("dataset", "[1, -1]"),
        ("check", '[["path", "message"]]'),
        ("devices_per_replica", "0"),
        ("log", "1"),
        ("describe", "{}"),
        ("describe", '{"doc": "", "missing_modules": [], "class_data": {"build": "x"}, "schema": {}, "options": []}'),
        ("step", 'b"{"'),
        ("step", 'b""'),
        ("step", r'b"\xff\xfe"'),
        ("step", '"[" * 100_000'.join(["(", ").encode()"])),
        ("describe", '("[" * 100_000 + "]" * 100_000).encode()'),
        ("rows", '("[{\\"a\\":" + "[" * 100_000 + "]" * 100_000 + "}]").encode()'),
    ],
)
def test_what_a_verb_does_not_answer_with_is_refused(plugin: Plugin, verb: str, answer: str, raises: Raises) -> None:
    process = answering(plugin, answer)
    with raises(PluginError, "acme-evil", verb):
        process.call(verb, 1)
    with pytest.raises(PluginError):  # the process is still there, and as bad as before
        process.call(verb, 1)


def test_numbers_that_json_has_no_word_for_arrive() -> None:
    step = result_of(
        "step", b'{"score": {"reward": NaN, "metrics": {"a": -Infinity}}, "observation": null, "done": true}'
    )
    assert math.isnan(step.score.reward)
    assert step.score.metrics == {"a": -math.inf}
    (row,) = result_of("rows", json.dumps([{"n": 10**40, "x": math.nan, "deep": [[{"a": None}]]}]).encode())
    assert (row["n"], row["deep"]) == (10**40, [[{"a": None}]])


@pytest.mark.parametrize("verb", sorted(REPLIES))
def test_no_reply_makes_anything_but_the_agreed_type_or_an_error(verb: str) -> None:
    """Half a thousand damaged replies per verb: each is refused, or is what it would be undamaged."""
    draw = random.Random(verb)
    seeds = [json.dumps(STEP), '[1, "name", true]', "7", "null", '[["a", "b", null]]', '[{"a": {"b": [1, 2.5, "x"]}}]']
    pieces = [
        b"[",
        b"]",
        b"{",
        b"}",
        b'"',
        b",",
        b":",
        b"null",
        b"1e999",
        b"\xff",
        b"\\u0000",
        b"-",
        b"\\ud800",
        b"\x80\x04",
    ]
    allowed = (Step, Description, str, int, list, tuple, type(None))
    for _ in range(500):
        body = bytearray(draw.choice(seeds).encode())
        for _ in range(draw.randrange(4)):
            place = draw.randrange(len(body) + 1)
            body[place : place + draw.randrange(3)] = draw.choice(pieces)
        with suppress(WireError):
            assert isinstance(result_of(verb, bytes(body)), allowed)


def test_noise_on_its_output_reaches_nobody(plugin: Plugin, capfd: pytest.CaptureFixture[str], raises: Raises) -> None:
    noise = 'os.write(1, b"NOISE\\n" * 200_000); os.write(2, b"{}\\n" * 1000)'
    process = plugin(f"{noise}; greet(); number, _ = hear(); {noise}; say(number, 3); {noise}; hear(); os._exit(4)")
    assert process.call("start", 1) == 3
    with raises(PluginError, 4) as caught:
        process.call("start", 1)
    assert str(caught.value).count("\n") <= isolated_process.LOG_LINES + 2
    assert capfd.readouterr() == ("", "")


def test_the_environment_of_the_driver_is_not_the_plugins(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = (
        "ACME_TOKEN",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "HTTPS_PROXY",
        "PYTHONPATH",
        "PATH_KEY",
    )
    for name in (*secrets, "OMP_NUM_THREADS", "LC_ALL"):
        monkeypatch.setenv(name, f"value of {name}")
    process = plugin(ANSWERS.format(answer="[[name, value, None] for name, value in os.environ.items()]"))
    seen = {name: value for name, value, _ in process.call("check", "a:B", {})}
    assert not seen.keys() & set(secrets)
    assert "value of" not in " ".join(
        value for name, value in seen.items() if name not in ("OMP_NUM_THREADS", "LC_ALL")
    )
    assert {"PATH", "HOME", "OMP_NUM_THREADS", "LC_ALL"} <= seen.keys()


def test_a_variable_that_was_granted_is_passed_on(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "key")
    monkeypatch.setenv("HF_TOKEN", "token")
    code = ANSWERS.format(answer="[[name, value, None] for name, value in os.environ.items()]")
    process = plugin(code, environment=["WANDB_API_KEY"])
    seen = {name: value for name, value, _ in process.call("check", "a:B", {})}
    assert seen["WANDB_API_KEY"] == "key"
    assert "HF_TOKEN" not in seen


def test_a_process_that_never_answers_is_given_up(plugin: Plugin, raises: Raises) -> None:
    process = plugin("greet(); hear(); time.sleep(60)")
    with raises(PluginError, "acme-evil", 0):
        process.call("start", 1, within_s=0.2)


def test_a_process_that_never_greets_is_ended(plugin: Plugin, monkeypatch: pytest.MonkeyPatch, raises: Raises) -> None:
    monkeypatch.setattr(isolated_process, "START_S", 0.3)
    with raises(PluginError, 0):
        plugin("time.sleep(60)").call("start", 1)


@pytest.mark.parametrize("sent", ["struct.pack('>I', 9)", "struct.pack('>IQB', 100, number, 1) + b'half'"])
def test_a_process_that_dies_in_the_middle_of_a_message_is_reported(plugin: Plugin, sent: str, raises: Raises) -> None:
    process = plugin(f"greet(); number, _ = hear(); connection.sendall({sent}); print('bye', flush=True); os._exit(3)")
    with raises(PluginError, "acme-evil", 3):
        process.call("describe", "a:B")


def test_a_process_that_leaves_another_behind_is_reported(plugin: Plugin, raises: Raises) -> None:
    """The one left behind holds the socket and the output open."""
    process = plugin("greet(); hear()\nif os.fork(): os._exit(5)\ntime.sleep(10)")
    with raises(PluginError, "acme-evil", 5):
        process.call("describe", "a:B", within_s=30)


def test_answers_that_nobody_asked_for_are_dropped(plugin: Plugin) -> None:
    process = plugin("greet(); number, _ = hear(); say(77, 1); say(0, 'again'); say(number, 2); say(number, 3); hear()")
    assert process.call("start", 1) == 2


def test_an_error_is_text_of_a_bounded_length(plugin: Plugin, raises: Raises) -> None:
    process = plugin(r"greet(); number, _ = hear(); say(number, b'\xff' + b'x' * 1_000_000, kind=2); hear()")
    with raises(PluginError, "acme-evil", varies="x{9,}") as caught:
        process.call("start", 1)
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize(
    "name", ["__base__", "__class__", "build", "_venv", "problems", "model_config", "a b", "", "x" * 200]
)
def test_an_option_cannot_take_the_place_of_a_method(tmp_path: Path, name: str, raises: Raises) -> None:
    option = {"name": name, "type": "str", "required": False, "default": "x", "description": ""}
    told = {"doc": "", "missing_modules": [], "class_data": {}, "schema": {}, "options": [option], "not_asked": []}
    with raises((WireError, PluginError)):
        _made(PluginVenv(tmp_path, "acme"), "environments", "a:B", result_of("describe", json.dumps(told).encode()))


def test_a_message_arrives_whole_however_it_is_cut() -> None:
    ours, theirs = socket.socketpair()
    body = os.urandom(100_000)

    def trickle() -> None:
        whole = struct.pack(">IQB", len(body), 2**63, ERROR) + body
        for start in range(0, len(whole), 777):
            theirs.sendall(whole[start : start + 777])
        theirs.close()

    threading.Thread(target=trickle).start()
    assert isolated_wire.receive(ours) == (2**63, ERROR, body)
    with pytest.raises(EOFError):
        isolated_wire.receive(ours)
    ours.close()
    assert RESULT != ERROR


def test_a_task_that_exits_takes_no_other_of_its_plugin_with_it() -> None:
    async def answers() -> float:
        await asyncio.sleep(0.05)
        return 1.0

    async def exits() -> None:
        raise SystemExit(3)

    server = Server()
    answer = asyncio.run_coroutine_threadsafe(answers(), server.loop)
    asyncio.run_coroutine_threadsafe(exits(), server.loop)
    assert answer.result(60) == 1.0
