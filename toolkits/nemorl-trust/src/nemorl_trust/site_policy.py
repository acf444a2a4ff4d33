"""A site's policy by user and group: ``/etc/nemorl/policy.yaml``, the file that ``NEMORL_SITE_POLICY`` names besides.

Rules say for which users and groups they hold, what they deny and what they allow. A denial wins. What no rule allows
is free, unless some rule of the file allows things of that kind: then only what is allowed to this user is. Both files
must admit a thing, so that neither a variable nor a run's config can take back what ``/etc`` says. Who one is comes
from the system's user id. A file that cannot be understood, or that others may write, admits nothing: it was meant to
forbid.
"""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from nemorl.base.packages.site import SITE_FILE, VARIABLE
from nemorl.base.text.reading import expanded, may_be_there, read_text
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import UsageError

KINDS: Mapping[str, str] = {
    "plugins": "use the plugin",
    "install": "install",
    "clusters": "use the cluster",
    "engines": "use the engine",
    "datasets": "read the dataset",
    "models": "use the model",
    "code": "run the code",
    "unlock": "unlock",
}
"""Kinds of things that rules are about, with the words of a refusal."""
TOP = ("contact", "audit", "rules", "signed_plugins")
OF_A_RULE = ("name", "users", "groups", "allow", "deny")


@dataclass(frozen=True)
class Refusal:
    """Why somebody may not do something, and whom to ask."""

    message: str
    fix: str
    rule: str


@dataclass(frozen=True)
class Rule:
    """One entry of ``rules``."""

    name: str
    users: tuple[str, ...] | None
    """Unset, like ``groups``: everybody."""
    groups: tuple[str, ...] | None
    allow: Mapping[str, tuple[str, ...]]
    """Kind to patterns, as a shell has them: ``*`` stands for any characters."""
    deny: Mapping[str, tuple[str, ...]]

    def holds_for(self, person: Person) -> bool:
        if self.users is None and self.groups is None:
            return True
        return person.name in (self.users or ()) or bool(person.groups & set(self.groups or ()))


@dataclass(frozen=True)
class Person:
    """Whose process this is, by the system's lists of users and groups."""

    name: str
    groups: frozenset[str]

    @classmethod
    def me(cls) -> Person:
        from nemorl_trust.audit.log import user_name

        numbers = {os.getgid(), *os.getgroups()}
        return cls(user_name(), frozenset(filter(None, map(_group_name, numbers))))


@dataclass(frozen=True)
class SignedPlugins:
    """Sets of plugins that the site signed."""

    keys: tuple[Path, ...]
    """Files with public keys."""
    sets: tuple[Path, ...]
    """Sets that ``nemorl plugins sign`` wrote."""


@dataclass(frozen=True)
class SitePolicy:
    """One file."""

    path: Path
    contact: str = "who looks after this machine"
    audit: Path | None = None
    """Folder of audit logs. Given, a run that cannot write its log is refused."""
    signed_plugins: SignedPlugins | None = None
    """Given, only plugins of these sets may be used."""
    rules: tuple[Rule, ...] = ()
    trouble: str | None = None
    """Why it cannot be used: then it admits nothing."""

    def refusal(
        self,
        kind: str,
        name: str,
        *aliases: str,
        person: Person | None = None,
        needs_leave: bool = True,
        replaces: bool = False,
    ) -> Refusal | None:
        """Why this person may not; ``None`` where there is no reason.

        Args:
            kind: One of ``KINDS``.
            name: What the thing is, all links followed: what is allowed is allowed by this name.
            aliases: How it may be called besides: what is denied is denied by any name.
            person: Unset: whose process this is.
            needs_leave: Where some rule allows things of this kind, it has to be among them.
            replaces: It can stand in for installed packages: where plugins have to be signed, a rule has to allow it.
        """
        person = person or Person.me()
        if self.trouble is not None:
            return self._refused(
                person, kind, name, "", f"the site's policy {self.path} cannot be used ({self.trouble})"
            )
        mine = [rule for rule in self.rules if rule.holds_for(person)]
        for rule in mine:
            if any(_is_denied(each, rule.deny.get(kind, ())) for each in (name, *aliases)):
                return self._refused(person, kind, name, rule.name, f"rule {rule.name!r} in {self.path} denies it")
        if not needs_leave:
            return None
        allowing = [rule for rule in self.rules if kind in rule.allow]
        if not allowing and replaces and self.signed_plugins is not None:
            why = f"{self.path} lets only signed plugins run, which this could replace, and no rule allows any {kind}"
            return self._refused(person, kind, name, "signed_plugins", why)
        if not allowing or any(_fits(name, rule.allow[kind]) for rule in allowing if rule in mine):
            return None
        names = ", ".join(repr(rule.name) for rule in allowing)
        return self._refused(
            person, kind, name, names, f"only rules {names} in {self.path} allow {kind}, and not this one"
        )

    def _refused(self, person: Person, kind: str, name: str, rule: str, why: str) -> Refusal:
        return Refusal(f"{person.name} may not {KINDS[kind]} {name!r}: {why}", f"ask {self.contact}", rule)


@cache
def site_policies() -> tuple[SitePolicy, ...]:
    """The files that hold here, read once."""
    found = [read_site_policy(SITE_FILE, owners=frozenset({0}))] if may_be_there(SITE_FILE) else []
    named = os.environ.get(VARIABLE)
    if named:
        found.append(read_site_policy(expanded(named), owners=None))
    return tuple(found)


def refusal(kind: str, name: str, *aliases: str, needs_leave: bool = True, replaces: bool = False) -> Refusal | None:
    """Why the site does not let whose process this is; ``None`` where it does. As :meth:`SitePolicy.refusal`."""
    found = (
        policy.refusal(kind, name, *aliases, needs_leave=needs_leave, replaces=replaces) for policy in site_policies()
    )
    return next((each for each in found if each is not None), None)


