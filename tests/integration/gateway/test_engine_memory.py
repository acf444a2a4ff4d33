"""What an engine holds after thousands of requests, many of them cancelled: no more than after hundreds.

Measured is what the C library has given out (``mallinfo2().uordblks``): resident memory keeps what was freed. oneDNN
keeps a kernel for each shape that it has met, 1,024 of them by default; here 16, or most of the test would be their
coming.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="mallinfo2 is glibc's"),
]

PROGRAM = """
import ctypes, gc, json, random, sys
from concurrent.futures import wait

import torch
from nemorl.config.models import GenerationConfig, PolicyConfig
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_rl.placement.engines import standalone_generation

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]

libc = ctypes.CDLL("libc.so.6")
libc.mallinfo2.restype = Info
torch.set_num_threads(1)
generation = GenerationConfig.model_validate({"backend": {"name": "hf", "kv_cache_tokens": 512}})
engine = standalone_generation(generation, PolicyConfig(model_name=sys.argv[1], max_sequence_tokens=512, init="random"))
chance, used = random.Random(0), []
for _ in range(7):
    for _ in range(10):
        running = []
        for number in range(40):
            tokens = tuple(chance.randrange(5, 60) for _ in range(chance.randrange(4, 200)))
            sampling = SamplingParams(max_new_tokens=chance.randrange(1, 48))
            request = GenerationRequest(tokens, sampling, (chance.randrange(10**6),), goes_on=True)
            running.append(engine.submit(request, owner="a test", conversation=str(number), deadline_s=300))
        for future in running:
            if chance.random() < 0.3:
                future.cancel()
        wait(running)
    gc.collect()
    used.append(libc.mallinfo2().uordblks / 2**20)
print(json.dumps(used))
"""


def test_after_thousands_of_requests_an_engine_holds_what_it_held_after_hundreds(tiny_model: Path) -> None:
    environment = {**os.environ, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_model)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    used_mib = json.loads(done.stdout.splitlines()[-1])
    print([round(size, 1) for size in used_mib])  # pytest -rP
    assert max(used_mib[3:]) - used_mib[3] < 2.0, used_mib
