"""Damaged and forged versions of a good input: the same ones for the same seed.

A text is damaged in its bytes (flipped, cut, doubled, spliced) or, where it is JSON, in its values: one is replaced by
something that no reader should trust, removed, doubled, renamed, or wrapped until it is nested deeply.
"""

import copy
import gzip
import json
import random
from typing import Any

from forgeries import forged, forged_journal

EVIL_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2,
    3.5,
    -0.0,
    1e308,
    5e-324,
    10**18,
    2**63,
    -(2**63) - 1,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "x",
    "1",
    "nan",
    "1e400",
    "\x1b[2J\x1b]0;owned\x07",
    "a\nrm -rf ~\n",
    "\u202eevil\u2066",
    "\ud800",
    "x" * 5000,
    "__class__",
    "../../etc/passwd",
    [],
    {},
    [0],
    [[]],
    {"x": 1},
    [1] * 300,
)
"""Values that no reader should trust, of every kind that JSON has and some that it has not."""

EVIL_TOKENS = (
    b"9" * 5000,
    b"1e999",
    b"-",
    b"NaN",
    b"Infinity",
    b"\\ud800",
    b"\xff\xfe",
    b"\x00",
    b"[" * 2000,
    b'{"a":' * 500,
    b'"',
    b"}",
    b"\n",
    b",",
    b"\xef\xbb\xbf",
    b"99999999999",
    b"-1",
    b"0",
    b"x" * 4000,
    b"\x1b[31m",
)
"""Bytes that are put somewhere into a text."""

_NESTED = '"@nested@"'
"""What stands for a deeply nested list in a document, until it is text: Python itself cannot write such a list."""


def mutated(seed: bytes, chance: random.Random) -> bytes:
    """A damaged version of a good input, plain or gzipped."""
    if seed[:2] == b"\x1f\x8b" and chance.random() < 0.6:
        return gzip.compress(mutated(gzip.decompress(seed), chance), compresslevel=1, mtime=0)
    if seed[:1] == b"{" and chance.random() < 0.8:
        is_journal = b"}\n{" in seed
        text = _mutated_journal(seed, chance) if is_journal else _mutated_json(seed, chance)
        depth = chance.choice((50, 1500, 100_000))
        return text.encode().replace(_NESTED.encode(), b"[" * depth + b"]" * depth)
    return _mutated_bytes(seed, chance)


def _mutated_json(seed: bytes, chance: random.Random) -> str:
    """A JSON document with some values changed; what has a digest gets the right one half of the time."""
    document = json.loads(seed)
    is_sealed = "digest" in document
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        document = mutated_document(document, chance)
    if is_sealed and isinstance(document, dict) and chance.random() < 0.5:
        document = forged(document)
    return json.dumps(document, indent=chance.choice((None, 1)))


def _mutated_journal(seed: bytes, chance: random.Random) -> str:
    """A journal with one line changed, left out or moved; most have the right digests."""
    lines = seed.decode().splitlines()
    number = chance.randrange(len(lines)) if chance.random() < 0.7 else 0
    kind = chance.randrange(6)
    if kind == 0:
        del lines[number]
    elif kind == 1:
        chance.shuffle(lines)
    else:
        lines[number] = json.dumps(mutated_document(json.loads(lines[number]), chance))
    try:
        return forged_journal(lines) if chance.random() < 0.7 else "\n".join(lines) + "\n"
    except (AttributeError, TypeError):  # a line that is no object has no digest
        return "\n".join(lines) + "\n"


def mutated_document(document: Any, chance: random.Random) -> Any:
    """The document, changed in place in one value."""
    if not isinstance(document, dict | list) or not document:
        return copy.deepcopy(chance.choice(EVIL_VALUES))
    place = document
    while True:
        key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.85:
            place = inner
            continue
        _change(place, key, chance)
        return document


def _change(place: Any, key: Any, chance: random.Random) -> None:
    """Change one entry of a list or an object."""
    kind, value = chance.randrange(8), place[key]
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, dict):
        place[chance.choice(("x", "version", f"{key} ", str(key).upper()))] = place.pop(key)
    elif kind == 1:
        place.insert(key, value)
    elif kind == 2 and isinstance(value, int | float) and not isinstance(value, bool):
        place[key] = chance.choice((value + 1, -value, value * 10**6, value * 2, str(value), value // 3))
    elif kind == 3:
        place[key] = chance.choice(([value], _NESTED.strip('"')))
    elif kind == 4 and isinstance(place, list):
        chance.shuffle(place)
    else:
        place[key] = copy.deepcopy(chance.choice(EVIL_VALUES))


def _mutated_bytes(text: bytes, chance: random.Random) -> bytes:
    """The text with some of its bytes changed."""
    data = bytearray(text)
    for _ in range(chance.choice((1, 1, 2, 8))):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.choice((1, 4, 40, 400)))
        kind = chance.randrange(6)
        if kind == 0:
            del data[start:]
        elif kind == 1:
            del data[start:end]
        elif kind == 2:
            data[start:start] = data[start:end]
        elif kind == 3:
            data[start:start] = chance.choice(EVIL_TOKENS)
        elif kind == 4 and start < len(data):
            data[start] ^= 1 << chance.randrange(8)
        elif start < len(data):
            data[start] = chance.choice(b'0123456789-+.eE{}[],:"\n\t /ax\x00\xff')
    return bytes(data)
