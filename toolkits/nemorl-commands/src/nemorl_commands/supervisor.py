"""The ``nemorl`` script: a parent that waits for the command, passes signals on, and explains what nothing else can.

``os._exit(0)`` in a plugin, a segmentation fault, the kernel that is out of memory: these end a process without an
exception, some with exit status 0. So the command runs in a child, a fork made before anything slow is imported, in the
same process group, on the same terminal and with the same stdin. The child notes which runs it opens and which exit
code it means to give (:mod:`nemorl_base.last_words`); the parent compares, and :mod:`nemorl_commands.unexplained`
says what happened. Linux only: elsewhere the command runs as it is.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time

from nemorl_base.last_words import EXIT, VARIABLE, note

PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
PATIENCE_S = 0.1
"""How long a child may take to say that a signal reached it as well, as one to the whole process group does. If it runs
no Python meanwhile, the kernel makes one of the two."""
SAME_S = 10.0
"""The longest that one signal to both may lie back when the parent looks, which others may keep from the processor."""
PR_SET_PDEATHSIG = 1


def run() -> None:
    """Run the command of ``sys.argv`` in a child and exit as it did."""
    _open_standard_streams()
    if sys.platform == "linux":
        _supervise()
    from nemorl_commands import main

    main()


def _open_standard_streams() -> None:
    """Where the caller has closed one, it leads nowhere: the next file that is opened would take its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))


def _supervise() -> None:
    """Fork. Only the child returns."""
    said = os.memfd_create("nemorl-last-words")
    waited = {signal.SIGCHLD, *PASSED_ON}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _begin(said, parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    code = os.waitstatus_to_exitcode(_wait(child, waited, said))
    if code < 0 or not _read(said).endswith(EXIT % code):
        from nemorl_commands.unexplained import conclude

        code = conclude(code, said)
    os._exit(code)


def _begin(descriptor: int, parent: int) -> None:
    """What makes the child one that is supervised."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whoever kills the parent means the command
    if os.getppid() != parent:
        os._exit(1)
    os.environ[VARIABLE] = f"{descriptor}:{os.getpid()}"
    faulthandler.enable(descriptor)
    leave = os._exit

    def noted(status: int) -> None:
        """``os._exit``, which says who called it."""
        frame = sys._getframe(1)
        note(left=f"{frame.f_code.co_filename}, line {frame.f_lineno} ({frame.f_code.co_qualname})")
        leave(status)

    os._exit = noted  # type: ignore[assignment]


def _wait(child: int, waited: set[signal.Signals], descriptor: int) -> int:
    """The child's wait status. Signals from other processes are passed on; the terminal's reach it by themselves."""
    had: dict[int, int] = {}
    """By signal: how many the child said it has had, or was sent from here"""
    while True:
        found = signal.sigwaitinfo(waited)
        if found.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
            continue
        number = found.si_signo
        before = had.get(number, 0)
        had[number] = _heard(descriptor, number, before)
        # A positive code: from the kernel, which tells the whole group; but of a hang-up only the session's leader.
        is_for_us = found.si_code <= 0 or number == signal.SIGHUP
        if is_for_us and had[number] == before:
            os.kill(child, number)
            had[number] += 1


def _heard(descriptor: int, number: int, before: int) -> int:
    """How many signals of this number the child has had up to the one that just reached the parent as well.

    Returns:
        ``before``, the count up to the signal before this one, where the child does not say in time that it has it.
    """
    from nemorl_commands.unexplained import LastWords

    deadline = time.monotonic() + PATIENCE_S
    while True:
        times = LastWords.of(descriptor).signals.get(number, [])
        for place, at in enumerate(times[before:], before + 1):
            if time.time() - at < SAME_S:
                return place
        if time.monotonic() >= deadline:
            return before
        time.sleep(PATIENCE_S / 20)


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
