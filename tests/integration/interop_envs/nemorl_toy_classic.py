"""A classic environment of verifiers (0.1): a dataset, a rubric, and ``load_environment()``."""

import verifiers as vf
from datasets import Dataset


def load_environment(count=3):
    rows = Dataset.from_list([{"question": f"Say {number}.", "answer": str(number)} for number in range(count)])

    def right(completion, answer, **_):
        return float(completion[-1]["content"] == answer)

    def length(completion, **_):
        return float(len(completion[-1]["content"]))

    rubric = vf.Rubric(funcs=[right, length], weights=[2.0, 0.0])
    return vf.SingleTurnEnv(dataset=rows, rubric=rubric, system_prompt="Be brief.")
