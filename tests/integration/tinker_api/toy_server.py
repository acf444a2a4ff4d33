"""Tinker servers of the toy models in processes that can be killed: a keeper with torch loaded forks them at once.

The keeper reads commands from its standard input, one JSON object per line: ``{"folder", "port", "models", "times"}``
begins a server in place of the one that runs, ``null`` kills it; it answers each with a line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
KEYS = {"ada": "tml-ada-0123456789", "bob": "tml-bob-0123456789"}


class Keeper:
    """The test's end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._begun: dict[str, Any] = {}

    def begin(self, folder: Path, port: int, *, models: dict[str, Any] | None = None, **times: float) -> str:
        """A server; returns its address."""
        self._begun = {"folder": str(folder), "port": port, "models": {}, "times": times}
        return str(self._told({**self._begun, "models": models or {}}))

    def again(self) -> None:
        """The same server, after a kill, with models that live."""
        self._told(self._begun)

    def kill(self) -> None:
        """Kill the server, as ``kill -9`` does."""
        self._told(None)

    def close(self) -> None:
        self.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _told(self, command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _keep() -> None:
    import tinker_toy  # noqa: F401  (loaded once, before servers are forked)
    from nemorl_agents.tinker import server  # noqa: F401
    from nemorl_agents.tinker.wire.messages import messages

    messages()
    child = 0
    for line in sys.stdin:
        if child:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            child = 0
        command = json.loads(line)
        if command is None:
            print("null", flush=True)
            continue
        child = os.fork()
        if not child:
            _serve(command)


def _serve(command: dict[str, Any]) -> None:
    from nemorl_agents.tinker.keys import Keys
    from nemorl_agents.tinker.server import TinkerServer
    from nemorl_agents.tinker.service import Times
    from nemorl_trust.listening import Place
    from tinker_toy import ToyModels, toy_loss

    models, place = ToyModels(**command["models"]), Place(port=command["port"])
    folder, times = Path(command["folder"]), Times(**command["times"])
    with TinkerServer(models, folder, Keys(KEYS), toy_loss, place=place, times=times) as server:
        print(json.dumps(server.address), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    _keep()
