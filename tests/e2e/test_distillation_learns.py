"""A random student comes to answer as its teacher does, from what the teacher says of the student's own responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl_cli.console import Console
from nemorl_rl.data.tokenizer import Tokenizer as TextTokenizer
from nemorl_rl.models.tiny import BOS, EOS, PAD, UNK, write_tiny_model
from test_agents_learn import Drafts
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.slow

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "response": str(a + b)} for a in range(5) for b in range(5)]
COMMON: dict[str, Any] = {
    "policy": {
        "init": "random",
        "optimizer": {"lr": 3e-3},
        "schedule": {"kind": "linear", "warmup_steps": 10, "min_lr_frac": 0.1},
        "max_sequence_tokens": 16,
    },
    "validation": {"every": 0, "at_start": True},
    "checkpoint": {"every": 0},
    "cluster": {"gpus_per_node": 0},
}


def run(folder: Path, **settings: Any) -> nemorl.TrainResult:
    config = nemorl.load_config({**COMMON, "run_dir": str(folder / "run"), **settings})
    return config.build().fit(dataset=SUMS, val_dataset=SUMS, console=Console(quiet=True))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows the sums of two digits by heart (about 6 CPU seconds)."""
    folder = tmp_path_factory.mktemp("teacher")
    base = write_tiny_model(folder / "base", hidden_size=96, intermediate_size=192)
    result = run(folder, algorithm="sft", model=str(base), batch_size=len(SUMS), max_steps=80)
    assert result.metrics["validation/val_loss"] < 0.1
    return result.run_dir / "model"


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two thirds as wide."""
    return write_tiny_model(tmp_path_factory.mktemp("student"), hidden_size=64, intermediate_size=192)


def learn(
    algorithm: str, teacher: Path, student: Path, folder: Path, *, align: str = "ids", **settings: Any
) -> tuple[float, Any]:
    """The divergence before, and the metrics after. No answer and no reward takes part in learning."""
    result = run(
        folder,
        algorithm=algorithm,
        model=str(student),
        teacher={"model": str(teacher), "precision": "float32", "align": align},
        environment="math",  # for the accuracy of validation only
        generation={"max_new_tokens": 4},
        num_prompts_per_step=len(SUMS),
        **settings,
    )
    return result.history[0]["validation/reverse_kl"], result.metrics


@pytest.mark.full
def test_divergence_on_the_likeliest_tokens_teaches_the_sums(teacher: Path, student: Path, tmp_path: Path) -> None:
    # Seen on two cores: 4.18 nats before, 0.24 nats and 100 % after, 4 CPU seconds.
    before, after = learn("distillation", teacher, student, tmp_path, topk=16, max_steps=80)
    assert before > 2
    assert after["validation/reverse_kl"] < 0.25 * before
    assert after["validation/accuracy"] > 0.7


def test_a_bounded_divergence_teaches_the_sums(teacher: Path, student: Path, tmp_path: Path) -> None:
    before, after = learn("distillation", teacher, student, tmp_path, topk=16, max_steps=80, kl_type="jsd")
    assert before > 2
    assert after["validation/reverse_kl"] < 0.25 * before
    assert after["validation/accuracy"] > 0.7


@pytest.mark.full
def test_the_datasets_responses_teach_what_the_teacher_does_not_know(student: Path, tmp_path: Path) -> None:
    began = run(tmp_path / "ignorant", algorithm="sft", model=str(student), batch_size=4, max_steps=1)
    ignorant = began.run_dir / "model"
    knobs: dict[str, Any] = {"topk": 8, "kl_type": "jsd", "dataset_fraction": 1.0, "max_steps": 80}
    _, without = learn("distillation", ignorant, student, tmp_path / "without", **knobs)
    _, after = learn("distillation", ignorant, student, tmp_path / "with", **knobs, sft_loss_weight=1.0)
    assert without["validation/accuracy"] < 0.2
    assert after["validation/accuracy"] > 0.7
    assert after["train/sft_loss"] < 1.0


@pytest.mark.full
def test_the_policy_gradient_of_sampled_tokens_approaches_the_teacher(
    teacher: Path, student: Path, tmp_path: Path
) -> None:
    # One number per token instead of 16: slower. Seen with seeds 1, 2 and 3: 3.9 to 4.4 nats and 0 % before, 1.8 to 2.1
    # nats and 20 % after. With seed 42, 2.2 to 2.4 nats and, depending on the rounding of sums, 0 or 20 %.
    before, after = learn("opd", teacher, student, tmp_path, num_generations_per_prompt=2, max_steps=120, seed=1)
    assert before > 2
    assert after["validation/reverse_kl"] < 0.75 * before
    assert after["validation/accuracy"] > 0.05


@pytest.mark.full
def test_a_student_of_other_tokens_learns_the_sums(teacher: Path, tmp_path: Path) -> None:
    # The student writes "1+", "2+", … as one token each, and every other character has another number than for the
    # teacher. Nothing but the text is common to both.
    letters, merges = "=+9876543210", [(digit, "+") for digit in "01234"]
    names = [PAD, BOS, EOS, UNK, *letters, *("".join(pair) for pair in merges)]
    inner = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges, unk_token=UNK))
    inner.decoder = decoders.Fuse()
    student = write_tiny_model(tmp_path / "student", hidden_size=64, intermediate_size=192, vocab_size=len(names))
    special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(student)  # type: ignore[no-untyped-call]
    before, after = learn("distillation", teacher, student, tmp_path, align="text", topk=16, max_steps=80)
    assert before > 1
    assert after["validation/reverse_kl"] < 0.25 * before
    assert after["validation/accuracy"] > 0.7
    assert after["train/compared_frac"] > 0.8


@pytest.mark.full
def test_episodes_of_an_agent_that_forks_teach_what_the_teacher_would_have_said(
    teacher: Path, student: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": row["prompt"]} for row in SUMS]
    config = nemorl.load_config(
        {
            **COMMON,
            "run_dir": str(tmp_path / "run"),
            "algorithm": "distillation",
            "model": str(student),
            "teacher": {"model": str(teacher), "precision": "float32"},
            "generation": {"max_new_tokens": 2},
            "num_prompts_per_step": len(SUMS),
            "topk": 16,
            "max_steps": 60,
        }
    )
    agent = Drafts(TextTokenizer.load(str(student)))
    result = config.build().fit(rows, agent, val_dataset=rows, console=Console(quiet=True))
    first = next(record for record in result.history if "train/environment/sequences" in record)
    assert (first["train/environment/calls"], first["train/environment/sequences"]) == (3.0, 2.0)
    assert result.metrics["validation/reverse_kl"] < 0.25 * result.history[0]["validation/reverse_kl"]
