"""Tools that answer with images and sounds: a model that takes them is shown them, another is told of them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_world import ScriptedPolicy as Scripted
from agent_world import play, prompt_of, wants
from nemorl.media import Media, media_runs
from nemorl_agents.programs import AgentConfig
from nemorl_agents.programs.results import as_result, seen
from nemorl_agents.programs.tools import Toolbox, function_tool
from nemorl_media.decoding import pixels
from nemorl_rl.agents.policy import LivePolicy
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_testing.seeing import drawing, tune
from pictured_talks import CALL, live, policy_config, saying_sampler, url_of
from PIL import Image

SHOWN = {"type": "image", "image": drawing(1)}
AS_URL = {"type": "image", "image": url_of(drawing(1).data)}
RED = Image.new("RGB", (56, 28), "red")
TEXT = {"type": "text", "text": "seen:"}


def look() -> Any:
    return ["seen:", RED]


@pytest.fixture
def policy() -> Iterator[LivePolicy]:
    tokenizer = Tokenizer.of(policy_config())
    with saying_sampler(tokenizer, CALL, "42") as sampler:
        yield live(sampler, tokenizer)


@pytest.fixture
def tool(tmp_path: Path) -> str:
    path = tmp_path / "tools.py"
    path.write_text('from PIL import Image\n\ndef look():\n    return ["seen:", Image.new("RGB", (56, 28), "red")]\n')
    return f"{path}:look"


def agent(tool: str) -> Any:
    return AgentConfig(tools={"functions": [tool]}, reward="exact_match").build()


def test_a_policy_that_sees_is_shown_what_its_tool_returned(policy: LivePolicy, tool: str) -> None:
    score = asyncio.run(agent(tool).rollout(prompt_of(answer="42"), policy))
    assert (score.reward, score.metrics["tool_calls"], score.metrics["tool_errors"]) == (1.0, 1.0, 0.0)
    first, second = policy.calls
    said = (*first.prompt_ids, *first.completion.token_ids)
    assert second.prompt_ids[: len(said)] == said
    [item] = second.media
    assert pixels(item).getpixel((0, 0)) == (255, 0, 0)
    [(start, end)] = media_runs(second.prompt_ids)
    assert (start >= len(said), end - start) == (True, 2)  # 28 by 28 pixels are a token


def test_a_policy_of_text_alone_is_told_that_there_is_an_image(tool: str) -> None:
    policy = Scripted(wants("look"), "42")
    assert play(agent(tool), policy, prompt_of(answer="42")).reward == 1.0
    [_, _, told] = policy.heard[-1]
    assert told["content"] == "seen:\n[image]"


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("text", "text"),
        ({"a": 1}, '{"a": 1}'),
        ([1, "b"], '[1, "b"]'),
        ({"type": "message"}, '{"type": "message"}'),
        (drawing(1), [SHOWN]),
        (tune(1), [{"type": "audio", "audio": tune(1)}]),
        (["seen:", drawing(1), {"a": 1}], [TEXT, SHOWN, {"type": "text", "text": '{"a": 1}'}]),
        ((TEXT, AS_URL), [TEXT, AS_URL]),
    ],
)
def test_what_a_tool_returns_is_text_or_parts(returned: Any, expected: Any) -> None:
    assert as_result(returned) == expected


def test_text_is_cut_over_all_parts_and_items_are_whole() -> None:
    texts = ({"type": "text", "text": letters} for letters in ("y" * 6, "z"))
    long: list[dict[str, Any]] = [{"type": "text", "text": "x" * 6}, SHOWN, *texts]
    assert seen(long, {"image"}, 10) == [
        {"type": "text", "text": "x" * 6},
        SHOWN,
        {"type": "text", "text": "yyyy… (2 more characters)"},
        {"type": "text", "text": "… (1 more characters)"},
    ]


def test_items_of_kinds_that_the_model_does_not_take_are_named() -> None:
    box = Toolbox([function_tool(look)], kinds={"audio"})
    assert asyncio.run(box.call("look", "{}")) == "seen:\n[image]"
    assert seen([{"type": "audio", "audio": tune(1)}], {"image"}, 10) == "[audio]"


def test_what_mcp_servers_send_is_the_item() -> None:
    pytest.importorskip("mcp", reason="mcp is not installed")
    from mcp.types import AudioContent, CallToolResult, ImageContent, TextContent
    from nemorl_agents.programs.mcp_tools import _tool

    def sent(*content: Any, is_error: bool = False) -> Any:
        class Client:
            async def call_tool(self, name: str, given: Any) -> CallToolResult:
                return CallToolResult(content=[*content], is_error=is_error)

        class Told:
            name, description, input_schema = "look", "", {"type": "object"}

        client: Any = Client()
        return asyncio.run(Toolbox([_tool(client, Told)], kinds={"image"}).call("look", "{}"))

    def encoded(item: Media) -> str:
        return base64.b64encode(item.data).decode()

    image = ImageContent(type="image", data=encoded(drawing(1)), mime_type="image/png")
    sound = AudioContent(type="audio", data=encoded(tune(1)), mime_type="audio/wav")
    text = TextContent(type="text", text="seen:")
    assert sent(text, image) == [TEXT, SHOWN]
    assert sent(text, sound) == "seen:\n[audio]"
    assert sent(text) == "seen:"
    assert sent(image, text, is_error=True) == "error: seen:"
    assert sent(ImageContent(type="image", data="!", mime_type="image/png")).startswith("error: DataError")
