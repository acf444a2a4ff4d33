"""Every plugin of this repository against every clause of its kind, the way a stranger's plugin package does it."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest
from nemorl.plugins import registry
from nemorl_testing import checks_for, conformance
from nemorl_testing.kit import CHECKED_KINDS

SUMS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
FOLDER = tempfile.TemporaryDirectory(prefix="nemorl-sums-")
FILE = Path(FOLDER.name) / "sums.jsonl"
FILE.write_text("\n".join(map(json.dumps, SUMS)))

OF_CONFIG = [check.name for check in checks_for("loggers") if check.function.__module__.endswith("every_config")]
"""What every config promises."""

ARITHMETIC = {"text": "12+7=", "answer": "19"}
MATH_EXAMPLES = [
    (ARITHMETIC, "19", 1.0),
    (ARITHMETIC, "The answer is \\boxed{19}.", 1.0),
    (ARITHMETIC, "The answer is 18.", 0.0),
    (ARITHMETIC, "12+7", 0.0),
    ({"text": "Expand (x+1)^2.", "answer": "x^2+2x+1"}, "\\boxed{(x+1)^2}", 1.0),
    ({"text": "Expand (x+1)^2.", "answer": "x^2+2x+1"}, "\\boxed{(x-1)^2}", 0.0),
]

test_dtensor = conformance("training_backends", "dtensor")
test_dtensor_packed = pytest.mark.slow(conformance("training_backends", {"name": "dtensor", "layout": "packed"}))
test_dtensor_lora = conformance(
    "training_backends",
    "dtensor",
    policy={"lora": {"rank": 4}},
    only=[
        "continuing_from_a_checkpoint_changes_nothing",
        "reference_stays_frozen",
        "export_is_the_model",
        "save_pretrained_loads_with_transformers",
        "generator_speaks_for_the_trained_policy",
    ],
)
test_hf = conformance("generation_backends", "hf")
test_hf_in_small_batches = pytest.mark.full(conformance("generation_backends", {"name": "hf", "max_batch_rows": 2}))
test_dapo_math = conformance(
    "environments",
    "dapo_math",
    examples=[({"text": "1+1=", "answer": "2"}, "Answer: $2$", 1.0), ({"text": "1+1=", "answer": "2"}, "2", 0.0)],
)
test_multi_reward_math = conformance(
    "environments",
    "multi_reward_math",
    examples=[({"text": "1+1=", "answer": "2"}, "<think>so</think>\n<answer>2</answer>", 3.0)],
)
test_math_expr = conformance(
    "environments",
    {"name": "math_expr", "workers": 1},
    examples=[(ARITHMETIC, "<answer>19</answer>", 1.0), (ARITHMETIC, "19", 0.0)],
)
test_geo3k = conformance(
    "environments",
    {"name": "geo3k", "workers": 1},
    examples=[(ARITHMETIC, "</think> \\boxed{19}", 1.0), (ARITHMETIC, "\\boxed{19}", 0.9)],
)
test_math = conformance("environments", {"name": "math", "timeout_s": 2, "workers": 1}, examples=MATH_EXAMPLES)
test_arithmetic = conformance("datasets", "arithmetic")
test_arithmetic_chat = conformance("datasets", {"name": "arithmetic", "operations": ["+", "-", "*"], "chat": True})
test_word_problems = conformance("datasets", "word_problems")
test_drawings = conformance("datasets", {"name": "drawings", "num_train": 8, "num_validation": 4})
SUM_FILE = {"name": "file", "path": str(FILE), "validation_fraction": 0.2}
test_mixture = conformance(
    "datasets", {"name": "mixture", "parts": [{"data": SUM_FILE, "weight": 2}, {"data": "arithmetic", "weight": 1}]}
)
test_sets = conformance("datasets", {"name": "sets", "sets": {"sums": SUM_FILE, "arithmetic": "arithmetic"}})
test_preset = conformance(
    "datasets",
    {
        "name": "preset",
        "preset": "ResponseDataset",
        "path": str(FILE),
        "columns": {"prompt": "question", "response": "answer", "answer": "answer"},
        "validation_fraction": 0.2,
    },
)
test_file = conformance("datasets", {"name": "file", "path": str(FILE), "validation_fraction": 0.2})
test_huggingface = conformance("datasets", {"name": "huggingface", "path": FOLDER.name, "validation_fraction": 0.2})
test_records = conformance("hooks", "records")
test_save_deadline = conformance("hooks", "save_deadline")
test_efficiency = conformance("hooks", "efficiency")
test_alerts = conformance("hooks", "alerts")
test_audit = conformance("hooks", "audit")
test_certs_command = conformance("commands", "certs")
test_audit_command = conformance("commands", "audit")
test_sign_command = conformance("commands", "plugins.sign")
test_verify_command = conformance("commands", "plugins.verify")
test_plan_command = conformance("commands", "plan")
test_diff_command = conformance("commands", "compare.steps")
test_replay_command = conformance("commands", "compare.replay")
test_bisect_command = conformance("commands", "compare.bisect")
test_hindsight_command = conformance("commands", "compare.hindsight")
test_engines_command = conformance("commands", "engines")
test_launch_command = conformance("commands", "launch")
test_serve_command = conformance("commands", "serve")
test_view_command = conformance("commands", "view.page")
test_plan_section = conformance("report_sections", "plan")
test_sliding_puzzle_section = conformance("report_sections", "sliding_puzzle")
test_replicate = conformance("hooks", {"name": "replicate", "to": f"file://{tempfile.mkdtemp()}"})
test_early_stopping = conformance("hooks", {"name": "early_stopping", "patience": 2})
test_logs = conformance("hooks", "logs")
test_in_process = conformance("weight_transports", "in_process")
test_shared_memory = conformance("weight_transports", "shared_memory")
test_delta_socket = conformance("weight_transports", "delta_socket")
test_delta_folder = pytest.mark.usefixtures("weights_folder")(conformance("weight_transports", "delta_folder"))
test_object_store = pytest.mark.slow(
    pytest.mark.ray(pytest.mark.usefixtures("private_ray")(conformance("weight_transports", "object_store")))
)
test_nccl = conformance("weight_transports", "nccl")  # over gloo: the backend is that of the tensors' device
test_cuda_ipc = conformance(
    "weight_transports",
    "cuda_ipc",
    skip=dict.fromkeys(
        (
            "what_is_published_is_fetched",
            "what_arrives_has_the_digests_that_were_sent",
            "the_version_before_stays_valid",
            "a_payload_can_be_sent",
        ),
        "needs a GPU and a second process: tests/unit/transports/test_transports.py",
    ),
)
test_tensorboard = conformance("loggers", "tensorboard")
test_wandb = conformance("loggers", {"name": "wandb", "mode": "offline"})
test_mlflow = pytest.mark.full(
    conformance("loggers", {"name": "mlflow", "tracking_uri": f"sqlite:///{FOLDER.name}/mlflow.db"}, writes_files=False)
)
test_prometheus = conformance("loggers", {"name": "prometheus", "port": 0}, writes_files=False)
test_grafana_command = conformance("commands", "grafana")
# A package that is not installed for the tests; tests/unit/loggers has what is called of it.
test_swanlab = conformance("loggers", "swanlab", only=OF_CONFIG)
test_grpo = conformance("algorithms", {"name": "grpo", "num_prompts_per_step": 2, "num_generations_per_prompt": 4})
test_grpo_off_policy = conformance(
    "algorithms",
    {
        "name": "grpo",
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 4,
        "num_minibatches": 2,
        "kl_penalty": 0.0,
    },
    only=["small_run_finishes", "killed_run_resumes_as_if_nothing_happened"],
)
test_sft = conformance("algorithms", {"name": "sft", "batch_size": 4})
test_datasets_command = conformance("commands", "datasets")
test_quickstart = conformance("commands", "quickstart")
test_datasets = conformance("commands", "datasets")
test_try = conformance("commands", "config.try")
test_migrate = conformance("commands", "config.migrate")
test_import_checkpoint = conformance("commands", "runs.import-checkpoint")
test_doctor = conformance("commands", "doctor")
test_other_versions = conformance("commands", "try")
test_runs_copy = conformance("commands", "runs.copy")
test_runs_verify = conformance("commands", "runs.verify")
test_plugins_new = conformance("commands", "plugins.new")


@pytest.mark.gpu
class TestOnGPU:
    """The backends on a CUDA device. Log-probs of the CPU reference are float32 too, summed in another order."""

    test_dtensor = staticmethod(conformance("training_backends", "dtensor", device="cuda:0", tolerance=1e-3))
    test_hf = staticmethod(conformance("generation_backends", "hf", device="cuda:0", tolerance=1e-3))


def test_no_installed_plugin_is_left_out() -> None:
    source = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*conformance.py"))
    source += Path(__file__).read_text()
    kinds = set(CHECKED_KINDS) - {"templates"}  # test_templates_conformance.py has all that there are
    ours = [e for e in registry().index.entries if e.kind in kinds and e.distribution.startswith("nemorl")]
    untested = [
        e.id
        for e in ours
        if not re.search(rf'"{e.kind}",\s*"{e.name}"', source) and f'"name": "{e.name}"' not in source
    ]
    assert untested == []


@pytest.mark.parametrize("kind", CHECKED_KINDS)
def test_every_check_states_its_clause_and_section(kind: str) -> None:
    names = [check.name for check in checks_for(kind)]
    assert len(set(names)) == len(names)
    assert [check.name for check in checks_for(kind) if not check.section] == []


def test_every_section_that_a_check_names_is_published() -> None:
    text = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    chapters = set(re.findall(r"^## (\d)\.", text, re.MULTILINE))
    numbered = text.partition("## 7.")[2].partition("## 8.")[0]
    sections = chapters | {f"7.{number}" for number in re.findall(r"^(\d+)\. ", numbered, re.MULTILINE)}
    named = {check.section for kind in CHECKED_KINDS for check in checks_for(kind)}
    assert named - sections == set()
