"""The environment ``reward_model``: what it says is what transformers says of the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config.load import validate
from nemorl.errors import BackendError, ConfigError
from nemorl.types import Prompt, Score
from nemorl_preference.rm import RewardModelConfig
from nemorl_preference.rm.environment import RewardModel, load_classifier
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import EnvironmentPool
from recorded_messages import Raises

RESPONSES = ["2", "", "a much longer response, which others are padded to", "22", "<eos>"]
PLAIN = Prompt(0, "1+1=", (1,))
CHAT = Prompt(0, "1+1=", (1,), ({"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}))


def scores(environment: RewardModel, prompt: Prompt, responses: list[str]) -> list[Score]:
    pool = EnvironmentPool(environment, timeout_s=60)
    steps = pool.step([pool.start(prompt) for _ in responses], responses)
    return [step.score for step in steps]


@torch.no_grad()
def plainly(folder: Path, text: str) -> float:
    """transformers on one text, which needs no padding."""
    ids = Tokenizer.load(str(folder)).encode_observation(text)
    model = load_classifier(str(folder), "cpu", torch.float32)
    model.config.pad_token_id = None
    return float(model(input_ids=torch.tensor([ids])).logits)


@pytest.mark.parametrize("batch_tokens", [1, 64, 16384], ids=["alone", "some", "all"])
@pytest.mark.parametrize(
    ("prompt", "text"),
    [(PLAIN, "1+1={}<eos>"), (CHAT, "<system>s<user>1+1=<assistant>{}<eos>")],
    ids=["plain", "chat"],
)
def test_scores_are_those_of_transformers(prompt: Prompt, text: str, batch_tokens: int, classifier: Path) -> None:
    environment = RewardModelConfig(model=str(classifier), device="cpu", batch_tokens=batch_tokens).build()
    assert isinstance(environment, RewardModel)
    found = [score.reward for score in scores(environment, prompt, RESPONSES)]
    assert found == pytest.approx([plainly(classifier, text.format(r)) for r in RESPONSES], abs=1e-5)
    assert max(found) - min(found) > 0.1


def test_all_responses_of_a_turn_share_a_pass(classifier: Path) -> None:
    environment: Any = RewardModelConfig(model=str(classifier), device="cpu").build()
    sizes = []

    def note(_model: Any, _args: Any, inputs: Any) -> None:
        sizes.append(len(inputs["input_ids"]))

    environment._model.register_forward_pre_hook(note, with_kwargs=True)
    scores(environment, PLAIN, RESPONSES)
    assert sizes == [len(RESPONSES)]


def test_a_text_prompt_can_be_asked_as_a_chat(classifier: Path) -> None:
    environment: Any = RewardModelConfig(model=str(classifier), device="cpu", text="chat").build()
    assert scores(environment, PLAIN, ["2"])[0].reward == pytest.approx(
        plainly(classifier, "<user>1+1=<assistant>2<eos>"), abs=1e-5
    )


def test_a_long_text_is_cut_at_the_end(classifier: Path) -> None:
    environment: Any = RewardModelConfig(model=str(classifier), device="cpu", max_tokens=6).build()
    found = scores(environment, PLAIN, ["234567"])[0].reward
    assert found == pytest.approx(plainly(classifier, "1+1=23"), abs=1e-5)


def test_normalization_maps_and_clips(classifier: Path) -> None:
    plain: Any = RewardModelConfig(model=str(classifier), device="cpu", batch_tokens=1).build()
    raw = [score.reward for score in scores(plain, PLAIN, RESPONSES)]
    settings = {"mean": raw[0], "std": 0.5, "clip": 0.25}
    mapped: Any = RewardModelConfig(
        model=str(classifier),
        device="cpu",
        batch_tokens=1,
        normalization=settings,  # type: ignore[arg-type]
    ).build()
    found = scores(mapped, PLAIN, RESPONSES)
    assert [score.reward for score in found] == [max(-0.25, min(0.25, (value - raw[0]) / 0.5)) for value in raw]
    assert [score.metrics["reward_model_score"] for score in found] == raw


def test_an_encoder_reads_prompt_and_response_as_a_pair(tmp_path: Path) -> None:
    from nemorl_rl.models.tiny import write_tiny_model
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    write_tiny_model(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=1, **sizes)).eval()
    model.classifier.weight.data.normal_()
    model.save_pretrained(tmp_path)

    environment: Any = RewardModelConfig(model=str(tmp_path), device="cpu", text="pair").build()
    with torch.no_grad():
        expected = [float(model(**tokenizer("1+1=", r, return_tensors="pt")).logits) for r in RESPONSES]
    assert [score.reward for score in scores(environment, PLAIN, RESPONSES)] == pytest.approx(expected, abs=1e-5)


def test_a_language_model_is_no_reward_model(tiny_model: Path, raises: Raises) -> None:
    with raises(BackendError):
        RewardModelConfig(model=str(tiny_model), device="cpu").build()


def test_a_missing_folder_is_found_when_the_config_loads(raises: Raises) -> None:
    with raises(ConfigError, path="model"):
        validate(RewardModelConfig, {"model": "./no/such/folder"})
