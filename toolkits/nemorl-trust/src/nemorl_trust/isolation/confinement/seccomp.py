"""Seccomp: the kernel answers only the system calls of a list, for this process and all that it will start.

What is not on the list fails with ``ENOSYS``, as on a kernel that does not have it, so libraries fall back to older
calls. Calls that are allowed with some arguments only fail with ``EPERM`` for others. The filter is a program for the
classic BPF machine, assembled here: https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from libc import PR_SET_SECCOMP, prctl
from syscalls import numbers

ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
"""Machine -> column of the table, and the kernel's ``AUDIT_ARCH_…`` for it."""
LOAD, AND, JUMP_IF_EQUAL, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x45, 0x06
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in ``struct seccomp_data``; both machines are little-endian, so an argument's low half comes first."""

CLONE_NEW_ANYTHING = 0x7E020000
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
SOCK_STREAM, SOCK_TYPES = 1, 0xF
FCNTL_ALLOWED = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032, 1034)
"""Duplicate, flags, locks, the size of a pipe. Not its change, nor the owner of a descriptor, who gets its signals."""
IOCTL_ALLOWED = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Whether it is a terminal, its size, bytes to read, non-blocking, close on exec."""
PRCTL_ALLOWED = (2, 3, 15, 16, 0x53564D41)
"""Read the parent's death signal and dumpability, thread names, names of memory areas."""

_Instruction = tuple[int, int, int, int]


def restrict(*, may_signal: bool, connects: bool = False) -> None:
    """From now on only the calls of the list. ``PR_SET_NO_NEW_PRIVS`` must be set.

    Args:
        may_signal: Other processes can be signalled: safe only where the process namespace holds nobody else, or
            Landlock restricts whom.
        connects: TCP sockets can be made, no others: safe only where Landlock says to which ports.

    Raises:
        OSError: the machine is not known here, or the kernel has no seccomp.
    """
    code = b"".join(
        struct.pack("HBBI", *instruction) for instruction in assemble(os.uname().machine, may_signal, connects=connects)
    )
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(program))


def assemble(
    machine: str, may_signal: bool, process: int | None = None, *, connects: bool = False
) -> list[_Instruction]:
    """The filter's instructions: (operation, jump if true, jump if false, operand)."""
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    column, architecture = ARCHITECTURES[machine]
    number = numbers(column, connects=connects)
    by_argument = {
        "clone": _refuse_bits(0, CLONE_NEW_ANYTHING),
        "fcntl": _allow_values(1, FCNTL_ALLOWED),
        "ioctl": _allow_values(1, IOCTL_ALLOWED),
        "prctl": _allow_values(0, PRCTL_ALLOWED),
        "socketpair": _allow_values(0, (AF_UNIX,)),
    }
    if not may_signal:  # a thread may still signal its own process: abort() does
        by_argument |= {"kill": [_refuse()], "tkill": [_refuse()]}
        by_argument["tgkill"] = _allow_values(0, (process or os.getpid(),))
    if connects:
        is_stream = [_load(1), (AND, 0, 0, SOCK_TYPES), (JUMP_IF_EQUAL, 1, 0, SOCK_STREAM), _refuse()]
        by_argument["socket"] = [*is_stream, *_allow_values(0, (AF_INET, AF_INET6))]
    filtered = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),  # 32-bit calls have other numbers
        (LOAD, 0, 0, NUMBER),
    ]
    for name, rules in by_argument.items():
        filtered += [(JUMP_IF_EQUAL, 0, len(rules), number.pop(name)), *rules]
    for value in number.values():
        filtered += [(JUMP_IF_EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    return [*filtered, (RETURN, 0, 0, FAIL | errno.ENOSYS)]


def _refuse() -> _Instruction:
    return (RETURN, 0, 0, FAIL | errno.EPERM)


def _load(argument: int) -> _Instruction:
    return (LOAD, 0, 0, FIRST_ARGUMENT + 8 * argument)


def _refuse_bits(argument: int, bits: int) -> list[_Instruction]:
    return [_load(argument), (JUMP_IF_ANY_BIT, 0, 1, bits), _refuse(), (RETURN, 0, 0, ALLOW)]


def _allow_values(argument: int, values: tuple[int, ...]) -> list[_Instruction]:
    rules = [_load(argument)]
    for value in values:
        rules += [(JUMP_IF_EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    return [*rules, _refuse()]
