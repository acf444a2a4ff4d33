"""A teacher that does not read what it alone is told teaches nothing: the run ends before it learns."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import nemorl
import pytest
import torch
from nemorl.errors import BackendError
from nemorl.types import Samples, Score
from nemorl_cli.console import Console
from nemorl_distillation.privileged import PrivilegedBatch
from nemorl_distillation.told_inputs import kind_of, told_swaps
from nemorl_rl.audit.dead_inputs import Swap, reached, swaps
from nemorl_rl.models.tiny import CHAT_TEMPLATE
from nemorl_rl.models.tiny_sight import write_tiny_sight
from nemorl_tensors import TokenBatch
from nemorl_testing.models import tiny_model
from nemorl_testing.seeing import drawing
from recorded_messages import Raises
from torch import Tensor

# P prompt, a answer:   0: P P a a   1: P a   2: P P a
BATCH = TokenBatch.from_sequences(
    [[1, 2, 11, 12], [3, 13], [1, 2, 14]], [[False, False, True, True], [False, True], [False, False, True]]
)
BEFORE = [2, 1, 2]


def prompt_of(_index: int, told: Mapping[str, str]) -> list[int]:
    """Digits as they are, between 90 and 91; feedback after them, tens for ones."""
    return [90, *map(int, told["solution"]), 91, *(10 * int(each) for each in told.get("feedback", ""))]


def swapped(*told: Mapping[str, str] | None, names: Iterable[str] = ("solution",), limit: int = 9) -> list[Swap]:
    return list(told_swaps(BATCH, BEFORE, told, prompt_of, names, limit))


def test_each_response_stands_behind_the_text_of_the_next_in_the_place_and_length_of_its_own() -> None:
    found = swapped({"solution": "56"}, None, {"solution": "7"})
    assert [swap.one.token_ids.tolist() for swap in found] == [[90, 5, 6, 91, 11, 12], [90, 7, 91, 14]]
    assert [swap.other.token_ids.tolist() for swap in found] == [[90, 7, 7, 91, 11, 12], [90, 5, 91, 14]]
    assert found[0].one.mask.tolist() == [False] * 4 + [True] * 2


def test_a_text_is_turned_backwards_where_no_other_fits_in_its_place() -> None:
    (alone,) = swapped({"solution": "56"}, None, None)
    assert alone.other.token_ids.tolist() == [90, 6, 5, 91, 11, 12]
    longer, shorter = swapped({"solution": "56"}, None, {"solution": "563"})  # which has the other in it
    assert longer.other.token_ids.tolist()[:4] == [90, 6, 5, 91]
    assert shorter.other.token_ids.tolist()[:5] == [90, 3, 6, 5, 91]
    assert swapped({"solution": "5"}, None, {"solution": "5"}) == []


def test_texts_are_swapped_one_at_a_time_and_only_where_there_are_any() -> None:
    told = {"solution": "5", "feedback": "7"}, {"solution": "6", "feedback": ""}, {"solution": "5", "feedback": "8"}
    found = swapped(*told[:1], None, told[2], names=("feedback", "solution"))
    assert [(swap.kind, swap.other.token_ids.tolist()) for swap in found] == [
        (kind_of("feedback"), [90, 5, 91, 80, 11, 12]),
        (kind_of("feedback"), [90, 5, 91, 70, 14]),
    ]
    assert [swap.other.token_ids.tolist()[1] for swap in swapped(*told[:2], None)] == [6, 5]
    assert swapped(told[1], told[1], told[1], names=("feedback",)) == []


def test_a_response_without_room_is_not_tried() -> None:
    assert len(swapped({"solution": "56"}, {"solution": "78"}, None, limit=5)) == 1  # 4 + 2 tokens, 4 + 1 tokens


def test_a_teacher_that_reads_one_text_of_two_is_caught_with_the_other() -> None:
    def read(batch: TokenBatch) -> Tensor:
        counted = torch.where((batch.token_ids >= 10) & (batch.token_ids < 90), 0, batch.token_ids)
        return torch.where(batch.mask, -1e-3 * counted.cumsum(0), 0.0)

    told = {"solution": "5", "feedback": "7"}, None, {"solution": "6", "feedback": "8"}
    found = reached(swapped(*told, names=("feedback", "solution")), read)
    assert found == {kind_of("feedback"): False, kind_of("solution"): True}
    sure = reached(swapped(*told), lambda batch: torch.zeros(batch.num_tokens))
    assert sure == {kind_of("solution"): None}


# Runs

SOUND = tiny_model(num_hidden_layers=1)
ROWS = [
    {"prompt": [{"role": "user", "content": f"{a}+1="}], "answer": str(a + 1), "solution": "7" * a + "8"}
    for a in range(1, 5)
]
"""Solutions of other lengths."""


def cutting(folder: Path, kept: int) -> Path:
    """The sound model with a chat template that writes so many characters of a message."""
    shutil.copytree(SOUND, folder)
    template = CHAT_TEMPLATE.replace("message['content'] }}", f"message['content'][:{kept}] }}}}")
    assert template != CHAT_TEMPLATE
    (folder / "chat_template.jinja").write_text(template)
    return folder


def short_sighted() -> Path:
    """A model each of whose tokens sees itself and the one before."""
    return tiny_model(num_hidden_layers=1, use_sliding_window=True, sliding_window=2, max_window_layers=0)


def config(algorithm: str, model: Path, folder: Path, **changes: Any) -> Any:
    return nemorl.load_config(
        {
            "algorithm": algorithm,
            "model": str(model),
            "num_prompts_per_step": 4,
            "max_steps": 1,
            "topk": 8,
            "policy": {"max_sequence_tokens": 40},
            "generation": {"max_new_tokens": 4},
            "validation": {"every": 0, "at_end": False},
            "checkpoint": {"export": False},
            "run_dir": str(folder / "run"),
            **changes,
        }
    )


def fit(config: Any, **options: Any) -> Any:
    return config.build().fit(ROWS, console=Console(quiet=True), **options)


def has_learnt(folder: Path) -> bool:
    return '"step": 1' in (folder / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("algorithm", ["opsd", "sdft"])
@pytest.mark.parametrize("weights", ["initial", "current"])
def test_a_template_that_drops_the_text_ends_the_run(
    algorithm: str, weights: str, tmp_path: Path, raises: Raises
) -> None:
    name = {"opsd": "solution", "sdft": "demonstration"}[algorithm]
    rest: dict[str, Any] = {"teacher_prompt": f"{{prompt}}{{{name}}}", "teacher_weights": weights}
    if algorithm == "sdft":
        rest["context_column"] = "solution"
    with raises(BackendError, name):
        fit(config(algorithm, cutting(tmp_path / "model", 4), tmp_path, **rest))
    assert not has_learnt(tmp_path)
    assert fit(config(algorithm, cutting(tmp_path / "other", 6), tmp_path / "sound", **rest)).steps == 1


def test_a_model_that_does_not_look_that_far_back_ends_the_run(tmp_path: Path, raises: Raises) -> None:
    with raises(BackendError, "solution"):
        fit(config("opsd", short_sighted(), tmp_path, teacher_prompt="{solution} {prompt}"))
    assert not has_learnt(tmp_path)
    seen = {"teacher_prompt": "{prompt}{solution}", "max_steps": 2}  # the last of it is before the role that answers
    assert fit(config("opsd", SOUND, tmp_path / "sound", **seen)).steps == 2


def test_the_teacher_reads_each_response_behind_the_image_that_it_answers(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": [drawing(a).data], "solution": str(a)}
        for a in range(4)
    ]
    read: list[TokenBatch] = []

    class Watching(config("opsd", SOUND, tmp_path).build().__class__):  # type: ignore[misc]
        def privileged(self, samples: Samples, batch: TokenBatch) -> PrivilegedBatch:
            behind: PrivilegedBatch = super().privileged(samples, batch)
            for place, sample in enumerate(samples):
                assert [*behind.batch.select([place]).media] == [sample.media[0].name]
            read.append(behind.batch)
            return behind

    policy = {"init": "random", "max_sequence_tokens": 300}
    settings = config("opsd", write_tiny_sight(tmp_path / "model"), tmp_path, policy=policy)
    assert Watching(settings).fit(rows, console=Console(quiet=True)).steps == 1
    (told,) = read
    assert len([swap for swap in swaps(told) if swap.kind == "image"]) == len(told.media) == 4


def test_feedback_is_tried_when_it_first_comes(tmp_path: Path, raises: Raises) -> None:
    """At the first step nothing is said, and nothing learnt. Of two texts the one that is cut off is named."""
    numbers = itertools.count(100)

    def judge(prompt: str, response: str) -> Score:
        return Score(0.0, feedback=f"{next(numbers)}" if trainer.progress.step else "")

    settings = {
        "teacher_prompt": "{prompt}{demonstration}{feedback}",
        "feedback_text": "({feedback})",
        "num_generations_per_prompt": 1,
        "max_steps": 2,
    }
    trainer = config("sdpo", cutting(tmp_path / "model", 5), tmp_path, **settings).build()
    with raises(BackendError, "feedback"):
        trainer.fit(ROWS, reward_fn=judge, console=Console(quiet=True))
    assert trainer.progress.step == 1
    assert trainer.unproven == {"demonstration", "feedback"}
