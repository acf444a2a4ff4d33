"""An agent that is a program: asks once, says what it was told."""

import json
import os
import sys
import urllib.request


def digits(prompt, response):
    return sum(letter.isdigit() for letter in response) / max(1, len(response))


def main():
    messages = [{"role": "user", "content": sys.stdin.read()}]
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages})
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)))
    print(answer["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
