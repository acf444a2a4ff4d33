"""Landlock: a process gives up rights to files and the network, for itself and all it will start. Needs no root.

https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Sequence

from libc import SYS_LANDLOCK_ADD, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_RESTRICT, syscall

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
"""Rights that mean something for a file; the others are about what a folder holds."""
READ = EXECUTE | READ_FILE | READ_DIR
RIGHTS_OF_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""File rights that each version of the interface knows; later ones know those of 5."""
CONNECT_TCP, BIND_AND_CONNECT_TCP, SCOPE_SOCKETS_AND_SIGNALS = 2, 3, 3
RULE_OF_PATH, RULE_OF_PORT = 1, 2
KNOWS_PORTS, KNOWS_SIGNALS = 4, 6
"""Versions of the interface from which TCP ports and signals can be restricted (Linux 6.7 and 6.12)."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _PortRule(ctypes.Structure):
    _fields_ = (("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64))


def version() -> int:
    """Of the kernel's interface.

    Raises:
        OSError: the kernel has no Landlock, or it is not enabled.
    """
    found: int = syscall("landlock", SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return found


def restrict(readable: Sequence[str], writable: Sequence[str], ports: Sequence[int] = ()) -> None:
    """From now on only these paths and, where the kernel can tell (6.7 on), no TCP but to these ports of any machine.

    Raises:
        OSError: the kernel has no Landlock, or it is not enabled.
    """
    abi = version()
    rights = RIGHTS_OF_ABI[min(abi, 5)]
    attributes = _Ruleset(
        rights,
        BIND_AND_CONNECT_TCP if abi >= KNOWS_PORTS else 0,
        SCOPE_SOCKETS_AND_SIGNALS if abi >= KNOWS_SIGNALS else 0,
    )
    size = 8 if abi < KNOWS_PORTS else 16 if abi < KNOWS_SIGNALS else 24
    ruleset = syscall("landlock", SYS_LANDLOCK_CREATE, ctypes.byref(attributes), ctypes.c_size_t(size), 0)
    for path in readable:
        _allow(ruleset, path, READ & rights)
    for path in writable:
        _allow(ruleset, path, rights & ~IOCTL_DEV)
    for port in ports if abi >= KNOWS_PORTS else ():
        rule = _PortRule(CONNECT_TCP, port)
        syscall("landlock", SYS_LANDLOCK_ADD, ruleset, RULE_OF_PORT, ctypes.byref(rule), 0)
    syscall("landlock", SYS_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def keep_apart() -> None:
    """From now on no signal to a process that this one did not start, no abstract socket of it, and no look into it.

    Files and the network stay as they are: whoever restricts them can also mount nothing.

    Raises:
        OSError: the kernel has no Landlock, or one that cannot do that (Linux 6.12 can).
    """
    attributes = _Ruleset(0, 0, SCOPE_SOCKETS_AND_SIGNALS)
    ruleset = syscall("landlock", SYS_LANDLOCK_CREATE, ctypes.byref(attributes), ctypes.c_size_t(24), 0)
    syscall("landlock", SYS_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(os.fstat(parent).st_mode):
        rights &= ON_FILES
    rule = _PathRule(rights, parent)
    syscall("landlock", SYS_LANDLOCK_ADD, ruleset, RULE_OF_PATH, ctypes.byref(rule), 0)
    os.close(parent)
