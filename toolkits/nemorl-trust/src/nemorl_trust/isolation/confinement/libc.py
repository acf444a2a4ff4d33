"""The few system calls that Python's standard library lacks. Linux only; standard library only.

Imported by programs that run in a fresh interpreter, before any foreign code is read. Nothing here imports nemorl.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWUTS = 0x20000000, 0x40000000, 0x04000000
MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC = 32, 1024, 2048, 4096, 16384
MS_PRIVATE, MS_RELATIME = 1 << 18, 1 << 21
ST_RELATIME = 4096
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 8, 47, 2
CAPABILITIES_VERSION_3 = 0x20080522
CAP_DAC_READ_SEARCH = 2
CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON = 19, 21, 38
LOOKS_INTO_OTHERS = (CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON)
"""With one of these a process may read the memory and the environment of others, whatever Landlock says."""
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446  # the same on every architecture

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Leave namespaces behind (``os.unshare`` exists from Python 3.12 on)."""
    _checked("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    kind_bytes = None if kind is None else kind.encode()
    _checked(
        f"mount {target}",
        _libc.mount(source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), options.encode() or None),
    )


def prctl(option: int, value: int, other: int = 0) -> None:
    _checked(f"prctl {option}", _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(other), 0, 0))


def drop_capabilities() -> None:
    """A root without powers. With ``PR_SET_NO_NEW_PRIVS`` they do not come back when a program is executed."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION_3, 0)
    _checked("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))


def keep_capability(number: int) -> None:
    """No powers but this one (below 32), which programs that are executed keep. It must be permitted."""
    header, bit = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION_3, 0), 1 << number
    _checked("capset", _libc.capset(header, (ctypes.c_uint32 * 6)(bit, bit, bit)))
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, number)


def drop_some_capabilities(dropped: Sequence[int]) -> None:
    """A root without these powers, and no others than it had. As above they do not come back."""
    header, held = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _checked("capget", _libc.capget(header, held))
    for number in dropped:
        for kind in range(3):  # effective, permitted, inheritable, of 32 each; then the same of those from 32 on
            held[number // 32 * 3 + kind] &= ~(1 << number % 32)
    _checked("capset", _libc.capset(header, held))


def syscall(what: str, number: int, *arguments: Any) -> int:
    return _checked(what, _libc.syscall(ctypes.c_long(number), *arguments))
