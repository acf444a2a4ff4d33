"""The server of a sandbox: ``python -I -B inside <descriptor> <folder>``. Forks a keeper for every run that it is sent.

It runs no foreign code and knows no program; a request is one byte with four descriptors: standard input, output and
error of the run, and the socket that its description comes from and its end is told to. Starting an interpreter and its
imports once, instead of once per run, makes up for the second process that judging takes.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import sys

sys.path.append(sys.argv[2])  # the parts that other sandboxes have as well: nemorl_trust.isolation

import keeper
import wire
from supervisor import report

DESCRIPTORS = 4


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _be_the_first_to_go()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        while fds := _receive(requests):
            if os.fork() == 0:
                requests.close()
                _keep(fds)
                os._exit(0)
            for fd in fds:
                os.close(fd)


def _receive(requests: socket.socket) -> list[int]:
    """The descriptors of the next run; none when nobody is there to ask any more."""
    said, ancillary, _, _ = requests.recvmsg(1, socket.CMSG_SPACE(DESCRIPTORS * array.array("i").itemsize))
    fds = array.array("i")
    for _, _, data in ancillary if said else ():
        fds.frombytes(data)
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds.tolist()


def _keep(fds: list[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, control = fds
    for target, fd in enumerate(standard):
        os.dup2(fd, target)
        os.close(fd)
    try:
        read = wire.reader(control)
        spec = json.loads(read(int.from_bytes(read(8), "big")))
    except EOFError:
        return
    report(control, who="keeper", began=True)  # what ends without this line has run no program
    try:
        keeper.keep(control, spec)
    except OSError as error:  # no process, no descriptor
        report(control, who="keeper", error=f"{type(error).__name__}: {error}")


def _be_the_first_to_go() -> None:
    """Where memory runs out, the kernel takes a program rather than the trainer. Inherited."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


main()
