"""The loss of MTP layers and its gradients are those of a formula worked by hand, however a model is spread; the policy
beside them learns as it does without them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from layouts import CP, EP, PADDED, PP, RECOMPUTED, TP
from megatron_mtp import FACTOR, Case, Found, by_hand, step
from mtp_models import COPIES, StepByHand, write_mtp_model
from nemorl.config.load import load_config
from nemorl_cli.console import Console
from safetensors.torch import load_file
from spread_cases import run_spread

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

ONE = {"num_layers": 1, "loss_scaling_factor": FACTOR}
JOINT = {**ONE, "detach_heads": False}
TWO = {**ONE, "num_layers": 2, "detach_heads": False}
REPEATED = {**ONE, "num_layers": 3, "use_repeated_layer": True}
PACKED = {"layout": "packed"}
CASES = (
    Case("one, padded", "one", options=PADDED, mtp=JOINT),
    Case("one, packed", "one", options=PACKED, mtp=JOINT),
    Case("one, apart", "one", mtp=ONE),
    Case("one, recomputed, apart", "one", policy=RECOMPUTED, mtp=ONE),
    Case("two depths", "two", options=PACKED, mtp=TWO),
    Case("one layer, three depths", "one", mtp=REPEATED),
    Case("one layer, three depths, recomputed", "one", policy=RECOMPUTED, mtp={**REPEATED, "detach_heads": False}),
    Case("dp2", "one", 2, mtp=ONE),
    Case("tp2", "one", 2, TP, mtp=JOINT, saves="tp2"),
    Case("tp2, recomputed, three depths", "one", 2, TP | RECOMPUTED, PADDED, mtp=REPEATED),
    Case("cp2", "two", 2, options=CP, mtp=TWO),
    Case("cp2, padded, apart", "one", 2, options=CP | PADDED, mtp=REPEATED),
    Case("ep2", "one", 2, options=EP, mtp=JOINT),
    Case("pp2", "two", 2, options=PP, mtp=TWO, saves="pp2"),
    Case("pp2, apart", "one", 2, options=PP | PADDED, mtp=ONE),
)
RESUMED = (
    Case("tp2 -> one", "one", mtp=JOINT, resumes="tp2"),
    Case("pp2 -> one", "two", mtp=TWO, resumes="pp2"),
    Case("pp2 -> tp2", "two", 2, TP, mtp=TWO, resumes="pp2"),
)
DEPTHS = {"one": 1, "two": 2}


def _key(case: Case) -> tuple[str, int, bool]:
    assert case.mtp is not None
    return case.model, case.mtp["num_layers"], case.mtp.get("detach_heads", True)


class Steps:
    """Of all cases, and by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, depths in DEPTHS.items():
            write_mtp_model(folder / name, 2, depths)
        self.expected: dict[tuple[str, int, bool], StepByHand] = {
            key: by_hand(folder / key[0], key[1], detach=key[2]) for key in sorted({_key(case) for case in CASES})
        }
        self.ranks: dict[str, list[Found]] = {}
        for cases in (CASES, RESUMED):
            for case in cases:
                (folder / case.saves).mkdir(exist_ok=True)
            self.ranks |= run_spread(step, {case.name: self.placed(case) for case in cases})

    def placed(self, case: Case) -> Case:
        saves, resumes = (str(self.folder / name) if name else "" for name in (case.saves, case.resumes))
        return replace(case, model=str(self.folder / case.model), saves=saves, resumes=resumes)

    def alone(self, case: Case, **changes: Any) -> Found:
        """The same in one process, changed."""
        name = "changed"
        ((found),) = run_spread(step, {name: replace(self.placed(case), world_size=1, **changes)})[name]
        return found


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return Steps(tmp_path_factory.mktemp("mtp"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_and_gradients_are_those_of_the_formulas(case: Case, steps: Steps) -> None:
    expected, ranks = steps.expected[_key(case)], steps.ranks[case.name]
    shards = {shard: found.metrics for shard, found in zip(case.shards, ranks, strict=True)}
    for name, (total, count) in expected.metrics.items():
        found = [sum(part) for part in zip(*(metrics[name] for metrics in shards.values()), strict=True)]
        assert found[0] == pytest.approx(total, rel=2e-6)
        assert name == "loss" or found[1] == count > 0
    gradients = ranks[0].gradients
    assert gradients.keys() == {name for name in expected.gradients if "e_score" not in name}
    for name, gradient in gradients.items():
        right = expected.gradients[name]
        # The gradient of a key's bias is nothing but rounding: a softmax does not see it.
        assert float((gradient - right).norm()) < 2e-5 * float(right.norm()) + 1e-7, name
    is_ahead = {name: name.startswith(("model.layers.2.", "model.layers.3.")) for name in gradients}
    squares = {name: float(expected.gradients[name].double().square().sum()) for name in gradients}
    ahead = sum(square for name, square in squares.items() if is_ahead[name])
    others = sum(squares.values()) - ahead
    is_apart = _key(case)[2]
    assert ranks[0].metrics["grad_norm"][0] == pytest.approx((others if is_apart else others + ahead) ** 0.5, rel=1e-5)
    if is_apart:
        assert ranks[0].metrics["mtp_grad_norm"][0] == pytest.approx(ahead**0.5, rel=1e-5)
    assert any(".eh_proj." in name and float(gradients[name].norm()) > 1e-3 for name in gradients)


@pytest.mark.parametrize("mtp", [ONE, REPEATED, {"loss_scaling_factor": 0}], ids=["one", "repeated", "measured"])
@pytest.mark.parametrize(
    ("policy", "options"),
    [({}, PACKED), (RECOMPUTED, PADDED), ({}, PACKED | {"router": {"balance_loss": 0.1, "bias_update_rate": 0.01}})],
    ids=["kept", "recomputed", "balanced"],
)
def test_the_policy_learns_as_without_mtp_to_the_last_bit(
    mtp: dict[str, Any], policy: dict[str, Any], options: dict[str, Any], steps: Steps
) -> None:
    case = Case("one", "one", policy=policy, options=options)
    without, found = steps.alone(case), steps.alone(case, mtp=mtp)
    assert without.metrics["loss"] == found.metrics["loss"]
    # Clipped at 0.05, each by its own norm.
    assert without.metrics["grad_norm"] == found.metrics["grad_norm"] > (0.05, 1.0)
    assert without.weights.keys() < found.weights.keys()
    assert all(torch.equal(found.gradients[name], gradient) for name, gradient in without.gradients.items())
    assert all(torch.equal(found.weights[name], weight) for name, weight in without.weights.items())


def test_layers_that_are_measured_alone_stay_as_they_are(steps: Steps) -> None:
    case = Case("one", "one", options=PACKED)
    found = steps.alone(case, mtp={"loss_scaling_factor": 0})
    stored = load_file(steps.folder / "one" / "model.safetensors")
    layers = [name for name in found.weights if name.startswith("model.layers.2.")]
    assert layers
    assert all(torch.equal(found.weights[name], stored[name]) for name in layers)
    expected = steps.expected["one", 1, True].metrics["mtp_loss"]
    assert found.metrics["mtp_loss"] == (pytest.approx(expected[0], rel=2e-6), expected[1])


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.name)
def test_checkpoints_hold_mtp_layers_in_any_layout(case: Case, steps: Steps) -> None:
    (written,) = (other for other in CASES if other.saves == case.resumes)
    before, after = steps.ranks[written.name][0].weights, steps.ranks[case.name][0].weights
    assert before.keys() == after.keys()
    assert any("shared_head.norm" in name for name in after)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_an_export_has_the_names_of_the_files_that_were_read(name: str, steps: Steps) -> None:
    (case,) = (case for case in CASES if case.saves == name)
    exported = load_file(steps.folder / name / "exported" / "model.safetensors")
    assert exported.keys() == load_file(steps.folder / case.model / "model.safetensors").keys()
    for layer in range(2, 2 + DEPTHS[case.model]):
        for copy, original in COPIES.items():
            assert torch.equal(exported[f"model.layers.{layer}.{copy}"], exported[original])
    stored = json.loads((steps.folder / name / "exported" / "config.json").read_text())
    assert stored["num_nextn_predict_layers"] == DEPTHS[case.model]


def test_an_engine_that_does_not_use_mtp_layers_proves_what_it_samples_from(tmp_path: Path) -> None:
    model = write_mtp_model(tmp_path / "model", 2, 1)
    config = load_config(
        {
            "algorithm": "grpo",
            "model": str(model),
            "policy": {"max_sequence_tokens": 32, "backend": {"name": "megatron", "mtp": {"num_layers": 1}}},
            "generation": {"backend": "hf", "max_new_tokens": 4},
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 2,
            "max_steps": 1,
            "validation": {"every": 0, "at_end": False},
            "weights": {"receipts": "digests", "share": 1.0},
            "cluster": {"launcher": "local"},
            "run_dir": str(tmp_path / "run"),
        }
    )
    rows = [{"prompt": "1+1="}, {"prompt": "2+2="}]
    history = config.build().fit(rows, lambda _, response: float(len(response)), console=Console(quiet=True)).history
    assert [step["train/weights_proven"] for step in history] == [1.0]
    assert history[0]["train/mtp_loss"] > 0
