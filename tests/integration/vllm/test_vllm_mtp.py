"""Tokens guessed ahead by the policy's MTP layers: log-probs are the policy's own, and updates reach the layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_models import COPIES, ByHand, write_mtp_model
from nemorl.metrics import values
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_testing.models import load_reference
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm_engines import gaps

pytestmark = [pytest.mark.full, pytest.mark.vllm, pytest.mark.slow]

PROMPT = (9, 18, 10, 33)
TOLERANCE = 1e-4
LAYER = "model.layers.2."


def guessing(tokens: int) -> dict[str, Any]:
    return {"speculative": {"method": "mtp", "num_speculative_tokens": tokens}}


def requests(count: int, **sampling: Any) -> list[GenerationRequest]:
    params = SamplingParams(**{"max_new_tokens": 24, **sampling})
    return [GenerationRequest(PROMPT, params, tuple(range(count)))]


def handle_of(folder: Path, version: int, *, mtp: bool = True) -> WeightHandle:
    """The tensors that a trainer of the model in a folder sends, each in a bucket; with or without MTP layers."""

    def export() -> Iterator[Mapping[str, Tensor]]:
        for name, tensor in load_file(folder / "model.safetensors").items():
            if not name.startswith(LAYER) or (mtp and not name.endswith((*COPIES,))):
                yield {name: tensor}

    return in_process_handle(export, version)


def mixed(policy: Path, layers: Path, folder: Path) -> Path:
    """A model with the policy of one folder and the MTP layers of another."""
    found = load_file(policy / "model.safetensors")
    theirs = load_file(layers / "model.safetensors")
    kept = {name: theirs[name] if name.startswith(LAYER) else tensor for name, tensor in found.items()}
    folder.mkdir()
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((policy / "config.json").read_text())
    return folder


def expected_rate(folder: Path, group: list[Completion]) -> float:
    """The mean share of guesses of second tokens that is accepted: sum_v min(p_v, q_v) after each first token.

    vLLM 0.32 gives MTP layers zeros in place of the embedding that goes with a sequence's first token.
    """
    model = ByHand(folder, first_embedding=False)
    rates: dict[int, float] = {}
    for first in {completion.token_ids[0] for completion in group}:
        with torch.no_grad():
            states, ahead = model.states(torch.tensor([*PROMPT, first]), 1, detach=False)
            p, q = (torch.softmax(found[-1] @ model.model.lm_head.weight.T, -1) for found in (states, ahead))
        rates[first] = float(torch.minimum(p, q).sum())
    return sum(rates[completion.token_ids[0]] for completion in group) / len(group)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape: the MTP layer of the first is often right, that of the second is not."""
    folder = tmp_path_factory.mktemp("mtp")
    # Kernels of the CPU have heads of 32 at least.
    old = write_mtp_model(folder / "old", 2, 1, head_dim=32)
    new = write_mtp_model(folder / "new", 2, 1, seed=11, gain=2, head_dim=32)
    hidden = load_file(old / "model.safetensors")[LAYER + "enorm.weight"].shape[0]
    # What comes next follows from the last token's embedding, whose half of the projection is the identity.
    return sharpened(old, torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)), sharpened(new)


def sharpened(folder: Path, projection: Tensor | None = None) -> Path:
    """The model, sure of what comes next, as far as embeddings tell."""
    found = load_file(folder / "model.safetensors")
    for name, tensor in found.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.1)
        elif name.endswith(("lm_head.weight", "shared_head.head.weight")):
            tensor.mul_(6)
        elif name.endswith("eh_proj.weight") and projection is not None:
            tensor.copy_(projection)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_log_probs_are_the_policys_and_guesses_are_those_of_the_version(
    build: Any, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = models
    engine = build(old, weights=handle_of(old, 0), **guessing(1))
    told: list[str] = []
    monkeypatch.setattr("nemorl_vllm.worker.logger.warning", told.append)
    third = mixed(old, new, tmp_path / "third")
    rates = []
    for version, (policy, sent, layers, mtp) in enumerate(
        [(old, old, old, True), (new, new, new, True), (old, old, third, False)]
    ):
        engine.update_weights(handle_of(sent, version + 1, mtp=mtp), version + 1)
        asked = [found for kind in (0.0, 0.7, 1.4) for found in requests(3, temperature=kind)]
        assert max(gaps(load_reference(policy), asked, engine.generate(asked))) < TOLERANCE
        engine.take_metrics()
        (group,) = engine.generate(requests(2000, max_new_tokens=2))
        found = values(engine.take_metrics())
        rates.append((found["draft_acceptance_rate"], expected_rate(layers, group)))
        assert len(told) == (not mtp)
    engine.update_weights(handle_of(old, 4, mtp=False), 4)
    assert len(told) == 1  # once is enough
    for rate, expected in rates:
        # The standard deviation of a mean of 2,000 is at most 0.5 / sqrt(2000) = 0.011.
        assert rate == pytest.approx(expected, abs=0.045)
    assert abs(rates[0][1] - rates[2][1]) > 0.2  # so layers of another version would be seen


def test_one_layer_guesses_several_tokens_one_after_the_other(build: Any, models: tuple[Path, Path]) -> None:
    old, new = models
    engine = build(old, weights=handle_of(new, 0), **guessing(3))
    asked = [found for kind in (0.0, 0.7, 1.4) for found in requests(3, temperature=kind)]
    groups = engine.generate(asked)
    assert max(gaps(load_reference(new), asked, groups)) < TOLERANCE
    assert values(engine.take_metrics())["draft_guessed_tokens"] > 100
    ((alone,),) = engine.generate([GenerationRequest(PROMPT, asked[1].sampling, (2,))])
    assert alone.token_ids == groups[1][2].token_ids
