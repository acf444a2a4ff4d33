"""What newcomers call the things that templates name by the field's words, for `nemorl config templates --for`."""

from __future__ import annotations

from collections.abc import Mapping

OTHER_WORDS: Mapping[str, str] = {
    # tasks
    "math": "maths mathematical exercises problems equations calculate olympiad competition numbers proofs",
    "reasoning": "think thinking thoughts r1 o1 deepseek step-by-step logic chain-of-thought cot",
    "arithmetic": "sums addition plus",
    "first run": "try tutorial beginner start hello example simple learn quick cheap school",
    "code": "coding coder python javascript functions software unit tests leetcode bugs sql write",
    "tool use": "tools functions call calling search engine api browser retrieval web",
    "agents": "agent agentic assistant act rounds steps several turns environment",
    "games": "game play puzzle moves board chess sudoku",
    "chat": "chatbot assistant dialogues conversations support customer helpful bot",
    "alignment": "align polite safe harmless tone style behaviour values",
    "rlhf": "human feedback taste people",
    "writing": "essays poems stories creative free-form text letters summaries",
    "instructions": "instruction follow examples demonstrations logs prompts imitate",
    "fine-tuning": "finetune finetuning tune adapt domain supervised own facts knowledge question answer pairs",
    "preferences": "preference better worse compare choose chosen rejected thumbs votes ranking liked prefer pick",
    "reward model": "scorer score rate rates classifier judge taste grade rating human",
    "distillation": "distil distill compress shrink student teacher imitate copy big bigger larger good",
    "long documents": "books reports papers summarise summarize articles contracts long",
    # what they use
    "given responses": "saved answers file texts offline generated already recorded written",
    "async": "overlap wait waits idle parallel simultaneously same time off-policy pipeline",
    "moe": "mixture mixture-of-experts sparse",
    "judge": "gpt-4 claude grades grader grade llm-as-a-judge opinion",
    "small memory": "little memory vram consumer 24gb 16gb rtx 4090 3090 qlora cheap low fits",
    "many nodes": "cluster multi-node huge slurm supercomputer large",
    "critic": "value function actor-critic gae baseline",
    "other tokenizer": "different vocabulary tokens",
    "small data": "tiny few little",
    "overfitting": "overfit overfits",
    "generated data": "synthetic nothing",
    "long context": "long 32k 128k tokens",
    "packing": "short texts padding faster efficient",
    "margin": "stars scale how much degrees",
}
"""By a tag of a template's second line: other words for it."""
