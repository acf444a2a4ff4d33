"""The shared layout says and learns what sequences alone do, whatever they have in common."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nemorl
import pytest
import torch
from batch_metrics import of_the_batch
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl_cli.console import Console
from nemorl_distillation.loss import TopKDistillationLoss
from nemorl_dtensor import DTensorConfig
from nemorl_dtensor.training import DTensorBackend
from nemorl_ppo.loss import PPOLoss
from nemorl_ppo.value_loss import ValueLoss
from nemorl_preference.dpo.sigmoid import SigmoidLoss
from nemorl_preference.rm.loss import BradleyTerryLoss
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_sft.loss import NLLLoss
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.tree_attention import bucketed
from nemorl_tensors.filtering import TokenFilter
from recorded_messages import Raises
from torch import Tensor
from transformers import AutoConfig

from .conftest import Build
from .test_logprobs import architecture

__all__ = ["architecture"]  # a fixture

WINDOWED = {"mistral": "sliding_window", "gemma2": "sliding_attention", "gemma3_text": "sliding_attention"}
"""Of the architectures, those whose attention is not full, and what says so. The others share."""
SHARED, ALONE = {"layout": "shared"}, {"layout": "padded"}
LOGPROBS, GRADIENTS = 5e-6, 5e-6
Draw = Callable[[int], list[int]]


def group(draw: Draw) -> tuple[list[list[int]], list[list[bool]]]:
    prompt = draw(12)
    return [prompt + draw(n) for n in (7, 9, 1, 5)], [[False] * 12 + [True] * n for n in (7, 9, 1, 5)]


def conversation(draw: Draw) -> tuple[list[list[int]], list[list[bool]]]:
    """A prompt, two first turns, of each two second turns after an observation; one ends early, one is there twice."""
    prompt, ids, masks = draw(6), [], []
    for _ in range(2):
        turn = prompt + draw(5) + draw(3)
        for _ in range(2):
            ids.append(turn + draw(4))
            masks.append([False] * 6 + [True] * 5 + [False] * 3 + [True] * 4)
        ids.append(turn[:11])
        masks.append([False] * 6 + [True] * 5)
    return [*ids, list(ids[0])], [*masks, list(masks[0])]


def mixed(draw: Draw) -> tuple[list[list[int]], list[list[bool]]]:
    """Two groups, a tree, a stranger, one token alone, the same tokens trained on in other places, nothing scored."""
    ids, masks = [
        one + two + three for one, two, three in zip(group(draw), group(draw), conversation(draw), strict=True)
    ]
    return (
        [*ids, draw(8), draw(1), ids[0], ids[1]],
        [*masks, [True] * 8, [True], [t % 2 == 0 for t in range(19)], [False] * 21],
    )


def batch_of(build: Callable[[Draw], Any], *, width: int = 1, seed: int = 0) -> TokenBatch:
    """The sequences, in random order of their units, with every field a loss may read."""
    random_ids = random.Random(seed)
    ids, masks = build(lambda count: [random_ids.randrange(8, 80) for _ in range(count)])
    units = list(range(len(ids) // width))
    random_ids.shuffle(units)
    order = [unit * width + i for unit in units for i in range(width)]
    batch = TokenBatch.from_sequences(
        [ids[i] for i in order], [masks[i] for i in order], temperature=0.8, sequences_per_group=width
    )
    generator = torch.Generator().manual_seed(seed)
    fields = {name: torch.randn(batch.num_tokens, generator=generator) for name in ("advantages", "returns", "noise")}
    old = torch.rand(batch.num_tokens, generator=generator) - 4.5
    names = ("old_logprobs", "reference_logprobs", "generation_logprobs", "old_values")
    return batch.with_tokens(**fields, **{name: old + 0.1 * index for index, name in enumerate(names)})


def pairs(draw: Draw) -> tuple[list[list[int]], list[list[bool]]]:
    """Preferences, two of them on one prompt; responses begin alike."""
    first, second = draw(10), draw(6)
    ids = []
    for prompt in (first, second, first):
        start = draw(3)
        ids += [prompt + start + draw(5), prompt + start + draw(8)]
    return ids, [[False] * (len(p) - (8 if i % 2 == 0 else 11)) + [True] * (8 if i % 2 == 0 else 11)
                 for i, p in enumerate(ids)]  # fmt: skip


def gradients(backend: DTensorBackend, batch: TokenBatch, loss: Any) -> tuple[Tensor, dict[str, float]]:
    """Of one step, all parameters in one tensor; and its metrics but those of the work that it took."""
    backend.clear_gradients()
    metrics, _ = backend.forward_backward(batch, loss)
    masters = backend._optimizer._masters.values()
    found = torch.cat([master.grad.flatten().double() for master in masters if master.grad is not None])
    metrics = {**metrics, **backend.optimizer_step()}
    return found, {name: metric.value for name, metric in of_the_batch(metrics).items()}


def expect_equal(shared: DTensorBackend, alone: DTensorBackend, batch: TokenBatch, loss: Any) -> None:
    """Gradient and metrics of both are the same, and tokens were shared."""
    found, found_metrics = gradients(shared, batch, loss)
    wanted, wanted_metrics = gradients(alone, batch, loss)
    assert float(wanted.norm()) > 0
    assert float((found - wanted).norm()) <= GRADIENTS * float(wanted.norm())
    assert found_metrics.pop("tree_ratio") > 1.2
    assert wanted_metrics.pop("tree_ratio") == 1.0
    assert found_metrics == pytest.approx(wanted_metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("make", [group, conversation, mixed], ids=lambda make: make.__name__)
def test_log_probs_are_those_of_sequences_alone(make: Any, build: Build) -> None:
    batch = batch_of(make)
    alone = build(options=ALONE, microbatch_tokens=1).get_logprobs(batch)
    for tokens in (1, 30, 100_000):
        shared = build(options=SHARED, microbatch_tokens=tokens).get_logprobs(batch)
        torch.testing.assert_close(shared, alone, atol=LOGPROBS, rtol=0)


def with_candidates(batch: TokenBatch, keep: int = 3) -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(8, 80, (batch.num_tokens, keep), generator=generator)
    teacher = torch.log_softmax(torch.randn((batch.num_tokens, keep + 1), generator=generator), 1)[:, :keep]
    return batch.with_tokens(candidate_ids=ids, teacher_logprobs=teacher)


def with_pairs(batch: TokenBatch) -> TokenBatch:
    reference = torch.linspace(-30, -20, len(batch))
    return batch.with_sequences(reference_response_logprobs=reference, margins=torch.zeros(len(batch)))


LOSSES: dict[str, tuple[Any, Callable[[], TokenBatch]]] = {
    "grpo": (ClippedPolicyGradientLoss(kl_penalty=0.1), lambda: batch_of(mixed)),
    "ppo": (PPOLoss(kl_penalty=0.1), lambda: batch_of(conversation)),
    "sft": (NLLLoss(), lambda: batch_of(mixed)),
    "dpo": (SigmoidLoss(beta=0.1), lambda: with_pairs(batch_of(pairs, width=2))),
    "distillation": (TopKDistillationLoss("forward"), lambda: with_candidates(batch_of(mixed))),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tokens", [40, 100_000])
def test_every_loss_has_the_gradient_of_sequences_alone(name: str, tokens: int, build: Build) -> None:
    loss, make = LOSSES[name]
    shared, alone = (build(options=options, microbatch_tokens=tokens) for options in (SHARED, ALONE))
    expect_equal(shared, alone, make(), loss)


@pytest.mark.parametrize("filtered", [TokenFilter(top_k=5), TokenFilter(top_p=0.9, beside_whole=True)])
def test_a_truncated_distribution_is_that_of_each_sequence(filtered: TokenFilter, build: Build) -> None:
    batch = replace(batch_of(conversation), keep=filtered)
    found, wanted = (build(options=options).get_logprobs(batch) for options in (SHARED, ALONE))
    assert torch.equal(found.isfinite(), wanted.isfinite())
    kept = wanted.isfinite()
    torch.testing.assert_close(found[kept], wanted[kept], atol=LOGPROBS, rtol=0)


def test_the_likeliest_tokens_and_reference_log_probs_are_the_same(build: Build) -> None:
    batch = batch_of(mixed)
    shared, alone = (build(options=options, reference=True) for options in (SHARED, ALONE))
    (ids, logprobs), (wanted_ids, wanted) = (backend.get_topk_logprobs(batch, 3) for backend in (shared, alone))
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(logprobs, wanted, atol=LOGPROBS, rtol=0)
    found, wanted = (backend.get_logprobs(batch, "reference") for backend in (shared, alone))
    torch.testing.assert_close(found, wanted, atol=LOGPROBS, rtol=0)


def critic(pretrained: Path, options: dict[str, Any]) -> DTensorBackend:
    policy = PolicyConfig(model_name=str(pretrained), max_grad_norm=None)
    backend = DTensorConfig(**options).build(policy, WorkerContext(), reference=False, head="value")
    assert isinstance(backend, DTensorBackend)
    return backend


@pytest.mark.parametrize("name", ["critic", "reward model"])
def test_value_heads_say_and_learn_the_same(name: str, pretrained: Path) -> None:
    batch, loss = batch_of(mixed), ValueLoss(clip=0.2)
    if name == "reward model":
        batch, loss = with_pairs(batch_of(pairs, width=2)), BradleyTerryLoss()
    shared, alone = (critic(pretrained, options) for options in (SHARED, ALONE))
    torch.testing.assert_close(shared.get_values(batch), alone.get_values(batch), atol=LOGPROBS, rtol=0)
    expect_equal(shared, alone, batch, loss)


@pytest.mark.parametrize(
    "policy",
    [{"activation_checkpointing": True}, {"lora": {"rank": 4}}],
    ids=["activation checkpointing", "lora"],
)
def test_checkpointed_activations_and_adapters_learn_the_same(policy: dict[str, Any], build: Build) -> None:
    shared, alone = (build(options=options, **policy) for options in (SHARED, ALONE))
    expect_equal(shared, alone, batch_of(mixed), ClippedPolicyGradientLoss())


def test_every_architecture_shares_or_says_why_not(architecture: Path, build: Build, raises: Raises) -> None:
    batch = batch_of(mixed)
    kind = AutoConfig.from_pretrained(architecture).model_type
    if kind in WINDOWED:
        with raises(BackendError, WINDOWED[kind]):
            build(model_name=str(architecture), options=SHARED)
        assert gradients(build(model_name=str(architecture)), batch, NLLLoss())[1]["tree_ratio"] == 1.0
        return
    shared, alone = (build(model_name=str(architecture), options=options) for options in (SHARED, ALONE))
    torch.testing.assert_close(shared.get_logprobs(batch), alone.get_logprobs(batch), atol=2e-5, rtol=1e-5)
    expect_equal(shared, alone, batch, NLLLoss())


def test_auto_shares_where_it_saves_a_fifth_of_the_tokens(build: Build) -> None:
    backend = build()
    for count, ratio in ((8, 8 * 31 / (20 + 8 * 11)), (1, 1.0)):
        ids = [[9] * 20 + [10 + i, *range(10, 21)] for i in range(count)]
        batch = TokenBatch.from_sequences(ids, [[False] * 20 + [True] * 12] * count)
        assert backend.train_step(batch, NLLLoss())["tree_ratio"].value == pytest.approx(ratio)


def test_a_model_that_does_not_share_remarks_why(build: Build) -> None:
    (remark,) = build(options={"attn_implementation": "eager"}).remarks()
    assert "eager" in remark
    assert build().remarks() == ()


def test_attention_problems_of_similar_size_are_one_call() -> None:
    # A whole sequence of 700 and one of 30; responses of 200 and 190 after 500; two of 10 and 8 after 20.
    lengths, new = [700, 700, 690, 30, 30, 28], [700, 200, 190, 30, 10, 8]
    assert bucketed(lengths, new) == [[0], [3], [1, 2], [4, 5]]
    assert bucketed([60, 40, 20], [10, 10, 10]) == [[0, 1, 2]]  # 3 * 10 * 60 scores are less than another call
    assert bucketed([5, 5], [5, 0]) == [[0]]  # the same sequence twice: computed once
    assert bucketed([], []) == []


def remarks_of(settings: dict[str, Any], rows: list[dict[str, Any]], run_dir: Path) -> list[dict[str, Any]]:
    """Those among the events of a run on these rows, two at a time."""
    whole = {"batch_size": 2, "checkpoint": {"export": False}, "run_dir": str(run_dir), **settings}
    nemorl.load_config(whole).build().fit(rows, console=Console(quiet=True))
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "remark"]


def test_the_reason_is_among_the_events_of_a_run(tiny: Path, tmp_path: Path) -> None:
    settings = {
        "algorithm": "sft",
        "model": str(tiny),
        "max_steps": 1,
        "policy": {"init": "random", "backend": {"name": "dtensor", "attn_implementation": "eager"}},
    }
    (remark,) = remarks_of(settings, [{"prompt": "1+1=", "response": "2"}] * 2, tmp_path / "run")
    assert "eager" in remark["message"]


@pytest.mark.parametrize("algorithm", ["dpo", "sft"])
def test_sequences_that_share_too_little_are_told_of_after_the_first_step(
    algorithm: str, tiny: Path, tmp_path: Path
) -> None:
    settings = {"algorithm": algorithm, "model": str(tiny), "max_steps": 2, "policy": {"init": "random"}}
    rows: list[dict[str, Any]] = [{"prompt": "1+1=", "chosen": "2" * 60, "rejected": "3" * 60}] * 4
    if algorithm == "sft":
        rows = [{"prompt": "1+1=", "response": digit * 60} for digit in "2323"]
    (remark,) = remarks_of(settings, rows, tmp_path / "run")
    assert remark["step"] == 1
    assert "sharing begins above 1.2" in remark["message"]
