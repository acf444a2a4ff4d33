"""An unmodified pydantic-ai agent teaches its model to use a calculator: the real engine, gateway, trainer and client.

A model of 50,000 weights has seen demonstrations: one in six leaves the sum to the calculator, the others guess. It
knows how to call, and seldom does. That a call is worth it is learned from rewards alone, given for the right answer
whatever the way to it. Every fifth sum is in no demonstration and in no rollout, and tells what was learned.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config.load import load_config
from nemorl.contracts.environment import Environment
from nemorl.types import Prompt, Score
from nemorl_cli.console import Console
from nemorl_rl.agents.contract import EpisodePolicy
from nemorl_rl.agents.gateways import EpisodeGateway, start_gateway
from nemorl_rl.chat.codec import codec_of
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.models.tiny import ALPHABET, write_tiny_model

pytestmark = pytest.mark.slow

pytest.importorskip("pydantic_ai")

SYSTEM = "Use the tool."
TEMPLATE = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}{{ '<' + message.role + '>' }}"
    "{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}"
    "{{ '}</tool_call>' }}{% endfor %}{% if message.role == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
WORDS = ["<tool_call>", "</tool_call>", '{"name": "', "add", '", "arguments": ', '{"a": ', ', "b": ', "}", SYSTEM]
"""One token each, as in a grown tokenizer, so that a call is a dozen tokens."""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
SUMS = [(a, b) for a in range(10) for b in range(10) if (a + 2 * b) % 5]
HELD_OUT = [(a, b) for a in range(10) for b in range(10) if (a + 2 * b) % 5 == 0]
CALLED = 1 / 6
"""The share of demonstrations that call."""
MOST_BATCHES, AT_ONCE, WARM_UP, FADING = 3000, 32, 50, 200
STEPS = 22


class Calculator(Environment):
    """The agent of pydantic-ai's own introduction, over the gateway."""

    name = "calculator"

    def __init__(self, gateway: EpisodeGateway) -> None:
        from openai import DefaultAsyncHttpxClient

        self.gateway = gateway
        self.client = DefaultAsyncHttpxClient()  # shared: a client of its own would cost each episode 25 ms

    async def rollout(self, prompt: Prompt, policy: EpisodePolicy) -> Score:
        from pydantic_ai import Agent
        from pydantic_ai.exceptions import AgentRunError
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        access = self.gateway.open(policy)
        provider = OpenAIProvider(access.openai_base_url, api_key=access.api_key, http_client=self.client)
        agent = Agent(OpenAIChatModel(access.model, provider=provider), system_prompt=SYSTEM)
        uses: list[tuple[int, int]] = []

        @agent.tool_plain
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            uses.append((a, b))
            return a + b

        try:
            answer = (await agent.run(prompt.text)).output
        except AgentRunError:  # arguments that are no numbers, or nothing said, again and again
            answer = ""
        finally:
            self.gateway.close(access)
        return Score(float(answer.strip() == prompt.answer), metrics={"uses": float(len(uses))})


def call(a: int, b: int) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


