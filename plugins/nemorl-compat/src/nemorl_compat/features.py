"""Features by the values that ask for them: environments, processors and options of datasets by NeMo RL's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEDIA_ON_MEGATRON = "images and audio on Megatron"
MEDIA_FAMILY = "images and audio for a model of no known family (docs/media.md lists them)"
MEDIA_TENSOR_PARALLEL = "tensor parallelism of a model that sees or hears (FSDP shards it: `tensor_parallel_size: 1`)"
MEDIA_VALUES = "images and audio for models that give values or rewards"
MEDIA_FILES = "conversations that name files of images, sounds and films (general-conversation-jsonl)"
FILMS = "films (their frames can be given as images)"
GYM = "NeMo-Gym environments"
GYM_MODELS = "models that NeMo-Gym serves on GPUs of the run's own nodes (num_gpu_nodes gives them others)"
SECOND_MODEL = "a second model server of NeMo-Gym that is no copy of the policy's"

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
    "kd_data_processor": "distillation between tokenizers by a projection matrix "
    "(nemorl has GOLD, `teacher.align: text`)",
}
OPTIONS: Mapping[str, str] = {
    "video": FILMS,
    "media": MEDIA_FILES,
    "num_frames": FILMS,
    "allowed_problem_types": FILMS,
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
    "general-conversation-jsonl": MEDIA_FILES,
    "intent-train": FILMS,
    "intent-bench": FILMS,
}
"""Datasets that no preset can give, and why."""
MEDIA_DATASETS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("clevrcogent", "geometry3k", "refcoco", "mmprtiny"), ("image",)),
    **dict.fromkeys(("avqa", "audiomcq", "mmau", "twinkstartmmau"), ("audio",)),
    **dict.fromkeys(("dailyomni", "intenttrain", "intentbench"), ("audio", "video")),
}
"""What datasets show, by their names in small letters and digits only."""
MEDIA_PROCESSOR = "vlm_hf_data_processor"
