"""What nemorl-vllm costs over vLLM itself: the same requests to both, in turn, in one process.

    python benchmarks/vllm_overhead.py --rounds 9 --cases 16,64,256 --json

Both engines have the same settings and get the same seeds, so they draw the same tokens; that is checked. vLLM's own
side is asked for what training needs: token ids in and out, the log-prob of each sampled token, no text. It reports
log-probs at temperature 1, nemorl at the sampling temperature.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _common import limit_threads, print_table, start_side, write_model

THREADS = limit_threads()
PROMPTS = ["3+4=", "12*5=", "abc+d=", "9-2=", "x*y=", "77+1=", "Hello:", "a,b,c"]
MAX_SEQUENCE_TOKENS = 128
KV_CACHE_GIB = 0.25

Side = Callable[[Sequence[Any]], list[list[tuple[int, ...]]]]
"""Requests -> the tokens of every sample of each."""


def nemorl_side(model: Path, seed: int) -> Side:
    """The backend as a run builds it."""
    from nemorl.config import GenerationConfig, PolicyConfig
    from nemorl.resources.worker import WorkerContext

    policy = PolicyConfig(model_name=str(model), max_sequence_tokens=MAX_SEQUENCE_TOKENS)
    generation = GenerationConfig.model_validate({"backend": {"name": "vllm", "kv_cache_gib": KV_CACHE_GIB}})
    engine = generation.backend.build(generation, policy, WorkerContext(seed=seed), None)

    def generate(requests: Sequence[Any]) -> list[list[tuple[int, ...]]]:
        return [[sample.token_ids for sample in samples] for samples in engine.generate(requests)]

    return generate


def vllm_side(model: Path, seed: int) -> Side:
    """``vllm.LLM`` with the same settings, called as its documentation shows."""
    from nemorl_rl.rollouts.seeding import mixed_seed
    from nemorl_vllm.engine import CPU_BATCH_TOKENS, GIB
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(
        model=str(model),
        dtype="float32",
        seed=seed,
        max_model_len=MAX_SEQUENCE_TOKENS,
        kv_cache_memory_bytes=int(KV_CACHE_GIB * GIB),
        enforce_eager=True,
        max_num_seqs=256,
        enable_chunked_prefill=False,
        max_num_batched_tokens=CPU_BATCH_TOKENS,
        async_scheduling=False,
    )

    def generate(requests: Sequence[Any]) -> list[list[tuple[int, ...]]]:
        prompts, params = [], []
        for request in requests:
            for sample_seed in request.seeds:
                prompts.append({"prompt_token_ids": list(request.token_ids)})
                params.append(
                    SamplingParams(
                        temperature=request.sampling.temperature,
                        seed=mixed_seed(sample_seed),
                        max_tokens=request.sampling.max_new_tokens,
                        logprobs=0,
                        flat_logprobs=True,
                        detokenize=False,
                        output_kind=RequestOutputKind.FINAL_ONLY,
                    )
                )
        outputs = iter(engine.generate(prompts, params, use_tqdm=False))
        return [[tuple(next(outputs).outputs[0].token_ids) for _ in request.seeds] for request in requests]

    return generate


def requests_of(samples: int, new_tokens: int, start: int, model: Path) -> list[Any]:
    """``samples`` samples over the eight prompts, with seeds from ``start`` on."""
    from nemorl.types import GenerationRequest, SamplingParams
    from nemorl_rl.data.tokenizer import Tokenizer

    tokenizer, params = Tokenizer.load(str(model)), SamplingParams(max_new_tokens=new_tokens)
    each = samples // len(PROMPTS)
    return [
        GenerationRequest(
            tuple(tokenizer.encode(prompt)), params, tuple(range(start + row * each, start + (row + 1) * each))
        )
        for row, prompt in enumerate(PROMPTS)
    ]


def measure(sides: dict[str, Side], samples: int, options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Medians of one case. The side that goes first changes every round; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens = 0
    for number in range(options.rounds + 1):
        requests = requests_of(samples, options.new_tokens, 1000 * number, model)
        found = {}
        for name in sorted(sides, reverse=bool(number % 2)):
            start = time.perf_counter()
            found[name] = sides[name](requests)
            seconds[name].append(time.perf_counter() - start)
        assert found["nemorl"] == found["vllm"], "the two sides drew different tokens: this compares nothing"
        tokens = sum(len(ids) for group in found["nemorl"] for ids in group)
    # Each round's ratio compares neighbours in time, which a busy machine disturbs least.
    ratios = [one / other for one, other in zip(seconds["nemorl"][1:], seconds["vllm"][1:], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "tokens": tokens,
        **{name: statistics.median(values[1:]) for name, values in seconds.items()},
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="calls per side and case, after one to warm up")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=["16", "64", "256"], help="samples")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one last line of JSON")
    return parser.parse_args()


def main() -> None:
    options = parse()
    start_side(THREADS)
    packages = ", ".join(f"{name} {version(name)}" for name in ("nemorl-vllm", "torch", "transformers"))
    cores = f"{os.cpu_count()} x {platform.machine()} cores, {THREADS} thread(s)"
    print(f"{cores}, Python {platform.python_version()}, {packages}")
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", seed=options.seed)
        sides = {"nemorl": nemorl_side(model, options.seed), "vllm": vllm_side(model, options.seed)}
        results = {case: measure(sides, int(case), options, model) for case in options.cases}
    rows = [
        [case, f"{part['tokens']:,}", f"{part['nemorl']:.3f}", f"{part['vllm']:.3f}", f"{part['ratio']:.3f}",
         f"{part['tokens'] / part['nemorl']:,.0f}"]
        for case, part in results.items()
    ]  # fmt: skip
    columns = ["samples", "tokens", "nemorl s", "vLLM s", "nemorl / vLLM", "tokens/s"]
    print_table(
        f"generate, medians of {options.rounds} rounds after 1, {options.new_tokens} new tokens at most", columns, rows
    )
    if options.json:
        print(json.dumps({"ratios": {case: round(part["ratio"], 4) for case, part in results.items()}}))


if __name__ == "__main__":
    main()
