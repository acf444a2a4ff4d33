"""Penalties on single messages: which are faulty, and what becomes of the advantages of their tokens, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.config.load import load_config
from nemorl.errors import ConfigError
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_rl.policy_gradient.penalties import (
    MessagePenalties,
    PenaliseMessages,
    Turn,
    has_invalid_tool_call,
    has_malformed_thinking,
    turns,
)
from nemorl_tensors import TokenBatch
from recorded_messages import Raises

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
THINK = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("text", "is_invalid"),
    [
        (f"I add. {CALL}", False),
        (f"{CALL}\n{CALL}", False),
        ("No call at all.", False),
        (CALL.removesuffix("</tool_call>"), True),
        (CALL.removeprefix("<tool_call>"), True),
        (f"{CALL}</tool_call>", True),
        (f"<tool_call>{CALL}</tool_call>", True),
        ("<tool_call>add 1</tool_call>", True),
        ('<tool_call>{"arguments": {}}</tool_call>', True),
        ('<tool_call>{"name": ""}</tool_call>', True),
        ("<tool_call>[1]</tool_call>", True),
        ("<tool_call></tool_call>", True),
        ("<function_call>{}</function_call>", True),
        (f'{CALL}<function_call>{{"name": "f"}}</function_call>', False),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", True),
        ("<tool_call>" * 20_000, True),
    ],
)
def test_a_tag_outside_a_whole_call_is_invalid(text: str, is_invalid: bool) -> None:
    assert has_invalid_tool_call(text, MessagePenalties(invalid_tool_call_advantage=-1).tool_call_tags) == is_invalid


@pytest.mark.parametrize(
    ("before", "text", "is_cut", "is_malformed"),
    [
        ("?", "4", False, False),  # no thinking
        ("?", "<think>so</think>4", False, False),
        ("?", "\n<think>so</think>4", False, False),
        ("?", "4 <think>so</think>", False, True),  # thinking after the answer
        ("?", "<think>so<think></think>4", False, True),
        ("?", "<think>so</think></think>4", False, True),
        ("?", "so</think>4", False, True),
        ("?", "<think>so", False, True),
        ("?", "<think>so", True, False),  # the token limit came first
        ("?<think>", "so</think>4", False, False),  # the chat template opened it
        ("?<think>\n", "4", False, True),
        ("?<think>\n", "so on and", True, False),
        ("?<think>", "<think>so</think>4", False, True),
        ("?<think>", "so</think>4</think>", False, True),
        ("?<think>\n\n</think>", "4", False, False),  # thinking turned off
        ("?<think>\n\n</think>", "4</think>", False, True),
        ("is <think> a tag?<think></think>", "so</think>4", False, False),
    ],
)
def test_think_tags_are_one_pair_or_the_end_of_the_prompts(
    before: str, text: str, is_cut: bool, is_malformed: bool
) -> None:
    assert has_malformed_thinking(text, before, THINK, is_cut=is_cut) == is_malformed


WORDS = {1: "?", 2: "<think>", 3: "</think>", 4: "so", 5: CALL, 6: "<tool_call>", 7: "84", 8: "<eos>"}


def decode(token_ids: Any) -> str:
    return "".join(WORDS[int(token)] for token in token_ids)


def sample(tokens: list[int], mask: str, finish_reason: Any = "stop") -> Sample:
    chosen = tuple(letter == "A" for letter in mask)
    return Sample(Prompt(0, "?", (1,)), tuple(tokens), chosen, (0.0,) * len(tokens), Score(1.0), "", finish_reason)


def test_turns_are_the_runs_of_sampled_tokens() -> None:
    #                        P  A  A  E  E  A
    assert turns(sample([1, 4, 5, 7, 7, 4], "PAAEEA")) == [Turn(1, 3, 0), Turn(5, 6, 3)]
    assert turns(sample([1], "P")) == []


def test_the_tokens_of_a_faulty_message_get_its_advantage_and_no_others() -> None:
    samples = Samples(
        [
            sample([1, 5, 8, 7, 6, 4, 8, 1, 4, 8], "PAAEAAAEAA"),  # a call, its result, a broken call, an answer
            sample([1, 2, 4, 3, 7], "PAAAA"),  # thinks, then answers
            sample([1, 3, 6, 8], "PAAA"),  # both faults: the call counts
            sample([1, 2, 4], "PAA", "length"),  # cut while thinking
            sample([1, 4, 3], "PAA"),  # closes what nobody opened
        ]
    )
    batch = TokenBatch.from_samples(samples, [2.0, 1.0, -1.0, 0.5, 0.25])
    penalties = MessagePenalties(invalid_tool_call_advantage=-5.0, malformed_thinking_advantage=-3.0)
    found, metrics = PenaliseMessages(penalties, decode)(batch, samples)
    expected = [2, 2, 2, 2, -5, -5, -5, 2, 2, 2] + [1] * 5 + [-1, -5, -5, -5] + [0.5] * 3 + [0.25, -3, -3]
    assert found["advantages"].tolist() == expected
    assert batch["advantages"].tolist() == [2.0] * 10 + [1.0] * 5 + [-1.0] * 4 + [0.5] * 3 + [0.25] * 3
    # 3 + 1 + 1 + 1 + 1 = 7 messages, of which 2 have a broken call and 1 broken think tags.
    assert {name: metric.value for name, metric in metrics.items()} == {
        "invalid_tool_call_rate": pytest.approx(2 / 7),
        "malformed_thinking_rate": pytest.approx(1 / 7),
    }


def test_only_what_is_asked_for_is_penalised() -> None:
    samples = Samples([sample([1, 3, 6], "PAA")])
    batch = TokenBatch.from_samples(samples, [1.0])
    found, _ = PenaliseMessages(MessagePenalties(malformed_thinking_advantage=0.0), decode)(batch, samples)
    assert found["advantages"].tolist() == [1, 0, 0]


def config(model: Path, **changes: Any) -> Any:
    return load_config(
        {
            "algorithm": "grpo",
            "model": str(model),
            "policy": {"init": "random", "max_sequence_tokens": 32},
            "generation": {"max_new_tokens": 3},
            "data": {"name": "arithmetic", "max_digits": 1, "num_train": 20, "num_validation": 0},
            "environment": "math",
            "max_steps": 1,
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 2,
            **changes,
        }
    )


def test_a_run_reports_the_shares_of_faulty_messages(tiny_model: Path, tmp_path: Path) -> None:
    penalties = {"malformed_thinking_advantage": -5.0, "thinking_tags": ["0", "1"]}  # as digits occur in its words
    result = config(tiny_model, message_penalties=penalties, run_dir=str(tmp_path / "run")).build().fit()
    assert 0 <= result.metrics["train/malformed_thinking_rate"] <= 1
    assert result.metrics["train/invalid_tool_call_rate"] == 0


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({}, "message_penalties.invalid_tool_call_advantage"),
        ({"invalid_tool_call_advantage": 1.0}, "message_penalties.invalid_tool_call_advantage"),
    ],
)
def test_penalties_that_are_none_are_refused(
    tmp_path: Path, options: dict[str, Any], path: str, raises: Raises
) -> None:
    with raises(ConfigError, path=path):
        config(Path("org/model"), message_penalties=options)
