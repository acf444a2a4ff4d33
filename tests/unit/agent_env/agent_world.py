"""A policy that says what it is told to, and a server of the fewest lines that lets programs call it."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from nemorl.media import Media
from nemorl.types import Completion, Prompt
from nemorl_agents.programs.environment import Agent
from nemorl_rl.agents.contract import (
    AS_THE_RUN,
    CallLimitError,
    CallOptions,
    ChatMessage,
    ChatReply,
    EpisodeLimits,
    EpisodePolicy,
    ToolChoice,
)

LIMITS = EpisodeLimits(max_sequence_tokens=4096, max_new_tokens=64, max_calls=20, timeout_s=60.0)


class ScriptedPolicy:
    """Answers with the messages of a list, one after the other; then it has had its calls."""

    episode_id = "episode 3.1"
    text = None

    def __init__(self, *answers: str | Mapping[str, Any] | Exception, timeout_s: float = 60.0) -> None:
        self._answers = [*answers]
        self.limits = replace(LIMITS, timeout_s=timeout_s)
        self.heard: list[list[ChatMessage]] = []
        self.tools: list[Mapping[str, Any]] = []

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        options: CallOptions = AS_THE_RUN,
    ) -> ChatReply:
        self.heard.append([*messages])
        self.tools = [*tools]
        if not self._answers:
            raise CallLimitError("it has had its answers")
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        message = (
            {"role": "assistant", "content": answer} if isinstance(answer, str) else {"role": "assistant", **answer}
        )
        return ChatReply(message, Completion((7,), (-1.0,), "stop"), prompt_tokens=3)

    async def complete(
        self, token_ids: Sequence[int], media: Sequence[Media] = (), *, options: CallOptions = AS_THE_RUN
    ) -> Completion:
        return Completion((7,), (-1.0,), "stop")

    def reward(self, value: float, completion: Completion | None = None) -> float:
        return value


def wants(name: str, number: int = 1, **arguments: Any) -> dict[str, Any]:
    """A message that calls one tool."""
    call = {"id": f"call_{number}", "type": "function"}
    return {"content": None, "tool_calls": [{**call, "function": {"name": name, "arguments": json.dumps(arguments)}}]}


@dataclass(frozen=True)
class Access:
    """To one episode of a ``TinyGateway``."""

    base_url: str
    api_key: str
    model: str = "policy"

    @property
    def openai_base_url(self) -> str:
        return f"{self.base_url}/v1"


class Traffic:
    def metrics(self) -> Mapping[str, float]:
        return {"gateway_requests": 1.0}


class TinyGateway:
    """Answers ``POST /v1/chat/completions`` of known keys."""

    def __init__(self) -> None:
        self.open_policies: dict[str, EpisodePolicy] = {}
        self.keys: list[str] = []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                key = self.headers["Authorization"].removeprefix("Bearer ")
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                policy = gateway.open_policies.get(key)
                if policy is None:
                    self.send_error(401)
                    return
                try:
                    reply = asyncio.run(policy.chat(body["messages"]))
                except Exception as error:
                    self.send_error(400 if isinstance(error, ValueError) else 500)
                    return
                answer = json.dumps({"choices": [{"message": reply.message}]}).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def open(self, policy: EpisodePolicy) -> Access:
        key = secrets.token_hex(8)
        self.keys.append(key)
        self.open_policies[key] = policy
        return Access(f"http://127.0.0.1:{self._server.server_address[1]}", key)

    def close(self, access: Any) -> Traffic:
        self.open_policies.pop(access.api_key, None)
        return Traffic()

    def shutdown(self) -> None:
        self._server.shutdown()
        self._server.server_close()


ASK = """
import json, os, sys, urllib.request
def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


Script = Callable[[str], Path]


def prompt_of(text: str = "6*7=", **row: Any) -> Prompt:
    return Prompt(0, text, (5,), answer=row.get("answer"), row=row)


Programs = Callable[..., Agent]


def play(environment: Agent, policy: ScriptedPolicy, prompt: Prompt | None = None) -> Any:
    """One episode."""
    return asyncio.run(environment.rollout(prompt or prompt_of(), policy))
