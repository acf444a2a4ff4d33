"""Histories that agents send: forked, retried, compacted, rewritten; and prompts that begin with what was sampled."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from chat_models import ADD, Engine, template, tokenizer_of
from nemorl.errors import DataError
from nemorl.types import Completion
from nemorl_rl.agents.contract import ChatReply
from nemorl_rl.agents.record import Call, sequences
from nemorl_rl.chat.codec import codec_of
from nemorl_rl.chat.conversation import MOST_OPTIONS, ChatPrompt, Conversation
from nemorl_rl.chat.messages import plain_messages
from recorded_messages import Raises

SUB = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "1 + 2?"}


def call_of(name: str = "add", arguments: str = '{"a": 1,  "b": 2}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class World:
    """One episode with an engine that says what it is told to."""

    def __init__(self, name: str = "qwen3", seed: int = 5) -> None:
        self.tokenizer = tokenizer_of(template(name))
        self.engine = Engine(self.tokenizer)
        self.codec = codec_of(self.tokenizer)
        self.conversation = Conversation(self.codec, seed)
        self.calls: list[Call] = []

    def ask(
        self, messages: list[Any], text: str, tools: Any = (ADD,), *, is_cut: bool = False, **options: Any
    ) -> tuple[ChatPrompt, Completion, ChatReply]:
        prompt = self.conversation.prompt(messages, tools)
        completion = self.engine.say(prompt, text, is_cut=is_cut)
        self.calls.append(Call(len(self.calls), prompt.token_ids, completion, realigned_tokens=prompt.realigned_tokens))
        return prompt, completion, self.conversation.reply(prompt, completion, **options)

    def render(self, messages: list[Any], tools: Any = (ADD,)) -> tuple[int, ...]:
        return self.codec.render(plain_messages(messages), tools)


@pytest.fixture
def world() -> World:
    return World()


def result(message: Any, content: str = "3") -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": content} for call in message["tool_calls"]]


def test_what_is_sampled_is_not_what_the_tokenizer_would_write(world: World) -> None:
    sampled = world.engine.ids("Sum.42" + call_of())
    assert tuple(world.tokenizer.encode_observation(world.engine.text(sampled))) != sampled


def test_an_append_only_episode_is_one_sequence(world: World) -> None:
    history: list[Any] = [USER]
    for _ in range(4):
        *_, reply = world.ask(history, "<think>\nhm 42\n</think>\n\nSum." + call_of())
        history += [reply.message, *result(reply.message)]
    world.ask(history, "It is 42.")
    history += [{"role": "assistant", "content": "It is 42."}, {"role": "user", "content": "Sure?"}]
    world.ask(history, "Yes.")
    [sequence] = sequences(world.calls)
    assert sum(sequence.response_mask) == sum(len(call.completion.token_ids) for call in world.calls)
    assert sum(call.realigned_tokens for call in world.calls) == 0


def test_a_retry_of_the_same_request_has_the_same_prompt(world: World) -> None:
    first, *_ = world.ask([USER], "One.")
    second, *_ = world.ask([USER], "Two.")
    assert first.token_ids == second.token_ids


def test_of_two_answers_to_one_question_each_is_continued_as_itself(world: World) -> None:
    one, said_one, reply_one = world.ask([USER], "Sum." + call_of())
    two, said_two, reply_two = world.ask([USER], "<think>\nhm\n</think>\n\nSum." + call_of())
    for prompt, said, reply in ((one, said_one, reply_one), (two, said_two, reply_two)):
        more = world.conversation.prompt([USER, reply.message, *result(reply.message)], [ADD])
        recorded = (*prompt.token_ids, *said.token_ids)
        assert more.token_ids[: len(recorded)] == recorded


def test_of_two_answers_with_the_same_words_the_one_with_the_client_s_reasoning_is_meant(world: World) -> None:
    one, said_one, reply_one = world.ask([USER], "<think>\nhm\n</think>\n\n42")
    _, said_two, reply_two = world.ask([USER], "<think>\nYes\n</think>\n\n42")
    for said, message in (
        (said_one, reply_one.message),
        (said_two, reply_two.message),
        (said_two, {"role": "assistant", "content": "42"}),  # nothing tells them apart: the last
    ):
        recorded = (*one.token_ids, *said.token_ids)
        assert world.conversation.prompt([USER, message, USER], [ADD]).token_ids[: len(recorded)] == recorded


def test_parallel_calls_have_ids_of_their_own_and_come_back_together(world: World) -> None:
    prompt, said, reply = world.ask([USER], call_of() + "\n" + call_of("sub", "{}"), [ADD, SUB])
    calls = reply.message["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["add", "sub"]
    assert len({call["id"] for call in calls}) == 2
    assert reply.message["content"] is None
    more = world.conversation.prompt([USER, reply.message, *result(reply.message)], [ADD, SUB])
    recorded = (*prompt.token_ids, *said.token_ids)
    assert more.token_ids[: len(recorded)] == recorded
    assert world.engine.text(more.token_ids[len(recorded) :]).count("<tool_response>") == 2


def test_results_of_several_calls_go_on_though_the_template_writes_one_call_alone(raises: Raises) -> None:
    world = World("llama3_1")
    text = '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "add", "parameters": {"a": 3, "b": 4}}'
    prompt, said, reply = world.ask([USER], text)
    assert len(reply.message["tool_calls"]) == 2
    history = [USER, reply.message, *result(reply.message)]
    more = world.conversation.prompt(history, [ADD])
    recorded = (*prompt.token_ids, *said.token_ids)
    assert more.token_ids[: len(recorded)] == recorded
    assert world.engine.text(more.token_ids[len(recorded) :]).count("ipython") == 2
    with raises(DataError, "tool-calls"):
        world.render(history)


def test_results_of_tools_bear_the_tool_s_name() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    told = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    _, found, other = plain_messages(
        [{"role": "assistant", "content": None, "tool_calls": [call]}, told, {**told, "name": "own"}]
    )
    assert (found["name"], other["name"]) == ("add", "own")


def test_a_call_left_out_of_the_echo_is_a_rewritten_turn(world: World) -> None:
    *_, reply = world.ask([USER], call_of() + call_of("sub", "{}"), [ADD, SUB])
    [first, _] = reply.message["tool_calls"]
    history = [USER, {**reply.message, "tool_calls": [first]}, *result({"tool_calls": [first]})]
    more = world.conversation.prompt(history, [ADD, SUB])
    assert more.token_ids == world.render(history, [ADD, SUB])


@pytest.mark.parametrize("change", [{"arguments": '{"a": 1, "b": 3}'}, {"name": "sub"}])
def test_a_call_that_the_client_rewrote_is_written_as_the_client_says(world: World, change: dict[str, str]) -> None:
    *_, reply = world.ask([USER], "Sum." + call_of())
    [call] = reply.message["tool_calls"]
    rewritten = {**reply.message, "tool_calls": [{**call, "function": {**call["function"], **change}}]}
    history = [USER, rewritten, *result(reply.message)]
    more = world.conversation.prompt(history, [ADD])
    assert more.token_ids == world.render(history)


def test_a_message_before_a_recognised_call_makes_a_new_prompt_around_the_same_tokens(world: World) -> None:
    """As after compaction: the beginning is written anew, the answer stays as it was sampled."""
    _, said, reply = world.ask([{"role": "system", "content": "Long."}, USER], "Sum.42" + call_of())
    summary = {"role": "user", "content": "Summary: 1 + 2 was asked."}
    more = world.conversation.prompt([summary, reply.message, *result(reply.message)], [ADD])
    prefix = (*world.render([summary]), *said.token_ids)
    assert more.token_ids[: len(prefix)] == prefix
    assert more.realigned_tokens == 0


def test_other_tools_make_a_new_prompt(world: World) -> None:
    _, said, reply = world.ask([USER], "Sum." + call_of())
    more = world.conversation.prompt([USER, reply.message, *result(reply.message)], [ADD, SUB])
    prefix = (*world.render([USER], [ADD, SUB]), *said.token_ids)
    assert more.token_ids[: len(prefix)] == prefix


def test_an_answer_without_calls_in_another_place_is_written_anew_and_counted(world: World) -> None:
    _, said, reply = world.ask([USER], "It is 42.")
    history = [{"role": "user", "content": "Before."}, USER, reply.message, {"role": "user", "content": "Sure?"}]
    more = world.conversation.prompt(history, [ADD])
    assert more.token_ids == world.render(history)
    assert more.realigned_tokens == len(said.token_ids)


def test_answers_that_others_wrote_are_context(world: World) -> None:
    """Few-shot examples, or an answer of another model between ours."""
    prompt, said, reply = world.ask([USER], "It is 42.")
    others = {"role": "assistant", "content": "I agree."}
    more, *_ = world.ask([USER, reply.message, {"role": "user", "content": "B?"}, others, USER], "Yes.")
    recorded = (*prompt.token_ids, *said.token_ids)
    assert more.token_ids[: len(recorded)] == recorded
    assert "I agree.<|im_end|>" in world.engine.text(more.token_ids)


def test_the_history_may_end_with_an_answer(world: World) -> None:
    prompt, said, reply = world.ask([USER], "It is 42.")
    more = world.conversation.prompt([USER, reply.message], [ADD])
    recorded = (*prompt.token_ids, *said.token_ids)
    assert more.token_ids[: len(recorded)] == recorded
    assert world.engine.text(more.token_ids[len(recorded) :]) == "\n<|im_start|>assistant\n"


def test_a_cut_answer_is_continued_behind_its_end(world: World) -> None:
    prompt, said, reply = world.ask([USER], "It is", is_cut=True)
    assert reply.finish_reason == "length"
    more = world.conversation.prompt([USER, reply.message, {"role": "user", "content": "Go on."}], [ADD])
    recorded = (*prompt.token_ids, *said.token_ids)
    assert more.token_ids[: len(recorded)] == recorded
    assert world.engine.text(more.token_ids[len(recorded) :]).startswith("<|im_end|>\n<|im_start|>user\nGo on.")


def test_what_ends_an_answer_for_the_client_is_not_in_its_content(world: World) -> None:
    prompt = world.conversation.prompt([USER], [ADD])
    completion = world.engine.say(prompt, "Thought: add.\nObservation:", is_cut=True)
    completion = Completion(completion.token_ids, completion.logprobs, "stop")
    reply = world.conversation.reply(prompt, completion, "auto", ["Observation:"])
    assert (reply.text, reply.finish_reason) == ("Thought: add.\n", "stop")
    more = world.conversation.prompt([USER, reply.message, USER], [ADD])
    recorded = (*prompt.token_ids, *completion.token_ids)
    assert more.token_ids[: len(recorded)] == recorded


@pytest.mark.parametrize(
    ("choice", "text", "broke"),
    [
        ("auto", "No.", False),
        ("required", "No.", True),
        ("required", call_of(), False),
        ("none", call_of(), True),
        ("none", "No.", False),
        ("add", call_of(), False),
        ("add", call_of("sub", "{}"), True),
        ("add", "No.", True),
    ],
)
def test_a_choice_of_tools_that_was_not_kept_is_counted(world: World, choice: str, text: str, broke: bool) -> None:
    *_, reply = world.ask([USER], text, [ADD, SUB], tool_choice=choice)
    assert reply.broke_tool_choice is broke
    has_calls = "tool_calls" in reply.message
    assert has_calls is (text != "No." and choice != "none")
    assert reply.finish_reason == ("tool_calls" if has_calls else "stop")


def test_malformed_calls_are_counted_and_stay_in_the_text(world: World) -> None:
    *_, reply = world.ask([USER], "<tool_call>\n{add}\n</tool_call>")
    assert (reply.malformed_tool_calls, reply.finish_reason) == (1, "stop")
    assert reply.text == "<tool_call>\n{add}\n</tool_call>"


def test_ids_are_those_of_the_episode_and_differ_between_episodes() -> None:
    ids = []
    for seed in (5, 5, 6):
        world = World(seed=seed)
        replies = [world.ask([USER], call_of())[2] for _ in range(3)]
        ids.append([reply.message["tool_calls"][0]["id"] for reply in replies])
    assert ids[0] == ids[1]
    assert len({*ids[0], *ids[2]}) == 6
    assert all(re.fullmatch("call_[0-9a-z]{24}", one) for one in ids[0])


def test_calls_at_the_same_time_do_not_mix(world: World) -> None:
    def branch(number: int) -> bool:
        history: list[Any] = [{"role": "user", "content": f"Branch {number}?"}]
        recorded: tuple[int, ...] = ()
        for turn in range(5):
            prompt = world.conversation.prompt(history, [ADD])
            completion = world.engine.say(prompt, f"{number}.{turn}" + call_of())
            reply = world.conversation.reply(prompt, completion)
            if prompt.token_ids[: len(recorded)] != recorded or prompt.realigned_tokens:
                return False
            recorded = (*prompt.token_ids, *completion.token_ids)
            history += [reply.message, *result(reply.message)]
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(branch, range(16)))


@pytest.mark.parametrize(
    ("messages", "facts"),
    [
        ([], ["messages"]),
        ([{"role": "wizard", "content": "x"}], ["0", "wizard", "assistant"]),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], ["0", "image_url"]),
        ([{"role": "user", "content": 5}], ["0", "5"]),
        (["1 + 2?"], ["0", "str"]),
        ([{"role": "assistant", "content": "x", "tool_calls": 5}], ["0"]),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}], ["0", "function"]),
    ],
)
def test_messages_that_are_none_are_refused(
    world: World, messages: list[Any], facts: list[str], raises: Raises
) -> None:
    with raises(DataError, *facts):
        world.conversation.prompt(messages)


def test_half_characters_reach_no_tokenizer(world: World) -> None:
    """JSON can hold them, and so can what a client writes into arguments and a tool sends back."""
    *_, reply = world.ask([USER], call_of("add", r'{"a": "x"}'))
    half, whole_one = json.loads(r'"\ud83d"'), json.loads(r'"\ud83d\ude00"')
    [call] = reply.message["tool_calls"]
    written = {**call, "function": {**call["function"], "arguments": r'{"a": "\ud83d"}'}}
    answer = {**reply.message, "content": half, "tool_calls": [written]}
    history = [USER, answer, *result(reply.message, f"{half}{whole_one}")]
    text = world.engine.text(world.conversation.prompt(history, [ADD]).token_ids)
    assert "<tool_response>" in text
    assert plain_messages([{"role": "user", "content": f"{half}!{whole_one}"}])[0]["content"] == "\ufffd!\U0001f600"


@pytest.mark.parametrize("tool", [5, {}, {"type": "function"}, {"type": "function", "function": {"name": None}}])
def test_tools_that_are_none_are_refused(world: World, tool: Any, raises: Raises) -> None:
    with raises(DataError, "0"):
        world.conversation.prompt([USER], [tool])


# A property of all histories

WORDS = ["42", "Sum.", "Let me.", "hm", "It is 12.", "Yes"]


def random_text(chance: random.Random, number: int, family: str) -> str:
    if family.startswith("llama"):
        arguments = json.dumps({"a": number, "b": chance.randrange(9)}, indent=chance.choice([None, 0, 1]))
        call = f'{{"name": "add", "parameters": {arguments}}}'
        return call if chance.random() < 0.5 else f"{number}. {chance.choice(WORDS)}"
    thought = f"<think>\n{chance.choice(WORDS)}\n</think>\n\n" if chance.random() < 0.5 else ""
    words = " ".join(chance.choices(WORDS, k=chance.randrange(3)))
    arguments = json.dumps({"a": chance.randrange(9), "b": chance.randrange(9)}, indent=chance.choice([None, 0, 1]))
    calls = [call_of("add", arguments) for _ in range(chance.choice([0, 0, 1, 1, 2]))]
    return f"{thought}{number}. {words}" + "\n".join(calls)


def echoed(message: Any, chance: random.Random) -> dict[str, Any]:
    """As some client sends it."""
    echo = {key: value for key, value in message.items() if key != "reasoning_content" or chance.random() < 0.5}
    if "tool_calls" in echo and chance.random() < 0.5:
        echo["tool_calls"] = [
            {
                **call,
                "function": {**call["function"], "arguments": json.dumps(json.loads(call["function"]["arguments"]))},
            }
            for call in echo["tool_calls"]
        ]
    if echo["content"] and chance.random() < 0.3:
        echo["content"] = [{"type": "text", "text": echo["content"]}]
    return echo


def squeezed(text: str) -> str:
    """Without what may differ: reasoning, and white space."""
    return re.sub(r"\s+", "", re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_2"])
@pytest.mark.parametrize("seed", range(15))
def test_every_prompt_begins_with_what_was_sampled_and_says_what_the_template_says(name: str, seed: int) -> None:
    world, chance = World(name), random.Random(seed)
    histories: list[tuple[list[Any], tuple[int, ...]]] = [([USER], ())]
    for number in range(12):
        history, recorded = chance.choice(histories)
        text = random_text(chance, number, name)
        prompt, completion, reply = world.ask(history, text, is_cut=chance.random() < 0.1)
        assert prompt.realigned_tokens == 0
        assert prompt.token_ids[: len(recorded)] == recorded
        assert squeezed(world.engine.text(prompt.token_ids)) == squeezed(world.engine.text(world.render(history)))
        after = result(reply.message) if "tool_calls" in reply.message else [{"role": "user", "content": "So?"}]
        histories.append(
            ([*history, echoed(reply.message, chance), *after], (*prompt.token_ids, *completion.token_ids))
        )
    branches = sequences(world.calls)
    trained = sum(sum(branch.response_mask) for branch in branches)
    assert trained == sum(len(call.completion.token_ids) for call in world.calls), "each token is trained once"


def test_other_variables_of_the_template_are_another_conversation(raises: Raises) -> None:
    world = World()
    without = world.conversation.speaking('{"enable_thinking": false}')
    assert without is world.conversation.speaking('{"enable_thinking": false}')
    assert world.conversation.speaking(None) is world.conversation
    thinks, silent = world.conversation.prompt([USER]).token_ids, without.prompt([USER]).token_ids
    assert silent[: len(thinks)] == thinks
    assert world.engine.text(silent[len(thinks) :]) == "<think>\n\n</think>\n\n"
    # An answer of one is a stranger in the other: nothing of it stands there as it was sampled.
    prompt, completion, reply = world.ask([USER], "Sum.42" + call_of())
    history, said = [USER, reply.message, *result(reply.message)], (*prompt.token_ids, *completion.token_ids)
    assert world.conversation.prompt(history, (ADD,)).token_ids[: len(said)] == said
    assert without.prompt(history, (ADD,)).token_ids[: len(said)] != said
    assert without.prompt(history, (ADD,)).realigned_tokens == 0
    assert world.conversation.speaking('{"unread": 1}').prompt([USER]).token_ids == thinks
    for number in range(MOST_OPTIONS - 2):
        world.conversation.speaking(f'{{"enable_thinking": {number}}}')
    with raises(DataError, MOST_OPTIONS):
        world.conversation.speaking('{"enable_thinking": null}')
