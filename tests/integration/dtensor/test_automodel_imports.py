"""``runs import-checkpoint`` of mixtures that ranks saved: the model that they came from, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from automodel_saves import Case, write
from nemorl_compat.checkpoints import import_checkpoint
from nemorl_testing.batches import ragged_batch
from nemorl_testing.models import load_reference, plain_logprobs
from routed_mixtures import MEGATRON_MIXTURES, MIXTURES, mixture
from safetensors.torch import load_file
from spread_cases import run_spread
from tiers import in_full
from transformers import AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*in a single process.*")]

CASES = tuple(
    Case(f"{model}, {experts}{', safetensors' * safetensors}", model, experts, safetensors)
    for model, experts, safetensors in (
        ("qwen3_moe", "each", False),
        ("qwen3_moe", "each", True),
        ("qwen3_moe", "parts", False),
        ("qwen3_moe", "stacked", False),
        ("glm4_moe", "each", True),
        *in_full([("mixtral", "each", False), ("mixtral", "stacked", False), ("deepseek_v3", "each", False)]),
    )
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: mixture(folder / name, name) for name in {*MIXTURES, *MEGATRON_MIXTURES}}


@pytest.fixture(scope="module")
def steps(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``step_5`` of each case, as NeMo RL lays it out."""
    folder = tmp_path_factory.mktemp("saved")
    found = {case.name: folder / str(number) / "step_5" for number, case in enumerate(CASES)}
    placed = {}
    for case in CASES:
        inside = "weights" if case.experts == "stacked" else "weights/model"
        weights = found[case.name] / "policy" / inside
        weights.mkdir(parents=True)
        placed[case.name] = replace(case, model=str(models[case.model]), folder=str(weights))
        AutoTokenizer.from_pretrained(models[case.model]).save_pretrained(found[case.name] / "policy" / "tokenizer")
        settings = {"policy": {"model_name": str(models[case.model])}}
        (found[case.name] / "config.yaml").write_text(yaml.safe_dump(settings))
    run_spread(write, placed)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_checkpoint_of_a_mixture_becomes_the_model_that_it_came_from(
    case: Case, models: dict[str, Path], steps: dict[str, Path], tmp_path: Path
) -> None:
    assert import_checkpoint(steps[case.name], tmp_path / "out") == str(models[case.model])
    stored, found = (load_file(folder / "model.safetensors") for folder in (models[case.model], tmp_path / "out"))
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
    batch = ragged_batch()
    with torch.no_grad():
        before, after = (load_reference(folder) for folder in (models[case.model], tmp_path / "out"))
        one, other = (plain_logprobs(model, batch) for model in (before, after))
    assert torch.equal(one, other)
