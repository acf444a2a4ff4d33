"""ConstraintError: a form of the answer that an engine cannot hold a policy to."""

from __future__ import annotations

from nemorl.errors import UsageError

CONSTRAINED = "constrained"
"""The capability of engines that sample within ``SamplingParams.json_schema``."""
REMEDY = (
    "generate with vLLM (generation.backend: vllm), or describe the format in the prompt and leave the field out, by"
    " the agent or by environment.gateway.ignored_fields"
)


class ConstraintError(UsageError):
    """The engine cannot constrain its sampling so.

    Example:
        >>> issubclass(ConstraintError, ValueError)
        True
    """
