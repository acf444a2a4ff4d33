"""Checks of training backends that hand their adapters over apart from the model (capability ``adapters``)."""

# R = rank, O = outputs, I = inputs

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from nemorl.contracts import TrainingBackend
from safetensors.torch import load_file
from torch import Tensor

from nemorl_testing.backends import build_trainer, model_folder, reference, weights_of
from nemorl_testing.batches import WeightedNLL, ragged_batch
from nemorl_testing.kit import NotApplicable, Subject, expect

RANK, ALPHA = 4, 12.0
LORA = {"rank": RANK, "alpha": ALPHA}
SCALE = ALPHA / RANK
PREFIX, SUFFIX_A, SUFFIX_B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def check_adapters_are_what_the_model_has_beyond_its_base(subject: Subject) -> None:
    """Base + alpha / rank * B A of the adapters handed over is the exported model (arXiv:2106.09685). (DESIGN 5)"""
    trainer = _trained(subject)
    adapters, exported = _adapters(trainer), weights_of(trainer)
    modules = sorted(name.removesuffix(SUFFIX_A) for name in adapters if name.endswith(SUFFIX_A))
    expect(modules, f"no adapter is called {PREFIX}<module>{SUFFIX_A}, but {sorted(adapters)[:3]}")
    base = dict(reference(model_folder(subject)).named_parameters())
    for name, tensor in exported.items():
        module = PREFIX + name.removesuffix(".weight")
        wanted = base[name].detach().float()
        if module in modules:
            b_OR, a_RI = adapters[module + SUFFIX_B], adapters[module + SUFFIX_A]
            wanted = wanted + SCALE * b_OR @ a_RI
        gap = float((tensor - wanted).abs().max())
        expect(gap <= 1e-5, f"{name} is {gap:.3g} from its base and {SCALE:g} * B A of {module}")
    moved = max(float(adapters[module + SUFFIX_B].abs().max()) for module in modules)
    expect(moved > 0, "after a step every B is still 0: these are not the adapters that learn")


def check_the_saved_adapters_are_those_at_hand(subject: Subject) -> None:
    """The folder that is written has the adapters handed over, and says their rank, scale and base. (DESIGN 5)"""
    trainer: Any = _trained(subject)
    folder = subject.folder / "adapters"
    trainer.save_adapters(folder)
    stored, adapters = load_file(folder / "adapter_model.safetensors"), _adapters(trainer)
    expect(stored.keys() == adapters.keys(), f"names differ: {sorted(stored.keys() ^ adapters.keys())[:3]}")
    wrong = [name for name, tensor in adapters.items() if not torch.equal(stored[name].float(), tensor)]
    expect(not wrong, f"the file has another {', '.join(wrong[:3])}")
    told = json.loads((folder / "adapter_config.json").read_text())
    found = told.get("r"), told.get("lora_alpha"), told.get("base_model_name_or_path")
    wanted = RANK, ALPHA, model_folder(subject)
    expect(found == wanted, f"adapter_config.json says rank, alpha and base {found}, they are {wanted}")


def _trained(subject: Subject) -> TrainingBackend:
    if "adapters" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'adapters'}")
    trainer = build_trainer(subject, lora=LORA)
    trainer.train_step(ragged_batch(), WeightedNLL())
    return trainer


def _adapters(trainer: Any) -> Mapping[str, Tensor]:
    return {
        name: tensor.detach().float().cpu().clone()
        for bucket in trainer.export_adapters()
        for name, tensor in bucket.items()
    }
