"""The ``calculator`` environment: answers tool calls, then grades the final answer."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from nemorl.contracts.environment import Environment
from nemorl.errors import DataError
from nemorl.types import Prompt, Score, Step
from nemorl_rl.rollouts.prompts import required_answer

from nemorl_tasks.environments.expressions import ExpressionError, evaluate, show
from nemorl_tasks.environments.wording import has_alternative, is_denied, is_scaled

if TYPE_CHECKING:
    from nemorl_tasks.environments.config import CalculatorConfig

MAX_CALL_CHARS = 2000
"""The part of a response, from its end, in which a call is looked for. What comes before is reasoning."""
_TAG = re.compile(r"<tool>([^<>]*)</tool>\Z")
_CALL = re.compile(r"<tool_call>([^<>]*)</tool_call>\Z")
_NUMBER = r"(?P<number>(?:[-+−]\s*)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?)"
_MARKED = re.compile(rf"(?:answer(?:\s+is)?\s*[:=]?|<answer>|\\boxed\{{)[\s*_$(]*{_NUMBER}", re.IGNORECASE)
_ANY = re.compile(rf"(?<![\w.,]){_NUMBER}")
_OTHER = r"[-+−]?\$?\d[\d,.]*"
_GOES_ON = re.compile(
    r"\w|[.,]\d|\s*(?:[%^!°‰]|(?:\*{1,2}|[×·/+])\s*[\d(\\]|[-−]\s*\d|(?:hundred|thousand|million|billion|trillion|percent|dozen|squared|cubed)\b"
    r"|\\(?:times|cdot|div|pi|%|frac|sqrt))",
    re.IGNORECASE,
)
"""After a number that is a part of another: an exponent, a percent sign, more digits, an operation."""


class Calculator(Environment):
    """Conversations with a calculator."""

    name = "calculator"
    needs_columns = frozenset({"answer"})

    def __init__(self, config: CalculatorConfig) -> None:
        self._config = config

    def start(self, prompt: Prompt) -> _Session:
        answer = required_answer(prompt, self.name)
        try:
            wanted = evaluate(answer)
        except ExpressionError as error:
            raise DataError(
                f"the answer {answer!r} of prompt {prompt.text[:60]!r} is no number ({error})",
                fix="use `data: calculator`, or rows whose `answer` is a number",
            ) from error
        return _Session(self._config, wanted)


class _Session:
    def __init__(self, config: CalculatorConfig, wanted: Fraction) -> None:
        self._config, self._wanted = config, wanted
        self._calls = self._values = 0

    def step(self, response: str) -> Step:
        """The value of what is asked, or the verdict on a final answer."""
        expression = tool_call(response)
        if expression is None:
            is_right = final_number(response) == self._wanted and (self._values > 0 or not self._config.require_tool)
            return Step(Score(float(is_right), metrics=_counts(), correct=is_right))
        self._calls += 1
        if self._calls > self._config.max_calls:
            return Step(Score(0.0, metrics=_counts(calls=1), correct=False))
        try:
            result = show(evaluate(expression))
            self._values += 1
        except ExpressionError as error:
            result = f"error: {error}"
        counts = _counts(calls=1, errors=int(result.startswith("error")))
        observation = self._config.observation(f"<result>{result}</result>")
        return Step(Score(0.0, metrics=counts, correct=False), observation, done=False)


def _counts(calls: int = 0, errors: int = 0) -> dict[str, float]:
    return {"tool_calls": float(calls), "tool_errors": float(errors)}


def tool_call(response: str) -> str | None:
    """The expression of the call that a response ends with; ``None`` where it ends otherwise."""
    end = response[-MAX_CALL_CHARS:].rstrip()
    if found := _TAG.search(end):
        return found[1]
    found = _CALL.search(end)
    return None if found is None else _expression_in(found[1])


def _expression_in(text: str) -> str:
    """The expression in ``{"name": "calculator", "arguments": {"expression": "12*7"}}``; broken JSON is an expression
    without a value, so that the policy is told."""
    try:
        call: Any = json.loads(text)
        arguments = call["arguments"]
        if isinstance(arguments, str):  # some templates write the arguments as JSON text
            arguments = json.loads(arguments)
        return str(arguments["expression"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


def final_number(response: str) -> Fraction | None:
    """The last number after ``Answer:``, ``<answer>`` or ``\\boxed{``, else the last number of the response.

    ``None`` where the words round it deny it, make another number of it or offer a second one.
    """
    end = response[-MAX_CALL_CHARS:]
    found = list(_MARKED.finditer(end)) or list(_ANY.finditer(end))
    if not found:
        return None
    begin, stop = found[-1].span("number")
    before, after = end[:begin], end[stop:]
    if _GOES_ON.match(after) or is_denied(before, after) or is_scaled(before) or has_alternative(before, after, _OTHER):
        return None
    try:
        return evaluate(found[-1]["number"].replace("$", ""))
    except ExpressionError:
        return None
