"""Rows that the environment or the chat template cannot use are found before the model loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.config import PolicyConfig, load_config
from nemorl.contracts.display import Silence
from nemorl.contracts.environment import Environment
from nemorl.errors import ConfigError, DataError, NemorlError
from nemorl.plugins.registry import registry
from nemorl.types import Prompt
from nemorl_rl.data.prompt_check import prompt_problems
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import RewardFunction, WeightedEnvironment
from nemorl_rl.rollouts.rehearsal import reward_problems
from pydantic import ValidationError
from recorded_messages import Raises

SILENT = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


def built() -> list[Environment]:
    """Environments of all plugins that need no options."""
    found = []
    for entry in registry().index.of_kind("environments"):
        try:
            found.append(registry().load("environments", entry.name)().build())
        except (NemorlError, ValidationError):
            continue
    return found


def test_every_environment_that_cannot_do_without_an_answer_says_so() -> None:
    environments, silent = built(), []
    for environment in environments:
        try:
            environment.start(Prompt(0, "1+1=", (1,), (), None, {"prompt": "1+1="})).step("2")
        except DataError as error:
            if "answer" in error.message and "answer" not in environment.needs_columns:
                silent.append(environment.name)
        except Exception:
            continue  # not for want of an answer
        finally:
            environment.close()
    assert {"math", "exact_match", "multiple_choice"} <= {one.name for one in environments if one.needs_columns}
    assert not silent


def test_rows_without_an_answer_are_refused_with_the_columns_that_they_have(
    tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    policy = {"init": "random", "max_sequence_tokens": 32}
    config = load_config(
        {
            "algorithm": "grpo",
            "model": str(tiny_model),
            "environment": "math",
            "run_dir": str(tmp_path / "run"),
            "generation": {"max_new_tokens": 3},
            "policy": policy,
        }
    )
    announced: list[str] = []

    class Shown(Silence):
        def announce(self, text: str) -> None:
            announced.append(text)

    with raises(ConfigError, "math", "answer", "prompt", "solution"):
        config.build().fit([{"prompt": "1+1=", "solution": "2"}] * 4, console=Shown())
    assert not [text for text in announced if "loading" in text]


def test_columns_are_asked_of_parts_and_empty_ones_count_as_none() -> None:
    math = next(one for one in built() if one.name == "math")
    both = WeightedEnvironment({"math": math, "short": RewardFunction(lambda prompt, response: 1.0)})
    for row, count in (({"prompt": "a"}, 1), ({"prompt": "a", "answer": " "}, 1), ({"prompt": "a", "answer": 0}, 0)):
        assert len([issue for issue in reward_problems(both, row) if "answer" in issue.message]) == count
    both.close()


def problems(model: Path, roles: tuple[str, ...], template: str | None = None) -> list[str]:
    tokenizer = Tokenizer.of(PolicyConfig(model_name=str(model), tokenizer={"chat_template": template}))
    row = {"prompt": [{"role": role, "content": f"{number}+1="} for number, role in enumerate(roles)]}
    return [issue.message for issue in prompt_problems([{"prompt": "plain"}, row], tokenizer)]


def test_roles_that_no_template_knows_are_found(tiny_model: Path) -> None:
    assert problems(tiny_model, ("system", "user", "assistant", "user")) == []
    for role in ("human", "wizard"):
        (message,) = problems(tiny_model, ("user", role))
        assert "row 1" in message
        assert repr(role) in message
    assert (
        problems(tiny_model, ("user", "wizard"), "{% set known = 'wizard' %}" + SILENT + "{{ messages[1].content }}")
        == []
    )


def test_words_that_a_template_leaves_out_are_found(tiny_model: Path) -> None:
    (message,) = problems(tiny_model, ("system", "user"), SILENT)
    assert "'system'" in message
    assert problems(tiny_model, ("user",), SILENT) == []
    assert problems(tiny_model, ("user",), "{banana")


@pytest.mark.parametrize("template", ["banana", "no_such_file.jinja", "x" * 5000, "x" * 5000 + ".jinja", " "])
def test_what_is_no_template_is_refused_as_the_config_loads(template: str) -> None:
    with pytest.raises(ValidationError, match="chat_template"):
        PolicyConfig(model_name="org/model", tokenizer={"chat_template": template})


def test_templates_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(SILENT)
    given: Any
    for given in (None, "passthrough", SILENT, str(file)):
        assert PolicyConfig(model_name="org/model", tokenizer={"chat_template": given}).tokenizer.chat_template == given