def read_site_policy(path: Path, *, owners: frozenset[int] | None) -> SitePolicy:
    """A policy file. One that cannot be understood or trusted admits nothing.

    Args:
        path: Of the file.
        owners: Users to whom it, and the folders around it, may belong. ``None``: whoever has it.
    """
    from nemorl.base.text.yaml_text import parse_yaml

    try:
        if (doubt := _doubt(path, owners)) is not None:
            raise ValueError(doubt)
        return _checked(parse_yaml(read_text(path)) or {}, path)
    except (OSError, ValueError) as error:
        return SitePolicy(path, trouble=" ".join(str(error).split()))


def _doubt(path: Path, owners: frozenset[int] | None) -> str | None:
    """Who else could have written a file, or put another one in its place."""
    real = Path(os.path.realpath(path))
    around = real.parents if owners is not None else real.parents[:1]
    for place in (real, *around):
        found = place.stat()
        in_sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not in_sticky:
            return f"others than its owner may write {place}: chmod go-w {place}"
        if owners is not None and found.st_uid not in owners:
            return f"{place} belongs to the user {found.st_uid}, not to the site"
    return None


def _checked(data: Any, path: Path) -> SitePolicy:
    found = _mapping(data, TOP, "the file")
    contact = found.get("contact", SitePolicy.contact)
    if not isinstance(contact, str):
        raise ValueError("contact is a text: whom to ask")
    audit = found.get("audit")
    if audit is not None and not (isinstance(audit, str) and Path(audit).is_absolute()):
        raise ValueError("audit is the path of a folder, from the root on")
    signed = found.get("signed_plugins")
    if signed is not None:
        of_set = _mapping(signed, ("keys", "sets"), "signed_plugins")
        keys, sets = (_texts(of_set.get(key), f"{key} of signed_plugins") for key in ("keys", "sets"))
        signed = SignedPlugins(tuple(map(Path, keys)), tuple(map(Path, sets)))
    rules = found.get("rules", [])
    if not isinstance(rules, list):
        raise ValueError("rules is a list")
    return SitePolicy(
        path, contact, None if audit is None else Path(audit), signed,
        tuple(_rule(rule, number) for number, rule in enumerate(rules, 1)),
    )  # fmt: skip


def _rule(data: Any, number: int) -> Rule:
    found = _mapping(data, OF_A_RULE, f"rule {number}")
    name = found.get("name", f"number {number}")
    if not isinstance(name, str):
        raise ValueError(f"the name of rule {number} is a text")
    who = {key: _texts(found[key], f"{key} of rule {name!r}") if key in found else None for key in ("users", "groups")}
    if not found.keys() & {"allow", "deny"}:
        raise ValueError(f"rule {name!r} neither allows nor denies")
    return Rule(name, who["users"], who["groups"], _patterns(found, "allow", name), _patterns(found, "deny", name))


def _patterns(rule: Mapping[str, Any], key: str, name: str) -> dict[str, tuple[str, ...]]:
    where = f"{key} of rule {name!r}"
    found = _mapping(rule.get(key, {}), tuple(KINDS), where)
    return {kind: _texts(patterns, f"{kind} in {where}") for kind, patterns in found.items()}


def _mapping(data: Any, keys: Sequence[str], where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} is a mapping with the keys {', '.join(keys)}")
    for key in data:
        if key not in keys:
            raise ValueError(f"{where} has no key {key!r}. {did_you_mean(str(key), keys) or f'There are {list(keys)}'}")
    return data


def _texts(data: Any, where: str) -> tuple[str, ...]:
    if not isinstance(data, list) or not all(isinstance(text, str) and text for text in data):
        raise ValueError(f"{where} is a list of texts")
    return tuple(data)


def _is_denied(name: str, patterns: Sequence[str]) -> bool:
    # Hosts and names on the hub mean the same in any case. A file that differs in its case alone is denied as well.
    return _fits(name.casefold(), [pattern.casefold() for pattern in patterns])


def _fits(name: str, patterns: Sequence[str]) -> bool:
    # A folder fits the pattern of what is in it: who reads all of /data/x reads /data/x/*.
    return any(fnmatchcase(name, pattern) or fnmatchcase(f"{name}/", pattern) for pattern in patterns)


def _group_name(number: int) -> str | None:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return None


def names_of_path(text: str) -> Iterator[str]:
    """The names of a file or folder: what it is with all links followed first, then as it was written."""
    path = os.path.expanduser(text)
    is_here = os.path.exists(path)  # False also for what can be no path, for which Path.exists raises
    if is_here:
        yield os.path.realpath(path)
        yield os.path.abspath(path)
    yield text
    if not is_here and os.path.isabs(path):  # it may be there on another machine
        yield os.path.normpath(path)


def links_out_of(folder: Path) -> Iterator[str]:
    """Places outside of a folder that links in it lead to, and links in those: each is read as if it lay there.

    Raises:
        UsageError: A folder cannot be read.
    """
    seen, waiting = {str(folder)}, [str(folder)]
    while waiting:
        for place, folders, files in os.walk(waiting.pop(), onerror=_refuse_unread):
            for path in (os.path.join(place, name) for name in (*folders, *files)):
                target = os.path.realpath(path) if os.path.islink(path) else str(folder)
                if target not in seen and not Path(target).is_relative_to(folder):
                    seen.add(target)
                    yield target
                    waiting += [target] * os.path.isdir(target)


def _refuse_unread(error: OSError) -> None:
    raise UsageError(
        f"{error.filename} cannot be read ({error.strerror}), so nobody knows where links in it lead",
        fix="ask for the right to read it, or name another folder",
    ) from error
