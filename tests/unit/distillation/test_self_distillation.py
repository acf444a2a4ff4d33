"""Runs whose teacher is the policy itself: configs, columns, who reads what, whose weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nemorl
import pytest
import torch
from nemorl.config.load import validate
from nemorl.errors import ConfigError
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_cli.console import Console
from nemorl_distillation import OPSDConfig, SDFTConfig, SDPOConfig
from nemorl_distillation.loss import TopKDistillationLoss
from nemorl_distillation.reverse_kl import SampledReverseKLLoss
from nemorl_distillation.sdpo import SDPOTrainer
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_tensors import TokenBatch
from nemorl_testing.models import tiny_model
from recorded_messages import Raises
from transformers import AutoModelForCausalLM

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1), "solution": f"{a + 1}", "response": f"{a + 1}"} for a in range(8)]
MODEL = tiny_model(num_hidden_layers=1)
PROMPTS = {
    "opsd": "{solution}:{prompt}",
    "sdft": "{demonstration}:{prompt}",
    "sdpo": "{demonstration}{feedback}{prompt}",
}


def settings(algorithm: str, run_dir: Path, **changes: Any) -> Any:
    texts = {"demonstration_text": "{demonstration}:", "feedback_text": "{feedback};"} if algorithm == "sdpo" else {}
    return nemorl.load_config(
        {
            "algorithm": algorithm,
            "model": str(MODEL),
            "teacher_prompt": PROMPTS[algorithm],
            "num_prompts_per_step": 4,
            "max_steps": 1,
            "policy": {"optimizer": {"lr": 1e-2}, "max_sequence_tokens": 32},
            "generation": {"max_new_tokens": 4},
            "validation": {"every": 0, "at_end": False},
            "checkpoint": {"export": False},
            "cluster": {"gpus_per_node": 0},
            "run_dir": str(run_dir),
            **({} if changes.get("compare") == "sampled" else {"topk": 8}),
            **texts,
            **changes,
        }
    )


def batches_of(config: Any, rows: Any = ROWS, **options: Any) -> tuple[list[tuple[Samples, TokenBatch]], Any]:
    """What each step trains on, and the result."""
    seen: list[tuple[Samples, TokenBatch]] = []

    class Watching(config.build().__class__):  # type: ignore[misc]
        def ask_teachers(self, samples: Samples, batch: TokenBatch) -> TokenBatch:
            seen.append((samples, super().ask_teachers(samples, batch)))
            return seen[-1][1]

    result = Watching(config).fit(rows, console=Console(quiet=True), **options)
    return seen, result


def scores(token_ids: list[int]) -> torch.Tensor:
    """[tokens, V] log-probs in place of each token, of the model's files."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(torch.cat([torch.zeros_like(logits[:1]), logits[:-1]]), -1)


# Configs and columns


