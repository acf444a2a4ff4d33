"""Gives up rights, then becomes an agent's program: ``python -I -S confine.py SPEC COMMAND…``. Linux.

Afterwards the process and all that it starts can read and write the paths of the specification and no others, open TCP
connections to one port and no other sockets, signal each other and nobody else, and make no rare system calls.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    spec, *command = sys.argv[1:]
    told = json.loads(spec)
    sys.path.append(told["modules"])
    import landlock
    import libc
    import seccomp

    if landlock.version() < landlock.KNOWS_PORTS:
        raise OSError("the kernel cannot restrict ports (Linux 6.7 can)")
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    landlock.restrict(told["readable"], told["writable"], [told["port"]])
    libc.drop_capabilities()
    seccomp.restrict(may_signal=landlock.version() >= landlock.KNOWS_SIGNALS, connects=True)
    os.execvp(command[0], command)


if __name__ == "__main__":
    try:
        main()
    except OSError as problem:
        sys.exit(f"the sandbox cannot be entered: {problem}")
