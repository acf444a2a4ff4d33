"""A client's data as a batch: its layout by hand, damaged data, and log-probs and gradients of a real model.

# n = positions of one datum, N = tokens of all sequences of a batch, K = target tokens at each position
"""

from __future__ import annotations

import doctest
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.errors import UsageError
from nemorl.metrics import values
from nemorl.resources.worker import WorkerContext
from nemorl_agents.tinker import batches
from nemorl_agents.tinker.batches import ClientBatch, client_batch
from nemorl_agents.tinker.losses import LOSSES, loss_named
from nemorl_agents.tinker.models import Datum
from nemorl_dtensor import DTensorConfig
from nemorl_dtensor.model import load_model
from nemorl_dtensor.training import DTensorBackend
from nemorl_rl.models.tiny import write_tiny_model
from recorded_messages import Raises
from torch import Tensor
from transformers import AutoModelForCausalLM

VOCABULARY = 80
CROSS_ENTROPY = loss_named("cross_entropy")
SAMPLED = loss_named("importance_sampling")


def shifted(tokens: Sequence[int], **fields: Sequence[float]) -> Datum:
    """The data of SFT and RL: each position predicts the token that follows."""
    return datum(tokens[:-1], tokens[1:], **fields)


def datum(tokens: Sequence[int], targets: Any, **fields: Any) -> Datum:
    numbers = {name: torch.tensor(values, dtype=torch.float32) for name, values in fields.items()}
    return Datum(tuple(tokens), {"target_tokens": torch.tensor(targets, dtype=torch.int64), **numbers})


def made_of(*data: Datum, loss: str = "cross_entropy") -> ClientBatch:
    return client_batch(data, loss_named(loss), vocabulary=VOCABULARY)


def test_the_examples_in_docstrings_are_true() -> None:
    assert doctest.testmod(batches).attempted > 0
    assert doctest.testmod(batches).failed == 0


# Layout


def test_a_datum_is_its_input_and_its_last_target() -> None:
    made = made_of(
        shifted([5, 6, 7], logprobs=[-0.1, -0.2], advantages=[1.0, -2.0]),
        shifted([8, 9], logprobs=[-0.3], advantages=[0.0]),
        loss="importance_sampling",
    )
    batch = made.batch
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.lengths.tolist() == [3, 2]
    # Position i of a client stands at index i + 1, and each is scored: also where the advantage is 0.
    assert batch.mask.tolist() == [False, True, True, False, True]
    assert batch.loss_weights.tolist() == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert batch["advantages"].tolist() == [0.0, 1.0, -2.0, 0.0, 0.0]
    assert batch["logprobs"].tolist() == pytest.approx([0.0, -0.1, -0.2, 0.0, -0.3])
    assert batch.temperature == 1.0
    assert made.loss == SAMPLED
    assert "candidate_ids" not in batch
    back = made.logprobs(torch.tensor([9.0, -1.0, -2.0, 9.0, -3.0]))
    assert [each.tolist() for each in back] == [[-1.0, -2.0], [-3.0]]


def test_targets_that_do_not_follow_are_named_to_the_model() -> None:
    # The second position wants 11 where 7 follows: the model still reads 5, 6, 7.
    made = made_of(datum([5, 6, 7], [6, 11, 12], weights=[1.0, 2.0, 3.0]), shifted([8, 9]))
    batch = made.batch
    assert batch.token_ids.tolist() == [5, 6, 7, 12, 8, 9]
    assert batch["candidate_ids"].tolist() == [[0], [6], [11], [12], [0], [9]]
    assert batch["weights"].tolist() == [[0.0], [1.0], [2.0], [3.0], [0.0], [1.0]]
    assert made.loss.requires == {"weights", "candidate_ids"}
    back = made.logprobs(torch.arange(6.0)[:, None])
    assert [each.tolist() for each in back] == [[1.0, 2.0, 3.0], [5.0]]


