"""Namespaces: a file system of its own, no network, no other processes to see.

As root the process mounts first and then becomes a user that owns nothing; otherwise it mounts in a user namespace and
keeps its user, which loses the powers it had there when the program is executed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import libc

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
WORK = "/nemorl-program"
INODES = 8192
"""Files of the new root. Each takes about 1 KiB of the kernel's memory, which is not counted as disk."""
FIRST_USER = 0x70000000
"""User ids from here on belong to nobody. One per sandbox, since the process limit counts by user."""
_APART = libc.CLONE_NEWNS | libc.CLONE_NEWIPC | libc.CLONE_NEWPID | libc.CLONE_NEWNET | libc.CLONE_NEWUTS


def enter(root: str, readable: Sequence[str], disk_bytes: int) -> None:
    """Move into a new root that holds ``readable`` (read-only, at the same paths) and an empty folder to work in.

    The *children* of this process are in the new process namespace.

    Args:
        root: An empty folder to build the new root on; nothing appears in it outside.
        readable: Files and folders.
        disk_bytes: What may be written.

    Raises:
        OSError: this machine does not permit it.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        libc.unshare(_APART)
    else:
        libc.unshare(libc.CLONE_NEWUSER | _APART)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    libc.mount("none", "/", None, libc.MS_REC | libc.MS_PRIVATE)
    options = f"size={disk_bytes},nr_inodes={INODES},mode=0755"
    libc.mount("tmpfs", root, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, options)
    for path in readable:
        _bind(path, root, is_device=False)
    for path in DEVICES:
        _bind(path, root, is_device=True)
    os.mkdir(root + WORK, 0o777)
    os.chroot(root)
    os.chdir(WORK)
    if uid == 0:
        _become(FIRST_USER + os.getpid())
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)


def _become(user: int) -> None:
    """A user without name, files or powers."""
    os.chown(WORK, user, user)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _bind(path: str, root: str, *, is_device: bool) -> None:
    if not os.path.lexists(path):
        return
    target = root + path
    os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
    if os.path.islink(path):  # /lib -> usr/lib
        if not os.path.lexists(target):
            os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, 0o755, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    libc.mount(path, target, None, libc.MS_BIND | libc.MS_REC)
    if not is_device:
        # What the source forbids must stay forbidden, or the kernel refuses in a user namespace.
        found = os.statvfs(target).f_flag
        kept = found & (libc.MS_NOATIME | libc.MS_NODIRATIME | 8)  # 8: noexec
        kept |= libc.MS_RELATIME if found & libc.ST_RELATIME else 0
        flags = libc.MS_BIND | libc.MS_REMOUNT | libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NODEV
        libc.mount("none", target, None, flags | kept)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
