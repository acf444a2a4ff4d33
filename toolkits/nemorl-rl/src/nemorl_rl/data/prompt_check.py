"""Before the model loads: does its chat template say what the prompts of the first rows hold?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemorl.base.text.reading import shown
from nemorl.errors import ConfigIssue, DataError
from nemorl.types import Row

from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.rollouts.prompts import to_prompt

FIRST_ROWS = 64
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
"""Of published templates. Others count where the template names them."""
USUAL: Mapping[str, str] = {"human": "user", "prompter": "user", "gpt": "assistant", "bot": "assistant"}
SHOWN_AS_WRITTEN = frozenset({"system", "developer", "user"})
"""Their words stand in the text; of an answer the reasoning may be left out, results of tools may be quoted."""


def prompt_problems(rows: Sequence[Row], tokenizer: Tokenizer) -> Iterator[ConfigIssue]:
    """The first row whose prompt cannot be asked, or not be asked whole.

    Args:
        rows: The first of the data.
        tokenizer: With the template that the run uses.
    """
    for number, row in enumerate(rows):
        try:
            messages = to_prompt(row, number, tokenizer).messages
            text = tokenizer.chat_text(messages, add_generation_prompt=True) if messages else ""
        except DataError as error:
            yield ConfigIssue("data", error.message, error.fix)
            return
        problem = _role_problem(messages, text, str(tokenizer.inner.chat_template or "") if messages else "")
        if problem is not None:
            yield ConfigIssue("data", f"row {number}: {problem[0]}", problem[1])
            return


def _role_problem(messages: Sequence[Mapping[str, Any]], text: str, template: str) -> tuple[str, str] | None:
    for message in messages:
        role, words = str(message["role"]), message["content"]
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            fix = f"write {USUAL[role]!r}" if role in USUAL else f"use {', '.join(sorted(ROLES))}"
            return f"no chat template knows the role {shown(role)}", fix
        if role in SHOWN_AS_WRITTEN and isinstance(words, str) and words.strip() not in text:
            fix = "leave such messages out, or use a template that shows them (policy.tokenizer.chat_template)"
            return f"the chat template does not show the words of the role {shown(role)}", fix
    return None
