"""Replayed routes on megatron-core: the sampler's choice of experts, weighed by the trainer's own routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import only

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.errors import BackendError, UsageError
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_dtensor import HFGenerationConfig
from nemorl_dtensor.generation import HFGeneration
from nemorl_megatron import MegatronConfig
from nemorl_megatron.training import MegatronBackend
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_tensors import TokenBatch
from nemorl_tensors.batch import ROUTES
from nemorl_testing.batches import WeightedNLL
from nemorl_testing.models import load_reference
from recorded_messages import Raises
from routed_mixtures import (
    CHOSEN,
    LAYERS,
    MEGATRON_MIXTURES,
    by_hand,
    exported,
    in_memory,
    mixture,
    own_routes,
    routed_batch,
    samples_of,
)
from routed_mixtures import trainer as dtensor_trainer

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

LAYOUTS = ("padded", "packed", "shared")
PROMPTS = ((9, 18, 10), (5, 6, 7, 8, 9, 11, 12), (4,))
SHOWN = {"optimizer": {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0}, "max_grad_norm": None}
"""Of the policy: an update shows the gradient, g / (|g| + 1)."""
LIKE_DTENSOR = {
    "one microbatch": {"policy": {"microbatch_tokens": 4096}},
    "router in float64": {"router": {"dtype": "float64"}},
    "router frozen": {"freeze_moe_router": True},
    "plain optimizer": {"distributed_optimizer": False},
    "optimizer in the host's memory": {"offload": {"optimizer": True}},
}


def trainer(folder: Path, *, replay: bool = True, reference: bool = False, **options: Any) -> MegatronBackend:
    policy = SHOWN | {"microbatch_tokens": 40} | options.pop("policy", {})
    router, head = {"replay": replay} | options.pop("router", {}), options.pop("head", "language_model")
    config = MegatronConfig.model_validate({"router": router, **options})
    made = PolicyConfig.model_validate({"model_name": str(folder), **policy})
    return MegatronBackend(made, WorkerContext(), config, reference=reference, head=head)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its experts' weights are softmaxes over all experts; those of the others add up to something."""
    return mixture(tmp_path_factory.mktemp("qwen"), "qwen3_moe", norm_topk_prob=False)


