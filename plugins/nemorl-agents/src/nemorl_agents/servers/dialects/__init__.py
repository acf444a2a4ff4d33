"""How each engine is spoken to: its requests, its answers, the calls that give it new weights. One module each.

These modules only make and read plain data, and say in which order things are sent; ``connection`` sends them.
"""

from __future__ import annotations

from collections.abc import Mapping

from nemorl_agents.servers.dialects.base import Dialect
from nemorl_agents.servers.dialects.sglang import SGLangDialect
from nemorl_agents.servers.dialects.tensorrt_llm import TensorRTLLMDialect
from nemorl_agents.servers.dialects.vllm import VLLMDialect

DIALECTS: Mapping[str, Dialect] = {
    "vllm": VLLMDialect(),
    "sglang": SGLangDialect(),
    "tensorrt-llm": TensorRTLLMDialect(),
}


def dialect(engine: str) -> Dialect:
    """The dialect of an engine, by its name in the config."""
    return DIALECTS[engine]
