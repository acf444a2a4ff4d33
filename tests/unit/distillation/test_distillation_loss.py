"""Distillation losses by hand, at their limits, and against the divergences that they estimate."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from nemorl.metrics import values
from nemorl_distillation.loss import TopKDistillationLoss, jensen_shannon, kl_divergence, with_tail
from nemorl_distillation.reverse_kl import SampledReverseKLLoss
from nemorl_tensors import TokenBatch
from torch import Tensor

NAN = float("nan")
STUDENT, TEACHER = (0.5, 0.2), (0.6, 0.3)
"""Probabilities of two tokens; 0.3 and 0.1 are left for others."""


def batch_of(teacher: Tensor, **fields: Tensor) -> TokenBatch:
    """One sequence: a prompt token, then a response token for each row of ``teacher``."""
    count = len(teacher) + 1
    batch = TokenBatch.from_sequences([[1] * count], [[False] + [True] * (count - 1)])
    padding = torch.full_like(teacher[:1], NAN)
    return batch.with_tokens(teacher_logprobs=torch.cat([padding, teacher]), **fields)


def topk_batch(teacher: Tensor) -> TokenBatch:
    return batch_of(teacher, candidate_ids=torch.zeros((len(teacher) + 1, teacher.shape[1]), dtype=torch.int64))


def with_prompt(rows: Tensor) -> Tensor:
    return torch.cat([torch.full_like(rows[:1], NAN), rows])


# KL on the teacher's likeliest tokens


@pytest.mark.parametrize(
    ("outside", "forward", "reverse"),
    [
        # 0.6 ln(0.6/0.5) + 0.3 ln(0.3/0.2) + 0.1 ln(0.1/0.3);  0.5 ln(0.5/0.6) + 0.2 ln(0.2/0.3) + 0.3 ln(0.3/0.1)
        ("tail", 0.1211712, 0.1573299),
        # p = (5/7, 2/7), q = (2/3, 1/3): 2/3 ln(14/15) + 1/3 ln(7/6);  5/7 ln(15/14) + 2/7 ln(6/7)
        ("renormalize", 0.0053883, 0.0052376),
        # q = (2/3, 1/3, e^-100): 2/3 ln(4/3) + 1/3 ln(5/3);  0.5 ln(3/4) + 0.2 ln(3/5) + 0.3 (ln 0.3 + 100)
        ("zero", 0.3620633, 29.3928021),
    ],
)
def test_the_loss_is_the_divergence(outside: Any, forward: float, reverse: float) -> None:
    # A second place where both agree adds nothing to the sum and halves the weights.
    student = with_prompt(torch.tensor([STUDENT, (0.75, 0.25)]).log())
    batch = topk_batch(torch.tensor([TEACHER, (0.75, 0.25)]).log())
    mixed = 0.3 * forward + 0.7 * reverse
    for kind, expected in (("forward", forward), ("reverse", reverse), ("mixed", mixed)):
        loss, metrics = TopKDistillationLoss(kind, 0.3, outside)(student, batch)  # type: ignore[arg-type]
        assert float(loss) == pytest.approx(expected / 2, rel=1e-5, abs=2e-6)
        found = values(metrics)
        assert found["forward_kl"] == pytest.approx(forward / 2, rel=1e-5, abs=2e-6)
        assert found["reverse_kl"] == pytest.approx(reverse / 2, rel=1e-5, abs=2e-6)
        assert found["student_topk_mass"] == pytest.approx((0.7 + 1) / 2)
        assert found["teacher_topk_mass"] == pytest.approx((0.9 + 1) / 2)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        # m = (0.55, 0.25, 0.2): KL(q || m) = 0.0375886, KL(p || m) = 0.0293557
        (0.5, 0.0334722),
        # m = (0.51, 0.21, 0.28): 0.1 * (0.6 ln(0.6/0.51) + 0.3 ln(0.3/0.21) + 0.1 ln(0.1/0.28))
        # + 0.9 * (0.5 ln(0.5/0.51) + 0.2 ln(0.2/0.21) + 0.3 ln(0.3/0.28)) = 0.1 * 0.1015519 + 0.9 * 0.0010386
        (0.1, 0.0110899),
    ],
)
def test_a_jensen_shannon_divergence_compares_both_with_their_mixture(beta: float, expected: float) -> None:
    student = with_prompt(torch.tensor([STUDENT]).log())
    loss, metrics = TopKDistillationLoss("jsd", jsd_beta=beta)(student, topk_batch(torch.tensor([TEACHER]).log()))
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    assert values(metrics)["jsd"] == pytest.approx(expected, abs=1e-6)
    assert values(metrics)["forward_kl"] == pytest.approx(0.1211712, abs=1e-6)  # reported whatever is trained


def test_a_jensen_shannon_divergence_is_bounded_and_its_ends_are_the_kls() -> None:
    apart = torch.tensor([[0.0, -90.0]]), torch.tensor([[-90.0, 0.0]])
    assert float(jensen_shannon(*apart, 0.5)) == pytest.approx(math.log(2))
    assert float(kl_divergence(*apart)) == pytest.approx(90)
    student, teacher = (torch.tensor([*part, 1 - sum(part)]).double().log() for part in (STUDENT, TEACHER))
    assert float(jensen_shannon(student, teacher, 1e-6)) / 1e-6 == pytest.approx(0.1211712, rel=1e-4)
    assert float(jensen_shannon(student, teacher, 1 - 1e-6)) / 1e-6 == pytest.approx(0.1573299, rel=1e-4)


def test_the_likelihood_counts_for_given_responses_alone() -> None:
    # Two responses of two tokens, of weight 1/4 each; the first is the dataset's: 0.5 * (2.0 + 4.0) / 4
    batch = TokenBatch.from_sequences([[1] * 3] * 2, [[False, True, True]] * 2).with_tokens(
        candidate_ids=torch.zeros(6, 3, dtype=torch.int64),
        teacher_logprobs=torch.tensor([STUDENT] * 6).log(),
    )
    batch = batch.with_sequences(is_given=torch.tensor([True, False]))
    own = torch.tensor([NAN, -2.0, -4.0, NAN, -8.0, -16.0])
    student = torch.cat([torch.tensor([STUDENT] * 6).log(), own[:, None]], 1).requires_grad_()
    loss, metrics = TopKDistillationLoss(sft_weight=0.5)(student, batch)  # a student that is its teacher
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(0.75, abs=1e-6)
    assert values(metrics)["sft_loss"] == pytest.approx(3.0)
    assert student.grad is not None
    assert student.grad[:, 2].tolist() == [0, -0.125, -0.125, 0, 0, 0]


@pytest.mark.parametrize("outside", ["tail", "renormalize", "zero"])
def test_what_stands_in_masked_slots_reaches_neither_loss_nor_gradient(outside: Any) -> None:
    student = with_prompt(torch.tensor([STUDENT]).log()).requires_grad_()
    loss, _ = TopKDistillationLoss(outside_topk=outside)(student, topk_batch(torch.tensor([TEACHER]).log()))
    loss.backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert torch.equal(student.grad[0], torch.zeros(2))
    assert torch.isfinite(student.grad).all()
    assert student.grad[1].abs().min() > 0


def distributions(vocabulary: int, count: int = 6) -> tuple[Tensor, Tensor]:
    """Logits of a student, with gradient, and log-probs of a teacher."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(count, vocabulary, generator=generator, dtype=torch.float64) * 2
    teacher = torch.log_softmax(torch.randn(count, vocabulary, generator=generator, dtype=torch.float64) * 2, 1)
    return logits.requires_grad_(), teacher


