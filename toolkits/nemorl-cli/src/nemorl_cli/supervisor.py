"""The ``nemorl`` script. `train`, `eval` and `quickstart` run in a child; of a death that Python cannot explain (a
signal, the kernel out of memory, ``os._exit``) the parent says one sentence. Linux only: elsewhere there is no parent.

The child is a fork made before torch or a plugin is imported, in the same process group and on the same terminal. It
notes the signals that reach it and the exit code it means to give (:mod:`nemorl.base.process.stopping`). That a run
was killed is also known by its directory, when it is listed or continued.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import time
from collections import Counter

from nemorl.base.process.stopping import MARK, VARIABLE

from nemorl_cli.app import BY_SIGNAL, main
from nemorl_cli.streams import open_standard_streams

SUPERVISED = {"train", "eval", "quickstart"}
PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
WAITED = {signal.SIGCHLD, *PASSED_ON}
PATIENCE_S, SAME_S = 0.1, 10.0
"""A signal to the whole process group: how long the child may take to note it, and the parent to look at it."""
UNEXPLAINED = 70
"""Exit code in place of a 0 that the command did not mean: EX_SOFTWARE of sysexits.h."""
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
FIX = "whose code that is must not end the process (--debug shows its stacks); the same command continues a run"
FIX_KILLED = "see `dmesg` for out-of-memory messages, lower batch sizes; the same command continues a run"


def run() -> None:
    """Run the command of ``sys.argv`` and exit as it does."""
    open_standard_streams()
    words = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if sys.platform == "linux" and SUPERVISED.intersection(words[:1]):
        _supervise()
    main()


def _supervise() -> None:
    """Fork. Only the child returns."""
    said = os.memfd_create("nemorl-last-words")
    before, parent = signal.pthread_sigmask(signal.SIG_BLOCK, WAITED), os.getpid()
    child = os.fork()
    if child:
        os._exit(_conclude(_wait(child, said), said))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: whoever kills the parent means the command
    if os.getppid() != parent:
        os._exit(1)
    os.environ[VARIABLE] = f"{said}:{os.getpid()}"
    faulthandler.enable(said)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(child: int, said: int) -> int:
    """The child's exit code, negative for a signal. Signals to the parent alone are passed on to it."""
    had: Counter[int] = Counter()  # by signal: how many the child noted, or was sent from here
    while True:
        found = signal.sigwaitinfo(WAITED)
        number = found.si_signo
        if number == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            continue
        noted, deadline = 0, time.monotonic() + PATIENCE_S
        while not noted and time.monotonic() < deadline:
            times = [note["time"] for note in _notes(said)[0] if note.get("signal") == number][had[number] :]
            noted = next((place for place, at in enumerate(times, 1) if time.time() - at < SAME_S), 0)
            time.sleep(0 if noted else PATIENCE_S / 20)
        # A positive code: from the kernel, which tells the whole group; but of a hang-up only the session's leader.
        if not noted and (found.si_code <= 0 or number == signal.SIGHUP):
            os.kill(child, number)
            noted = 1
        had[number] += noted


def _conclude(code: int, said: int) -> int:
    """The exit code of the command, whose process ended with ``code``. What it could not say itself is said here."""
    notes, fault = _notes(said)
    meant = next((note["exit"] for note in notes if "exit" in note), None)
    if meant is not None and (code in (0, meant) or -code in PASSED_ON):  # asked to stop when it had stopped
        return int(meant)
    when = "before the command had ended" if meant is None else f"after the command had ended with exit code {meant}"
    if code < 0:
        how = f"was killed by signal {-code} ({signal.Signals(-code).name}){_place(fault)}, {when}"
        how += ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
    elif fault.startswith("Timeout"):
        how = f"was stuck{_place(fault)}, {when}"
    else:
        how = f"ended itself with exit code {code}, {when}: by os._exit, or by Ray without its raylet or GCS"
    shown = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress display may have hidden the cursor
    sys.stderr.write(f"{shown}error: the process {how}\n  fix: {FIX_KILLED if code == -signal.SIGKILL else FIX}\n")
    sys.stderr.write(f"{fault}\n" if fault and "--debug" in sys.argv else "")
    sys.stderr.flush()
    return BY_SIGNAL - code if code < 0 else code or UNEXPLAINED


def _notes(said: int) -> tuple[list[dict[str, float]], str]:
    """The child's notes, and the stacks that faulthandler wrote."""
    lines = os.pread(said, os.fstat(said).st_size, 0).splitlines()
    fault = b"\n".join(line for line in lines if not line.startswith(MARK)).decode(errors="replace")
    return [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)], fault.strip()


def _place(fault: str) -> str:
    """The innermost frame of the failed thread, Python's own library aside."""
    failed = fault.partition("Current thread")[2] or fault.rpartition("Thread ")[2]  # of a time-out: the main thread
    frames = FRAME.findall(failed.partition("\nThread ")[0])
    library = os.path.dirname(os.__file__)
    own = [frame for frame in frames if not frame[0].startswith(library) or "site-packages" in frame[0]] or frames
    return " in {}, line {} ({})".format(*own[0]) if own else ""
