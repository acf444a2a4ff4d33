"""What the blocks of the documents find when they run: a model of few words, a few rows, and what each presupposes.

A block is executed as it is written. What it uses and does not define comes from its ``preamble``; what must be true
afterwards is its ``check``. Names of models and datasets that would be downloaded, and of hardware that is not here,
are replaced in the text (``REPLACED``). Preambles are written with the old names and rewritten along with the block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl.plugins import registry
from nemorl_rl.models.tiny import EOS, write_tiny_model

ROWS = [
    {"prompt": f"{n}+1=", "answer": str(n + 1), "response": str(n + 1), "chosen": str(n + 1), "rejected": "0"}
    for n in range(32)
]


def write_terse_model(folder: Path) -> Path:
    """A tiny model, with weights, whose responses have three tokens on average: the documents set no limits.

    Dimension 0 of every embedding is 1, the others are small: the final norm makes about sqrt(32) of it, and the head
    reads it into the logit of the end of sequence: 0.7 * 5.7 = 4, a third of the probability.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    write_tiny_model(folder, hidden_size=32, intermediate_size=64, tie_word_embeddings=False)
    end = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(EOS)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0
        model.get_output_embeddings().weight[end, 0] = 0.7
    model.save_pretrained(folder)
    return folder


def write_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def replaced(model: Path, rows: Path) -> dict[str, str]:
    """Text of a document -> what stands for it here."""
    return {
        "Qwen/Qwen2.5-1.5B": str(model),
        "llama2-7b": str(model),
        "meta-llama/Llama-3.1-8B-Instruct": str(model),
        "nvidia/OpenMathInstruct-2": str(rows),
        # The one run on 4 nodes with 8 GPUs each is made on this machine.
        "tensor_parallel_size=4": "tensor_parallel_size=1",
        "ClusterConfig(num_nodes=4, gpus_per_node=8)": "ClusterConfig(num_nodes=1)",
    }


def provide_megatron() -> None:
    """Where nemorl-megatron is not installed, the documents' ``megatron`` is ``dtensor`` by another name."""
    from nemorl import get_training_backend, register_training_backend

    if "megatron" not in [entry.name for entry in registry().index.of_kind("training_backends")]:
        dtensor = get_training_backend("dtensor")
        register_training_backend("megatron")(type("StandInConfig", (dtensor,), {"__module__": __name__}))


@dataclass(frozen=True)
class Use:
    """How one block is run."""

    preamble: str = ""
    """Source that comes first."""
    after: str = ""
    """Another block that comes before the preamble."""
    check: str = ""
    """Source that comes last, under both names."""
    check_old: str = ""
    """Source that comes last, under the old names: what an adapter makes of the block."""
    trains: bool = False
    ray: bool = False
    not_run: str = ""
    """Why it cannot run at all."""
    not_new: str = ""
    """Why it cannot run under the new names."""

    def source(self, block: str, blocks: Mapping[str, str], *, is_new: bool) -> str:
        parts = [blocks[self.after] if self.after else "", self.preamble, block, self.check]
        return "\n".join([*parts, "" if is_new else self.check_old])


NO_PYTHON = "not Python: "
OTHER_SHAPE = "nemorl does this in another shape, see docs/migration.md: "
BY_HAND = f"{OTHER_SHAPE}a config and a trainer instead of a policy that is driven by hand"

SCORES = """
def my_reward(prompt, response): return float(len(response) < 3)
math_verify = score = my_reward_function = reward_fn = my_reward
"""
SFT = """
from nemo_rl import SFTTrainer
printed = []
print = printed.append
data = ROWS
"""
MY_ALGO = """
from nemo_rl.trainers.base import BaseTrainer

class MyAlgoTrainer(BaseTrainer):
    def _train_step(self, batch):
        return {"loss": sum(len(row["response"]) for row in batch) / len(batch)}

class MyAlgoConfig:
    pass

provide("nemo_rl.algorithms.myalgo", MyAlgoTrainer=MyAlgoTrainer, MyAlgoConfig=MyAlgoConfig)
"""
BACKENDS = """
from nemo_rl.backends import TrainingBackend, get_training_backend, register_training_backend
"""
BUILT = """
from nemo_rl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
built = get_training_backend("custom")().build(PolicyConfig(), WorkerContext(), reference=False)
"""

