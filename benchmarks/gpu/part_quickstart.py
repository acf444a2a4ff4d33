"""``nemorl quickstart`` from start to end: supervised steps, then GRPO, on the device that nemorl chooses by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec

from _figures import parse

SMALL = ("max_steps=2", "num_prompts_per_step=4")
WITHOUT_PYARROW = ("records.max_gib=0",)
"""The wheel of pyarrow, which records need, is larger than all others together: it is not packed."""


def main() -> None:
    options = parse()
    folder = options.json.with_name("quickstart-run")
    command = [sys.executable, "-m", "nemorl", "quickstart", "--json", "--run-dir", str(folder)]
    command += WITHOUT_PYARROW if find_spec("pyarrow") is None else ()
    environment = dict(os.environ) if options.is_cuda else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    start_s = time.monotonic()
    done = subprocess.run(
        [*command, *(SMALL if options.small else ())], capture_output=True, text=True, env=environment, check=False
    )
    options.figures.add("seconds", round(time.monotonic() - start_s, 1))
    print(done.stderr[-3000:])
    if done.returncode:
        options.figures.fail("quickstart", (done.stderr or done.stdout)[-3000:])
        return
    options.figures.add("result", json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
