"""What a hostile isolated plugin achieves by being slow, curious or many: nothing but its own end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hostile_plugins import Plugin, answering, hostile
from nemorl.errors import PluginError
from nemorl_trust.isolation import CONFINEMENT
from nemorl_trust.isolation import process as isolated_process
from recorded_messages import Raises


@pytest.mark.parametrize("reads", ["", "while connection.recv(1): time.sleep(0.01)"], ids=["nothing", "byte by byte"])
def test_a_process_that_reads_nothing_or_hardly_anything_is_ended(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch, reads: str, raises: Raises
) -> None:
    monkeypatch.setattr(isolated_process, "SEND_S", 0.3)
    process = plugin(f"greet()\n{reads}\ntime.sleep(60)")
    with raises(PluginError):
        process.call("check", "a:B", {"text": "x" * (8 << 20)})


def test_a_greeting_byte_by_byte_is_not_waited_for(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    monkeypatch.setattr(isolated_process, "START_S", 0.5)
    process = plugin("while True:\n    connection.sendall(bytes(1))\n    time.sleep(0.2)")
    with raises(PluginError):
        process.call("start", 1)


def test_an_answer_byte_by_byte_comes_too_late_and_is_nobody_elses(plugin: Plugin, raises: Raises) -> None:
    slowly = "hear(); body = struct.pack('>IQB', 1, 1, 1) + b'8'\nfor byte in body[:-1]: connection.send(bytes([byte]))"
    process = plugin(f"greet(); {slowly}\nhear(); connection.send(body[-1:]); say(2, 9); hear()")
    with raises(PluginError):
        process.call("start", 1, within_s=0.2)
    assert process.call("start", 1) == 9


LOOKS = """
greet(); number, asked = hear(); found = []
def through(what, attempt, *arguments):
    try:
        attempt(*arguments)
        found.append(what)
    except OSError:
        pass
for pid in asked[2]["others"]:
    for name in ("environ", "mem", "maps", "fd/0", "fd/1", "fd/2"):
        through(name, os.open, f"/proc/{pid}/{name}", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("root", "cwd", "exe"):
        through(name, os.readlink, f"/proc/{pid}/{name}")
    through("signals", os.kill, pid, 0)
through("the terminal", open, "/dev/tty")
for descriptor in range(3, 64):
    if descriptor != connection.fileno():
        through(f"descriptor {descriptor}", os.fstat, descriptor)
say(number, [[what, "", None] for what in found]); hear()
"""


def test_it_sees_neither_the_driver_nor_another_plugin(plugin: Plugin, tmp_path: Path) -> None:
    version = subprocess.run(
        [sys.executable, "-c", "import landlock; print(landlock.version() >= landlock.KNOWS_SIGNALS)"],
        check=False, cwd=CONFINEMENT, capture_output=True, text=True,
    )  # fmt: skip
    if version.stdout != "True\n":
        pytest.skip("processes of one user are kept apart by Landlock, from Linux 6.12 on")
    other = hostile(tmp_path / "acme-good", "greet(); number, _ = hear(); say(number, os.getpid()); hear()")
    others = [os.getpid(), other.call("start", 1)]
    assert plugin(LOOKS).call("check", "a:B", {"others": others}) == []


def test_what_it_started_ends_with_it(plugin: Plugin) -> None:
    """A plugin that starts processes for ever is ended as a whole."""
    process = plugin(
        "greet(); number, _ = hear(); read, write = os.pipe()\n"
        "children = [pid for _ in range(8) if (pid := os.fork())]\n"
        "if len(children) == 8:\n    say(number, [[str(pid), '', None] for pid in children]); hear(); os._exit(3)\n"
        "time.sleep(60)"
    )
    children = [int(pid) for pid, _, _ in process.call("check", "a:B", {})]
    assert len(children) == 8
    with pytest.raises(PluginError):
        process.call("check", "a:B", {})
    deadline = time.monotonic() + 10  # a process that was killed still has to be run to its end
    while any(_lives(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid in children if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_finalizer_in_the_middle_of_a_call_waits_for_nobody(plugin: Plugin) -> None:
    process = plugin("""
        greet()
        heard = []
        while True:
            number, asked = hear()
            heard.append([asked[0], str(asked[-1]), None])
            if asked[0] == "check":
                say(number, heard)
    """)
    with process._lock:
        process.forget(7)
    assert process.call("check", "a:B", {}) == [("forget", "7", None), ("check", "{}", None)]


def test_a_name_of_a_megabyte_makes_a_short_error(plugin: Plugin) -> None:
    lists = '"missing_modules": [], "options": [], "not_asked": []'
    told = f'{{"doc": "", "schema": {{}}, "class_data": {{"x" * (1 << 20): 1}}, {lists}}}'
    with pytest.raises(PluginError) as caught:
        answering(plugin, told).call("describe", "a:B")
    assert len(str(caught.value)) < 1500
