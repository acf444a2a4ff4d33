"""Secrets that show by their form or by what stands before them, in any text: keys of services, headers, URLs, options.

Everything here is a pattern over text. What the values of this process's variables are, :mod:`nemorl.base.text.secrets`
knows; rules for many more services are in ``detect-secrets``, which configs are held against
(:mod:`nemorl_trust.secret_check`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

SHORTEST = 8
"""Shorter values are found in any text by chance."""
_VALUE = r"""(?P<value>[^\s"'`,;&|<>\\(){}\[\]]{8,})"""
SECRET_OPTION = (
    r"(?:[\w-]{0,40}[_-])?(?:api[_-]?(?:key|token)|(?:access|auth|bearer|hf|session|refresh|id|github|personal)[_-]?token"
    r"|(?:access|private|secret|signing|encryption)[_-]?key|secret|client[_-]?secret|passw(?:or)?d|passphrase|credentials?)"
)
"""How options and variables for secrets are called."""
_OF_A_TOKENIZER = re.compile(
    r"(pad|eos|bos|unk|sep|cls|mask|stop|end|start|special|image|video|audio|tool|think)\w*_token$", re.IGNORECASE
)
_COUNTS = re.compile(r"(?:.*[_-])?(?:token|pat)", re.IGNORECASE)
_NUMBER = re.compile(r"[\d.]+(?:e[-+]?\d+)?", re.IGNORECASE)
"""Under such names it is a measure: ``seconds_per_token: 0.01234567``."""


class Form(NamedTuple):
    """One way in which secrets show."""

    what: str
    pattern: re.Pattern[str]
    """Its group ``value`` is the secret."""
    hints: tuple[str, ...]
    """Of which a text in lower case holds one, where this could fit: regular expressions are slow."""
    is_sure: bool = False
    """Nothing else looks like it: a placeholder need not be ruled out."""


FORMS = (
    Form("key of some service", re.compile(
        r"(?<![A-Za-z0-9_-])(?P<value>hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}"
        r"|github_pat_[A-Za-z0-9_]{30,}|glpat-[A-Za-z0-9_-]{20,}|xox[abeprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{20,}"
        r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,}|GOCSPX-[A-Za-z0-9_-]{20,}"
        r"|nvapi-[A-Za-z0-9_-]{30,}|gsk_[A-Za-z0-9]{30,}|xai-[A-Za-z0-9]{40,}|pplx-[A-Za-z0-9]{30,}|r8_[A-Za-z0-9]{30,}"
        r"|tgp_v1_[A-Za-z0-9_-]{30,}|fw_[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{30,}"
        r"|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}|dapi[a-f0-9]{32}"
        r"|dop_v1_[a-f0-9]{40,}|hvs\.[A-Za-z0-9_-]{20,}|lsv2_[a-z]{2}_[a-f0-9_]{30,}|wandb_v1_[A-Za-z0-9_]{30,}"
        r"|AGE-SECRET-KEY-1[A-Z0-9]{30,}|ATATT3[A-Za-z0-9_=-]{20,}|tskey-[a-z]{2,10}-[A-Za-z0-9-]{16,})"
    ), (
        "hf_", "sk-", "gh", "glpat-", "xox", "xapp-", "akia", "asia", "aiza", "ya29.", "gocspx-", "nvapi-", "gsk_",
        "xai-", "pplx-", "r8_", "tgp_", "fw_", "npm_", "pypi-", "sg.", "k_live_", "k_test_", "dapi", "dop_v1_", "hvs.",
        "lsv2_", "wandb_v1_", "age-secret-key-", "atatt3", "tskey-",
    ), is_sure=True),
    Form("JSON Web Token", re.compile(
        r"(?P<value>\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,})"
    ), ("eyj",), is_sure=True),
    Form("private key", re.compile(
        r"(?P<value>-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
        r".*?(?:-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|$))", re.DOTALL
    ), ("private key",), is_sure=True),
    # A token has a digit, and a word after "basic" has none.
    Form("token", re.compile(
        r"\b(?:Bearer|Basic|Token)\s+(?=[\w.~+/=-]*\d)(?P<value>[\w.~+/=-]{8,})", re.IGNORECASE
    ), ("bearer", "basic", "token")),
    Form("header", re.compile(
        r"\b(?:Authorization|Proxy-Authorization|X-Api-Key|X-Auth-Token|Api-Key)[\"']?\s*[:=]\s*[\"']?"
        r"(?!Bearer\b|Basic\b|Token\b)(?P<value>[^\s\"',;&]{8,})", re.IGNORECASE
    ), ("authorization", "api-key", "auth-token")),
    Form("cookie", re.compile(
        r"\b(?:Set-)?Cookie[\"']?\s*[:=]\s*[\"']?(?P<value>[\w.-]+=[^\s\"',]{8,}(?:;\s*[\w.-]+=[^\s\"',;]+)*)",
        re.IGNORECASE,
    ), ("cookie",)),
    Form("signature", re.compile(
        rf"[?&;](?:{SECRET_OPTION}|key|token|sig|signature|x-amz-(?:signature|security-token|credential)|x-goog-signature"
        r"|awsaccesskeyid)=(?P<value>[^\s&#\"'<>]{8,})", re.IGNORECASE
    ), ("key=", "token=", "sig=", "signature=", "secret=", "passw", "credential", "passphrase=", "keyid=")),
    Form("option", re.compile(
        rf"(?<![\w-])--?(?:{SECRET_OPTION}|token)(?:\s+|=)[\"']?(?!-)(?P<value>[^\s\"'`$<>]{{8,}})", re.IGNORECASE
    ), ("-",)),
    Form("secret", re.compile(
        rf"(?<![\w$-])(?P<name>{SECRET_OPTION}|(?:[\w-]{{0,40}}_)?token|(?:\w{{0,40}}_)?(?:PAT|APIKEY))\\{{0,3}}[\"']?\s*[=:]\s*\\{{0,3}}[\"']?"
        r"(?![/$<`*{(])" + _VALUE,
        re.IGNORECASE,
    ), ("key", "token", "secret", "passw", "passphrase", "credential", "pat")),
    Form("password", re.compile(  # curl, .netrc, sshpass
        r"(?:(?<![\w-])(?:-u|--user)[\s=][\"']?[\w.@-]{1,60}:|\blogin\s+\S{1,60}\s+password\s+|\bsshpass\s+-p\s*)"
        r"[\"']?(?P<value>[^\s\"'`$<>]{8,})", re.IGNORECASE
    ), ("-u", "login", "sshpass")),
    Form("token", re.compile(r"://(?=[A-Za-z_-]{0,200}\d)(?P<value>[A-Za-z0-9_-]{20,200})@"), ("://",)),
    Form("account key", re.compile(r"\bAccountKey=(?P<value>[A-Za-z0-9+/=]{20,})"), ("accountkey",), is_sure=True),
)  # fmt: skip
URL_PASSWORD = re.compile(
    r"""(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,40}://[^\s/:@"'\\<>]{0,200}:(?P<value>[^\s/@"'\\<>]+)@""", re.IGNORECASE
)
_PLACEHOLDER = re.compile(
    r"(?:your|my|the|some|insert|enter|replace|put|change|add|paste|dummy|fake|example|sample|test|todo|placeholder|none|null"
    r"|true|false|empty|redacted|hidden|secret|password|token|key|here|me|api|value|not|set|unset|required|optional|x++|\.++"
    r"|\*++|[-_ ]++|\d{1,4}(?!\d))+", re.IGNORECASE
)  # fmt: skip
"""Words that stand where a secret would: ``your_key_here``, ``xxxxxxxx``, ``changeme``."""
LONGEST_PLACEHOLDER = 64


def secrets_by_form(text: str) -> Iterator[tuple[int, int, str]]:
    """Where in a text secrets show, and what they are: begin, end, name of the form.

    >>> [*secrets_by_form("curl -H 'Authorization: Bearer abc123def456'")]
    [(31, 43, 'token')]
    >>> [*secrets_by_form("export API_KEY=your_key_here")]
    []
    """
    lower = text.lower()
    for form in FORMS:
        if any(hint in lower for hint in form.hints):
            for found in form.pattern.finditer(text):
                if form.is_sure or _can_be_secret(found):
                    yield *found.span("value"), form.what
    if "://" in text:
        for found in URL_PASSWORD.finditer(text):
            if not is_placeholder(found["value"]) and not found["value"].startswith(("<", "$")):
                yield *found.span("value"), "password"


def is_placeholder(value: str) -> bool:
    """A text stands where a secret would, and is none.

    >>> is_placeholder("your_key_here"), is_placeholder("${TOKEN}"), is_placeholder("a8f3k2l9")
    (True, True, False)
    """
    if len(value) > LONGEST_PLACEHOLDER:
        return False
    return value.startswith(("<", "$", "{", "%")) or not value.strip("*.") or bool(_PLACEHOLDER.fullmatch(value))


def _can_be_secret(found: re.Match[str]) -> bool:
    value, name = found["value"], found.groupdict().get("name")
    if is_placeholder(value) or (name is not None and is_harmless(name, value)):
        return False
    is_mixed = any(map(str.isdigit, value)) or (any(map(str.isupper, value)) and any(map(str.islower, value)))
    return name is None or is_mixed or name.isupper()


def is_harmless(name: str, value: str) -> bool:
    """Under this name the value is a token of a tokenizer, or a measure of tokens."""
    return bool(_OF_A_TOKENIZER.search(name) or (_COUNTS.fullmatch(name) and _NUMBER.fullmatch(value)))
