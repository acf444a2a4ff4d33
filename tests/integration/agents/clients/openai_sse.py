"""An agent with the openai SDK: chat completions as a stream of events."""

import json
import os
import sys

from openai import OpenAI
from openai_tools import TOOLS

client = OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    content, calls = "", {}
    events = client.chat.completions.create(
        model=os.environ["OPENAI_MODEL"],
        messages=messages,
        tools=TOOLS,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in events:
        for choice in event.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": part.id, "type": "function", "function": {}})
                name, arguments = part.function.name or "", part.function.arguments or ""
                call["function"]["name"] = call["function"].get("name", "") + name
                call["function"]["arguments"] = call["function"].get("arguments", "") + arguments
        if event.usage is not None:
            assert event.usage.total_tokens == event.usage.prompt_tokens + event.usage.completion_tokens
    said = {"role": "assistant", "content": content}
    messages.append({**said, "tool_calls": [*calls.values()]} if calls else said)
    if not calls:
        break
    for call in calls.values():
        numbers = json.loads(call["function"]["arguments"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(numbers["a"] + numbers["b"])})
print(content)
