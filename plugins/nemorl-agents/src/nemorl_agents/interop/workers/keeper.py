"""Runs a command for as long as standard input is open: ``python -I -S keeper.py COMMAND…``.

So what it starts ends with nemorl, however nemorl ends. It is ended as by Ctrl-C, and what is then left of its session
after ``ENDING_S`` is killed. The exit code is the command's. Standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

ENDING_S = 20.0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job ignores it, and so would what it starts
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=end_with_stdin, args=(child,), daemon=True).start()
    return child.wait()


def end_with_stdin(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    with suppress(ProcessLookupError):
        child.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        child.wait(ENDING_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
