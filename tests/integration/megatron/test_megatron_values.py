"""Critics and reward models over megatron-core learn what those of dtensor learn, however the model is spread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

import spread_cases
from layouts import CP, EP, HEADS, LOW, MIXTURE, PADDED, PLAIN, PP, RECOMPUTED, SHARED, TP, VPP, WHOLE
from megatron_values import SAVED_AFTER, Case, Found, batch_of, policy_of, run, train
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor import DTensorConfig
from nemorl_testing.models import tiny_model
from spawned import run_calls
from spread_cases import gap, run_spread
from tiers import in_full
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

VALUES = 5e-6
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},  # tied embeddings, which a value head does without
    "deep": {"num_hidden_layers": 4},
    "llama": {"architecture": "llama", "tie_word_embeddings": False},
    "moe": MIXTURE,
}
CASES: dict[str, Case] = {
    "one": Case("qwen2", saves="one"),
    "one, packed": Case("qwen2", options={"layout": "packed"}),
    "one, shared": Case("qwen2", options=SHARED),
    "one pairs": Case("qwen2", loss="pairs", saves="one pairs"),
    "dp2": Case("qwen2", 2, saves="dp2"),
    "tp2": Case("qwen2", 2, TP, saves="tp2"),
    "tp2, recomputed": Case("llama", 2, {**TP, **RECOMPUTED}),
    "pp2": Case("qwen2", 2, {}, PP, saves="pp2"),
    "ep2": Case("moe", 2, {}, EP),
    "one bfloat16": Case("qwen2", policy=LOW),
    **in_full(
        {
            "one moe": Case("moe"),
            "pp2 pairs": Case("qwen2", 2, {}, PP, "pairs"),
            "cp2": Case("qwen2", 2, {}, CP),
            "tp2 bfloat16": Case("qwen2", 2, {**TP, **LOW}),
            "one, padded": Case("qwen2", options=PADDED),
            "one llama": Case("llama"),
            "dp2, plain optimizer": Case("qwen2", 2, options=PLAIN),
            "tp2, padded": Case("qwen2", 2, TP, PADDED),
            "tp2, whole sequences": Case("qwen2", 2, TP, WHOLE),
            "tp2 pairs": Case("qwen2", 2, TP, loss="pairs"),
            "pp2, padded": Case("llama", 2, {}, PP | PADDED),
            "pp2 vpp2": Case("deep", 2, {}, VPP),
        }
    ),
}
ELSEWHERE = {"one": "tp2", "tp2": "pp2", "pp2": "dp2"}
"""Case -> in whose checkpoint it goes on."""


def write_classifier(folder: Path, language_model: Path) -> str:
    """A reward model with the layers of a language model and a head that is far from zero."""
    model = AutoModelForSequenceClassification.from_pretrained(language_model, num_labels=1)
    with torch.no_grad():
        model.score.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(9))
    model.save_pretrained(folder)
    return str(folder)


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        bases = {name: tiny_model(**HEADS, **sizes) for name, sizes in MODELS.items()}
        self.models = {name: write_classifier(folder / f"model {name}", base) for name, base in bases.items()}
        self.headless = str(bases["qwen2"])
        self.dtensor = {name: self._dtensor(case) for name, case in CASES.items()}
        self.found = self._run(CASES)
        own = {name: replace(case, saves="", resumes=case.saves) for name, case in CASES.items() if case.saves}
        self.resumed = self._run(own)
        self.elsewhere = self._run(
            {name: replace(CASES[name], saves="", resumes=other) for name, other in ELSEWHERE.items()}
        )

    def _dtensor(self, case: Case) -> Found:
        policy = {key: value for key, value in case.policy.items() if key not in TP}
        alone = replace(case, model=self.models[case.model], policy=policy, saves="")
        config, batch = DTensorConfig(), batch_of(case)
        return run(config, policy_of(alone, config), WorkerContext(), batch, [*range(len(batch))], alone)

    def placed(self, case: Case) -> Case:
        saves, resumes = (str(self.folder / name) if name else "" for name in (case.saves, case.resumes))
        if saves:
            Path(saves).mkdir(exist_ok=True)
        return replace(case, model=self.models.get(case.model, case.model), saves=saves, resumes=resumes)

    def _run(self, cases: dict[str, Case]) -> dict[str, list[Found]]:
        return run_spread(train, {name: self.placed(case) for name, case in cases.items()})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    return Runs(tmp_path_factory.mktemp("values"))


def together(case: Case, found: list[Found], name: str) -> Tensor:
    """[N] values of the whole batch, from those of its shards."""
    return spread_cases.together(found, name, batch_of(case).lengths)


EXACT = [name for name, case in CASES.items() if "precision" not in case.policy]


@pytest.mark.parametrize("name", EXACT)
def test_values_are_those_of_dtensor_before_and_after_training(name: str, runs: Runs) -> None:
    case, found, expected = CASES[name], runs.found[name], runs.dtensor[name]
    assert gap(together(case, found, "before"), expected.before) < VALUES
    # Of pairs, one token of each text has a gradient: many are near 0, where Adam's steps follow the rounding.
    assert gap(together(case, found, "after"), expected.after) < (5e-4 if case.loss == "pairs" else 1e-4)
    assert gap(expected.after, expected.before) > 1e-2, "four steps changed nothing: this proves nothing"


@pytest.mark.parametrize("name", EXACT)
def test_losses_gradients_and_weights_are_those_of_dtensor(name: str, runs: Runs) -> None:
    case, found, expected = CASES[name], runs.found[name], runs.dtensor[name]
    shards = {tuple(part.sequences): part.losses for part in found}
    assert gap(torch.tensor([*shards.values()]).sum(0), torch.tensor(expected.losses)) < 1e-4
    for part in found:
        torch.testing.assert_close(part.grad_norms, expected.grad_norms, rtol=1e-4, atol=1e-4)
    weights = found[0].weights
    assert "score.weight" in weights
    assert "lm_head.weight" not in weights
    if case.model != "moe":  # transformers keeps all experts of a layer in one tensor
        assert weights.keys() == expected.weights.keys()
        assert max(gap(weights[key], expected.weights[key]) for key in weights) < 1e-4
    assert not any(part.weights for part in found[1:])


@pytest.mark.parametrize("name", ["one bfloat16", *in_full(["tp2 bfloat16"])])
def test_bfloat16_is_as_close_to_float32_as_that_of_dtensor(name: str, runs: Runs) -> None:
    exact, after = runs.dtensor["one"].after, together(CASES[name], runs.found[name], "after")
    found, expected = (float((values - exact).abs().mean()) for values in (after, runs.dtensor[name].after))
    assert found < 1.5 * expected


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.saves])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name: str, runs: Runs) -> None:
    for straight, resumed in zip(runs.found[name], runs.resumed[name], strict=True):
        assert resumed.losses == straight.losses[SAVED_AFTER:]
        assert resumed.grad_norms == straight.grad_norms[SAVED_AFTER:]
        assert torch.equal(resumed.after, straight.after)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_checkpoint_continues_in_another_layout(name: str, runs: Runs) -> None:
    source = ELSEWHERE[name]
    straight = together(CASES[source], runs.found[source], "after")
    assert gap(together(CASES[name], runs.elsewhere[name], "after"), straight) < 1e-5


@pytest.mark.parametrize("name", ["one", "tp2", "pp2", "dp2"])
def test_what_is_saved_is_a_sequence_classifier_of_transformers(name: str, runs: Runs) -> None:
    folder = runs.folder / CASES[name].saves / "exported"
    assert AutoConfig.from_pretrained(folder).architectures == ["Qwen2ForSequenceClassification"]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    batch, values = batch_of(CASES[name]), together(CASES[name], runs.found[name], "after")
    starts = batch.lengths.cumsum(0) - batch.lengths
    for start, length in zip(starts.tolist(), batch.lengths.tolist(), strict=True):
        for place in range(start + 1, start + length):
            if batch.mask[place]:
                said = model(input_ids=batch.token_ids[None, start:place]).logits
                assert float(said) == pytest.approx(float(values[place]), abs=1e-5)


def test_a_language_model_gets_the_same_new_head_in_every_layout(runs: Runs) -> None:
    case = Case(runs.headless)
    (alone,) = [train(WorkerContext(), case)]
    for policy, options in ((TP, {}), ({}, PP)):
        (found,) = run_calls([(train, (replace(case, world_size=2, policy=policy, options=options),))], 2)
        assert gap(together(case, found[:1], "before"), alone.before) < VALUES
    assert float(alone.before.abs().max()) > 1e-3
