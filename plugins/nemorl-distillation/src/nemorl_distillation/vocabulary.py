"""Whether student and teacher mean the same by a token id."""

from __future__ import annotations

from pathlib import Path

from nemorl.errors import UsageError, boundary
from nemorl_rl.data.tokenizer import Tokenizer

SAME_FAMILY = (
    "choose student and teacher of one family, e.g. both Qwen2.5: token ids are compared as they are. Or set align: "
    "text for this teacher (algorithm: distillation)"
)


def shared_vocabulary(student: str, teacher: str, tokenizer: str | None = None) -> tuple[int, int]:
    """Ids that student and teacher give log-probs to, of two models with one tokenizer.

    The two numbers may differ: models of one family pad the tokenizer's vocabulary to different sizes.

    Args:
        student: Name or folder of a model.
        teacher: Another.
        tokenizer: The student's, where it is not that of its model.

    Raises:
        UsageError: the tokenizers differ, or the student may write an id that the teacher cannot read.
    """
    own, other = (Tokenizer.load(name).inner.get_vocab() for name in (tokenizer or student, teacher))
    differing = sorted(token for token in {*own, *other} if own.get(token) != other.get(token))
    if differing:
        token = differing[0]
        raise UsageError(
            f"the tokenizers of student {student!r} and teacher {teacher!r} differ in {len(differing)} tokens, "
            f"e.g. {token!r} is {own.get(token, 'unknown')} to the student and {other.get(token, 'unknown')} to the "
            "teacher",
            fix=SAME_FAMILY,
        )
    student_ids, teacher_ids = model_ids(student), model_ids(teacher)
    if student_ids > teacher_ids:
        raise UsageError(
            f"student {student!r} has {student_ids} token ids, teacher {teacher!r} only {teacher_ids}: the student "
            "could write what the teacher cannot read",
            fix=SAME_FAMILY,
        )
    return student_ids, teacher_ids


def model_ids(model: str) -> int:
    """Rows of a model's embedding: the tokenizer's vocabulary and its padding."""
    from transformers import AutoConfig

    with boundary(f"reading the config of {model!r}"):
        config = AutoConfig.from_pretrained(str(Path(model).expanduser()))
        size: int = config.get_text_config().vocab_size
    return size
