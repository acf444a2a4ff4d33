"""Distillation between tokenizers: where texts meet, which tokens are the same, the loss by hand and against GOLD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nemorl
import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.config.load import validate
from nemorl.errors import ConfigError
from nemorl.metrics import values
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_cli.console import Console
from nemorl_distillation import DistillationConfig, OPDConfig
from nemorl_distillation.loss import TopKDistillationLoss
from nemorl_distillation.other_tokens import OtherTokens, beginnings, token_texts
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_tensors import TokenBatch
from nemorl_testing.models import load_reference, plain_logprobs, tiny_model
from other_tokenizers import CORPUS, byte_level, loaded, metaspace, pairs, write_model
from recorded_messages import Raises
from torch import Tensor

STUDENT = pairs("ab+=", [("a", "b")])
TEACHER = pairs("=+abc", [("b", "+"), ("b", "b")])
"""Texts to ids: the student has a 4, b 5, + 6, = 7, ab 8; the teacher = 4, + 5, a 6, b 7, c 8, b+ 9, bb 10."""


# Where tokens begin


@pytest.mark.parametrize("tokens", [byte_level(420), metaspace(150)], ids=["byte level", "metaspace"])
def test_beginnings_cut_a_text_into_what_its_tokens_say(tokens: Any, tmp_path: Path) -> None:
    tokenizer = loaded(tokens, tmp_path)
    for text in CORPUS[:3]:
        ids = tokenizer.encode_observation(text)
        told, places = beginnings(tokenizer, ids)
        assert told == text
        assert (places[0], places[len(text)]) == (0, len(ids))
        for at, index in places.items():
            assert tokenizer.decode(ids[:index]) == text[:at]  # so all before a beginning is whole characters
    assert len(beginnings(tokenizer, tokenizer.encode_observation("🙂🙂"))[1]) == 3  # of eight bytes: two, and the end


def test_a_response_that_ends_within_a_character_has_no_beginning_there(tmp_path: Path) -> None:
    tokenizer = loaded(byte_level(300), tmp_path)
    ids = tokenizer.encode_observation("a🙂")
    assert beginnings(tokenizer, ids[:-1]) == ("a", {0: 0, 1: 1})
    assert beginnings(tokenizer, []) == ("", {0: 0})


# Which tokens are the same


def test_tokens_of_one_text_are_the_same_however_they_are_spelled(tmp_path: Path) -> None:
    one, other = loaded(byte_level(420), tmp_path / "a"), loaded(metaspace(150), tmp_path / "b", eos_token="</s>")
    texts, others = token_texts(one, 10**6), token_texts(other, 10**6)
    assert texts["text", " answer"] == one.inner.get_vocab()["Ġanswer"]
    assert others["text", " answer"] == other.inner.get_vocab()["▁answer"]
    assert texts["end", ""] == one.inner.eos_token_id
    assert others["end", ""] == other.inner.eos_token_id
    shared = set(texts) & set(others)
    assert {("text", "a"), ("text", "+"), ("text", " "), ("text", "\n")} <= shared
    assert not {kind for kind, _ in shared} - {"text", "end", "special"}


def test_ids_beyond_the_model_are_left_out(tmp_path: Path) -> None:
    assert max(token_texts(loaded(byte_level(300), tmp_path), 280).values()) < 280


# Where two texts meet


def between(student: Path, teacher: Path) -> OtherTokens:
    return OtherTokens.between(PolicyConfig(model_name=str(student)), str(teacher))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> OtherTokens:
    folder = tmp_path_factory.mktemp("tokens")
    return between(write_model(folder / "student", STUDENT), write_model(folder / "teacher", TEACHER))


def sampled(reader: OtherTokens, *pieces: int, prompt: str = "a+a=") -> Sample:
    ids = tuple(reader.student.encode_observation(prompt))
    asked = Prompt(0, prompt, ids, row={"prompt": prompt})
    mask = (*(False for _ in ids), *(True for _ in pieces))
    return Sample(asked, (*ids, *pieces), mask, (0.0,) * len(mask), Score(0.0), "", "stop")


def batch_of(samples: Samples) -> TokenBatch:
    return TokenBatch.from_sequences([s.token_ids for s in samples], [s.response_mask for s in samples])


def test_texts_meet_where_a_token_of_each_begins(reader: OtherTokens) -> None:
    # student: ab | + | b | b | <eos>        teacher: a | b+ | bb | <eos>
    # begins   0    2   3   4   5                     0   1    3    5          both: 0, 3, 5
    samples = Samples([sampled(reader, 8, 6, 5, 5, 2), sampled(reader, 4, 6)])
    own, theirs = reader.meet(samples, batch_of(samples))
    assert theirs.batch.lengths.tolist() == [4 + 4, 4 + 3]  # the end is always there to ask
    assert theirs.batch.token_ids.tolist() == [6, 5, 6, 4, 6, 9, 10, 2, 6, 5, 6, 4, 6, 5, 2]  # a + a = …
    assert own.places.tolist() == [4, 6, 8, 13, 14]  # after four tokens of prompt each
    assert theirs.places.tolist() == [4, 6, 7, 12, 13]
    assert own.is_read.tolist() == [False] * 4 + [True] * 5 + [False] * 4 + [True] * 2


def test_of_a_text_that_the_teacher_cannot_write_its_beginning_is_compared(tmp_path: Path) -> None:
    models = write_model(tmp_path / "s", pairs("abx=", [])), write_model(tmp_path / "t", pairs("ab=", []))
    reader = between(*models)
    samples = Samples([sampled(reader, 4, 6, 5, 2, prompt="a=")])  # a x b <eos>: x is unknown to the teacher
    own, _ = reader.meet(samples, batch_of(samples))
    assert (own.places - 2).tolist() == [0, 1]
    assert own.is_read.tolist() == [False, False, True, False, False, False]


def test_what_follows_a_special_token_is_not_compared(reader: OtherTokens) -> None:
    samples = Samples([sampled(reader, 4, 1, 5, 2), sampled(reader, 2), sampled(reader, 1)])  # a <bos> b <eos>
    own, theirs = reader.meet(samples, batch_of(samples))
    assert theirs.batch.lengths.tolist() == [4 + 2, 4 + 1, 4 + 1]
    assert own.places.tolist() == [4, 5, 12, 17]  # what the teacher would have said there, it is asked
    assert own.is_read.nonzero().flatten().tolist() == [4, 12]


def test_of_a_text_without_prompt_the_first_token_is_not_compared(reader: OtherTokens) -> None:
    samples = Samples([sampled(reader, 8, 6, 5, 5, 2, prompt="")])  # ab | + | b | b | <eos>, a | b+ | bb | <eos>
    own, theirs = reader.meet(samples, batch_of(samples))
    assert own.places.tolist() == [2, 4]
    assert theirs.places.tolist() == [2, 3]


class Table:
    """A teacher that always says the same."""

    def __init__(self, probabilities: list[float]) -> None:
        self.logprobs = torch.tensor(probabilities).log()

    def get_topk_logprobs(self, batch: TokenBatch, k: int) -> tuple[Tensor, Tensor]:
        found = self.logprobs.topk(k)
        return found.indices.expand(batch.num_tokens, k), found.values.expand(batch.num_tokens, k)


def test_candidates_are_the_students_ids_at_the_places_of_the_student(reader: OtherTokens) -> None:
    # teacher:      pad bos  eos  unk  =    +    a    b    c    b+   bb
    says = Table([0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.3, 0.2, 0.0, 0.25, 0.15])
    samples = Samples([sampled(reader, 8, 6, 5, 5, 2)])
    found = reader.candidates(says, samples, batch_of(samples), 5)  # type: ignore[arg-type]
    assert found.compared.nonzero().flatten().tolist() == [4, 6, 8]
    known = found.logprobs[4] > -torch.inf
    assert found.ids[4][known].tolist() == [4, 5, 2]  # a, b and the end; b+ and bb are not the student's
    assert found.logprobs[4][known].exp().tolist() == pytest.approx([0.3, 0.2, 0.1])
    assert found.uncommon[4][~known].exp().tolist() == pytest.approx([0.25, 0.15])
    assert bool((found.logprobs[5] == -torch.inf).all())
    assert bool((found.uncommon[5] == -torch.inf).all())
    assert reader.lacks.nonzero().flatten().tolist() == [8]  # ab


# The loss

GOLD_STUDENT = [[0.4, 0.2, 0.25, 0.1, 0.05], [0.1, 0.3, 0.05, 0.25, 0.3]]
"""Probabilities of a, b, ab, <eos>, ba at two places."""
GOLD_TEACHER = [[0.3, 0.35, 0.05, 0.2, 0.06, 0.04], [0.25, 0.15, 0.3, 0.02, 0.18, 0.10]]
"""Of b, a, <eos>, abc, c, bb."""
GOLD_MATCHED = {"forward": 0.0550910, "reverse": 0.0051019}
GOLD_UNMATCHED = 0.145
"""What ``ULDLoss._compute_hybrid_uld_loss`` of TRL 1.16.0 says of these tables (beta 0 and 1, both weights 1)."""
TAIL = {"forward": -0.0231226, "reverse": 0.0269764}
"""The outcome that GOLD does not have, any other token: 0.3 and 0.3, then 0.35 and 0.3. (0.3 ln(0.3/0.35)) / 2 and
(0.35 ln(0.35/0.3)) / 2."""


def gold_batch() -> tuple[Tensor, TokenBatch]:
    """Candidates of a teacher's six tokens, then the student's five, in one response of two tokens."""
    student, teacher = torch.tensor(GOLD_STUDENT), torch.tensor(GOLD_TEACHER)
    ids = torch.tensor([1, 0, 3, 0, 0, 0])  # b, a, <eos>; the others mean nothing
    is_known = torch.tensor([True, True, True, False, False, False])
    own = torch.cat([student, torch.zeros(2, 1)], 1)
    empty = torch.zeros(1, 6)
    batch = TokenBatch.from_sequences([[9, 9, 9]], [[False, True, True]]).with_tokens(
        candidate_ids=torch.zeros(3, 12, dtype=torch.int64),
        teacher_logprobs=torch.cat([empty, torch.where(is_known, teacher.log(), -torch.inf)]),
        teacher_uncommon=torch.cat([empty, torch.where(is_known, -torch.inf, teacher.log())]),
        student_uncommon=torch.tensor([False, False, True, False, True, False]).expand(3, 6),
    )
    candidates = torch.cat([student[:, ids], own], 1).log()
    return torch.cat([torch.full((1, 12), torch.nan), candidates]), batch


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_the_loss_is_that_of_gold_and_a_tail(kind: Any) -> None:
    candidates, batch = gold_batch()
    loss, metrics = TopKDistillationLoss(kind, uncommon_weight=1.0)(candidates, batch)
    found = values(metrics)
    assert found["uncommon_distance"] == pytest.approx(GOLD_UNMATCHED)  # (|.25-.2| + |.05-.06| + .04 + .19) / 2
    assert found[f"{kind}_kl"] == pytest.approx(GOLD_MATCHED[kind] + TAIL[kind], abs=1e-6)
    assert float(loss) == pytest.approx(found[f"{kind}_kl"] + GOLD_UNMATCHED, abs=1e-6)
    half, _ = TopKDistillationLoss(kind, uncommon_weight=0.5)(candidates, batch)
    assert float(loss - half) == pytest.approx(GOLD_UNMATCHED / 2, abs=1e-6)


def test_gradients_of_the_distance_are_those_of_finite_differences() -> None:
    candidates, batch = gold_batch()
    loss = TopKDistillationLoss("mixed", uncommon_weight=2.0)
    rows = candidates[1:].double().clamp(min=-20).requires_grad_()
    nothing = torch.full((1, 12), torch.nan, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda given: loss(torch.cat([nothing, given]), batch)[0], rows)


# Runs

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1), "response": str(a + 1)} for a in range(8)]
DIGITS = "0123456789+="


def settings(run_dir: Path, student: Path, reads: Path, **changes: Any) -> Any:
    return nemorl.load_config(
        {
            "algorithm": "distillation",
            "model": str(student),
            "teacher": {"model": str(reads), "precision": "float32", "align": "text"},
            "topk": 8,
            "num_prompts_per_step": 4,
            "max_steps": 1,
            "policy": {"optimizer": {"lr": 1e-3}, "max_sequence_tokens": 32},
            "generation": {"max_new_tokens": 4},
            "validation": {"every": 0, "at_start": True, "at_end": False},
            "checkpoint": {"export": False},
            "cluster": {"gpus_per_node": 0},
            "run_dir": str(run_dir),
            **changes,
        }
    )


def fit(config: Any) -> Any:
    return config.build().fit(ROWS, val_dataset=ROWS, console=Console(quiet=True)).metrics


@pytest.mark.slow
def test_with_one_tokenizer_both_ways_are_the_same(tmp_path: Path) -> None:
    student, teacher = tiny_model(num_hidden_layers=1), tiny_model(seed=11)
    by_ids = {"model": str(teacher), "precision": "float32"}
    text = fit(settings(tmp_path / "text", student, teacher))
    ids = fit(settings(tmp_path / "ids", student, teacher, teacher=by_ids))
    assert (text["train/compared_frac"], text["train/uncommon_distance"]) == (1.0, 0.0)
    for name in ("train/loss", "train/grad_norm", "train/forward_kl"):
        assert text[name] == pytest.approx(ids[name], rel=1e-4), name


def test_a_student_that_is_its_teacher_has_no_divergence(tmp_path: Path) -> None:
    same = tiny_model(num_hidden_layers=1)
    found = fit(settings(tmp_path, same, same))
    for name in ("train/forward_kl", "train/uncommon_distance", "validation/reverse_kl"):
        assert abs(found[name]) < 1e-5


def test_a_student_learns_from_a_teacher_of_other_tokens(tmp_path: Path) -> None:
    student = write_model(tmp_path / "student", pairs(DIGITS, [("1", "0"), ("2", "1")]), seed=1)
    teacher = write_model(tmp_path / "teacher", pairs(DIGITS[::-1], [("1", "="), ("3", "4"), ("2", "1")]), seed=2)
    other = {"model": str(teacher), "precision": "float32", "align": "text"}
    same = {"model": str(student), "precision": "float32"}
    found = fit(settings(tmp_path / "run", student, teacher, teacher=None, teachers={"a": other, "b": same}))
    assert 0.5 < found["train/compared_frac"] <= 1
    assert found["train/reverse_kl/a"] > found["train/reverse_kl/b"] == pytest.approx(0, abs=1e-5)
    assert found["train/uncommon_distance"] > 0
    assert found["validation/reverse_kl"] > 0


@pytest.mark.parametrize("align", ["ids", "text"])
def test_plain_text_is_given_and_nothing_is_sampled(align: str, tmp_path: Path) -> None:
    rows = [{"prompt": "", "response": f"{a}+1={a + 1}"} for a in range(8)]
    teacher = {"model": str(tiny_model(seed=11)), "precision": "float32", "align": align}
    student = tiny_model(num_hidden_layers=1)
    config = settings(tmp_path, student, student, teacher=teacher, dataset_fraction=1.0)
    found = config.build().fit(rows, val_dataset=rows, console=Console(quiet=True)).metrics
    assert found["train/mean_gen_tokens_per_sample"] == 6  # 0+1=1 and the end
    assert found["train/compared_frac"] == 1  # of what is trained on: the first token is not
    assert found["validation/reverse_kl"] > 0
    assert not [name for name in found if name.endswith("/generation")]


@pytest.mark.parametrize(("column", "fraction"), [("response", 1.0), ("prompt", 0.5)])
def test_what_training_cannot_use_is_asked_before_the_models_load(
    column: str, fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"prompt": "1+1=", "response": "2", "answer": "2"}
    rows = [good, good, {**good, column: None}]
    student = tiny_model(num_hidden_layers=1)
    config = settings(tmp_path, student, student, teacher={"model": str(student)}, dataset_fraction=fraction)
    monkeypatch.setattr("nemorl.session.Run.build", lambda *_, **__: pytest.fail("a model is loaded"))
    with pytest.raises(ConfigError, match=column):
        config.build().fit(rows, console=Console(quiet=True))


def test_validation_compares_stretches_of_text(tmp_path: Path) -> None:
    # Both read `ab+bb<eos>` after `a+a=`: stretches ab+ | bb | <eos>, of 2, 2 and 1 tokens of the student.
    models = write_model(tmp_path / "s", STUDENT, seed=3), write_model(tmp_path / "t", TEACHER, seed=4)
    reader = between(*models)
    samples = Samples([sampled(reader, 8, 6, 5, 5, 2)])
    batch = batch_of(samples)
    _, rewritten = reader.meet(samples, batch)
    with torch.no_grad():
        own = plain_logprobs(load_reference(models[0]), batch)
        theirs = plain_logprobs(load_reference(models[1]), rewritten.batch)

    class Model:
        def get_logprobs(self, given: TokenBatch) -> Tensor:
            assert torch.equal(given.token_ids, rewritten.batch.token_ids)
            return theirs

    found = reader.reverse_kl(Model(), samples, batch, own)  # type: ignore[arg-type]
    gaps = torch.stack([theirs[4:6].sum() - own[4:6].sum(), theirs[6] - own[6:8].sum(), theirs[7] - own[8]])
    assert found.total == pytest.approx(float((gaps.exp() - 1 - gaps).sum()), rel=1e-5)
    assert found.count == 5


@pytest.mark.parametrize(("kind", "more"), [(OPDConfig, {}), (DistillationConfig, {"max_turns": 2})])
def test_what_other_tokens_cannot_do_is_refused(kind: Any, more: dict[str, Any], raises: Raises) -> None:
    teacher = {"model": "some/teacher", "align": "text"}
    with raises(ConfigError, path="teacher.align"):
        validate(kind, {"model": "some/model", "teacher": teacher, **more}, source="test")


def test_tokenizers_of_two_alphabets_have_the_end_in_common(reader: OtherTokens) -> None:
    assert isinstance(reader.student, Tokenizer)
    assert reader.to_student[2] == 2
