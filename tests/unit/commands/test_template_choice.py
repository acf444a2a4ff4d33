"""Which template a wish finds, and what is said of it."""

from __future__ import annotations

import pytest
from nemorl.plugins import registry
from nemorl_cli.template_choice import OTHER_WORDS, TemplateFacts, billions_in, choose, facts_of, gpus_in, unknown_words
from nemorl_trust.source import read_source, template_text

EIGHT = facts_of(
    "big",
    "GRPO with vLLM.",
    "# GRPO with vLLM.\n# task: math | hardware: 8 GPUs | model: 8B | uses: vLLM, multi-turn\nalgorithm: grpo\n",
)
ONE = facts_of(
    "small", "DPO.", "# DPO.\n# task: preferences | hardware: 1 GPU | model: 1.5B | uses: LoRA\nalgorithm: dpo\n"
)


@pytest.fixture(scope="module")
def installed() -> list[TemplateFacts]:
    entries = [e for e in registry().index.of_kind("templates") if e.distribution.startswith("nemorl-")]
    return [facts_of(e.name, read_source(e).summary, template_text(e)) for e in entries]


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("8 GPUs", 8),
        ("one GPU", 1),
        ("single-gpu", 1),
        ("8xH100", 8),
        ("2x A100", 2),
        ("4 nodes", 32),  # of eight each
        ("2 nodes of 4 GPUs", 8),
        ("a laptop", None),
        ("Qwen3-8B", None),
    ],
)
def test_gpus_are_counted(text: str, gpus: int | None) -> None:
    assert gpus_in(text) == gpus


@pytest.mark.parametrize(
    ("text", "billions"),
    [("Qwen3-8B", 8.0), ("qwen2.5-1.5b-instruct", 1.5), ("Qwen3-30B-A3B", 30.0), ("70 B", 70.0), ("gpt2", None)],
)
def test_sizes_are_read_off_names(text: str, billions: float | None) -> None:
    assert billions_in(text) == billions


def test_what_a_template_says_of_itself_is_its_second_line() -> None:
    assert (EIGHT.algorithm, EIGHT.gpus, EIGHT.billions) == ("grpo", 8, 8.0)
    assert EIGHT.facts["uses"] == ("vLLM", "multi-turn")
    silent = facts_of("mine", "A run.", "# A run.\nalgorithm: grpo\n")
    assert (silent.algorithm, silent.gpus, set(silent.facts.values())) == ("grpo", None, {()})


def test_each_match_says_why() -> None:
    [match] = choose("8 GPUs, math, Qwen3-7B, DPO", [EIGHT, ONE])
    assert match.template is EIGHT
    assert match.fits == ["8 GPUs", "7B (written for 8B)", "math (task)"]
    assert match.lacks == ["dpo"]


def test_a_smaller_machine_is_near() -> None:
    [match] = choose("4 GPUs", [EIGHT, ONE])
    assert match.fits == ["4 GPUs (written for 8: change `cluster`)"]


@pytest.mark.parametrize("word", ["multi-turn", "Multi-Turn", "multiturn", "vllm", "grpo", "big"])
def test_one_word_is_enough(word: str) -> None:
    assert [match.template.name for match in choose(word, [EIGHT, ONE])] == ["big"]


def test_words_that_say_nothing_are_left_out() -> None:
    assert choose("I want to train with the", [EIGHT, ONE]) == []
    assert unknown_words("math for quantum computers", [EIGHT, ONE]) == ["quantum", "computers"]


@pytest.mark.parametrize(
    ("wish", "name"),
    [
        ("8 GPUs, math, Qwen3-8B", "grpo_8gpu"),
        ("one GPU, LoRA, preferences", "dpo_lora"),
        ("async rollouts on 8xH100", "grpo_async"),
        ("long context SFT", "sft_long_context"),
        ("70B DPO on 4 nodes with Megatron", "dpo_megatron"),
        ("multi-turn tool use", "grpo_multi_turn"),
        ("PPO with a reward model", "ppo_reward_model"),
        ("distillation from a larger teacher, 1 GPU", "distillation"),
        ("SFT with packing", "sft_packing"),
        ("code", "grpo_code"),
    ],
)
def test_a_newcomer_finds_the_right_one_first(wish: str, name: str, installed: list[TemplateFacts]) -> None:
    assert choose(wish, installed)[0].template.name == name


@pytest.mark.parametrize(
    ("wish", "names"),
    [
        ("teach my chatbot to be more polite from thumbs up and thumbs down", "dpo dpo_8gpu dpo_ipo dpo_lora rm"),
        ("make a small model as good as a big one", "distillation distillation_8gpu distillation_given opd"),
        ("solve school exercises", "grpo_gsm8k"),
        ("write python functions that pass unit tests", "grpo_code"),
        ("call functions and use a search engine", "grpo_multi_turn"),
        ("my GPU has only little memory, 8B model", "dpo_lora grpo_lora ppo_lora"),
        ("just try it out on my laptop", "rloo_small"),
        ("teach it facts from question answer pairs", "sft sft_packing"),
        ("play a puzzle game", "ppo_multi_turn"),
        ("summarise very long reports", "sft_long_context"),
        ("score answers by human taste for later RL", "rm rm_8gpu rm_for_rl rm_margin"),
        ("let GPT-4 grade free-form essays", "grpo_judge"),
        ("pick the better of two answers", "dpo dpo_8gpu dpo_ipo dpo_lora rm"),
        ("deepseek r1 style thinking", "dapo_17k dapo_long_context grpo grpo_8gpu grpo_gsm8k sft_reasoning"),
        ("huge mixture-of-experts on a cluster", "gspo_megatron_moe"),
        ("cheap fine-tune of llama on customer support dialogues", "sft"),
        ("sampling and training at the same time so no GPU waits", "grpo_async"),
        ("copy answers of a teacher model that I saved in a file", "distillation_given"),
        ("competition maths olympiad problems on one machine with 8 cards", "dapo_17k grpo_8gpu ppo_8gpu"),
        ("coding assistant for leetcode", "grpo_code"),
        ("agent that uses tools over several rounds", "grpo_multi_turn"),
        ("fine-tune on my own chat logs", "sft sft_8gpu sft_packing"),
        ("compress a 32B model into a 4B one", "distillation_8gpu"),
        ("teacher has a different vocabulary", "distillation_other_tokenizer"),
        ("beginner, small, cheap, nothing to download", "grpo_gsm8k rloo_small"),
        ("my training set is tiny and it overfits", "dpo_ipo"),
        ("a classifier that rates how good an answer is", "rm rm_8gpu rm_for_rl rm_margin"),
        ("actor critic with value function", "ppo ppo_8gpu ppo_lora"),
        ("70 billion parameters supervised", "sft_megatron"),
    ],
)
def test_a_wish_in_the_words_of_a_newcomer_finds_one_that_suits_it(
    wish: str, names: str, installed: list[TemplateFacts]
) -> None:
    assert choose(wish, installed)[0].template.name in names.split()


def test_other_words_belong_to_what_templates_say_of_themselves(installed: list[TemplateFacts]) -> None:
    said = {tag.lower() for template in installed for fact in ("task", "uses") for tag in template.facts[fact]}
    assert not set(OTHER_WORDS) - said


def test_a_word_that_few_templates_have_counts_for_more() -> None:
    both = [EIGHT, ONE, *(facts_of(f"other{n}", "", "# x\n# task: math\nalgorithm: grpo\n") for n in range(8))]
    assert choose("math, preferences", both)[0].template is ONE
