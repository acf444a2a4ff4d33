"""An agent with openai-agents, over responses."""

import os
import sys

from agents import Agent, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


model = OpenAIResponsesModel(os.environ["OPENAI_MODEL"], AsyncOpenAI())
agent = Agent("calculator", instructions="Use the tool.", tools=[add], model=model)
print(Runner.run_sync(agent, sys.argv[1]).final_output)