class Demonstrations:
    """First turns that call or guess, and second ones that say what the calculator said."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer, self.codec, self.draw = tokenizer, codec_of(tokenizer), random.Random(seed)
        self.first = {(a, b): self.rendered(asked(a, b)) for a, b in SUMS}
        self.second = [self.called(*pair) for pair in SUMS]

    def rendered(self, messages: list[dict[str, Any]]) -> list[int]:
        return list(self.codec.render(messages, TOOLS))

    def called(self, a: int, b: int) -> tuple[list[int], str]:
        """The calculator was called, and said any number."""
        number = str(self.draw.randint(0, 18))
        function = {"name": "add", "arguments": f'{{"a": {a}, "b": {b}}}'}
        made = {"type": "function", "id": "call_1", "function": function}
        told = {"role": "tool", "tool_call_id": "call_1", "content": number}
        return self.rendered([*asked(a, b), {"role": "assistant", "content": "", "tool_calls": [made]}, told]), number

    def one(self) -> tuple[list[int], list[int]]:
        """Prompt and answer."""
        if self.draw.random() < 0.25:
            prompt, answer = self.draw.choice(self.second)
            return prompt, self.whole(answer)
        a, b = self.draw.choice(SUMS)
        if self.draw.random() < 0.75:  # once it calls, it does so well
            return self.begun(a, b)
        answer = call(a, b) if self.draw.random() < CALLED else str(self.draw.randint(0, 18))
        return self.first[a, b], self.whole(answer)

    def whole(self, answer: str) -> list[int]:
        return [*self.tokenizer.encode_observation(answer), *sorted(self.tokenizer.stop_token_ids)]

    def calls(self) -> list[tuple[list[int], list[int]]]:
        """A call for each sum, its first token given."""
        return [self.begun(*pair) for pair in SUMS]

    def begun(self, a: int, b: int) -> tuple[list[int], list[int]]:
        first, *others = self.whole(call(a, b))
        return [*self.first[a, b], first], others


def padded(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of prompts and answers."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(rows):
        whole = torch.tensor([*prompt, *answer])
        ids[row, : len(whole)] = whole
        labels[row, len(prompt) : len(whole)] = whole[len(prompt) :]
    return ids, labels


def knows_how(model: Any, demonstrations: Demonstrations) -> bool:
    """Nine of ten calls that it begins are right."""
    ids, labels = padded(demonstrations.calls())
    with torch.no_grad():
        loss = model(input_ids=ids, labels=labels).loss  # a mean over the 11 tokens of each
    return float(loss) < 0.1 / 11


def asked(a: int, b: int) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{a}+{b}="}]


def teach(folder: Path, seed: int) -> Path:
    """A model that has seen the demonstrations."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 112}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}
    sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}  # it looks back 20 tokens at most
    write_tiny_model(folder, alphabet=ALPHABET + "{}_", **sizes)
    tokenizer = Tokenizer.load(str(folder))
    tokenizer.inner.add_tokens(WORDS)
    tokenizer.inner.chat_template = TEMPLATE
    tokenizer.save(folder)
    demonstrations = Demonstrations(Tokenizer.load(str(folder)), seed)
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.from_pretrained(folder))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), fused=True)
    last = None
    for step in range(MOST_BATCHES):
        if last is None and step % 50 == 0 and knows_how(model, demonstrations):
            last = step + FADING
        optimizer.param_groups[0]["lr"] = 5e-3 * min(
            1, step / WARM_UP, *([] if last is None else [(last - step) / FADING])
        )
        ids, labels = padded([demonstrations.one() for _ in range(AT_ONCE)])
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == last:
            break
    assert last is not None, f"no good calls after {MOST_BATCHES} batches of demonstrations"
    model.save_pretrained(folder)
    return folder


def rows(sums: list[tuple[int, int]]) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a, b in sums]


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_reward_rises(seed: int, tmp_path: Path) -> None:
    config = load_config(
        {
            "algorithm": "grpo",
            "model": str(teach(tmp_path / "model", seed)),
            "policy": {"max_sequence_tokens": 64, "optimizer": {"lr": 8e-4}},
            "generation": {"max_new_tokens": 24},
            "rollouts": {"max_calls": 4},
            "num_prompts_per_step": 8,
            "num_generations_per_prompt": 8,
            "validation": {"every": 0, "at_start": True},
            "max_steps": STEPS,
            "seed": seed,
            "run_dir": str(tmp_path / "run"),
        }
    )
    gateway = start_gateway()
    try:
        agent = Calculator(gateway)
        result = config.build().fit(rows(SUMS), agent, val_dataset=rows(HELD_OUT), console=Console(quiet=True))
    finally:
        gateway.shutdown()
    steps = [record for record in result.history if "train/reward" in record]
    held_out = [record["validation/accuracy"] for record in result.history if "validation/accuracy" in record]
    rewards = [record["train/reward"] for record in steps]
    print(f"\nseed {seed}: {[round(reward, 2) for reward in rewards]}, held out: {held_out}")
    assert rewards[0] < 0.3
    assert sum(rewards[-3:]) / 3 > 0.8
    assert held_out[0] < 0.3
    assert held_out[-1] > 0.8
    assert steps[0]["train/environment/uses"] < 0.3
    assert steps[-1]["train/environment/uses"] > 0.8
    assert all(step["train/environment/realigned_tokens"] == 0 for step in steps)
    assert max(step["train/token_mult_prob_error"] for step in steps) < 1.001  # trained is what was sampled