def topk_loss(logits: Tensor, teacher: Tensor, k: int, **options: Any) -> Tensor:
    likeliest = teacher.topk(k, 1)
    student = torch.log_softmax(logits, 1).gather(1, likeliest.indices)
    return TopKDistillationLoss(**options)(with_prompt(student), topk_batch(likeliest.values))[0]


@pytest.mark.parametrize("outside", ["tail", "renormalize"])
@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
def test_with_all_tokens_it_is_the_divergence_over_the_vocabulary(kind: str, outside: str) -> None:
    logits, teacher = distributions(9)
    student = torch.log_softmax(logits, 1)
    forward, reverse = kl_divergence(teacher, student).mean(), kl_divergence(student, teacher).mean()
    exact = {"forward": forward, "reverse": reverse, "mixed": (forward + reverse) / 2}[kind]
    loss = topk_loss(logits, teacher, 9, kl_type=kind, outside_topk=outside)
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=1e-4)
    found, wanted = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (loss, exact))
    assert torch.allclose(found, wanted, atol=1e-4)


def test_the_tail_gives_a_lower_bound_that_rises_with_k() -> None:
    logits, teacher = distributions(40)
    student = torch.log_softmax(logits, 1)
    for kind, exact in (("forward", kl_divergence(teacher, student)), ("reverse", kl_divergence(student, teacher))):
        bounds = [float(topk_loss(logits, teacher, k, kl_type=kind).detach()) for k in (1, 4, 16, 39)]
        assert 0 < bounds[0] < bounds[1] < bounds[2] < bounds[3] <= float(exact.detach().mean()) + 1e-6


