"""``POST /reward``: given to the answer that was meant, once, and refused with a reason where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from nemorl_rl.agents.contract import EpisodeClosedError
from scripted_policy import ScriptedPolicy, saying

ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "?"}]},
    "/v1/responses": {"input": "?"},
    "/v1/messages": {"messages": [{"role": "user", "content": "?"}], "max_tokens": 5},
    "/v1/completions": {"prompt": "?"},
}


def ask(talk: Any, path: str = "/v1/chat/completions", **fields: Any) -> str:
    answer = talk.post(path, {"model": "policy", **ASKS[path], **fields})
    assert answer.status_code == 200, answer.text
    name: str = answer.json()["id"]
    return name


def values(talk: Any) -> list[float]:
    return [value for _, value in talk.policy.rewards]


def test_without_an_id_the_newest_answer_is_rewarded_and_rewards_add_up(open_talk: Any) -> None:
    talk = open_talk(ScriptedPolicy(lambda asked: saying(str(asked.messages[-1]["content"]))))
    ask(talk, messages=[{"role": "user", "content": "a"}])
    newest = ask(talk, messages=[{"role": "user", "content": "b"}])
    told = [talk.post("/v1/reward", {"reward": value}).json() for value in (0.5, -2)]
    assert [(one["response_id"], one["reward"], one["total"]) for one in told] == [
        (newest, 0.5, 0.5),
        (newest, -2.0, -1.5),
    ]
    assert [completion.token_ids for completion, _ in talk.policy.rewards] == [(98,), (98,)]  # "b"
    assert talk.episode.traffic.rewards == 2


@pytest.mark.parametrize("path", ASKS)
def test_each_api_names_answers_by_their_id(talk: Any, path: str) -> None:
    first = ask(talk, path)
    ask(talk, path)
    told = talk.post("/reward", {"reward": 1, "response_id": first})
    assert (told.status_code, told.json()["response_id"]) == (200, first)
    assert len(talk.policy.asked) == 2


def test_of_several_choices_the_index_says_which(open_talk: Any) -> None:
    replies = iter("xyz")
    talk = open_talk(ScriptedPolicy(lambda asked: saying(next(replies))))
    name = ask(talk, n=3)
    assert talk.post("/v1/reward", {"reward": 1, "response_id": name}).status_code == 400
    assert talk.post("/v1/reward", {"reward": 1, "response_id": name, "index": 3}).status_code == 400
    assert talk.post("/v1/reward", {"reward": 1, "response_id": name, "index": 1}).status_code == 200
    [(completion, _)] = talk.policy.rewards
    assert completion.token_ids == (121,)  # "y"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "no JSON"),
        (b"[1]", "not a JSON object"),
        (b"{}", "reward: is missing"),
        (b'{"reward": null}', "reward: is missing"),
        (b'{"reward": NaN}', "NaN is no number of JSON"),
        (b'{"reward": Infinity}', "Infinity is no number of JSON"),
        (b'{"reward": 1e999}', "reward: must be a number"),
        (b'{"reward": 2e9}', "reward: must be a number"),
        (b'{"reward": "1"}', "reward: must be a number"),
        (b'{"reward": true}', "reward: must be a number"),
        (b'{"reward": 1, "rewrad": 2}', "rewrad: unknown field: Did you mean 'reward'?"),
        (b'{"reward": 1, "response_id": 7}', "response_id: must be a string"),
        (b'{"reward": 1, "index": 1}', "index: is of no response"),
        (b'{"reward": 1, "idempotency_key": ""}', "idempotency_key: has 0 characters"),
    ],
)
def test_a_bad_body_is_refused_and_gives_nothing(talk: Any, raw: bytes, says: str) -> None:
    ask(talk)
    answer = talk.post("/v1/reward", raw=raw)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert talk.policy.rewards == []


def test_what_there_is_no_answer_for_is_said(talk: Any) -> None:
    early = talk.post("/v1/reward", {"reward": 1})
    assert (early.status_code, early.json()["error"]["code"]) == (400, "no_answer")
    ask(talk)
    unknown = talk.post("/v1/reward", {"reward": 1, "response_id": "chatcmpl-1"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "response_not_found")
    assert talk.policy.rewards == []


def test_another_key_and_an_ended_episode_are_refused(talk: Any) -> None:
    ask(talk)
    wrong = talk.post("/v1/reward", {"reward": 1}, headers={"authorization": "Bearer x"})
    talk.doors.dismiss(talk.name)
    late = talk.post("/v1/reward", {"reward": 1})
    assert (wrong.status_code, late.status_code) == (401, 409)
    assert late.json()["error"]["code"] == "episode_closed"
    assert talk.policy.rewards == []


def test_an_episode_that_ends_meanwhile_is_told_as_ended(open_talk: Any) -> None:
    class Ended(ScriptedPolicy):
        def reward(self, value: float, completion: Any = None) -> float:
            raise EpisodeClosedError("it has ended")

    talk = open_talk(Ended())
    ask(talk)
    assert talk.post("/v1/reward", {"reward": 1}).json()["error"]["code"] == "episode_closed"


@pytest.mark.parametrize("as_header", [True, False])
def test_a_key_makes_a_reward_count_once(talk: Any, as_header: bool) -> None:
    ask(talk)
    body = {"reward": 1} if as_header else {"reward": 1, "idempotency_key": "goal"}
    headers = {"idempotency-key": "goal"} if as_header else {}
    first, again = [talk.post("/v1/reward", body, headers=headers) for _ in range(2)]
    assert first.json() == again.json()
    other = talk.post("/v1/reward", {**body, "reward": 3}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert values(talk) == [1.0]
    assert (talk.episode.traffic.rewards, talk.episode.traffic.retries) == (1, 1)


def test_a_marked_retry_counts_once_unless_the_policy_has_answered_again(talk: Any) -> None:
    mark = {"x-stainless-retry-count": "1"}
    ask(talk)
    assert talk.post("/v1/reward", {"reward": 1}, headers=mark).status_code == 200  # the first try never arrived
    assert talk.post("/v1/reward", {"reward": 1}, headers=mark).status_code == 200
    assert values(talk) == [1.0]
    assert talk.post("/v1/reward", {"reward": 1}).status_code == 200  # no retry: one more
    ask(talk)
    assert talk.post("/v1/reward", {"reward": 1}, headers=mark).status_code == 200  # of another answer
    assert values(talk) == [1.0, 1.0, 1.0]
