"""Ray workers that are forked from one process, which has imported what is heavy and done nothing else.

A worker that starts from nothing spends three seconds of a core on imports. ``python_that_forks`` is an executable
that Ray takes for Python: it hands the start of a worker to the forking process, and all else to the real Python. So it
does with a worker of a runtime environment of its own. Run as a script, this file is the forking process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

OURS = ("torch", "transformers.models.qwen2.modeling_qwen2", "nemorl_dtensor.training", "nemorl_dtensor.generation")
RAYS = (
    "google.protobuf",
    "jsonschema",
    "pyarrow",
    "pydantic.v1.fields",
    "requests",
    "starlette.datastructures",
    "uvloop",
)
"""What Ray imports in each worker. Not Ray itself, which reads its environment when it is imported."""
STREAMS = (0, 1, 2)

EXECUTABLE = """#!{python} -IS
import json, os, socket, sys
arguments = sys.argv[1:]
if os.path.basename(arguments[0]) != "default_worker.py":
    os.execv({python!r}, [{python!r}, *arguments])
request = json.dumps({{"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}})
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"0"], [0, 1, 2])
    server.sendall(request.encode())
    server.shutdown(socket.SHUT_WR)
    server.recv(1)  # ends with the worker
"""


@contextmanager
def python_that_forks(folder: Path, inside: Sequence[str] = (), modules: Sequence[str] = ()) -> Iterator[Path]:
    """The executable. Who begins a Ray cluster with it as ``sys.executable`` has workers that are forked.

    Args:
        folder: An empty one, of a short path.
        inside: What the command of the forking process begins with, to put it and the workers into a namespace.
        modules: What it imports besides.
    """
    address = str(folder / "workers")
    executable = folder / "python"
    executable.write_text(EXECUTABLE.format(python=sys.executable, address=address))
    executable.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)
        command = [*inside, sys.executable, "-I", __file__, str(server.fileno()), *modules]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[server.fileno()]) as process:
            yield executable
            process.terminate()


@contextmanager
def begun_by(python: Path) -> Iterator[None]:
    """A Ray cluster that begins in here takes this for its workers' Python."""
    real, sys.executable = sys.executable, str(python)
    try:
        yield
    finally:
        sys.executable = real


def _serve(descriptor: int, modules: Sequence[str]) -> socket.socket | None:
    """Fork for every request, until the process that began this one has gone.

    Returns:
        In a fork, the client whose request it is; ``None`` in this process, at the end.
    """
    gc.disable()
    for name in (*OURS, *RAYS, *modules):
        with suppress(ModuleNotFoundError):  # what is not installed, no worker imports
            importlib.import_module(name)
    gc.freeze()  # workers share what is there: a collection would make each write to all of it
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as server, selectors.DefaultSelector() as ready:
        for source in (server, sys.stdin):
            ready.register(source, selectors.EVENT_READ)
        while all(key.fileobj is server for key, _ in ready.select()):
            client, _ = server.accept()
            if os.fork() == 0:
                return client
            client.close()
    return None


def _be_worker(client: socket.socket) -> None:
    """Become what the client was asked to be: its streams, environment, folder and arguments."""
    _, streams, _, _ = socket.recv_fds(client, 1, len(STREAMS))
    with client.makefile("rb") as text:
        request: dict[str, Any] = json.load(text)
    for stream, descriptor in zip(STREAMS, streams, strict=True):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    script = Path(sys.argv[0])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [str(script.parent), *paths]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    client = _serve(int(sys.argv[1]), sys.argv[2:])
    if client is not None:
        _be_worker(client)