@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
def test_gradients_through_the_tail_are_those_of_finite_differences(kind: Any) -> None:
    logits, teacher = distributions(12, count=2)
    assert torch.autograd.gradcheck(lambda given: topk_loss(given, teacher, 3, kl_type=kind), logits)


def test_a_student_equal_to_its_teacher_is_left_alone() -> None:
    _, teacher = distributions(40)
    logits = teacher.detach().clone().requires_grad_()
    for kind in ("forward", "reverse"):
        loss = topk_loss(logits, teacher, 8, kl_type=kind)
        assert float(loss.detach()) == pytest.approx(0, abs=1e-6)
        assert torch.autograd.grad(loss, logits)[0].abs().max() < 1e-6


@pytest.mark.parametrize("outside", ["tail", "renormalize", "zero"])
def test_a_token_that_the_student_does_not_have_counts_as_others(outside: Any) -> None:
    student = torch.tensor([[*STUDENT, 0.1]]).log()  # the third is that of another token: it must not be read
    teacher = torch.tensor([[*TEACHER, 0.05]]).log()
    teacher[0, 2] = -torch.inf
    loss, metrics = TopKDistillationLoss(outside_topk=outside)(with_prompt(student), topk_batch(teacher))
    fewer, expected = TopKDistillationLoss(outside_topk=outside)(
        with_prompt(student[:, :2]), topk_batch(teacher[:, :2])
    )
    assert float(loss) == pytest.approx(float(fewer))
    assert values(metrics) == pytest.approx(values(expected))


def test_a_certain_student_gets_finite_gradients() -> None:
    logits = torch.tensor([[60.0, 0.0, 0.0, 0.0]], requires_grad=True)
    teacher = torch.tensor([[0.2, 0.2, 0.3, 0.3]]).log()
    for kind in ("forward", "reverse"):
        for outside in ("tail", "renormalize", "zero"):
            loss = topk_loss(logits, teacher, 2, kl_type=kind, outside_topk=outside)
            assert torch.isfinite(loss)
            assert torch.isfinite(torch.autograd.grad(loss, logits)[0]).all()


def test_the_tail_is_what_is_left() -> None:
    found = with_tail(torch.tensor([[0.5, 0.2], [0.75, 0.25]]).log()).exp()
    assert found[0].tolist() == pytest.approx([0.5, 0.2, 0.3])
    assert found[1].tolist() == pytest.approx([0.75, 0.25, 1e-6], rel=0.1)


