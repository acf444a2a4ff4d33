"""The request classes that SGLang publishes: field names, and which of them a request must have.

``python published_engines.py sglang-0.5.23-….whl > sglang_classes.json`` reads them from a wheel (``pip download
--no-deps sglang==0.5.23``), without importing it: it takes GPUs. The file is what tests compare requests with.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

REQUESTS = "sglang/srt/managers/io_struct.py"
CLASSES = {
    **dict.fromkeys(
        (
            *("GenerateReqInput", "PauseGenerationReqInput", "ContinueGenerationReqInput"),
            *("UpdateWeightFromDiskReqInput", "InitWeightsUpdateGroupReqInput", "BeginWeightUpdateReqInput"),
            *("EndWeightUpdateReqInput", "UpdateWeightsFromDistributedReqInput", "UpdateWeightsFromTensorReqInput"),
        ),
        REQUESTS,
    ),
    "SamplingParams": "sglang/srt/sampling/sampling_params.py",
    "TokenizeRequest": "sglang/srt/entrypoints/openai/protocol.py",
}
FILE = Path(__file__).with_name("sglang_classes.json")


def sglang_classes() -> dict[str, Any]:
    """``{"version": …, class: {field: it is required}}``, of the file."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def read_wheel(wheel: Path) -> dict[str, Any]:
    """The same, of a wheel."""
    with zipfile.ZipFile(wheel) as files:
        classes = {name: _fields(files.read(file).decode(), name) for name, file in sorted(CLASSES.items())}
    return {"version": wheel.name.split("-")[1], **classes}


def _fields(source: str, name: str) -> dict[str, bool]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                item.target.id: item.value is None
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
    raise AssertionError(f"there is no class {name}")


if __name__ == "__main__":
    print(json.dumps(read_wheel(Path(sys.argv[1])), indent=1))
