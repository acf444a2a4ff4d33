"""Becomes another program, which cannot look into processes of others: ``python -I -S -B apart.py PROGRAM …``.

On Linux 6.12 and newer, with Landlock: neither the program nor what it starts can read the environment, the memory or
the open files of a process that it did not start, signal one, or connect to its abstract sockets. Its rights to files
and to the network are those of its user. On other systems it is started all the same.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def main() -> None:
    sys.path.append(os.path.dirname(__file__))
    with suppress(OSError, AttributeError):  # AttributeError: a C library without prctl
        import landlock
        import libc

        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
        landlock.keep_apart()
        libc.drop_some_capabilities(libc.LOOKS_INTO_OTHERS)
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    try:
        main()
    except OSError as problem:
        sys.exit(f"{sys.argv[1]} cannot start: {problem}")
