"""The GPU check, one command on a machine without network: tests, parity with the CPU, benchmarks; in 16 minutes.

    python3 check.py                 # beside wheels/, as pack.py lays it out
    python3 check.py --cpu           # the same parts in miniature, without a GPU; --simulated: under a GPU's rules
    python3 check.py --parts parity,decoding

Installs the wheels into a folder of its own, then runs each part in a process of its own and within its own time: a
part that crashes or is late costs its own figures from that point on, and nothing else. After every part ``gpu.json``
(device, versions, figures, failures with the end of their tracebacks) and ``gpu.md`` are written anew. Exit code 0:
nothing failed.

Standard library only: what is tested may not even be importable.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from summary import write_summary

HERE = Path(__file__).parent
ERROR_LINES = 40
"""Of a failed part's output that are kept."""
ENDING_S = 5.0
"""Between asking a late part to end and ending it."""


@dataclass(frozen=True)
class Part:
    """One script of this folder."""

    name: str
    budget_s: float
    """On a GPU. It may begin late, but may not take longer."""
    about: str


DEVICE = "cuda:0"
PARTS = (
    Part("machine", 30, "the device, and what it does at most: matrix products and copies"),
    Part("tests", 150, "pytest -m gpu"),
    Part("parity", 60, "log-probs, gradients, a train step and decoded tokens, beside the CPU"),
    Part("quickstart", 90, "nemorl quickstart, start to finish"),
    Part("training", 75, "training steps of 135M and 1.7B models: tokens/s, MFU"),
    Part("shared", 40, "prompts computed once per group against the padded layout"),
    Part("decoding", 75, "tokens/s at several batch sizes against the bandwidth"),
    Part("transports", 75, "weights from one process to another, with and without receipts"),
    Part("memory", 40, "peak memory of training steps, predicted and measured"),
    Part("offload", 60, "parts of the model in the host's memory: log-probs, peak memory, seconds"),
    Part("turns", 60, "a trainer and an engine in the same memory, one after the other"),
    Part("large", 90, "training steps of an 8B model"),
    Part("megatron", 75, "megatron-core beside the CPU and beside dtensor"),
    Part("stalls", 40, "where the host waits for the GPU, and kernels per step"),
)


def install(wheels: Path, site: Path) -> str:
    """Put the wheels into a folder; what pip says when it cannot."""
    found = sorted(str(wheel) for wheel in wheels.glob("*.whl"))
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), *found]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr


def run_part(part: Part, options: argparse.Namespace, environment: dict[str, str], limit_s: float) -> dict[str, Any]:
    """One part to its end or to the end of its time; what it measured and what went wrong."""
    figures, log = options.out / f"{part.name}.json", options.out / f"{part.name}.log"
    figures.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / f"part_{part.name}.py"), "--device", options.device, "--json", str(figures)]
    command += ["--small"] if options.device != DEVICE else []
    started_s = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=options.out
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    found = json.loads(figures.read_text()) if figures.is_file() else {"figures": {}, "failures": {}}
    status = "late" if code is None else "ok" if code == 0 and not found["failures"] else "failed"
    result = {
        "status": status,
        "seconds": round(time.monotonic() - started_s, 1),
        "limit_s": round(limit_s, 1),
        **found,
    }
    if status != "ok":
        result["output_end"] = log.read_text(errors="replace").splitlines()[-ERROR_LINES:]
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(ENDING_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run_parts(options: argparse.Namespace, environment: dict[str, str], report: dict[str, Any]) -> None:
    """Every chosen part, while there is time; the report is on disk after each."""
    deadline_s = time.monotonic() + options.minutes * 60 - (time.monotonic() - options.started_s)
    for part in (part for part in PARTS if part.name in options.parts):
        limit_s = min(part.budget_s * options.patience, deadline_s - time.monotonic())
        print(f"{part.name}: {part.about} (at most {max(limit_s, 0):.0f} s)", flush=True)
        if limit_s < 1:
            report["parts"][part.name] = {"status": "no time left", "figures": {}, "failures": {}}
        else:
            report["parts"][part.name] = run_part(part, options, environment, limit_s)
        found = report["parts"][part.name]
        print(f"  {found['status']} after {found.get('seconds', 0)} s", flush=True)
        write(report, options.out)


def write(report: dict[str, Any], out: Path) -> None:
    """``gpu.json`` and ``gpu.md``."""
    (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    write_summary(report, out / "gpu.md")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    miniature = parser.add_mutually_exclusive_group()
    on = {"action": "store_const", "dest": "device", "default": DEVICE}
    miniature.add_argument("--cpu", const="cpu", help="all parts in miniature on the CPU", **on)
    miniature.add_argument("--simulated", const="sim:0", help="in miniature on nemorl_testing's simulated device", **on)
    parser.add_argument("--out", type=Path, default=Path("gpu-check-results"), help="where to write")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=names, help=",".join(names))
    parser.add_argument("--minutes", type=float, default=16.0, help="for everything, the installation included")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on each part's time")
    parser.add_argument("--no-install", action="store_true", help="nemorl is installed in this Python")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.parts) - set(names))
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; the parts are {', '.join(names)}")
    options.started_s = time.monotonic()
    options.out = options.out.absolute()
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    date, is_small = time.strftime("%Y-%m-%d %H:%M"), options.device != DEVICE
    report: dict[str, Any] = {"format": 1, "date": date, "miniature": is_small, "parts": {}}
    if not options.no_install:
        site = options.out / "site"
        if problem := install(HERE / "wheels", site):
            print(f"the wheels cannot be installed into {site}:\n{problem}", file=sys.stderr)
            return 2
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    run_parts(options, environment, report)
    statuses = {name: found["status"] for name, found in report["parts"].items()}
    print(f"{options.out / 'gpu.md'}: " + ", ".join(f"{name} {status}" for name, status in statuses.items()))
    return 0 if set(statuses.values()) <= {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())
