"""Plugins that speak to the driver's socket as they like: scripts in an interpreter's place, without site-packages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import nemorl
from nemorl_trust.isolation.process import IsolatedProcess
from nemorl_trust.isolation.venvs import PluginVenv

SPEAKS = """#!{python} -ISB
import json, os, socket, struct, sys, time
connection = socket.socket(fileno=int(sys.argv[-1]))
def say(number, body, kind=1, length=None):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.sendall(struct.pack(">IQB", len(body) if length is None else length, number, kind) + body)
def hear():
    head = connection.recv(13, socket.MSG_WAITALL)
    length, number, kind = struct.unpack(">IQB", head)
    return number, json.loads(connection.recv(length, socket.MSG_WAITALL))
def greet():
    say(0, "{version}")
"""
STEP = {"score": {"reward": 1.0}, "observation": None, "done": True}

Plugin = Callable[..., IsolatedProcess]


ANSWERS = "greet()\nwhile True:\n    number, asked = hear()\n    say(number, {answer})\n"


def answering(plugin: Plugin, answer: str) -> IsolatedProcess:
    """A plugin that answers everything with one Python expression."""
    return plugin(ANSWERS.format(answer=answer))


def hostile(folder: Path, code: str, **record: Any) -> IsolatedProcess:
    """A plugin that runs this code, in a folder by its name."""
    (folder / "bin").mkdir(parents=True)
    (folder / "nemorl-plugin.json").write_text(json.dumps({"distribution": folder.name, **record}))
    program = folder / "bin" / "python"
    program.write_text(SPEAKS.format(python=sys.executable, version=nemorl.__version__) + dedent(code))
    program.chmod(0o755)
    return IsolatedProcess(PluginVenv(folder, folder.name))
