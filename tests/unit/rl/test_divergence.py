"""Where two engines part: numbers by hand, and bugs planted in a real trainer beside the sampler ``hf``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from nemorl.config import GenerationConfig
from nemorl.config.load import validate
from nemorl.plugins import Registry, registry
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest
from nemorl_dtensor import HFGenerationConfig
from nemorl_rl.audit.divergence import CAUSES, compare_activations, relative_errors
from nemorl_rl.audit.float32_reference import Float32Reference
from nemorl_rl.audit.layer_audit import LayerAudit
from nemorl_rl.audit.mismatch import measure_mismatch
from nemorl_rl.config import RolloutRunConfig
from nemorl_tensors.engines.observing import LAST_ROLES, LAYER_ROLES, Place
from nemorl_testing.models import tiny_model
from nemorl_testing.plugin import use_registry
from planted_bugs import (
    HALVED,
    PROMPT,
    Pair,
    activation,
    build_trainer,
    check_a_swapped_row,
    check_all_plants,
    check_an_ignored_rotary_factor,
    policy,
)

NORM, QUERY, LOGITS = Place(0, "input_norm"), Place(0, "query"), Place(None, "logits")
IDS = [5, 6, 7, 8]
"""Two tokens of prompt, two of the response; the last is not fed to the model."""


def test_errors_by_hand() -> None:
    # |(3, 4)| = 5. A difference of (0.3, 0.4) is 0.5 / 5 = 0.1; a row of zeros counts as 1e-3 of the median norm 5,
    # so that a difference of 0.01 there is 0.01 / 0.005 = 2.
    wanted = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]])
    found = torch.tensor([[3.3, 4.4], [3.0, 4.0], [0.01, 0.0]])
    assert relative_errors(found, wanted).tolist() == pytest.approx([0.1, 0.0, 2.0])
    assert relative_errors(found[:2], wanted[:1]).tolist() == pytest.approx([0.0])  # of the last tokens
    assert relative_errors(found * torch.nan, wanted).tolist() == [torch.inf] * 3
    assert relative_errors(found[:, :1], wanted).tolist() == [torch.inf] * 3


def test_the_first_tensor_and_token_in_the_order_of_computation_are_named() -> None:
    trainer = {NORM: torch.ones(3, 4), QUERY: torch.ones(3, 4), LOGITS: torch.ones(3, 9)}
    query = torch.ones(3, 4)
    query[2, 0] += 0.2  # 0.2 / |(1, 1, 1, 1)| = 0.1, at the token after the prompt
    sampler = {LOGITS: torch.zeros(1, 9), QUERY: query, NORM: torch.ones(3, 4)}
    found = compare_activations(trainer, sampler, IDS, prompt_tokens=2)
    assert found.differences == pytest.approx({NORM: 0.0, QUERY: 0.1, LOGITS: 1.0})
    parting = found.parting
    assert parting is not None
    assert (parting.place, parting.position, parting.token_id, parting.is_generated) == (QUERY, 2, 7, True)
    assert parting.difference == pytest.approx(0.1)
    assert parting.causes[0].startswith("the cache")
    assert "the query projection of layer 0, generated token 2 (id 7)" in str(parting)


def test_logits_of_the_last_tokens_are_compared_with_the_last() -> None:
    trainer = {LOGITS: torch.arange(12.0).view(3, 4)}
    sampler = {LOGITS: torch.tensor([[4.0, 5, 6, 7], [8, 9, 10, 12]])}
    parting = compare_activations(trainer, sampler, IDS, prompt_tokens=2).parting
    assert parting is not None
    assert parting.position == 2


def test_rounding_is_that_of_the_engine_closer_to_float32() -> None:
    exact = {QUERY: torch.ones(3, 4)}
    trainer = {QUERY: exact[QUERY] * 1.02}
    for factor, parts in ((1.01, False), (1.0, True), (1.2, True)):
        # The closer engine is off by 0.01, 0 or 0.02: 0.04, 2^-7 or 0.08 pass as rounding; they are 0.01, 0.02, 0.18
        # apart, relative to 1.02.
        found = compare_activations(trainer, {QUERY: exact[QUERY] * factor}, IDS, 2, reference=exact).parting
        assert (found is not None) == parts
        if found is not None:
            assert found.suspect == ("sampler" if factor == 1.2 else "trainer")


class Records:
    """Both engines: on the prompts of ``parts``, the query of this layer is off by a tenth."""

    def __init__(self, parts: dict[tuple[int, ...], int] | None = None) -> None:
        self._parts, self.asked = parts or {}, 0

    def observe(self, request: Any) -> Any:
        """As a sampler of a request, or as a trainer of token ids."""
        self.asked += 1
        tokens = request.token_ids if isinstance(request, GenerationRequest) else tuple(request)
        found = {Place(layer, "query"): torch.ones(3, 4) for layer in range(9)}
        if tokens in self._parts:
            found[Place(self._parts[tokens], "query")] *= 1.1
        return (Completion((6, 7, 8), (0.0,) * 3, "length"), found) if isinstance(request, GenerationRequest) else found


@pytest.mark.parametrize(
    ("precision", "layers", "parts_at", "asked"),
    [
        ("bfloat16", (7, None, 2), None, 2),  # the second prompt shows that it was rounding
        ("bfloat16", (7, 2, 5), 5, 3),  # the median of three
        ("float32", (7, None, None), 7, 1),  # nothing rounds by a tenth there
    ],
)
def test_in_a_lower_precision_engines_part_if_they_do_on_every_prompt(
    precision: str, layers: tuple[int | None, ...], parts_at: int | None, asked: int
) -> None:
    config = validate(RolloutRunConfig, {"model": "some/model", "policy": {"precision": precision}})
    prompts = [(index,) for index in range(3)]
    parts: dict[tuple[int, ...], int] = {
        prompt: layer for prompt, layer in zip(prompts, layers, strict=True) if layer is not None
    }
    trainer, sampler = Records(), Records(parts)
    exact = Float32Reference(config, trainer)  # type: ignore[arg-type]
    exact._found = trainer  # type: ignore[assignment]
    audit = LayerAudit(config, trainer, sampler, prompts, None)  # type: ignore[arg-type]
    audit.compare(exact)
    (found,) = audit.found
    assert sampler.asked == asked
    assert (found.parting and found.parting.place.layer) == parts_at


def test_every_role_has_causes() -> None:
    assert CAUSES.keys() == LAYER_ROLES.keys() | LAST_ROLES.keys()


@pytest.mark.parametrize("llama_like", [True, False], ids=["written by hand", "transformers"])
@pytest.mark.slow
def test_bugs_in_a_trainer_are_found_beside_hf(llama_like: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not llama_like:
        from nemorl_dtensor import decode_llama, observing

        monkeypatch.setattr(decode_llama, "is_llama_like", lambda *_: False)
        monkeypatch.setattr(observing, "is_llama_like", lambda *_: False)
    trainer = build_trainer()
    sampler = HFGenerationConfig().build(GenerationConfig(), policy(), WorkerContext(), None)
    check_all_plants(trainer, sampler)
    check_a_swapped_row(trainer, sampler)
    halved = HFGenerationConfig().build(GenerationConfig(), policy(hf_config_overrides=HALVED), WorkerContext(), None)
    check_an_ignored_rotary_factor(halved)


def test_a_bug_in_bfloat16_is_told_from_rounding() -> None:
    trainer, exact = build_trainer(precision="bfloat16"), build_trainer()
    sampler = HFGenerationConfig().build(GenerationConfig(), policy("bfloat16"), WorkerContext(), None)
    pair = Pair.of(trainer, sampler)
    reference = exact.observe(pair.token_ids)
    sound = pair.compare(reference)
    assert sound.parting is None
    assert max(sound.differences.values()) > 0.01  # far more than what float32 calls rounding
    with ExitStack() as stack:
        activation(trainer._model, stack)
        parting = pair.compare(reference).parting
    assert parting is not None
    assert (parting.place.layer, parting.place.role, parting.suspect) == (1, "mlp_activation", "trainer")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_audit_compares_layers_before_and_after_the_update(precision: str) -> None:
    data = {"model": str(tiny_model()), "policy": {"precision": precision}, "generation": {"max_new_tokens": 4}}
    phases: list[str] = []
    report = measure_mismatch(validate(RolloutRunConfig, data), samples_per_prompt=1, phase=phases.append)
    assert report.ok
    assert [len(found.differences) for found in report.layers] == [24, 24]  # 11 of each layer, final norm, logits
    assert (report.parting, report.layers_skipped) == (None, None)
    assert phases[0] == "building the engines"


class Silent(HFGenerationConfig):
    """A sampler that does not record."""

    supports = frozenset({"any_transport"})


def test_a_backend_without_the_capability_is_named() -> None:
    scoped = Registry(registry().index)
    scoped.register("generation_backends", "silent", Silent)
    with use_registry(scoped):
        config = validate(RolloutRunConfig, {"model": "some/model", "generation": {"backend": "silent"}})
        nobody: object = None
        audit = LayerAudit.of(config, nobody, nobody, [PROMPT])  # type: ignore[arg-type]
    audit.compare(Float32Reference(config, nobody))  # type: ignore[arg-type]
    assert audit.skipped == "generation backend silent cannot record what is computed in each layer"
    assert audit.found == []
