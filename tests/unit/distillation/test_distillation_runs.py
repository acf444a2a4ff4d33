"""What is asked before and during a run of distillation: configs, vocabularies, given responses, validation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nemorl
import pytest
import torch
from nemorl.config.load import validate
from nemorl.errors import ConfigError, DataError, UsageError
from nemorl.types import Samples
from nemorl_cli.console import Console
from nemorl_cli.report.records.reading import read_records
from nemorl_distillation import DistillationConfig, OPDConfig
from nemorl_distillation.teachers import given_count, given_sample
from nemorl_distillation.trainer import DistillationTrainer, OPDTrainer
from nemorl_distillation.vocabulary import shared_vocabulary
from nemorl_rl.data.rows import RowDataModule
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors import TokenBatch
from nemorl_testing.models import tiny_model
from recorded_messages import Raises

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1), "response": str(a + 1)} for a in range(8)]
ONE_LAYER = {"num_hidden_layers": 1}


def settings(algorithm: str, run_dir: Path, **changes: Any) -> Any:
    return nemorl.load_config(
        {
            "algorithm": algorithm,
            "model": str(tiny_model(**ONE_LAYER)),
            "teacher": {"model": str(tiny_model(seed=11)), "precision": "float32"},
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 1,
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


def fit(config: Any, *args: Any, **options: Any) -> Any:
    return config.build().fit(ROWS, *args, console=Console(quiet=True), **options)


# Configs


def problems(kind: type, **given: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        validate(kind, {"model": "some/model", **given}, source="test")
    return {problem.path: problem.message for problem in caught.value.problems}


def test_mistakes_are_reported_with_their_path(tmp_path: Path) -> None:
    assert list(problems(DistillationConfig)) == ["teacher"]
    assert problems(DistillationConfig, teacher={"model": str(tmp_path)}) == {
        "teacher.model": f"{str(tmp_path)!r} has no config.json"
    }
    teacher = {"model": "some/teacher"}
    assert "tensor_parallel_size" in next(
        iter(problems(DistillationConfig, teacher={**teacher, "tensor_parallel_size": 2}))
    )
    assert list(problems(DistillationConfig, teacher=teacher, num_prompts_per_step=2, num_minibatches=3)) == [
        "num_minibatches"
    ]
    assert list(
        problems(
            DistillationConfig,
            teacher=teacher,
            dataset_fraction=0.5,
            rollouts={"mode": "async"},
            cluster={"launcher": "ray", "colocated": False, "workers_per_node": 2},
        )
    ) == ["dataset_fraction"]
    assert list(problems(DistillationConfig, teacher=teacher, sft_loss_weight=0.1)) == ["sft_loss_weight"]
    assert list(problems(DistillationConfig, teacher=teacher, jsd_beta=1.0)) == ["jsd_beta"]
    assert list(problems(OPDConfig, teacher=teacher, generation={"temperature": 0})) == ["generation.temperature"]


def test_overrides_of_the_students_config_are_not_the_teachers(tmp_path: Path) -> None:
    policy = {"hf_config_overrides": {"max_position_embeddings": 64}, "max_sequence_tokens": 32}
    config = settings("distillation", tmp_path, policy=policy)
    assert config.policy.hf_config_overrides == {"max_position_embeddings": 64}
    assert config.auxiliary_models["teacher"].policy.hf_config_overrides == {}


def test_the_teacher_is_a_model_beside_the_student() -> None:
    config = DistillationConfig(
        model="some/model",
        teacher={"model": "some/teacher", "microbatch_tokens": 7},  # type: ignore[arg-type]
        policy={"lora": {"rank": 2}, "max_sequence_tokens": 99},  # type: ignore[arg-type]
        generation={"max_new_tokens": 9},  # type: ignore[arg-type]
    )
    teacher = config.auxiliary_models["teacher"]
    assert not teacher.learns
    assert (teacher.policy.model_name, teacher.policy.precision) == ("some/teacher", "bfloat16")
    assert (teacher.policy.lora, teacher.policy.max_sequence_tokens, teacher.policy.microbatch_tokens) == (None, 99, 7)
    assert validate(DistillationConfig, config.model_dump(mode="json"), source="dump") == config


# Several teachers


def pair(**second: Any) -> dict[str, Any]:
    """Two teachers in place of one; the second is the first unless told otherwise."""
    first = {"model": str(tiny_model(seed=11)), "precision": "float32"}
    return {"teacher": None, "teachers": {"math": {**first, "weight": 0.5}, "code": {**first, "weight": 0.5, **second}}}


def test_one_teacher_or_several_is_a_choice() -> None:
    one, other = {"model": "some/teacher"}, {"model": "some/other"}
    assert "as well" in problems(DistillationConfig, teacher=one, teachers={"a": other})["teacher"]
    assert list(problems(DistillationConfig, teacher=one, teacher_column="task")) == ["teacher_column"]
    found = problems(OPDConfig, teachers={"a": one, "b": {**other, "tensor_parallel_size": 2}})
    assert list(found) == ["teachers.b.tensor_parallel_size"]


def test_a_model_that_teaches_under_two_names_is_loaded_once(tmp_path: Path) -> None:
    assert list(settings("distillation", tmp_path, **pair()).auxiliary_models) == ["teachers.math"]
    other = settings("distillation", tmp_path, **pair(model=str(tiny_model(seed=12))))
    assert list(other.auxiliary_models) == ["teachers.math", "teachers.code"]


@pytest.mark.parametrize("algorithm", ["distillation", "opd"])
@pytest.mark.slow
def test_two_halves_of_a_teacher_are_the_teacher(algorithm: str, tmp_path: Path) -> None:
    one = fit(settings(algorithm, tmp_path / "one"), val_dataset=ROWS)
    two = fit(settings(algorithm, tmp_path / "two", **pair()), val_dataset=ROWS)
    for name in ("train/loss", "train/grad_norm", "train/reverse_kl", "validation/reverse_kl"):
        assert two.metrics[name] == pytest.approx(one.metrics[name], rel=1e-5), name


def test_the_first_of_two_updates_finds_the_old_log_probs_in_its_own_forward_pass(tmp_path: Path) -> None:
    scored: list[int] = []

    class Watching(OPDTrainer):
        def with_old_logprobs(self, batch: TokenBatch) -> TokenBatch:
            scored.append(len(batch))
            return super().with_old_logprobs(batch)

    config = settings("opd", tmp_path, num_minibatches=2, max_steps=1, num_generations_per_prompt=2)
    result = Watching(config).fit(ROWS, console=Console(quiet=True))
    assert scored == [config.num_prompts_per_step]  # half of the responses
    assert result.metrics["train/probs_ratio"] != 1.0


@pytest.mark.parametrize("algorithm", ["distillation", "opd"])
def test_rows_choose_their_teacher(algorithm: str, tmp_path: Path) -> None:
    routed = [{**row, "task": "code" if index % 3 else "math"} for index, row in enumerate(ROWS)]
    config = settings(algorithm, tmp_path, **pair(model=str(tiny_model(seed=12))), teacher_column="task")
    told: dict[str, set[str]] = {"math": set(), "code": set()}

    class Watching(config.build().__class__):  # type: ignore[misc]
        def turns(self, samples: Samples, batch: TokenBatch) -> Any:
            for turn, model in super().turns(samples, batch):
                told[turn.teacher.name] |= {sample.prompt.row["task"] for sample in turn.samples}
                assert torch.equal(turn.batch.token_ids, batch.token_ids[turn.tokens])
                yield turn, model

    result = Watching(config).fit(routed, val_dataset=routed, console=Console(quiet=True))
    assert told == {"math": {"math"}, "code": {"code"}}
    assert result.metrics["validation/reverse_kl"] > 0.1


@pytest.mark.parametrize("named", ["cod", None])
def test_a_row_must_name_one_of_the_teachers(named: str | None, tmp_path: Path, raises: Raises) -> None:
    rows = [{"prompt": "1+1=", **({"task": named} if named else {})}] * 4
    with raises(DataError, "math", "code"):
        settings("opd", tmp_path, **pair(), teacher_column="task").build().fit(rows, console=Console(quiet=True))


@pytest.mark.parametrize("task", ["cod", None])
def test_the_first_row_is_looked_at_before_a_launch(task: str | None, tmp_path: Path, raises: Raises) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", **({"task": task} if task else {})}))
    teachers = {"math": {"model": "some/teacher"}, "code": {"model": "some/other"}}
    config = {"algorithm": "opd", "model": "some/model", "teachers": teachers, "teacher_column": "task"}
    with raises(ConfigError, "math", "code", path="teacher_column"):
        nemorl.load_config({**config, "data": {"name": "file", "path": str(rows)}}, for_launch=True)


# Vocabularies


def test_models_with_one_tokenizer_share_a_vocabulary(tmp_path: Path, raises: Raises) -> None:
    small, large = write_tiny_model(tmp_path / "small"), write_tiny_model(tmp_path / "large", vocab_size=128)
    ids = len(Tokenizer.load(str(small)).inner)
    assert shared_vocabulary(str(small), str(large)) == (ids, 128)
    with raises(UsageError, 128, ids):
        shared_vocabulary(str(large), str(small))


def test_another_tokenizer_is_refused_and_a_difference_named(tmp_path: Path, raises: Raises) -> None:
    one, other = (write_tiny_model(tmp_path / name, alphabet=name) for name in ("abc", "acb"))
    with raises(UsageError, 2, "b", 9, 10):
        shared_vocabulary(str(one), str(other))


def test_tokens_that_only_the_teacher_has_are_marked(tmp_path: Path) -> None:
    padded = tiny_model(seed=11, vocab_size=512, **ONE_LAYER)
    config = settings("distillation", tmp_path / "run", teacher={"model": str(padded), "precision": "float32"}, topk=64)
    seen: list[TokenBatch] = []

    class Watching(DistillationTrainer):
        def ask_teachers(self, samples: Samples, batch: TokenBatch) -> TokenBatch:
            seen.append(super().ask_teachers(samples, batch))
            return seen[-1]

    result = Watching(config).fit(ROWS, console=Console(quiet=True))
    batch = seen[0]
    ids, logprobs = batch["candidate_ids"][batch.mask], batch["teacher_logprobs"][batch.mask]
    unknown = torch.isinf(logprobs)
    assert 0.1 < unknown.float().mean() < 0.99  # of 512 ids the student has about 100
    assert int(ids.max()) < int(Tokenizer.load(config.policy.model_name).inner.vocab_size) + 16
    assert not ids[unknown].any()
    assert 0 < result.metrics["train/forward_kl"] < 20


def test_more_candidates_than_tokens_are_refused(tmp_path: Path, raises: Raises) -> None:
    with raises(UsageError, 999):
        fit(settings("distillation", tmp_path / "run", topk=999))


# Given responses


def test_the_share_of_given_responses_is_exact_over_many_steps() -> None:
    assert [given_count(0.3, 2, step) for step in range(1, 6)] == [0, 1, 0, 1, 1]
    assert sum(given_count(0.25, 7, step) for step in range(1, 41)) == 70
    assert {given_count(1.0, 7, step) for step in range(1, 9)} == {7}
    assert {given_count(0.0, 7, step) for step in range(1, 9)} == {0}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1=", "response": "12"},
        {"prompt": [{"role": "user", "content": "1+1="}], "response": "12"},
        {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "12"}]},
    ],
    ids=["text", "chat", "messages"],
)
def test_a_given_response_is_a_sample_of_it(row: Any, raises: Raises) -> None:
    tokenizer = Tokenizer.load(str(tiny_model(**ONE_LAYER)))
    sample = given_sample(row, 0, tokenizer, 99)
    said = [token for token, own in zip(sample.token_ids, sample.response_mask, strict=True) if own]
    assert tuple(said) == (*tokenizer.encode_observation("12"), *tokenizer.stop_token_ids)
    assert sample.token_ids[: len(sample.prompt.token_ids)] == sample.prompt.token_ids
    assert (sample.response, sample.finish_reason) == ("12", "stop")
    cut = given_sample(row, 0, tokenizer, len(sample.token_ids) - 1)
    assert (cut.token_ids, cut.finish_reason, cut.response) == (sample.token_ids[:-1], "length", "12")
    shorter = given_sample(row, 0, tokenizer, sample.response_mask.index(True) + 1)
    assert (shorter.finish_reason, shorter.response) == ("length", "1")
    with raises(DataError):
        given_sample(row, 0, tokenizer, len(sample.prompt.token_ids))


def test_without_sampling_the_student_learns_from_given_responses(tmp_path: Path) -> None:
    result = fit(settings("distillation", tmp_path / "run", dataset_fraction=1.0))
    assert result.metrics["train/mean_gen_tokens_per_sample"] == 2  # a digit and the end
    assert "timing/train/generation" not in result.metrics


@pytest.mark.parametrize("rows", [4, 3])
def test_the_likelihood_is_that_of_the_given_ones_of_a_mixed_step(rows: int, tmp_path: Path) -> None:
    seen: list[TokenBatch] = []

    class Watching(DistillationTrainer):
        def ask_teachers(self, samples: Samples, batch: TokenBatch) -> TokenBatch:
            seen.append(super().ask_teachers(samples, batch))
            return seen[-1]

    knobs = {"dataset_fraction": 0.5, "sft_loss_weight": 0.1, "num_generations_per_prompt": 2, "topk": 3}
    data = RowDataModule(ROWS, batch_size=rows, seed=0)  # whatever num_prompts_per_step asks for
    result = Watching(settings("distillation", tmp_path, **knobs)).fit(data, console=Console(quiet=True))
    (batch,) = seen
    # Half of the rows are given, rounded down; the others have two responses each.
    given = rows // 2
    assert batch["is_given"].tolist() == [True] * given + [False] * 2 * (rows - given)
    assert torch.equal(batch["candidate_ids"][:, 3], batch.token_ids)
    assert int(batch.mask[: int(batch.lengths[0])].sum()) == 2  # a digit and the end
    assert result.metrics["train/sft_loss"] > 0


# Validation


@pytest.mark.parametrize("algorithm", ["distillation", "opd"])
def test_validation_measures_the_divergence(algorithm: str, tmp_path: Path) -> None:
    result = fit(settings(algorithm, tmp_path / "run"), val_dataset=ROWS)
    assert result.metrics["validation/reverse_kl"] > 0.1
    assert not [name for name in result.metrics if name.endswith(("reward", "accuracy"))]
    splits = [record["split"] for record in read_records(tmp_path / "run")]
    assert splits.count("validation") == len(ROWS)


def test_an_environment_counts_for_validation(tmp_path: Path) -> None:
    result = fit(settings("distillation", tmp_path / "run"), lambda prompt, response: 0.25, val_dataset=ROWS)
    assert result.metrics["validation/accuracy"] == result.metrics["train/reward"] == 0.25
    assert result.metrics["validation/reverse_kl"] > 0.1


def test_a_student_that_is_its_teacher_has_no_divergence(tmp_path: Path) -> None:
    same = {"model": str(tiny_model(**ONE_LAYER)), "precision": "float32"}
    result = fit(settings("distillation", tmp_path / "run", teacher=same), val_dataset=ROWS)
    for name in ("validation/reverse_kl", "train/reverse_kl", "train/forward_kl"):
        assert abs(result.metrics[name]) < 1e-5
