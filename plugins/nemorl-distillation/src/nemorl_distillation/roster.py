"""The teachers that a config names, and how each reads the student's tokens."""

from __future__ import annotations

from collections.abc import Callable

from nemorl_distillation.config import TeacherConfig, TeacherModels
from nemorl_distillation.other_tokens import OtherTokens
from nemorl_distillation.teachers import Reader, SameTokens, Teacher
from nemorl_distillation.vocabulary import shared_vocabulary


def roster(config: TeacherModels, check: Callable[[str, int], None] = lambda _path, _token_ids: None) -> list[Teacher]:
    """The teachers of a run, in the order of the config.

    Args:
        config: Names them.
        check: Told the path of each in the config, and how many token ids the student has in common with it.

    Raises:
        UsageError: student and teacher do not mean the same by a token id.
    """
    return [_teacher(path, teacher, config, check) for path, teacher in config.teachers_by_path.items()]


def _teacher(path: str, teacher: TeacherConfig, config: TeacherModels, check: Callable[[str, int], None]) -> Teacher:
    policy = config.policy
    reader: Reader
    if teacher.align == "text":
        reader = OtherTokens.between(policy, teacher.model)
        token_ids = min(len(reader.to_student), len(reader.lacks))
    else:
        student_ids, token_ids = shared_vocabulary(policy.model_name, teacher.model, policy.tokenizer.name)
        reader = SameTokens(student_ids)
    check(path, token_ids)
    return Teacher(path.rpartition(".")[2], teacher.weight, config.role_of(teacher), reader)