def test_data_of_different_numbers_of_targets_share_a_batch() -> None:
    made = made_of(
        datum([5, 6], [[6, 1, 2], [7, 3, 4]], weights=[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]),
        datum([5, 6], [[6, 1], [7, 3]]),  # without weights: 1 for each target, and 0 for what pads them
        shifted([8, 9]),
        datum([4], [[3]], weights=[[2.0]]),
    )
    batch = made.batch
    assert batch["candidate_ids"].tolist() == [
        [0, 0, 0], [6, 1, 2], [7, 3, 4], [0, 0, 0], [6, 1, 0], [7, 3, 0], [0, 0, 0], [9, 0, 0], [0, 0, 0], [3, 0, 0],
    ]  # fmt: skip
    assert batch["weights"].tolist() == [
        [0, 0, 0], [0.5, 0.25, 0.25], [1, 0, 0], [0, 0, 0], [1, 1, 0], [1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0],
        [2, 0, 0],
    ]  # fmt: skip
    back = made.logprobs(torch.arange(30.0).view(10, 3))
    assert [tuple(each.shape) for each in back] == [(2, 3), (2, 2), (1,), (1, 1)]
    assert [each.tolist() for each in back] == [
        [[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]], [[12.0, 13.0], [15.0, 16.0]], [21.0], [[27.0]],
    ]  # fmt: skip


def test_bounds_of_a_datum_stand_beside_those_of_the_loss() -> None:
    fields = {"logprobs": [-0.1], "advantages": [1.0]}
    made = made_of(shifted([5, 6], **fields, clip_high_threshold=[1.5]), shifted([5, 6], **fields), loss="ppo")
    assert made.batch["clip_high_threshold"][made.batch.mask].tolist() == pytest.approx([1.5, 1.2])
    assert made.batch["clip_low_threshold"][made.batch.mask].tolist() == pytest.approx([0.8, 0.8])


def test_whole_numbers_are_taken_for_numbers() -> None:
    made = made_of(Datum((5, 6), {"target_tokens": torch.tensor([6, 7]), "weights": torch.tensor([0, 2])}))
    assert made.batch["weights"].tolist() == [0.0, 0.0, 2.0]
    assert made.batch["weights"].dtype == torch.float32


# Damaged data

GOOD = shifted([1, 2, 3], logprobs=[-1.0, -1.0], advantages=[1.0, 1.0])


def damaged(**fields: Any) -> Datum:
    """The good datum with other fields; None: without one."""
    found = {**GOOD.fields, **fields}
    return Datum(GOOD.token_ids, {name: value for name, value in found.items() if value is not None})


@pytest.mark.parametrize(
    ("bad", "facts"),
    [
        (Datum((), {}), ["data[1]"]),
        (Datum((1, VOCABULARY), GOOD.fields), ["data[1].token_ids[1]", VOCABULARY, VOCABULARY - 1]),
        (Datum((1, -1), GOOD.fields), ["data[1].token_ids[1]", "-1"]),
        (Datum((1, 2, 3), GOOD.fields), ["data[1].target_tokens", "[2]", "3"]),
        (damaged(target_tokens=None), ["data[1]", "target_tokens"]),
        (damaged(target_tokens=torch.tensor([2, 99])), ["data[1].target_tokens[1]", "99"]),
        (damaged(target_tokens=torch.tensor([2.0, 3.0])), ["data[1].target_tokens", "float32", "int64"]),
        (damaged(target_tokens=torch.tensor(2)), ["data[1].target_tokens"]),
        (damaged(target_tokens=torch.tensor([[2], [3]])), ["data[1].target_tokens", "[2, 1]"]),
        (damaged(advantages=None), ["data[1]", "advantages"]),
        (damaged(advantages=torch.tensor([1.0])), ["data[1].advantages", "[1]", "[2]"]),
        (damaged(advantages=torch.tensor([[1.0], [1.0]])), ["data[1].advantages", "[2, 1]", "[2]"]),
        (damaged(advantages=torch.tensor([1.0, math.nan])), ["data[1].advantages[1]", "nan"]),
        (damaged(advantages=torch.tensor([1.0, math.inf])), ["data[1].advantages[1]", "inf"]),
        (damaged(advantages=torch.tensor([True, False])), ["data[1].advantages", "bool", "float32"]),
        (damaged(advantages=torch.tensor([1.0, 2.0]).to(torch.complex64)), ["data[1].advantages", "complex64"]),
        (damaged(logprobs=torch.tensor([-math.inf, 0.0])), ["data[1].logprobs[0]", "-inf"]),
        (damaged(mask=torch.tensor([1.0, 1.0])), ["data[1]", "mask", "advantages"]),
        (damaged(advantage=torch.tensor([1.0, 1.0])), ["data[1]", "advantage", "advantages"]),
    ],
)
def test_damaged_data_are_refused_by_datum_and_field(bad: Datum, facts: list[object], raises: Raises) -> None:
    with raises(UsageError, *facts):
        client_batch([GOOD, bad], SAMPLED, vocabulary=VOCABULARY)


