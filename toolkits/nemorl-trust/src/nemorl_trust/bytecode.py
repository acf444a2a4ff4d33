"""Tells whether compiled files come from their sources. Run as a program of its own, by path, with no other imports.

``marshal`` may crash on bytes that somebody made up, and files of an isolated plugin are nothing that a driver would
ever load. So pairs of paths come in as JSON, and for each a line goes out.
"""

from __future__ import annotations

import json
import marshal
import os
import sys
from importlib.util import MAGIC_NUMBER, source_hash

OWN, FOREIGN = "own", "foreign"


def comes_from(compiled: str, source: str, optimize: int) -> bool:
    """Whether Python would pass a compiled file by, or it is what the source compiles to.

    Dates, sizes and hashes in its head decide the first. Whoever plants code can copy them, so the code is compared.
    """
    try:
        with open(compiled, "rb") as file:
            content = file.read()
        with open(source, "rb") as file:
            text, status = file.read(), os.fstat(file.fileno())
        flags, word, size = (int.from_bytes(content[at : at + 4], "little") for at in (4, 8, 12))
        dated = int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF
        if content[:4] != MAGIC_NUMBER or (flags == 0 and (word, size) != dated):
            return True
        if flags == 0b11 and content[8:16] != source_hash(text):
            return True
        code = compile(text, source, "exec", dont_inherit=True, optimize=optimize)
        return bool(marshal.loads(content[16:]) == code)
    except (OSError, ValueError, EOFError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    for pair in asked["pairs"]:
        print(OWN if comes_from(pair[0], pair[1], asked["optimize"]) else FOREIGN, flush=True)
