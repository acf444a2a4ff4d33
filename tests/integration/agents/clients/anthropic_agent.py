"""An agent with the anthropic SDK."""

import os
import sys

from anthropic import Anthropic

TOOLS = [
    {
        "name": "add",
        "description": "Adds two numbers.",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
]

client = Anthropic()
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    reply = client.messages.create(model=os.environ["ANTHROPIC_MODEL"], max_tokens=200, messages=messages, tools=TOOLS)
    messages.append({"role": "assistant", "content": reply.content})
    calls = [block for block in reply.content if block.type == "tool_use"]
    if not calls:
        break
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] + call.input["b"])}
        for call in calls
    ]
    messages.append({"role": "user", "content": results})
print("".join(block.text for block in reply.content if block.type == "text"))