def problems(kind: type, **given: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        validate(kind, {"model": "some/model", **given}, source="test")
    return {problem.path: problem.message for problem in caught.value.problems}


def test_mistakes_are_reported_with_their_path() -> None:
    assert "no more than the student" in problems(OPSDConfig, teacher_prompt="{prompt}")["teacher_prompt"]
    assert "demonstration" in problems(OPSDConfig, teacher_prompt="{prompt}{demonstration}")["teacher_prompt"]
    assert list(problems(SDPOConfig, feedback_text="no more")) == ["feedback_text"]
    assert list(problems(SDFTConfig, compare="sampled", topk=7, jsd_beta=0.1)) == ["topk", "jsd_beta"]
    assert list(problems(OPSDConfig, compare="sampled", generation={"temperature": 0})) == ["generation.temperature"]
    assert list(problems(OPSDConfig, num_prompts_per_step=1, num_minibatches=2)) == ["num_minibatches"]


@pytest.mark.parametrize("kind", [OPSDConfig, SDFTConfig, SDPOConfig])
def test_a_config_survives_a_dump(kind: Any) -> None:
    config = kind(model="some/model")
    assert validate(kind, config.model_dump(mode="json"), source="dump") == config


def test_the_initial_weights_are_the_reference_or_a_model_beside_it() -> None:
    def config(**given: Any) -> OPSDConfig:
        return OPSDConfig(model="some/model", policy={"lora": {"rank": 2}}, **given)  # type: ignore[arg-type]

    beside = config().auxiliary_models["teacher"]
    assert (beside.policy.model_name, beside.policy.lora, beside.learns) == ("some/model", None, False)
    sampled, current = config(compare="sampled"), config(teacher_weights="current")
    assert (sampled.needs_reference, dict(sampled.auxiliary_models)) == (True, {})
    assert (current.needs_reference, dict(current.auxiliary_models)) == (False, {})
    assert isinstance(sampled.build_loss(), SampledReverseKLLoss)
    assert isinstance(current.build_loss(), TopKDistillationLoss)


@pytest.mark.parametrize(("algorithm", "column"), [("opsd", "solution"), ("sdft", "response")])
def test_a_missing_column_is_reported_before_a_launch(
    algorithm: str, column: str, tmp_path: Path, raises: Raises
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1="}))
    config = {"algorithm": algorithm, "model": "some/model", "data": {"name": "file", "path": str(rows)}}
    with raises(ConfigError, column, path="context_column"):
        nemorl.load_config(config, for_launch=True)


def test_a_row_without_the_column_is_reported_before_the_model_loads(tmp_path: Path, raises: Raises) -> None:
    trainer = settings("opsd", tmp_path / "run").build()
    with raises(ConfigError, "solution", path="data"):
        trainer.fit([*ROWS[:3], {"prompt": "1+1="}], console=Console(quiet=True))
    assert not hasattr(trainer, "generation")


def test_sdpo_needs_something_that_scores(tmp_path: Path, raises: Raises) -> None:
    with raises(ConfigError, path="environment"):
        settings("sdpo", tmp_path / "run").build().fit(ROWS, console=Console(quiet=True))


def test_more_candidates_than_tokens_are_refused(tmp_path: Path, raises: Raises) -> None:
    with raises(nemorl.errors.UsageError, 999):
        settings("opsd", tmp_path / "run", topk=999).build().fit(ROWS, console=Console(quiet=True))


# What the teacher says


@pytest.mark.parametrize("weights", ["current", "initial"])
@pytest.mark.parametrize(("algorithm", "compare"), [("opsd", "sampled"), ("opsd", "topk"), ("sdft", "topk")])
def test_the_teacher_is_the_model_behind_the_privileged_prompt(
    algorithm: str, compare: str, weights: str, tmp_path: Path
) -> None:
    config = settings(algorithm, tmp_path / "run", compare=compare, teacher_weights=weights)
    ((samples, batch),), result = batches_of(config)
    tokenizer = Tokenizer.load(str(MODEL))
    for index, sample in enumerate(samples):
        told = list(tokenizer.encode(f"{sample.prompt.row['solution']}:{sample.prompt.text}"))
        said = list(sample.token_ids[len(sample.prompt.token_ids) :])
        expected = scores([*told, *said])[len(told) :]
        part = batch.select([index])
        found = part["teacher_logprobs"][part.mask]
        if compare == "sampled":
            likeliest = expected.gather(1, torch.tensor(said)[:, None])[:, 0]
        else:
            likeliest = expected.gather(1, part["candidate_ids"][part.mask])
            assert torch.allclose(likeliest, expected.topk(8).values, atol=1e-5)
        assert torch.allclose(found, likeliest, atol=1e-5)
    assert result.metrics["train/taught_frac"] == 1.0


@pytest.mark.parametrize("compare", ["topk", "sampled"])
def test_initial_weights_stay_and_current_ones_move(compare: str, tmp_path: Path) -> None:
    """At the second step the policy has moved: only a teacher that moves with it says something else."""
    last: dict[str, float] = {}
    for weights in ("current", "initial"):
        config = settings("opsd", tmp_path / weights, compare=compare, teacher_weights=weights, max_steps=2)
        (_, (samples, batch)), _ = batches_of(config)
        tokenizer, gap = Tokenizer.load(str(MODEL)), 0.0
        for index, sample in enumerate(samples):
            told = list(tokenizer.encode(f"{sample.prompt.row['solution']}:{sample.prompt.text}"))
            expected = scores([*told, *sample.token_ids[len(sample.prompt.token_ids) :]])[len(told) :]
            part = batch.select([index])
            ids = part.token_ids[:, None] if compare == "sampled" else part["candidate_ids"]
            found = part["teacher_logprobs"].view(ids.shape)[part.mask]
            gap = max(gap, float((found - expected.gather(1, ids[part.mask])).abs().max()))
        last[weights] = gap
    assert last["initial"] < 1e-4
    assert last["current"] > 1e-2


def test_a_response_without_room_behind_the_privileged_prompt_trains_nothing(tmp_path: Path) -> None:
    # A prompt has 5 tokens (its first is <bos>), a response at most 4, the privileged prompt 16 of 17 for long rows.
    long = [{**row, "solution": "7" * (15 if number % 2 else 1)} for number, row in enumerate(ROWS)]
    config = settings("opsd", tmp_path / "run", policy={"max_sequence_tokens": 18}, num_prompts_per_step=8)
    ((samples, batch),), result = batches_of(config, long)
    masked = [not bool(batch.select([index]).mask.any()) for index in range(len(samples))]
    assert masked == [len(sample.prompt.row["solution"]) == 15 for sample in samples]
    assert (result.metrics["train/taught_frac"], result.metrics["train/no_room_frac"]) == (0.5, 0.5)


# SDPO


def sample(index: int, response: str, reward: float, feedback: str = "", *, valid: bool = True) -> Sample:
    score = Score(reward, valid=valid, feedback=feedback)
    return Sample(Prompt(index, "1+1=", (5,)), (5, 6), (False, True), (0.0, -1.0), score, response, "stop")


def test_a_response_is_told_of_the_first_other_one_that_succeeded(tmp_path: Path) -> None:
    trainer = SDPOTrainer(settings("sdpo", tmp_path / "run"))
    found = trainer.contexts(
        Samples(
            [
                sample(0, "a", 0.0),
                sample(0, "b", 1.0),
                sample(0, "c", 0.5, "nearly"),
                sample(0, "d", 1.0),
                sample(0, "e", 1.0, valid=False),
                sample(1, "f", 1.0),
                sample(1, "g", 0.0, valid=False),
                sample(2, "h", 0.0, "wrong"),
                sample(2, "i", 0.0),
            ]
        )
    )
    assert found == [
        {"demonstration": "b:", "feedback": ""},
        {"demonstration": "d:", "feedback": ""},  # not itself
        {"demonstration": "b:", "feedback": "nearly;"},
        {"demonstration": "b:", "feedback": ""},
        None,  # no verdict
        None,  # nothing but itself succeeded
        None,
        {"demonstration": "", "feedback": "wrong;"},
        None,  # nothing succeeded, and nothing was said
    ]


def test_where_nothing_succeeds_nothing_moves_and_the_run_can_go_on(tmp_path: Path) -> None:
    def config(steps: int) -> Any:
        saved = {"every": 1, "export": False}
        return settings("sdpo", tmp_path / "run", max_steps=steps, checkpoint=saved, num_generations_per_prompt=2)

    ((_, batch),), result = batches_of(config(1), reward_fn=lambda prompt, response: 0.0)
    assert not bool(batch.mask.any())
    assert result.metrics["train/taught_frac"] == result.metrics["train/loss"] == result.metrics["train/grad_norm"] == 0
    _, later = batches_of(config(2), reward_fn=lambda prompt, response: 1.0, resume=True)
    assert later.metrics["train/taught_frac"] == 1.0
    assert later.metrics["train/grad_norm"] > 0


def test_feedback_alone_teaches(tmp_path: Path) -> None:
    def judge(prompt: str, response: str) -> Score:
        return Score(0.0, feedback=f"{len(response)}")

    ((samples, batch),), result = batches_of(settings("sdpo", tmp_path / "run"), reward_fn=judge)
    assert result.metrics["train/taught_frac"] == 1.0
    assert result.metrics["train/grad_norm"] > 0
    told = list(Tokenizer.load(str(MODEL)).encode(f"{len(samples[0].response)};{samples[0].prompt.text}"))
    said = list(samples[0].token_ids[len(samples[0].prompt.token_ids) :])
    part = batch.select([0])
    expected = scores([*told, *said])[len(told) :].gather(1, part["candidate_ids"][part.mask])
    assert torch.allclose(part["teacher_logprobs"][part.mask], expected, atol=1e-5)


def test_feedback_of_parts_is_joined_and_of_turns_is_the_last() -> None:
    from nemorl.types import Step
    from nemorl_rl.agents.turns import total_score
    from nemorl_rl.environments.composition import WeightedEnvironment

    scored = [Score(0.0, feedback="first"), Score(1.0, feedback="last")]
    assert total_score(scored).feedback == "last"
    weighted = WeightedEnvironment({"a": (lambda p, r: 1.0, 1.0), "b": (lambda p, r: 1.0, 1.0)})
    steps = {"a": Step(scored[0]), "b": Step(scored[1])}
    assert weighted.combine(steps).score.feedback == "first\nlast"
