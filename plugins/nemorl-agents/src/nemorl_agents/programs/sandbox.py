"""The sandbox of an agent's program: what it may read, write and reach, and whether that holds on this machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from nemorl.errors import PluginError
from nemorl_trust.isolation import CONFINEMENT

from nemorl_agents.programs.config import search_path
from nemorl_agents.programs.program import Program, clean_environment

CONFINE = Path(__file__).with_name("confine.py")
SYSTEM_PATHS = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/hosts"),
    *("/etc/nsswitch.conf", "/etc/passwd", "/etc/mime.types", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat"),
    *("/dev/urandom", "/dev/zero"),
)
"""Paths that programs need besides their own files. No home of a person, no ``/var``, no other process's ``/proc``."""
PROBE = """
import json, os, socket, sys
outside, own_port, other_port, parent = sys.argv[1], *map(int, sys.argv[2:])
def prevented(attempt):
    try:
        attempt()
    except OSError:
        return True
    return False
def datagram():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.sendto(b"x", ("127.0.0.1", other_port))
found = {
    "reading your files": prevented(lambda: open(outside).read()),
    "writing them": prevented(lambda: open(outside, "a")),
    "connecting to other ports": prevented(lambda: socket.create_connection(("127.0.0.1", other_port), 5)),
    "sending datagrams": prevented(datagram),
    "signalling your processes": prevented(lambda: os.kill(parent, 0)),
}
socket.create_connection(("127.0.0.1", own_port), 5).close()
open("own", "w").close()
print(json.dumps([name for name, holds in found.items() if not holds]))
"""


class Sandbox:
    """Confines the programs of one command."""

    def __init__(self, command: Sequence[str], readable: Iterable[Path]) -> None:
        """
        Args:
            command: The program and the files that its arguments name are readable, with their folders.
            readable: What else is.
        """
        found = shutil.which(command[0], path=search_path())
        named = [Path(argument) for argument in (found or command[0], *command[1:]) if Path(argument).is_file()]
        places = [*(path.absolute().parent for path in named), *readable]
        self._readable = [str(place.absolute()) for place in places]

    def prefix(self, folder: Path, port: int) -> list[str]:
        """The words that go before a command.

        Args:
            folder: It may write in there, and nowhere else.
            port: It may connect to this one.
        """
        writable = [str(folder), "/dev/null"]
        readable = [*SYSTEM_PATHS, sys.prefix, sys.base_prefix, *self._readable]
        spec = {"modules": str(CONFINEMENT), "readable": readable, "writable": writable, "port": port}
        return [sys.executable, "-I", "-S", "-B", str(CONFINE), json.dumps(spec)]

    @classmethod
    async def try_out(cls) -> None:
        """Have a program try what must not be possible, whatever the command.

        Raises:
            PluginError: It was possible, or no program can be run.
        """
        with (
            tempfile.TemporaryDirectory(prefix="nemorl-agent-probe-") as folder,
            tempfile.NamedTemporaryFile(prefix="nemorl-outside-") as outside,
            socket.create_server(("127.0.0.1", 0)) as own,
            socket.create_server(("127.0.0.1", 0)) as other,
        ):
            ports = [str(server.getsockname()[1]) for server in (own, other)]
            program = Program(
                [sys.executable, "-I", "-S", "-c", PROBE, outside.name, *ports, str(os.getpid())],
                folder=Path(folder),
                environment=clean_environment(),
                output_bytes=4096,
                limits={},
                prefix=cls([sys.executable], []).prefix(Path(folder), int(ports[0])),
            )
            ended = await program.run("", 60.0)
        possible = json.loads(ended.stdout) if ended.returncode == 0 else []
        if ended.returncode or possible:
            seen = f"it does not prevent {', '.join(possible)}" if possible else ended.stderr.strip()[-300:]
            raise PluginError(
                f"this machine cannot confine agents: {seen}",
                fix="use Linux 6.12 or newer with Landlock, or environment.sandbox: false in a container or virtual "
                "machine without anything of value",
            )