def test_a_batch_without_responses_costs_nothing() -> None:
    batch = topk_batch(torch.tensor([TEACHER]).log())
    silent = replace(batch, mask=torch.zeros_like(batch.mask))
    loss, metrics = TopKDistillationLoss()(with_prompt(torch.tensor([STUDENT]).log()), silent)
    assert float(loss) == 0
    assert values(metrics)["forward_kl"] == 0


# Several teachers

SURE = (0.75, 0.25)


def several(student: Tensor, teachers: Tensor, numbers: Tensor) -> TokenBatch:
    fields = {"candidate_ids": torch.zeros_like(with_prompt(student)).long(), "teacher_ids": with_prompt_ids(numbers)}
    return batch_of(teachers, **fields)


def with_prompt_ids(numbers: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(numbers[:1]), numbers])


def test_divergences_from_several_teachers_are_added_by_weight() -> None:
    # Forward divergences from (0.5, 0.2 | 0.3): from TEACHER 0.1211712 (above); from (0.75, 0.25 | 1e-6)
    # 0.75 ln(0.75/0.5) + 0.25 ln(0.25/0.2) - 1e-6 ln(0.3/1e-6) = 0.3040988 + 0.0557859 - 0.0000126. 2 a + 0.5 b:
    student = torch.tensor([[*STUDENT, *STUDENT]]).log()
    teachers = torch.tensor([[*TEACHER, *SURE]]).log()
    loss, metrics = TopKDistillationLoss("forward", teachers=(("a", 2.0), ("b", 0.5)))(
        with_prompt(student), several(student, teachers, torch.tensor([[0, 1]]))
    )
    assert float(loss) == pytest.approx(2 * 0.1211712 + 0.5 * 0.3598721, abs=1e-5)
    found = values(metrics)
    assert found["forward_kl"] == pytest.approx((0.1211712 + 0.3598721) / 2, abs=1e-5)
    assert found["reverse_kl/a"] == pytest.approx(0.1573299, abs=1e-6)


def test_each_response_may_have_a_teacher_of_its_own() -> None:
    student = torch.tensor([STUDENT, STUDENT]).log()
    teachers = torch.tensor([SURE, TEACHER]).log()
    loss, metrics = TopKDistillationLoss("forward", teachers=(("a", 2.0), ("b", 0.5)))(
        with_prompt(student), several(student, teachers, torch.tensor([[1], [0]]))
    )
    assert float(loss) == pytest.approx((2 * 0.1211712 + 0.5 * 0.3598721) / 2, abs=1e-5)  # of two tokens
    assert values(metrics)["reverse_kl/a"] == pytest.approx(0.1573299, abs=1e-6)


@pytest.mark.parametrize("outside", ["tail", "renormalize", "zero"])
def test_a_place_without_known_tokens_is_not_compared(outside: Any) -> None:
    student = torch.tensor([STUDENT, STUDENT]).log().requires_grad_()
    teachers = torch.tensor([TEACHER, (0.0, 0.0)]).log()
    loss, metrics = TopKDistillationLoss("reverse", outside_topk=outside)(with_prompt(student), topk_batch(teachers))
    one, alone = TopKDistillationLoss("reverse", outside_topk=outside)(
        with_prompt(student[:1].detach()), topk_batch(teachers[:1])
    )
    assert float(loss.detach()) == pytest.approx(float(one) / 2)  # its weight is not given to the other
    assert values(metrics) == pytest.approx({**values(alone), "compared_frac": 0.5})
    gradient = torch.autograd.grad(loss, student)[0]
    assert gradient[0].abs().min() > 0
    assert not gradient[1].any()


# Policy gradient of the sampled reverse KL


