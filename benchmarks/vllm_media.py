"""Prompts with an image each, sampled by vLLM on the CPU: what images cost beside text of the same length.

    OMP_NUM_THREADS=1 python benchmarks/vllm_media.py

Needs vLLM and torchvision. CPU seconds of the process, so that others on the machine do not count.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch
from nemorl.config import PolicyConfig
from nemorl.media import Media
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_tensors.engines.model_config import read_model_config
from nemorl_testing.seeing import drawing, tiny_sight
from nemorl_testing.seeing_parts import words
from nemorl_vllm.config import VLLMConfig
from nemorl_vllm.generation import VLLMGeneration
from nemorl_vllm.shown import Shown

QUESTION = tuple(range(20, 60))
SAMPLED = SamplingParams(max_new_tokens=32, ignore_eos=True)


def requests(shown: Shown, count: int, samples: int, size: tuple[int, int]) -> list[GenerationRequest]:
    """Prompts of one image of its own each, and a question."""
    family = shown.family
    assert family is not None
    found = []
    for number in range(count):
        item: Media = family.named(drawing(number, *size))
        ids = (5, *item.token_ids(family.process(item).tokens), *QUESTION)
        seeds = tuple(range(number * samples, (number + 1) * samples))
        found.append(GenerationRequest(ids, SAMPLED, seeds, media=(item,)))
    return found


def cpu_s(work: Any) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(kind: str, size: tuple[int, int], longest: int, count: int, samples: int) -> None:
    folder = str(tiny_sight(kind))
    settings = {"processor": {"size": {"shortest_edge": 28 * 28, "longest_edge": longest**2}}}
    policy = PolicyConfig.model_validate({"model_name": folder, "max_sequence_tokens": 512, "media": settings})
    asked = requests(Shown(policy, read_model_config(policy)), count, samples, size)
    again = Shown(policy, read_model_config(policy))
    as_text = [replace(one, token_ids=tuple(words(one.token_ids, 7)), media=()) for one in asked]
    engine = VLLMGeneration(policy, WorkerContext(), None, VLLMConfig(kv_cache_gib=0.5))
    engine.generate(as_text[:1])
    processing = cpu_s(lambda: [again.process(one) for one in asked])
    first, second = (cpu_s(lambda: engine.generate(asked)) for _ in range(2))
    text = cpu_s(lambda: engine.generate(as_text))
    engine.shutdown()
    print(
        f"| {kind}, {size[0]} x {size[1]} | {len(asked[0].token_ids)} | {count / first:.1f} | {processing / first:.0%} "
        f"({1e3 * processing / count:.1f} ms) | {count / second:.1f} | {count / text:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| images | tokens of a prompt | requests/s | of it processing | again | text of this length |")
    print("|---|---|---|---|---|---|")
    for kind in ("qwen2_5_vl", "qwen3_vl"):
        for size, longest in (((90, 60), 112), ((640, 480), 448)):
            measure(kind, size, longest, options.prompts, options.samples)


if __name__ == "__main__":
    main()
