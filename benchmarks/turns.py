"""What a second turn costs a generator that computes its prompt anew, and one that kept keys and values: CPU seconds.

    python benchmarks/turns.py --repeats 5 --json
    python benchmarks/turns.py --cases 27m --rows 64

Conversations of a prompt of 128 tokens (eight of each), a response of 64, an observation of 16, a response of 64. Timed
is all of the second turn, for each engine in turn; ``floor`` is its decoding alone.

Times are medians, in CPU seconds of the process; ratios are medians of those of neighbours.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import limit_threads, machine, print_table, start_side

THREADS = limit_threads()

import torch  # noqa: E402  after the thread limit
from nemorl.config import PolicyConfig  # noqa: E402
from nemorl_dtensor.decode import build_decoder  # noqa: E402
from nemorl_dtensor.model import load_model  # noqa: E402
from nemorl_rl.models.tiny import write_tiny_model  # noqa: E402

PROMPT, RESPONSE, OBSERVATION, GROUP = 128, 64, 16, 8
CASES: dict[str, dict[str, Any]] = {
    "0.8m": {"num_hidden_layers": 4, "intermediate_size": 384},
    "27m": {
        "architecture": "llama",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
}


def tokens(rows: int, count: int, draw: torch.Generator) -> list[tuple[int, ...]]:
    found: list[list[int]] = torch.randint(8, 80, (rows, count), generator=draw).tolist()
    return [tuple(row) for row in found]


@torch.inference_mode()
def conversation(decoder: Any, rows: int, seed: int) -> dict[str, float]:
    """CPU seconds of its parts. Tokens are given, not drawn: both engines read the same."""
    draw = torch.Generator().manual_seed(seed)
    prompts = [prompt for prompt in tokens(rows // GROUP, PROMPT, draw) for _ in range(GROUP)]
    marks = [time.process_time()]

    def respond() -> list[tuple[int, ...]]:
        said = tokens(rows, RESPONSE, draw)
        for place in range(RESPONSE - 1):
            decoder.step(torch.tensor([response[place] for response in said]))
        marks.append(time.process_time())
        return said

    decoder.admit(prompts, RESPONSE, {})
    marks.append(time.process_time())
    said = respond()
    decoder.save_turns({row: (*prompts[row], *said[row][:-1]) for row in range(rows)})
    decoder.keep([])
    answers = tokens(rows, OBSERVATION, draw)
    second = [(*prompts[row], *said[row], *answers[row]) for row in range(rows)]
    marks.append(time.process_time())
    decoder.admit(second, RESPONSE, {})
    marks.append(time.process_time())
    respond()
    decoder.keep([])
    decoder.drop_turns()
    _, _, keeping, prompt, floor = (b - a for a, b in itertools.pairwise(marks))
    return {"keeping": keeping, "prompt": prompt, "floor": floor, "turn": keeping + prompt + floor}


def measure(name: str, rows: int, repeats: int) -> dict[str, Any]:
    longest = PROMPT + 2 * RESPONSE + OBSERVATION
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_model(Path(folder), **CASES[name])
        policy = PolicyConfig(model_name=str(path), init="random", max_sequence_tokens=longest)
        model = load_model(policy, "cpu", 0).eval()
    decoders = {
        "anew": build_decoder(model, longest),
        "kept": build_decoder(model, longest, turn_tokens=rows * longest),
    }
    found: dict[str, list[dict[str, float]]] = {side: [] for side in decoders}
    for round_ in range(repeats + 1):
        for side, decoder in decoders.items():
            parts = conversation(decoder, rows, round_)
            if round_:
                found[side].append(parts)
    result: dict[str, Any] = {"case": name, "rows": rows}
    for side, runs in found.items():
        for part in ("keeping", "prompt", "turn"):
            result[f"{side}_{part}_s"] = statistics.median(run[part] for run in runs)
    result["floor_s"] = statistics.median(run["floor"] for runs in found.values() for run in runs)
    result["ratio"] = statistics.median(
        a["turn"] / b["turn"] for a, b in zip(found["anew"], found["kept"], strict=True)
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", default="0.8m,27m", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rows", type=int, default=32, help="conversations, a multiple of 8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    arguments = parser.parse_args()
    start_side(THREADS)
    rows = [measure(case, arguments.rows, arguments.repeats) for case in arguments.cases.split(",")]
    if arguments.json:
        ratios = {row["case"]: row["ratio"] for row in rows}
        print(json.dumps({"machine": machine(THREADS), "rows": rows, "ratios": ratios}, indent=2))
        return
    print(machine(THREADS))
    table = [[f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    print_table("The second turn", [*rows[0]], table)


if __name__ == "__main__":
    main()