@pytest.mark.parametrize(
    ("bad", "facts"),
    [
        (datum([1, 2], [[2, 3], [3, 99]]), ["data[0].target_tokens[1][1]", "99"]),
        (datum([1, 2], [[2, 3], [3, 4]], weights=[1.0, 1.0]), ["data[0].weights", "[2]", "[2, 2]"]),
        (datum([1, 2], [[2, 3], [3, 4]], weights=[[1.0, 1.0], [math.nan, 1.0]]), ["data[0].weights[1][0]", "nan"]),
        (datum([1, 2], [[], []]), ["data[0].target_tokens", "[2, 0]"]),
        (datum([1, 2], [[[2]], [[3]]]), ["data[0].target_tokens", "[2, 1, 1]"]),
    ],
)
def test_damaged_soft_targets_are_refused(bad: Datum, facts: list[str], raises: Raises) -> None:
    with raises(UsageError, *facts):
        client_batch([bad], CROSS_ENTROPY, vocabulary=VOCABULARY)


def test_no_data_are_refused(raises: Raises) -> None:
    with raises(UsageError):
        client_batch([], CROSS_ENTROPY, vocabulary=VOCABULARY)


def test_bounds_of_a_datum_are_ratios_around_one(raises: Raises) -> None:
    fields = {"logprobs": [-1.0], "advantages": [1.0]}
    with raises(UsageError, "data[0].clip_high_threshold[0]", "0.25", "1"):
        made_of(shifted([1, 2], **fields, clip_high_threshold=[0.25]), loss="ppo")


# A real model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 whose log-probs are far from uniform."""
    torch.set_num_threads(1)
    bare = write_tiny_model(tmp_path_factory.mktemp("bare"), hidden_size=32, intermediate_size=64)
    model = load_model(PolicyConfig(model_name=str(bare), init="random"), seed=7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    path = tmp_path_factory.mktemp("spread")
    model.save_pretrained(path)
    return path


def passed(folder: Path, made: ClientBatch, layout: str) -> tuple[list[Tensor], dict[str, float]]:
    """Log-probs and metrics of one optimizer step, cut into small microbatches."""
    fields = {"model_name": str(folder), "optimizer": {"lr": 1e-9}, "max_grad_norm": 1e9, "microbatch_tokens": 24}
    backend = DTensorConfig(layout=layout).build(PolicyConfig(**fields), WorkerContext(seed=1), reference=False)
    assert isinstance(backend, DTensorBackend)
    metrics, outputs = backend.forward_backward(made.batch, made.loss)
    said = values({**metrics, **backend.optimizer_step()})
    backend.shutdown()
    return made.logprobs(outputs), said


def plain_logprobs(model: Any, data: Sequence[Datum]) -> list[Tensor]:
    """What transformers says of each datum by itself: at position i of its input, of its targets."""
    found = []
    for each in data:
        targets = each.fields["target_tokens"]
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([each.token_ids])).logits[0].float(), -1)
        found.append(logprobs.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape))
    return found


