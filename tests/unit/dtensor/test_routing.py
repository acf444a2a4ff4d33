"""Replayed routes: the sampler's choice of experts, weighed by the trainer's own routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.errors import BackendError, UsageError
from nemorl_dtensor.model import load_model
from nemorl_dtensor.routing import obstacle
from nemorl_tensors import TokenBatch
from nemorl_tensors.batch import ROUTES
from nemorl_testing.models import load_reference
from recorded_messages import Raises
from routed_mixtures import (
    CHOSEN,
    EXPERTS,
    LAYERS,
    MIXTURES,
    by_hand,
    exported,
    in_memory,
    mixture,
    own_routes,
    routed_batch,
    trainer,
)

LAYOUTS = ("padded", "packed", "shared")


@pytest.fixture(scope="module", params=MIXTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("qwen"), "qwen3_moe")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_routers_learn_the_gradient_of_a_forward_pass_by_hand_with_the_recorded_experts(
    folder: Path, layout: str, weighted_nll: Any
) -> None:
    batch, model = routed_batch(), load_reference(folder)
    wanted = by_hand(model, batch)
    value, _ = weighted_nll(wanted, batch)
    value.backward()
    backend = trainer(folder, layout=layout, policy={"microbatch_tokens": 40})
    torch.testing.assert_close(backend.get_logprobs(batch), wanted.detach(), atol=2e-5, rtol=0)
    before = exported(backend)
    metrics = backend.train_step(batch, weighted_nll)
    after = exported(backend)
    routers = [name for name in before if name.endswith("gate.weight")]
    assert len(routers) == LAYERS
    gradients = dict(model.named_parameters())
    for name in routers:
        (gradient,) = (each.grad for other, each in gradients.items() if other == in_memory(name))
        assert gradient is not None
        assert gradient.abs().max() > 1e-3, "the router learns"
        # The update shows g / (|g| + 1).
        torch.testing.assert_close(before[name] - after[name], gradient / (gradient.abs() + 1), atol=2e-5, rtol=0)
    assert metrics["loss"].value == pytest.approx(float(value.detach()), abs=1e-5)
    # Experts at random: of 8, the two recorded ones are seldom the router's own.
    assert 0.5 < metrics["routes_flipped"].value < 0.9


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainers_own_routes_change_no_bit(
    folder: Path, layout: str, checkpointing: bool, weighted_nll: Any
) -> None:
    policy = {"activation_checkpointing": checkpointing}
    batch = routed_batch()
    free = trainer(folder, replay=False, layout=layout, policy=policy)
    model = load_reference(folder)
    own = [own_routes(model, ids.tolist()) for ids in batch.token_ids.split(batch.lengths.tolist())]
    batch = batch.with_tokens(**{ROUTES: torch.cat(own).to(torch.int16)})
    bound = trainer(folder, layout=layout, policy=policy)
    assert torch.equal(free.get_logprobs(batch), bound.get_logprobs(batch))
    free.train_step(batch, weighted_nll)
    metrics = bound.train_step(batch, weighted_nll)
    assert metrics["routes_flipped"].value == 0
    theirs, ours = exported(free), exported(bound)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_recomputed_activations_go_where_the_first_pass_went_and_count_once(qwen: Path, weighted_nll: Any) -> None:
    batch = routed_batch()
    plain, recomputing = (
        trainer(qwen, layout="padded", policy={"activation_checkpointing": each, "microbatch_tokens": 30})
        for each in (False, True)
    )
    first, second = (each.train_step(batch, weighted_nll) for each in (plain, recomputing))
    assert first["routes_flipped"] == second["routes_flipped"]
    # Fed are all tokens but the last of each sequence: 12 + 10 + 13 + 8 + 12 + 5 = 60, in 2 layers, 2 experts each.
    assert first["routes_flipped"].count == 60 * LAYERS * CHOSEN
    theirs, ours = exported(plain), exported(recomputing)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_one_other_expert_of_one_token_is_one_flipped_choice(qwen: Path, weighted_nll: Any) -> None:
    batch = TokenBatch.from_sequences([[5, 6, 7, 8]], [[False, True, True, True]])
    batch = batch.with_tokens(advantages=torch.ones(4))
    own = own_routes(load_reference(qwen), [5, 6, 7, 8])
    other = own.clone()
    other[1, 0, 1] = next(each for each in range(EXPERTS) if each not in own[1, 0])
    backend = trainer(qwen)
    # Three tokens are fed: 3 * 2 layers * 2 experts = 12 choices. The second layer sees another input from token 1 on,
    # but its choices are its own of before, so the share is of both layers' routers as they score then.
    flipped = backend.train_step(batch.with_tokens(**{ROUTES: other.to(torch.int16)}), weighted_nll)["routes_flipped"]
    assert flipped.count == 12
    assert flipped.total >= 1
    swapped = own.flip(-1).to(torch.int16)  # the same experts in the other order: no choice differs
    fresh = trainer(qwen)
    assert fresh.train_step(batch.with_tokens(**{ROUTES: swapped}), weighted_nll)["routes_flipped"].total == 0


def test_tokens_without_routes_choose_by_themselves(qwen: Path) -> None:
    batch = routed_batch(known=0.0)
    assert (batch[ROUTES] < 0).all()
    bound, free = trainer(qwen), trainer(qwen, replay=False)
    assert torch.equal(bound.get_logprobs(batch), free.get_logprobs(batch))
    some = routed_batch(known=0.5)
    assert not torch.equal(bound.get_logprobs(some), free.get_logprobs(some))


def test_the_reference_and_what_follows_choose_by_themselves(qwen: Path) -> None:
    batch = routed_batch()
    lora = {"lora": {"rank": 2}}
    bound = trainer(qwen, reference=True, policy=lora)
    free = trainer(qwen, replay=False, reference=True, policy=lora)
    assert not torch.equal(bound.get_logprobs(batch), free.get_logprobs(batch))
    assert torch.equal(bound.get_logprobs(batch, "reference"), free.get_logprobs(batch, "reference"))
    bare = TokenBatch(batch.token_ids, batch.lengths, batch.mask, batch.loss_weights)
    assert torch.equal(bound.get_logprobs(bare), free.get_logprobs(bare)), "nothing is left of the pass before"


def test_a_batch_without_routes_is_not_trained_on(qwen: Path, weighted_nll: Any, raises: Raises) -> None:
    batch = TokenBatch.from_sequences([[5, 6]], [[False, True]]).with_tokens(advantages=torch.ones(2))
    with raises(UsageError, "routes"):
        trainer(qwen).train_step(batch, weighted_nll)


def test_routes_of_another_model_are_refused(qwen: Path, raises: Raises) -> None:
    batch = routed_batch()
    with raises(BackendError, "routes", 1):
        trainer(qwen).get_logprobs(batch.with_tokens(**{ROUTES: batch[ROUTES][:, :1]}))


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),  # two rounds of a largest score, no topk
        ("deepseek_v2", {**MIXTURES["deepseek_v3"], "topk_method": "group_limited_greedy", "num_hidden_layers": 2}),
        ("llama", {}),
    ],
)
def test_models_whose_choice_cannot_be_replaced_are_refused_by_name(
    architecture: str, sizes: dict[str, Any], tmp_path: Path, raises: Raises
) -> None:
    from nemorl.config import PolicyConfig
    from nemorl_rl.models.tiny import write_tiny_model

    write_tiny_model(tmp_path, architecture=architecture, **sizes)
    model = load_model(PolicyConfig(model_name=str(tmp_path), init="random"))
    assert obstacle(model)
    with raises(BackendError, type(model).__name__, "router.replay"):
        trainer(tmp_path, policy={"init": "random"})
