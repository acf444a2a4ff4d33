"""An agent with smolagents, which writes its own earlier calls as text."""

import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: A number.
        b: Another.
    """
    return a + b


model = OpenAIModel(os.environ["OPENAI_MODEL"], os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[add], model=model, verbosity_level=0, max_steps=4)
print(agent.run(sys.argv[1]))
