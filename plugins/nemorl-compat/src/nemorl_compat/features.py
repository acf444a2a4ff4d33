"""Features by the values that ask for them: environments, processors and options of datasets by NeMo RL's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEDIA = "images and audio"
MEDIA_ON_MEGATRON = "images and audio on Megatron"
GYM = "NeMo-Gym environments"

ENVIRONMENTS: Mapping[str, str] = {
    "nemo_gym": GYM,
    "code": "the environment code (programs of several turns)",
    "retriever": "the environment retriever",
    "rag": "the environment retriever",
    "dapo": "DAPO's verification of answers",
}
ENGINES: Mapping[str, str] = {
    "sglang": "SGLang inside the run (backend `server` samples with one that you start)",
    "trtllm": "TensorRT-LLM inside the run (backend `server` samples with one that you start)",
    "dynamo": "Dynamo",
}
PROCESSORS: Mapping[str, str] = {
    "nemo_gym_data_processor": GYM,
    "vlm_hf_data_processor": MEDIA,
    "kd_data_processor": "distillation between tokenizers by a projection matrix "
    "(nemorl has GOLD, `teacher.align: text`)",
}
OPTIONS: Mapping[str, str] = {
    "video": MEDIA,
    "media": MEDIA,
    "num_frames": MEDIA,
    "allowed_problem_types": MEDIA,
    "characters_per_sample": "raw text as a dataset (arrow_text)",
    "data_files": "raw text as a dataset (arrow_text)",
    "text_key": "raw text as a dataset (arrow_text)",
}


def feature_of(kind: str, key: str, value: Any) -> str | None:
    """The name of what a value asks for; ``None`` where no name is known."""
    if kind == "environment":
        return ENVIRONMENTS.get(str(value)) or f"an environment called {value}"
    if kind == "processor":
        return PROCESSORS.get(str(value)) or f"the processor of rows {value}"
    if kind == "engine":
        return ENGINES.get(str(value)) or f"the engine {value}"
    if kind == "option":
        option = key.rpartition(".")[2]
        return next((feature for start, feature in OPTIONS.items() if option.startswith(start)), None) or (
            f"the option {option} of a dataset"
        )
    return None


DATASETS: Mapping[str, str] = {
    "NemoGymDataset": GYM,
    "arrow_text": "raw text as a dataset (arrow_text)",
    **dict.fromkeys(
        ("general-conversation-jsonl", "intent-train", "intent-bench"), MEDIA,
    ),
}  # fmt: skip
"""Datasets that no preset can give, and why."""
MEDIA_DATASETS = frozenset(
    [
        *(
            "clevrcogent",
            "geometry3k",
            "refcoco",
            "mmprtiny",
            "avqa",
            "audiomcq",
            "dailyomni",
            "mmau",
            "twinkstartmmau",
        ),
        *("intenttrain", "intentbench"),
    ]
)
"""Datasets with images, sounds or videos, in small letters and digits only."""
MEDIA_PROCESSOR = "vlm_hf_data_processor"
