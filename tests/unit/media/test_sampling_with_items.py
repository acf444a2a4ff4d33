"""Sampling by the backend ``hf``: log-probs of what is sampled are those of training."""

from __future__ import annotations

import pytest
import torch
from nemorl.config.models import GenerationConfig, PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_dtensor import HFGenerationConfig
from nemorl_dtensor.generation import HFGeneration
from nemorl_tensors.batch import TokenBatch
from nemorl_tensors.engines.rows import to_rows
from nemorl_testing.seeing import tiny_sight
from seen_families import KINDS, conversations, seer

TOLERANCE = {"qwen3_5": 3e-5, "qwen3_5_moe": 3e-5}
"""float32, nats, cached keys and left padding against one pass: 1e-5. Recurrent layers are computed token by token when
sampling, and in chunks when training"""


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_of_samples_are_those_of_training(kind: str) -> None:
    of = seer(kind)
    sequences, masks, media = conversations(of)
    prompts = {tuple(ids[: mask.index(True)]): None for ids, mask in zip(sequences, masks, strict=True)}
    policy = PolicyConfig(model_name=str(tiny_sight(kind)), max_sequence_tokens=512)
    engine = HFGeneration(GenerationConfig(), policy, WorkerContext(), None, HFGenerationConfig())
    requests = [
        GenerationRequest(ids, SamplingParams(max_new_tokens=8), seeds=(1, 2), media=tuple(media)) for ids in prompts
    ]
    found = engine.generate(requests)
    ids, trained, sampled = [], [], []
    for prompt, completions in zip(prompts, found, strict=True):
        for completion in completions:
            ids.append([*prompt, *completion.token_ids])
            trained.append([False] * len(prompt) + [True] * len(completion.token_ids))
            sampled += completion.logprobs
    rows = to_rows(TokenBatch.from_sequences(ids, trained, media=media), packed=False)
    with torch.no_grad():
        scored = of.scorer().score(rows, 1.0)
    assert float((scored - torch.tensor(sampled)).abs().max()) <= TOLERANCE.get(kind, 1e-5)
