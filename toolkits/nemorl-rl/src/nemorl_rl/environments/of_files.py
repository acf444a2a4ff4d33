"""A function of a file as an environment: ``environment: reward.py:score``, or ``reward_fn: reward.py:score``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from nemorl.base.text.reading import shown
from nemorl.config import CodeName
from nemorl.errors import ConfigIssue, UsageError
from nemorl.plugins.kinds import EnvironmentConfig
from nemorl.plugins.slots import ConfigSection, OtherSpellings
from pydantic import Field

from nemorl_rl.environments.references import FORM, is_reference, load_function, reference_problems

if TYPE_CHECKING:
    from nemorl.contracts import Environment

NAME = "function"
SECTION = "reward_fn"
PLACE = "environment"


class FunctionConfig(EnvironmentConfig):
    """A function of a file of yours: ``reward.py:score`` in place of an environment's name means this.

    >>> FunctionConfig(function="math:gcd").function
    'math:gcd'
    """

    summary: ClassVar[str] = "a function of a file, f(prompt, response) -> reward, written `reward.py:score`"

    function: CodeName = Field(json_schema_extra={"pattern": FORM})
    """``file.py:function`` from the folder that the command runs in, or ``package.module:function``. It takes what a
    ``reward_fn`` of ``nemorl.train`` takes; a class of environments works as well."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        yield from reference_problems("", self.function)

    def build(self) -> Environment:
        from nemorl_rl.environments.sources import as_environment

        found = load_function(self.function)
        made = as_environment(found() if inspect.isclass(found) else found)
        if made is None:
            raise UsageError(f"{self.function} made no environment", fix="return one, or name a function of two")
        return made


def _expand(value: Mapping[str, Any], installed: Sequence[str]) -> Mapping[str, Any] | None:
    """The options that ``{"name": "reward.py:score"}`` or ``{"function": "reward.py:score"}`` means; ``None``: none."""
    if "name" not in value and is_reference(value.get("function")):
        return {"name": NAME, **value}
    if not is_reference(value.get("name")):
        return None
    return {**value, "name": NAME, "function": value["name"]}


def _schemas(names: Sequence[str]) -> list[dict[str, Any]]:
    """JSON schemas of what stands for an environment besides the ``names`` of plugins."""
    spelled = {"type": "string", "pattern": r"[.]py:[A-Za-z_]\w*$"}
    return [spelled, {"type": "object", "required": ["function"], "properties": {"function": spelled}}]


def _without_section(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """A config, as it was written and changes applied, with its ``reward_fn`` as the environment; and what is wrong."""
    rest = {key: value for key, value in data.items() if key != SECTION}
    wanted = data[SECTION]
    if not is_reference(wanted):
        fix = "write FILE.py:FUNCTION, or the name of an environment under `environment:`"
        return rest, [ConfigIssue(SECTION, f"expected a function of a file, got {shown(wanted)}", fix)]
    if PLACE in rest:
        return rest, [ConfigIssue(SECTION, "`environment:` says what scores the responses, too", "keep one of them")]
    return {**rest, PLACE: wanted}, []


def _schema_of_section() -> dict[str, Any]:
    """The JSON schema of ``reward_fn``, for editors."""
    return {"description": "A function that scores responses, `file.py:function`.", **_schemas(())[0]}


SPELLINGS = OtherSpellings(_expand, _schemas)
"""``environment: reward.py:score``, and ``environment: {function: reward.py:score}``."""
REWARD_FN = ConfigSection(_without_section, _schema_of_section)
"""``reward_fn: reward.py:score``."""
