"""Receipts of ``hf``: over every transport of a CPU, and for experts in both forms that they are sent in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.weights import IN_PROCESS, WeightHandle, transport
from nemorl_dtensor import HFGenerationConfig
from nemorl_dtensor.generation import HFGeneration
from nemorl_dtensor.published_names import PublishedNames
from nemorl_rl.serving.receipts import Receipt, Sent, compare
from nemorl_tensors.engines.digests import digested, digests
from nemorl_testing.models import load_reference, tiny_model
from routed_mixtures import mixture
from torch import Tensor

Tensors = Mapping[str, Tensor]


def build(folder: Path) -> HFGeneration:
    policy = PolicyConfig(model_name=str(folder), max_sequence_tokens=64)
    engine = HFGenerationConfig().build(GenerationConfig(), policy, WorkerContext(), None)
    assert isinstance(engine, HFGeneration)
    return engine


def receipt(engine: HFGeneration, sent: Tensors, before: Tensors) -> Receipt:
    answer = engine.held_digests(list(sent))
    return compare(Sent(2, digests(sent)), [answer], [Sent(1, digests(before))])


@pytest.mark.parametrize("name", [IN_PROCESS, "shared_memory"])
def test_weights_are_proven_over_each_transport(name: str) -> None:
    engine, sender = build(tiny_model()), transport(name)
    for version, seed in ((1, 7), (2, 8)):
        tensors = {n: p.detach() for n, p in load_reference(tiny_model(seed=seed)).named_parameters()}

        def buckets(tensors: Tensors = tensors) -> Iterator[Tensors]:
            names = list(tensors)
            yield {name: tensors[name] for name in names[:9]}
            yield {name: tensors[name] for name in names[9:]}

        export, found = digested(buckets)
        handle = WeightHandle(name, version, sender.publish(export), digests=found)
        engine.update_weights(handle, version)
        assert found == digests(tensors)
        told = compare(Sent(version, dict(found)), [engine.held_digests(list(found))])
        assert (told.is_proven, told.proven, dict(told.faults)) == (True, len(tensors), {})
    sender.close()
    engine.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["in memory", "published"])
def test_a_stale_expert_is_named(tmp_path: Path, form: str) -> None:
    folder = mixture(tmp_path, "qwen3_moe")
    model = load_reference(folder)
    names, held = PublishedNames(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    old = dict(names.published(held.items())) if form == "published" else held
    new = {name: tensor * 1.5 for name, tensor in old.items()}
    stale = next(name for name in new if "experts" in name and "down_proj" in name)
    arriving = {**new, stale: old[stale]}
    if form == "in memory":  # one of the experts that lie there together
        arriving[stale] = torch.cat([old[stale][:1], new[stale][1:]])
    engine = build(folder)
    for tensors, faults in ((new, set()), (arriving, {stale})):
        engine.update_weights(WeightHandle(IN_PROCESS, 2, lambda tensors=tensors: iter([tensors])), 2)
        told = receipt(engine, new, old)
        assert told.faults.keys() == faults
        assert told.proven == len(new) - len(faults)
    assert told.faults[stale].startswith("stale" if form == "published" else "truncated or overwritten")
    engine.shutdown()
