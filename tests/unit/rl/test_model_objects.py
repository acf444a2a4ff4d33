"""Models and tokenizers given as objects."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nemorl
import pytest
import torch
from nemorl.errors import UsageError
from nemorl_rl.models.model_objects import model_folder
from recorded_messages import Raises

SMALL: dict[str, Any] = {
    "max_steps": 1,
    "policy": {"max_sequence_tokens": 32},
    "validation": {"every": 0, "at_end": False},
    "checkpoint": {"every": 0, "export": False},
    "batch_size": 2,
}
ROWS = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "2+1=", "completion": "3"}]


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def model(tiny_model: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model))


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def test_a_model_object_is_trained_from_its_own_weights(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    from nemorl_rl.data.encoding import encode_row
    from nemorl_rl.data.tokenizer import Tokenizer

    result = nemorl.train_sft(model, ROWS, tokenizer=tokenizer, run_dir=tmp_path / "run", **SMALL)
    # The loss of the first step is the model's own: the mean over the four trained tokens, "2", "3" and two ends.
    total, count = 0.0, 0
    for row in ROWS:
        ids, mask, _ = encode_row(row, Tokenizer(tokenizer))
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        total -= sum(float(logprobs[t - 1, ids[t]]) for t in range(len(ids)) if mask[t])
        count += sum(mask)
    assert count == 4
    assert result.metrics["train/loss"] == pytest.approx(total / count, rel=1e-4)


def test_the_same_weights_are_the_same_folder_and_others_another(model: Any, tokenizer: Any, tiny_model: Path) -> None:
    first = model_folder(model, tokenizer)
    assert model_folder(model, tokenizer) == first
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert model_folder(model, tokenizer) != first
    assert sorted(path.name for path in Path(first).iterdir() if path.suffix == ".safetensors") == ["model.safetensors"]
    assert [path.name for path in Path(first).parent.iterdir() if path.name.startswith(".")] == []
    assert model_folder(tiny_model) == str(tiny_model)


def test_an_adapter_is_refused_with_both_ways_out(model: Any, tokenizer: Any, raises: Raises) -> None:
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for carrying in (wrapped, model):  # PEFT puts its layers into the model that it wraps
        with raises(UsageError, "merge_and_unload", "'lora'"):
            model_folder(carrying, tokenizer)


def test_a_quantised_model_is_refused(model: Any, tokenizer: Any, raises: Raises) -> None:
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with raises(UsageError):
        model_folder(model, tokenizer)


@pytest.mark.parametrize(
    "source",
    [torch.nn.Linear(2, 2), 7, None],
)
def test_what_is_no_model_of_transformers_is_refused(source: Any, raises: Raises) -> None:
    with raises(UsageError):
        nemorl.train_sft(source, ROWS, **SMALL)


def test_a_tokenizer_must_be_one_and_belongs_to_an_object(
    model: Any, tokenizer: Any, tiny_model: Path, raises: Raises
) -> None:
    assert (Path(model_folder(model)) / "tokenizer.json").is_file()  # that of the folder its config came from
    with raises(UsageError):
        model_folder(model, "org/model")
    with raises(UsageError):
        nemorl.train_sft(str(tiny_model), ROWS, tokenizer=tokenizer, **SMALL)
    model.name_or_path = ""
    with raises(UsageError):
        model_folder(model)