@pytest.fixture(scope="module", params=["qwen", *MEGATRON_MIXTURES])
def folder(request: pytest.FixtureRequest, qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen if request.param == "qwen" else mixture(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_routers_learn_the_gradient_of_a_forward_pass_by_hand_with_the_recorded_experts(
    folder: Path, layout: str, checkpointing: bool
) -> None:
    batch, model = routed_batch(), load_reference(folder)
    wanted = by_hand(model, batch)
    value, _ = WeightedNLL()(wanted, batch)
    value.backward()
    backend = trainer(folder, layout=layout, policy={"activation_checkpointing": checkpointing})
    torch.testing.assert_close(backend.get_logprobs(batch), wanted.detach(), atol=2e-5, rtol=0)
    before = exported(backend)
    metrics = backend.train_step(batch, WeightedNLL())
    after = exported(backend)
    backend.shutdown()
    routers = [name for name in before if name.endswith("gate.weight")]
    assert len(routers) == LAYERS
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name in routers:
        gradient = gradients[in_memory(name)]
        assert gradient is not None
        assert gradient.abs().max() > 1e-3, "the router learns"
        torch.testing.assert_close(before[name] - after[name], gradient / (gradient.abs() + 1), atol=2e-5, rtol=0)
    assert metrics["loss"].value == pytest.approx(float(value.detach()), abs=1e-5)
    # Experts at random: of 8, the two recorded ones are seldom the router's own.
    assert 0.5 < metrics["routes_flipped"].value < 0.9
    if layout != "shared":
        # Fed are all tokens but the last of each sequence: 12 + 10 + 13 + 8 + 12 + 5 = 60, in 2 layers, 2 experts each.
        assert metrics["routes_flipped"].count == 60 * LAYERS * CHOSEN


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_trainers_own_routes_change_nothing(folder: Path, layout: str, checkpointing: bool) -> None:
    policy = {"activation_checkpointing": checkpointing}
    batch, model = routed_batch(), load_reference(folder)
    own = [own_routes(model, ids.tolist()) for ids in batch.token_ids.split(batch.lengths.tolist())]
    batch = batch.with_tokens(**{ROUTES: torch.cat(own).to(torch.int16)})
    found = []
    for replay in (False, True):
        backend = trainer(folder, replay=replay, layout=layout, policy=policy)
        scored = backend.get_logprobs(batch)
        metrics = backend.train_step(batch, WeightedNLL())
        found.append((scored, exported(backend)))
        backend.shutdown()
    assert metrics["routes_flipped"].total == 0
    (free, theirs), (bound, ours) = found
    assert torch.equal(free, bound)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


@pytest.mark.parametrize("case", LIKE_DTENSOR)
def test_a_step_is_that_of_dtensor(qwen: Path, case: str) -> None:
    options = {name: dict(value) if isinstance(value, dict) else value for name, value in LIKE_DTENSOR[case].items()}
    batch = routed_batch(known=0.7)
    here, there = trainer(qwen, **options), dtensor_trainer(qwen)
    torch.testing.assert_close(here.get_logprobs(batch), there.get_logprobs(batch), atol=5e-6, rtol=0)
    ours, theirs = here.train_step(batch, WeightedNLL()), there.train_step(batch, WeightedNLL())
    mine, others = exported(here), exported(there)
    here.shutdown()
    for name in mine if case != "router frozen" else ():
        if name.endswith("gate.weight"):
            torch.testing.assert_close(mine[name], others[name], atol=1e-5, rtol=0)
    assert ours["loss"].value == pytest.approx(theirs["loss"].value, abs=1e-5)
    # Of a row's padding neither counts anything, and both have the same tokens: the same choices are flipped.
    one, other = ours["routes_flipped"], theirs["routes_flipped"]
    assert one.value == pytest.approx(other.value, abs=2 / 240), "but for scores that rounding makes equal"


def test_load_and_bias_follow_the_recorded_experts(tmp_path: Path) -> None:
    batch = routed_batch()
    options = {"router": {"balance_loss": 0.3, "bias_update_rate": 0.01}}
    backend = trainer(mixture(tmp_path, "glm4_moe"), **options)
    before = exported(backend)
    metrics = backend.train_step(batch, WeightedNLL())
    after = exported(backend)
    backend.shutdown()
    routes = torch.cat([part[:-1] for part in batch[ROUTES].split(batch.lengths.tolist())]).long()
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    counts = [torch.bincount(routes[:, layer].flatten(), minlength=8).double() for layer in range(LAYERS)]
    for name, count in zip(sorted(biases), counts, strict=True):
        moved = 0.01 * torch.sign(count.mean() - count).float()
        torch.testing.assert_close(after[name] - before[name], moved, atol=1e-7, rtol=0)
    assert metrics["expert_load_max"].value == pytest.approx(max(float(each.max() / each.mean()) for each in counts))
    assert metrics["balance_loss"].value > 0


def test_sequences_without_a_backward_pass_are_replayed_and_counted(qwen: Path) -> None:
    batch = routed_batch()
    first = batch.sequence_ids < 2
    trained = batch.with_tokens(advantages=torch.where(first, 1.0, 0.0))
    backend = trainer(qwen, layout="padded", policy={"microbatch_tokens": 14})
    scored = backend.get_logprobs(trained)
    trained = trained.with_tokens(old_logprobs=scored, generation_logprobs=scored)
    metrics = backend.train_step(trained, ClippedPolicyGradientLoss())
    backend.shutdown()
    assert metrics["skipped_backward_frac"].value > 0.5
    assert metrics["routes_flipped"].count == 60 * LAYERS * CHOSEN
    assert metrics["probs_ratio"].value == pytest.approx(1, abs=1e-6), "the same experts in all passes"


def test_tokens_without_routes_the_reference_and_values_choose_by_themselves(qwen: Path) -> None:
    lora = {"lora": {"rank": 2}}
    bound, free = (trainer(qwen, replay=each, reference=True, policy=lora) for each in (True, False))
    batch, blank = routed_batch(), routed_batch(known=0.0)
    bare = TokenBatch(batch.token_ids, batch.lengths, batch.mask, batch.loss_weights)
    assert torch.equal(bound.get_logprobs(blank), free.get_logprobs(blank))
    assert not torch.equal(bound.get_logprobs(batch), free.get_logprobs(batch))
    assert not torch.equal(bound.get_topk_logprobs(batch, 2)[1], free.get_topk_logprobs(batch, 2)[1])
    assert torch.equal(bound.get_logprobs(batch, "reference"), free.get_logprobs(batch, "reference"))
    assert torch.equal(bound.get_logprobs(bare), free.get_logprobs(bare)), "nothing is left of the pass before"
    for backend in (bound, free):
        backend.shutdown()
    critics = [trainer(qwen, replay=each, head="value") for each in (True, False)]
    values = [critic.get_values(batch) for critic in critics]
    assert torch.equal(*values)
    for critic in critics:
        critic.shutdown()


def test_adapters_learn_under_the_recorded_experts(qwen: Path) -> None:
    batch, model = routed_batch(), load_reference(qwen)
    wanted = by_hand(model, batch).detach()
    own = [own_routes(model, ids.tolist()) for ids in batch.token_ids.split(batch.lengths.tolist())]
    lora = {"lora": {"rank": 2}}
    backend = trainer(qwen, policy=lora)
    torch.testing.assert_close(backend.get_logprobs(batch), wanted, atol=2e-5, rtol=0)
    assert 0.5 < backend.train_step(batch, WeightedNLL())["routes_flipped"].value < 0.9
    assert float((backend.get_logprobs(batch) - wanted).abs().max()) > 1e-3, "the adapters learn"
    backend.shutdown()
    batch, found = batch.with_tokens(**{ROUTES: torch.cat(own).to(torch.int16)}), []
    for replay in (False, True):
        backend = trainer(qwen, replay=replay, policy=lora)
        backend.train_step(batch, WeightedNLL())
        found.append(exported(backend))
        backend.shutdown()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_bfloat16_takes_the_recorded_experts(qwen: Path) -> None:
    batch, model = routed_batch(), load_reference(qwen)
    wanted, low = by_hand(model, batch).detach(), {"precision": "bfloat16"}
    gaps = []
    for replay in (True, False):
        backend = trainer(qwen, replay=replay, policy=low)
        gaps.append(float((backend.get_logprobs(batch) - wanted).abs().mean()))
        backend.shutdown()
    assert gaps[0] < 0.01 < gaps[1] / 10, gaps


def test_a_batch_without_routes_or_with_those_of_another_model_is_refused(qwen: Path, raises: Raises) -> None:
    batch = TokenBatch.from_sequences([[5, 6]], [[False, True]]).with_tokens(advantages=torch.ones(2))
    backend, routed = trainer(qwen), routed_batch()
    with raises(UsageError, "routes"):
        backend.train_step(batch, WeightedNLL())
    with raises(BackendError, "routes", 1):
        backend.get_logprobs(routed.with_tokens(**{ROUTES: routed[ROUTES][:, :1]}))
    backend.shutdown()


@pytest.mark.parametrize("architecture", only("mixtral", of=MEGATRON_MIXTURES))
def test_a_float32_trainer_agrees_with_a_bfloat16_sampler_on_every_expert(architecture: str, tmp_path: Path) -> None:
    folder = mixture(tmp_path, architecture)
    made = PolicyConfig(model_name=str(folder), precision="bfloat16", max_sequence_tokens=128)
    sampler = HFGeneration(GenerationConfig(), made, WorkerContext(), None, HFGenerationConfig())
    asked = SamplingParams(max_new_tokens=48, ignore_eos=True, routes=True)
    requests = [GenerationRequest(prompt, asked, tuple(range(8))) for prompt in PROMPTS]
    batch = TokenBatch.from_samples(samples_of(requests, sampler.generate(requests)), [1.0] * 24)
    sampler.shutdown()
    gaps, flipped = {}, None
    for replay in (False, True):
        backend = trainer(folder, replay=replay, policy={"microbatch_tokens": 512})
        error = (backend.get_logprobs(batch) - batch["generation_logprobs"])[batch.mask].abs()
        gaps[replay] = float(error.mean()), float(error.max())
        flipped = backend.train_step(batch, WeightedNLL()).get("routes_flipped")
        backend.shutdown()
    assert flipped is not None
    assert 0 < flipped.value < 0.1, "some tokens would have gone elsewhere"
    assert gaps[True][0] < gaps[False][0] / 1.5
    assert gaps[True][1] < gaps[False][1] / 3
