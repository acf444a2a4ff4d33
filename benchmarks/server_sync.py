"""Seconds and bytes of one update of weights to a vLLM server, by each way that it offers, and tokens per second.

    python benchmarks/server_sync.py [--size 135m] [--updates 3] [--extension]

Starts the server, on loopback, with a model of random weights: ``tiny`` (0.1 M parameters) or ``135m``, the sizes
of SmolLM2-135M. ``write``: the folder, on this machine's disk, or the copy in memory. ``load``: from the first call to
the server to the last, in which it reads the folder, or is sent the tensors, and exchanges its weights. Each line is
the median over updates after the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration" / "server_engine"))

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "135m": {
        **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
        **{"num_key_value_heads": 3, "vocab_size": 49152},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--extension", action="store_true", help="nemorl-vllm's code in the server's workers")
    arguments = parser.parse_args()
    from vllm_server import EXTENDED, PLAIN, VLLMServer

    with tempfile.TemporaryDirectory() as place:
        model = write_model(Path(place) / "model", arguments.size, tied=arguments.extension)
        options = EXTENDED if arguments.extension else PLAIN
        server = VLLMServer(model, Path(place) / "log", options=options)
        try:
            server.wait()
            for way in ("folder", "distributed") if arguments.extension else ("folder",):
                print(json.dumps({"way": way, **measure(Path(place), model, server.url, arguments.updates, way)}))
        finally:
            server.kill()


def write_model(folder: Path, size: str, *, tied: bool) -> Path:
    import torch
    from nemorl_rl.models.tiny import write_tiny_model
    from transformers import AutoConfig, AutoModelForCausalLM

    write_tiny_model(folder, tie_word_embeddings=tied, **SIZES[size])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def measure(place: Path, model: Path, url: str, updates: int, way: str) -> dict[str, float]:
    from nemorl.config import GenerationConfig, PolicyConfig
    from nemorl.resources.worker import WorkerContext
    from nemorl.types import GenerationRequest, SamplingParams
    from nemorl.weights import in_process_handle
    from nemorl_agents.servers import ServerConfig
    from nemorl_testing.models import load_reference

    weights = load_reference(model)

    def handle(version: int) -> Any:
        return in_process_handle(lambda: iter([dict(weights.named_parameters())]), version)

    backend = ServerConfig.model_validate({"urls": [url], "check_weights_gib": 0.0, "weights": way})
    policy = PolicyConfig(model_name=str(model), max_sequence_tokens=128)
    context = WorkerContext(scratch=place / "scratch")
    engine: Any = backend.build(GenerationConfig(backend=backend), policy, context, handle(0))
    requests = [
        GenerationRequest((9, 18, 10 + n), SamplingParams(max_new_tokens=64), tuple(range(8))) for n in range(8)
    ]
    engine.generate(requests)
    begin = time.perf_counter()
    tokens = sum(len(one.token_ids) for group in engine.generate(requests) for one in group)
    generate_s = time.perf_counter() - begin
    total, write, load = [], [], []
    for version in range(1, updates + 1):
        begin = time.perf_counter()
        engine.update_weights(handle(version), version)
        total.append(time.perf_counter() - begin)
        time.sleep(2.5)  # until the run has said how its servers are
        state = json.loads((place / "scratch" / "engines" / "state.json").read_text())
        write.append(state["write_s"])
        load.append(state["servers"][0]["load_s"])
    engine.shutdown()
    return {
        "bytes": state["weights_bytes"],
        "update_s": statistics.median(total[1:]),
        "write_s": statistics.median(write[1:]),
        "load_s": statistics.median(load[1:]),
        "tokens_per_s": tokens / generate_s,
    }


if __name__ == "__main__":
    main()
