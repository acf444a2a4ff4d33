"""Of a version's tensors those of MTP layers are kept for the drafter, as they pass by."""

from __future__ import annotations

import torch
from nemorl_vllm.mtp_tensors import MtpTensors


def test_what_passes_by_is_unchanged_and_mtp_layers_are_kept() -> None:
    # 2 layers of the model: its MTP layer is number 2. Embedding and head are the model's again.
    names = [
        "model.embed_tokens.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.2.eh_proj.weight",
        "model.layers.2.mlp.experts.0.up_proj.weight",
        "model.layers.2.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight",
        "model.layers.2.shared_head.norm.weight",
        "lm_head.weight",
    ]
    memory = torch.zeros(1)
    kept = MtpTensors(2)
    passed = []
    for number, bucket in enumerate(kept.passed_on({name: memory} for name in names)):
        passed += [*bucket]
        memory.fill_(number + 1)  # a bucket's memory is the next one's
    assert passed == names
    assert {name: float(tensor) for name, tensor in kept.tensors.items()} == {
        names[2]: 2.0,
        names[3]: 3.0,
        names[6]: 6.0,
    }
