"""Checks of config templates: a file that is found without importing anything, says what it is, and loads."""

from __future__ import annotations

from typing import Any

from nemorl.base.text.mappings import read_source
from nemorl.config.load import load_config
from nemorl.errors import ConfigError
from nemorl_trust.source import template_text

from nemorl_testing.kit import NotApplicable, Subject, expect

MODEL = "a/model"
"""Filled in where a template leaves the model to its user. Loading a config does not look for it."""


def check_it_is_a_mapping(subject: Subject) -> None:
    """The file is YAML, a mapping that names its algorithm. (DESIGN 6)"""
    expect("algorithm" in _read(subject), "there is no `algorithm:`")


def check_first_line_says_what_it_is(subject: Subject) -> None:
    """The first line is a comment: `nemorl config templates` shows it as the summary. (DESIGN 4)"""
    first = template_text(subject.entry).partition("\n")[0]
    expect(first.startswith("#") and first.strip("# "), f"the first line is {first!r}")


def check_it_is_a_valid_config(subject: Subject) -> None:
    """It loads as a config once it is filled in: every key, value and plugin name is right. (DESIGN 6)"""
    load_config(_filled_in(subject), subject.settings.overrides)


def check_it_can_be_launched(subject: Subject) -> None:
    """`nemorl train` then has all it needs: rows, and what scores them. (DESIGN 6)"""
    config, overrides = _filled_in(subject), subject.settings.overrides
    try:
        load_config(config, overrides)
    except ConfigError as error:
        raise NotApplicable("it is no valid config") from error
    load_config(config, overrides, for_launch=True)


def _read(subject: Subject) -> dict[str, Any]:
    file = subject.folder / "template.yaml"
    file.write_text(template_text(subject.entry), encoding="utf-8")
    return read_source(file)


def _filled_in(subject: Subject) -> dict[str, Any]:
    try:
        config = _read(subject)
    except ConfigError as error:
        raise NotApplicable("it is no mapping") from error
    policy = config.get("policy")
    has_model = config.get("model") or (isinstance(policy, dict) and policy.get("model_name"))
    return config if has_model else {**config, "model": str(subject.settings.model or MODEL)}
