"""An agent that asks the policy once, as any client of OpenAI's API does."""

from __future__ import annotations

PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.stdin.read()}]})
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)))
print(answer["choices"][0]["message"]["content"])
"""
