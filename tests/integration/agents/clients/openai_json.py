"""An agent with the openai SDK: chat completions, answers as JSON."""

import json
import os
import sys

from openai import OpenAI
from openai_tools import TOOLS

client = OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=TOOLS)
    message = reply.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        numbers = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})
print(message.content)