def sampled_batch(teacher: list[float], **fields: list[float]) -> TokenBatch:
    given = {name: with_prompt(torch.tensor(column)) for name, column in fields.items()}
    return batch_of(torch.tensor(teacher), **{"generation_logprobs": with_prompt(torch.tensor(teacher)), **given})


def test_a_sampled_token_is_worth_what_the_teacher_finds_it_likelier() -> None:
    policy = with_prompt(torch.tensor([-1.0, -2.0])).requires_grad_()
    loss, metrics = SampledReverseKLLoss()(policy, sampled_batch([-0.5, -5.0]))
    loss.backward()  # type: ignore[no-untyped-call]
    # A = (0.5, -3): loss = -(0.5 - 3) / 2, and its gradient -A / 2
    assert float(loss.detach()) == pytest.approx(1.25)
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0, -0.25, 1.5]
    assert values(metrics)["reverse_kl"] == pytest.approx(1.25)
    assert values(metrics)["probs_ratio"] == 1


def test_what_a_token_is_worth_to_several_teachers_is_added_by_weight() -> None:
    # Teachers of weight 2 and 1 give -0.5 and -2: mean -1, sum of weights 3. A = 2 * 0.5 - 1 = 3 * (-1 + 1) = 0
    policy = with_prompt(torch.tensor([-1.0, -2.0])).requires_grad_()
    batch = sampled_batch([-1.0, -5.0], teacher_weights=[3.0, 0.5])
    loss, metrics = SampledReverseKLLoss(is_weighted=True)(policy, batch)
    assert float(loss.detach()) == pytest.approx(-(3 * 0 + 0.5 * -3) / 2)
    assert values(metrics)["reverse_kl"] == pytest.approx(1.5)  # nats, whatever the weights


@pytest.mark.parametrize(
    ("teacher", "surrogate", "slope"),
    [
        (0.8, 1.2 * math.log(2), 0.0),  # A = ln(0.8/0.4) > 0: the ratio 1.5 is clipped to 1.2, nothing more to gain
        (0.2, -1.5 * math.log(2), -1.5 * math.log(2)),  # A = -ln 2: the pessimistic one is not clipped
    ],
)
def test_later_updates_are_clipped(teacher: float, surrogate: float, slope: float) -> None:
    policy = with_prompt(torch.tensor([math.log(0.6)])).requires_grad_()
    batch = sampled_batch([math.log(teacher)], old_logprobs=[math.log(0.4)])
    loss, _ = SampledReverseKLLoss(on_policy=False)(policy, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(-surrogate)
    assert policy.grad is not None
    assert policy.grad[1].item() == pytest.approx(-slope)


def test_its_expected_gradient_is_that_of_the_reverse_kl() -> None:
    logits, teacher = distributions(9, count=1)
    student = torch.log_softmax(logits, 1)[0]
    exact = torch.autograd.grad(kl_divergence(student[None], teacher).sum(), logits, retain_graph=True)[0]
    # Every token once, with the weight of its probability: the expectation over what is sampled.
    batch = batch_of(teacher[0], generation_logprobs=with_prompt(student.detach()))
    batch = replace(batch, loss_weights=torch.cat([torch.zeros(1), student.detach().exp()]))
    loss, _ = SampledReverseKLLoss()(with_prompt(student), batch)
    found = torch.autograd.grad(loss, logits)[0]
    assert torch.allclose(found, exact, atol=1e-6)


def test_losses_say_what_they_read() -> None:
    assert TopKDistillationLoss().requires == {"candidate_ids", "teacher_logprobs"}
    assert TopKDistillationLoss(teachers=(("a", 2.0),)).requires == {"candidate_ids", "teacher_logprobs", "teacher_ids"}
    assert SampledReverseKLLoss().requires == {"teacher_logprobs", "generation_logprobs"}
    assert SampledReverseKLLoss(on_policy=False).requires == {"teacher_logprobs", "generation_logprobs", "old_logprobs"}
    assert "teacher_weights" in SampledReverseKLLoss(is_weighted=True).requires