USES: Mapping[str, Use] = {
    "api-documentation.md:110": Use(
        preamble="""
from nemo_rl.models import HuggingFacePolicy, VllmGeneration
from nemo_rl.environments import MathEnvironment
from nemo_rl.data import BatchedDataLoader
cluster = None  # in this process
config = {"model_name": "llama2-7b", "backend": "hf"}  # vLLM takes a minute to start
dataset = ROWS
""",
        check_old='assert policy.train(generations, rewards)["grad_norm"] >= 0\npolicy.close()',
        trains=True,
        not_new=BY_HAND,
    ),
    "api-documentation.md:128": Use(
        preamble="from nemo_rl.models import HuggingFacePolicy, MegatronPolicy\nprovide_megatron()\nbatch = ROWS[:2]",
        check_old="""
assert [sample.prompt.text for sample in generations] == ["0+1=", "1+1="]
policy_hf.close()
policy_megatron.close()
""",
        trains=True,
        not_new=BY_HAND,
    ),
    "api-documentation.md:142": Use(
        preamble="""
from nemo_rl.distributed import RayVirtualCluster, RayWorkerGroup

class policy_class:
    def __init__(self, context): self.context = context
    def rank(self): return self.context.rank
    def shutdown(self): pass
""",
        check="assert worker_group.call(policy_class.rank) == list(range(16))\n"
        "worker_group.shutdown()\ncluster.shutdown()",
        ray=True,
    ),
    "api-documentation.md:157": Use(
        preamble="dataset = ROWS",
        check_old="assert trainer.step == 1 and trainer.config.cluster.world_size == 4",
        trains=True,
        ray=True,
        not_new=BY_HAND,
    ),
    "api-documentation.md:177": Use(check="assert CustomPolicy().generate([]) is None"),
    "architecture-guide.md:162": Use(not_run=f"{NO_PYTHON}a tree of calls"),
    "architecture-guide.md:207": Use(
        check_old="""
trainer = MyAlgoTrainer.from_pretrained(MODEL, my_param=2.0, max_steps=3)
assert trainer._myalgo_config == {"my_param": 2.0}
assert trainer.config.max_steps == 3
""",
    ),
    "architecture-guide.md:236": Use(
        preamble=MY_ALGO + "__all__ = []", check='assert __all__ == ["MyAlgoTrainer", "MyAlgoConfig"]'
    ),
    "architecture-guide.md:244": Use(
        preamble=MY_ALGO + "from nemo_rl.api.train import _ALGORITHM_REGISTRY",
        check_old="""
import nemo_rl
result = nemo_rl.train(MODEL, ROWS, algorithm="myalgo", max_steps=1)
assert result.metrics["train/loss"] > 1
""",
        trains=True,
        not_new=f"{OTHER_SHAPE}the decorator register_algorithm(name)",
    ),
    "architecture-guide.md:256": Use(
        check=BACKENDS + BUILT + "assert isinstance(built, CustomTrainingBackend)",
    ),
    "architecture-guide.md:292": Use(
        after="architecture-guide.md:256", check=BUILT + "assert isinstance(built, CustomTrainingBackend)"
    ),
    "architecture-guide.md:302": Use(
        check="""
from nemo_rl.backends import get_generation_backend
from nemo_rl.config import GenerationConfig, PolicyConfig
from nemorl.resources.worker import WorkerContext
built = get_generation_backend("custom")().build(GenerationConfig(), PolicyConfig(), WorkerContext(), None)
assert isinstance(built, CustomGenerationBackend)
""",
    ),
    "architecture-guide.md:325": Use(
        preamble="from nemo_rl import GRPOTrainer\ntrainer = GRPOTrainer.from_pretrained(MODEL)\ndata = ROWS",
        check="assert trainer.step == 1",
        trains=True,
    ),
    "architecture-guide.md:334": Use(
        preamble=SCORES,
        check="""
assert env.batched and env.name == "batch_scorer"
assert rewards_of(env, ["a", "b"], ["1", "1234"]) == [1.0, 0.0]
""",
    ),
    "architecture-guide.md:345": Use(
        preamble="import torch",
        check_old="""
class Echoes(MyEnvironment):
    def _compute_rewards(self, logs): return [float(log[-1]["content"] == log[0]["content"]) for log in logs]
assert rewards_of(Echoes(), ["a", "b"], ["a", "c"]) == [1.0, 0.0]
assert Echoes().global_post_process_and_metrics({"rewards": torch.ones(2)})[1] == {"mean_reward": 1.0}
""",
    ),
    "architecture-guide.md:374": Use(preamble="from collections.abc import Callable\nfrom typing import Any"),
    "architecture-guide.md:394": Use(
        preamble=BACKENDS, check=BUILT + "assert backend is get_training_backend('custom')"
    ),
    "architecture-guide.md:413": Use(
        preamble="from nemo_rl.environments import FunctionalRewardWrapper",
        check='assert rewards_of(wrapper, ["a"], ["b"]) == [1.0]',
    ),
    "architecture-guide.md:427": Use(
        preamble=SFT + "trainer = SFTTrainer.from_pretrained(MODEL, batch_size=16, max_epochs=2)",
        check='assert [line[:9] for line in printed] == ["Epoch 0: ", "Epoch 1: "]',
        trains=True,
    ),
    "architecture-guide.md:448": Use(
        preamble="from typing import Any, Optional", check='assert my_function("test") is None'
    ),
    "architecture-guide.md:488": Use(
        preamble=MY_ALGO + 'config = {"model": MODEL}\nbatch = ROWS',
        check="TestMyAlgoTrainer().test_train_step_returns_loss()",
    ),
    "architecture-guide.md:516": Use(check="assert result.steps == 1", trains=True),
    "architecture-guide.md:528": Use(
        preamble=SCORES + 'from nemorl import register_dataset\nregister_dataset("my-dataset")(my_dataset)',
        check="assert trainer.step == 1",
        trains=True,
    ),
    "architecture-guide.md:540": Use(check="assert training().weight_transports and generation().weight_transports"),
    "architecture-guide.md:549": Use(
        preamble=SFT + "trainer = SFTTrainer.from_pretrained(MODEL, batch_size=2, max_steps=100)",
        check='assert [line[:15] for line in printed] == ["Step 100: loss="]',
        trains=True,
    ),
    "prd-refactoring.md:108": Use(not_run=f"{NO_PYTHON}`...` in place of parameters"),
    "prd-refactoring.md:134": Use(not_run=f"{NO_PYTHON}`...` in place of parameters"),
    "prd-refactoring.md:251": Use(preamble=SCORES + "my_dataset = ROWS", check="assert trainer.step == 1", trains=True),
    "prd-refactoring.md:270": Use(check='assert config.policy.precision == "bfloat16"'),
    "prd-refactoring.md:287": Use(
        check=BACKENDS + BUILT + "assert isinstance(built, CustomTrainingBackend)",
    ),
    "prd-refactoring.md:389": Use(
        preamble="""
from pathlib import Path
from typing import Protocol
import torch
from nemo_rl.config import GenerationConfig, PolicyConfig
from nemorl.contracts import Loss as LossFunction
from nemorl.resources.worker import WorkerContext as Cluster
from nemorl_tensors import TokenBatch as BatchedDataDict
""",
    ),
    "prd-refactoring.md:428": Use(
        preamble=SCORES + "from nemo_rl import CheckpointCallback, WandbCallback\nprovide_megatron()\ndataset = ROWS",
        check="assert trainer.step == 1 and list(trainer.run.path.glob('wandb/offline-run-*'))",
        trains=True,
    ),
    "prd-refactoring.md:716": Use(not_run=f"{NO_PYTHON}`...` as a target of an assignment"),
    "prd-refactoring.md:741": Use(preamble=SCORES, check="main()", trains=True),
}
"""``file:line`` -> how to run it."""


def my_dataset(split: str = "train") -> Any:
    """Rows that the documents call "my-dataset"."""
    return ROWS if split == "train" else None


def rewards_of(environment: Any, prompts: list[str], responses: list[str]) -> list[float]:
    """One turn of an environment, as a run takes it."""
    from nemorl.types import Prompt
    from nemorl_rl.environments import EnvironmentPool

    pool = EnvironmentPool(environment)
    episodes = [pool.start(Prompt(index, text, (0,))) for index, text in enumerate(prompts)]
    steps = pool.step(episodes, responses)
    pool.close()
    return [step.score.reward for step in steps]
