"""Records what NeMo RL's ``apply_reward_penalties`` says of our random episodes: its own code, run from its repository.

    python tests/unit/rl/record_reward_penalties.py FOLDER

FOLDER has the repository as ``record_peer_losses.py`` wants it. Output items are made as NeMo Gym makes them of an
answer that vLLM has parsed: reasoning until the first closing tag, a message where there is content or nothing else,
then calls. Writes ``reward_penalties.json`` beside this file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "grpo"))
from penalty_batches import BATCHES, CALL, CLOSE, EOS, OPEN, UNWANTED, WORDS, batch, decode
from record_peer_losses import Peer

FLAGS = (
    "penalize_duplicated_reasoning",
    "penalize_empty_final_answer",
    "penalize_unwanted_tokens",
    "penalize_malformed_think_tag",
)
ROLLOUTS, GYM = "nemo_rl/experience/rollouts.py", "nemo_rl/environments/nemo_gym.py"


def items_of(context: Sequence[int], message: Sequence[int]) -> list[dict[str, Any]]:
    text = decode(message[:-1] if message[-1] == EOS else message)
    starts_open = decode(context).endswith(WORDS[OPEN]) or text.lstrip().startswith(WORDS[OPEN])
    thought, closing, content = text.partition(WORDS[CLOSE])
    if not closing and not starts_open:
        thought, content = "", text
    calls = content.count(WORDS[CALL])
    content = content.replace(WORDS[CALL], "")
    thought = thought.lstrip().removeprefix(WORDS[OPEN])
    items: list[dict[str, Any]] = []
    if thought:
        items.append({"type": "reasoning", "summary": [{"text": thought}]})
    if content or not calls:
        items.append({"type": "message", "content": [{"text": content}]})
    items += [{"type": "function_call", "name": "f"}] * calls
    items[-1] = {**items[-1], "generation_str": decode(message)}
    return items


def result_of(sample: Any, detect: Any) -> dict[str, Any]:
    log, output, tokens, mask = [], [], list(sample.token_ids), list(sample.response_mask)
    while tokens:
        size = mask.index(True)
        end = mask.index(False, size) if False in mask[size:] else len(mask)
        context, message = tokens[:size], tokens[size:end]
        tokens, mask = tokens[end:], mask[end:]
        items = items_of(context, message)
        _, malformed = detect(items[-1], ["<none>"], None)
        log.append({"role": "user", "token_ids": torch.tensor(context)})
        log.append({"role": "assistant", "token_ids": torch.tensor(message), "has_malformed_thinking": malformed})
        output += items
    return {"message_log": log, "full_result": {"response": {"output": output}, "reward": sample.reward}}


class Tokenizer:
    """Knows the tags as tokens, or not."""

    def __init__(self, has_tags: bool) -> None:
        self.has_tags = has_tags

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [WORDS.index(text)] if self.has_tags else [9, 10]


def main() -> None:
    peer = Peer(Path(sys.argv[1]), "nemo_rl")
    helpers = [f"_get_reward_penalty_{name}" for name in ("config_value", "token_id", "token_ids")]
    names = [*helpers, "_get_required_reward_penalty_token_ids", "_infer_single_token_id"]
    names += ["resolve_reward_penalty_config", "apply_reward_penalties"]
    known = {"DEFAULT_THINKING_TAGS": ["<think>", "</think>"], "DEFAULT_INVALID_TOOL_CALL_PATTERNS": []}
    nemo = peer.load(ROLLOUTS, names, BaseModel=BaseModel, **known)
    detect = peer.load(GYM, ["_detect_invalid_tool_call_and_malformed_thinking"], **known)
    cases: dict[str, Any] = {}
    for flags in ([*FLAGS], *([flag] for flag in FLAGS)):
        for has_tags in (True, False):
            config = {**dict.fromkeys(flags, True), "token_ids": {"unwanted": [UNWANTED]}}
            config = nemo.resolve_reward_penalty_config(config, Tokenizer(has_tags))
            rewards, counts = [], []
            for number in range(BATCHES):
                results = [
                    result_of(one, detect._detect_invalid_tool_call_and_malformed_thinking) for one in batch(number)
                ]
                counts.append([*nemo.apply_reward_penalties(results, config).values()])
                rewards.append([one["full_result"]["reward"] for one in results])
            name = f"{'+'.join(flag.removeprefix('penalize_') for flag in flags)}, {'ids' if has_tags else 'text'}"
            cases[name] = {"rewards": rewards, "counts": counts}
    source = peer.source(ROLLOUTS, "apply_reward_penalties")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case, separators=(',', ':'))}" for name, case in cases.items())
    text = f'{{\n"source": {json.dumps(source)},\n{lines}\n}}\n'
    Path(__file__).with_name("reward_penalties.json").write_text(text)


if __name__ == "__main__":
    main()
