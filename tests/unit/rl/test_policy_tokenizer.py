"""``policy.tokenizer``: another tokenizer, another chat template, and what the template is given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import nemorl
import pytest
from huggingface_hub import constants
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError
from nemorl.types import Samples
from nemorl_cli.console import Console
from nemorl_rl.callbacks import Callback
from nemorl_rl.data.encoding import encode_row
from nemorl_rl.data.tokenizer import Tokenizer, context_tokens, end_token_ids
from nemorl_tensors.engines.model_folder import save_tokenizer
from recorded_messages import Raises
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

MESSAGES = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
SHOUTING = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
THINKING = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% if enable_thinking is defined and not enable_thinking %}0{% endif %}{% endif %}"
)


def tokenizer(model: Path, **settings: Any) -> Tokenizer:
    return Tokenizer.of(PolicyConfig(model_name=str(model), tokenizer=settings))


def test_a_template_of_the_config_renders_conversations(tiny_model: Path) -> None:
    found = tokenizer(tiny_model, chat_template="{% for m in messages %}{{ m['content'] }}+{% endfor %}")
    assert found.encode_prompt(MESSAGES[:1]) == found.encode_observation("1+1=+")
    assert Tokenizer.load(str(tiny_model)).encode_prompt(MESSAGES[:1]) != found.encode_prompt(MESSAGES[:1])


def test_passthrough_is_the_contents_and_nothing_else(tiny_model: Path) -> None:
    found = tokenizer(tiny_model, chat_template="passthrough")
    ids, mask, _ = encode_row({"messages": MESSAGES}, found)
    assert ids == found.encode_observation("1+1=2")
    assert [token for token, learnt in zip(ids, mask, strict=True) if learnt] == found.encode_observation("2")


def test_a_template_may_be_in_a_file(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(SHOUTING)
    path = str(tmp_path / "mine.jinja")
    assert tokenizer(tiny_model, chat_template=path).inner.chat_template == SHOUTING


def test_the_template_is_given_what_transformers_would_give_it(tiny_model: Path) -> None:
    plain = PreTrainedTokenizerFast.from_pretrained(tiny_model)
    for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        found = tokenizer(tiny_model, chat_template=THINKING, chat_template_kwargs=kwargs)
        text = plain.apply_chat_template(
            MESSAGES[:1], chat_template=THINKING, tokenize=False, add_generation_prompt=True, **kwargs
        )
        assert text == ("1+1==0" if kwargs == {"enable_thinking": False} else "1+1==")
        assert found.encode_prompt(MESSAGES[:1]) == found.encode_observation(text)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (
            {"chat_template": THINKING, "chat_template_kwargs": {"enable_thinkin": False}},
            ["enable_thinkin", "enable_thinking"],
        ),
        ({"name": "./no-such-folder"}, ["./no-such-folder"]),
    ],
)
def test_what_would_have_no_effect_is_refused(
    settings: dict[str, Any], facts: list[str], tiny_model: Path, raises: Raises
) -> None:
    with raises(BackendError, *facts):
        tokenizer(tiny_model, **settings)


def test_a_model_of_the_hub_is_exported_with_what_ends_its_generation(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = tmp_path / "hub" / "models--org--tiny"
    snapshot = shutil.copytree(tiny_model, stored / "snapshots" / "1234")
    (snapshot / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("1234")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    exported = tmp_path / "exported"
    exported.mkdir()
    save_tokenizer(exported, "org/tiny")
    assert json.loads((exported / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}


def test_an_exported_model_renders_as_the_run_did_without_being_told(tiny_model: Path, tmp_path: Path) -> None:
    policy = PolicyConfig(
        model_name=str(tiny_model),
        tokenizer={"chat_template": THINKING, "chat_template_kwargs": {"enable_thinking": False}},
    )
    save_tokenizer(tmp_path, policy.model_name, policy.tokenizer)
    exported = PreTrainedTokenizerFast.from_pretrained(tmp_path)

    def rendered(**kwargs: Any) -> str:
        text = exported.apply_chat_template(MESSAGES[:1], tokenize=False, add_generation_prompt=True, **kwargs)
        assert isinstance(text, str)
        return text

    assert rendered() == "1+1==0"
    assert rendered(enable_thinking=True) == "1+1=="  # a default, which a user may still override
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


def test_arguments_alone_become_defaults_of_the_models_own_template(
    tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    model, exported = tmp_path / "model", tmp_path / "exported"
    shutil.copytree(tiny_model, model)
    exported.mkdir()
    stored = PreTrainedTokenizerFast.from_pretrained(model)
    stored.chat_template = THINKING
    stored.save_pretrained(model)
    policy = PolicyConfig(
        model_name=str(model), tokenizer={"chat_template_kwargs": {"enable_thinking": False, "tools": [None, {"a": 1}]}}
    )
    with raises(BackendError, "tools"):
        Tokenizer.of(policy)
    save_tokenizer(exported, policy.model_name, policy.tokenizer)
    found = PreTrainedTokenizerFast.from_pretrained(exported)
    assert found.apply_chat_template(MESSAGES[:1], tokenize=False, add_generation_prompt=True) == "1+1==0"


def test_another_tokenizer_is_exported_with_the_models_own_generation_config(tiny_model: Path, tmp_path: Path) -> None:
    model, other, exported = (tmp_path / name for name in ("model", "other", "exported"))
    shutil.copytree(tiny_model, model)
    (model / "generation_config.json").write_text('{"eos_token_id": 7}')
    other.mkdir()
    renamed = AutoTokenizer.from_pretrained(tiny_model)
    renamed.add_tokens(["<extra>"])
    renamed.save_pretrained(other)
    exported.mkdir()

    policy = PolicyConfig(model_name=str(model), tokenizer={"name": str(other)})
    assert Tokenizer.of(policy).encode_observation("<extra>") == [len(renamed) - 1]
    save_tokenizer(exported, policy.model_name, policy.tokenizer)
    assert PreTrainedTokenizerFast.from_pretrained(exported).get_vocab() == renamed.get_vocab()
    assert json.loads((exported / "generation_config.json").read_text()) == {"eos_token_id": 7}


def test_rollouts_and_the_exported_model_use_the_runs_template(tiny_model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, ...]] = []

    class Prompts(Callback):
        def on_rollout_end(self, samples: Samples) -> None:
            seen.extend(sample.prompt.token_ids for sample in samples)

    config = nemorl.load_config(
        {
            "algorithm": "grpo",
            "model": str(tiny_model),
            "run_dir": str(tmp_path / "run"),
            "max_steps": 1,
            "num_prompts_per_step": 1,
            "num_generations_per_prompt": 2,
            "generation": {"max_new_tokens": 2},
            "validation": {"every": 0, "at_end": False},
            "policy": {
                "init": "random",
                "max_sequence_tokens": 32,
                "tokenizer": {"chat_template": THINKING, "chat_template_kwargs": {"enable_thinking": False}},
            },
        }
    )
    rows = [{"prompt": MESSAGES[:1], "answer": "2"}]
    config.build().fit(rows, reward_fn=lambda prompt, response: 1.0, callbacks=[Prompts()], console=Console(quiet=True))
    plain = Tokenizer.load(str(tiny_model))
    assert set(seen) == {tuple(plain.encode_observation("1+1==0"))}
    exported = Tokenizer.load(str(tmp_path / "run/model"))
    assert tuple(exported.encode_prompt(MESSAGES[:1])) == seen[0]


def test_the_home_directory_may_begin_a_models_name(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    GenerationConfig(eos_token_id=[2, 7]).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert 7 in end_token_ids("~/model", Tokenizer.load("~/model"))
    assert context_tokens("~/model") == 1024
