"""The files that launchers render, and users may replace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemorl.errors import ConfigError, ConfigIssue

HERE = Path(__file__).parent


def rendered(name: str, own: Path | None, **facts: Any) -> str:
    """A template filled in.

    Args:
        name: File of this folder.
        own: The user's, in its place.
        facts: Everything that a template may name.

    Raises:
        ConfigError: the user's template is no template, or names what there is not.
    """
    import jinja2

    path = own or HERE / name
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    try:
        return environment.from_string(path.read_text()).render(**facts)
    except (jinja2.TemplateError, OSError, UnicodeError) as error:
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        message = f"{path} cannot be rendered: {line}{error}"
        fix = f"it may use {', '.join(sorted(facts))}; begin with a copy of {HERE / name}"
        raise ConfigError([ConfigIssue("template", message, fix)], source="launch") from error