def drawn(n: int, *, columns: int | None = None, follows: bool = True, seed: int = 0) -> Datum:
    generator = torch.Generator().manual_seed(100 * seed + n)
    tokens = torch.randint(VOCABULARY, (n + 1,), generator=generator)
    targets = tokens[1:] if follows else torch.randint(VOCABULARY, (n,), generator=generator)
    if columns is not None:
        targets = torch.randint(VOCABULARY, (n, columns), generator=generator)
    weights = torch.randn(targets.shape, generator=generator) * (torch.rand(targets.shape, generator=generator) > 0.3)
    return Datum(tuple(tokens[:-1].tolist()), {"target_tokens": targets, "weights": weights})


def continued(each: Datum, n: int) -> Datum:
    """Another datum whose input begins with the whole input of one."""
    rest = drawn(n, seed=5)
    targets = torch.cat(
        [each.fields["target_tokens"][:-1], torch.tensor(rest.token_ids[:1]), rest.fields["target_tokens"]]
    )
    return Datum(each.token_ids + rest.token_ids, {"target_tokens": targets, "weights": torch.ones(len(targets))})


GROUP = [drawn(20, seed=1), drawn(20, seed=1, follows=False)]
KINDS = {
    "followers of one prompt": [GROUP[0], *(continued(GROUP[0], n) for n in (6, 9))],
    "others of one prompt": [GROUP[1], *(continued(GROUP[1], n) for n in (6, 9))],
    "followers": [drawn(n) for n in (9, 1, 30, 4, 17)],
    "others": [drawn(n, follows=False) for n in (9, 1, 30, 4, 17)],
    "mixed": [drawn(9), drawn(1, columns=3), drawn(30, follows=False), drawn(4, columns=1), drawn(17, columns=5)],
}


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_model_says_what_transformers_does(kind: str, layout: str, folder: Path) -> None:
    data = KINDS[kind]
    made = client_batch(data, CROSS_ENTROPY, vocabulary=VOCABULARY)
    assert made.loss.candidates == ("followers" not in kind)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = plain_logprobs(model, data)
    assert torch.cat([each.flatten() for each in expected]).std() > 0.5
    found, metrics = passed(folder, made, layout)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), atol=5e-6, rtol=5e-6)
    loss = -torch.stack(
        [(each.fields["weights"] * said).sum() for each, said in zip(data, expected, strict=True)]
    ).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]).norm()
    assert metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_a_loss_is_the_same_by_tokens_and_by_names(name: str, folder: Path) -> None:
    """One position has no advantage, and a sampler that agrees: which target it has is of no account."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(3)
    followers = [drawn(9), drawn(12)]
    others = [Datum(each.token_ids, {"target_tokens": each.fields["target_tokens"].clone()}) for each in followers]
    others[0].fields["target_tokens"][4] = 79 - others[0].fields["target_tokens"][4]
    noise = [0.3 * torch.randn(n, generator=generator) for n in (9, 12)]
    advantages = [torch.randn(n, generator=generator) for n in (9, 12)]
    noise[0][4] = advantages[0][4] = 0.0

    def made_from(data: list[Datum]) -> ClientBatch:
        fields = [
            {"target_tokens": each.fields["target_tokens"], "logprobs": p.detach() + away, "advantages": a}
            for each, p, away, a in zip(data, plain_logprobs(model, data), noise, advantages, strict=True)
        ]
        if name == "gspo":
            fields = [{**each, "sequence_ratio_mask": (each["advantages"] != 0).float()} for each in fields]
        return client_batch(
            [Datum(each.token_ids, found) for each, found in zip(data, fields, strict=True)],
            loss_named(name),
            vocabulary=VOCABULARY,
        )

    plain, named = made_from(followers), made_from(others)
    assert (plain.loss.candidates, named.loss.candidates) == (False, True)
    (_, first), (logprobs, second) = (passed(folder, made, "padded") for made in (plain, named))
    told = [metric for metric in first if ":" in metric] + ["loss", "grad_norm"]
    assert second["grad_norm"] > 0.1
    assert [second[metric] for metric in told] == pytest.approx([first[metric] for metric in told], rel=1e-4, abs=1e-5)
    for ours, theirs in zip(logprobs, plain_logprobs(model, others), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), atol=5e-6, rtol=5e-6)
