"""How text and bytes are damaged. Invariant: the same random generator gives the same damage."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, -7, 2**31, 2**53 + 1, 2**63, 10**400, -(10**30)),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf")),
    *("", " ", "x", "null", "\x00", "\ud800", "\u2028é😀", "a" * 100_000, "../x", "/nowhere", "."),
    *([], [[]], [None], {}, {"": 1}, [1, "1"], ["x"] * 3, {"a": {"b": None}}),
]
PIECES = [
    *(b"", b"\x00" * 64, b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r\n", b"\n\n", b"\t"),
    *(b"[" * 50_000, b'{"a":' * 50_000, b"7" * 6000, b"NaN", b"-Infinity", b"1e999", b"null"),
    *(b'"\\ud800"', b"{}", b"}", b"- ", b"&a [*a,*a]", b"${num_steps}", b"${oc.env:X}"),
    b"!!python/object/apply:os.getcwd []",
]

Mutation = Callable[[bytes, random.Random], bytes]


def flip_bits(data: bytes, draw: random.Random) -> bytes:
    """One to four bits turned over."""
    result = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 4])):
        if result:
            result[draw.randrange(len(result))] ^= 1 << draw.randrange(8)
    return bytes(result)


def cut(data: bytes, draw: random.Random) -> bytes:
    """Only the beginning, or nothing."""
    return data[: draw.choice([0, 1, len(data) // 2, max(0, len(data) - 1), len(data)])]


def splice(data: bytes, draw: random.Random) -> bytes:
    """A strange piece put in, with or without loss of what stood there."""
    at = draw.choice([0, len(data), draw.randint(0, len(data))])
    return data[:at] + draw.choice(PIECES) + data[at + draw.choice([0, 0, 1, 40]) :]


def shuffle(data: bytes, draw: random.Random) -> bytes:
    """A slice that stands twice, or is missing, or is zeros or noise."""
    start = draw.randint(0, len(data))
    end = min(len(data), start + draw.choice([1, 8, 100, 5000]))
    part = data[start:end]
    noise = draw.randbytes(len(part))
    return data[:start] + draw.choice([b"", part * 2, bytes(len(part)), noise]) + data[end:]


def change_lines(data: bytes, draw: random.Random) -> bytes:
    """A line that is gone, stands twice, or has changed places or indentation."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    line = lines.pop(at)
    new = draw.choice([[], [line, line], [b"  " + line], [line.lstrip()], [line[: len(line) // 2]]])
    lines[at:at] = new
    if draw.random() < 0.3:
        draw.shuffle(lines)
    return b"\n".join(lines)


def change_json(data: bytes, draw: random.Random) -> bytes:
    """A value of a JSON text, deep or shallow, replaced, renamed, doubled or gone."""
    try:
        value = json.loads(data)
    except ValueError:
        return splice(data, draw)
    return json.dumps(_changed(value, draw)).encode()


def change_json_line(data: bytes, draw: random.Random) -> bytes:
    """The same in one line of many."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    lines[at] = change_json(lines[at], draw)
    return b"\n".join(lines)


def change_header(data: bytes, draw: random.Random) -> bytes:
    """A safetensors file whose header says something else, its length included or not."""
    (size,) = struct.unpack("<Q", data[:8])
    header = change_json(data[8 : 8 + size], draw)
    stated_bytes = draw.choice([len(header)] * 6 + [0, 1, size, 2**63, 2**64 - 1])
    return struct.pack("<Q", stated_bytes) + header + data[8 + size :]


def change_number(data: bytes, draw: random.Random) -> bytes:
    """Weights with a NaN, an infinity or a huge number somewhere in the last half."""
    at = draw.randrange(len(data) // 2, len(data) - 4) // 4 * 4
    number = draw.choice([float("nan"), float("inf"), -float("inf"), 3e38])
    return data[:at] + struct.pack("<f", number) + data[at + 4 :]


def _changed(value: Any, draw: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or draw.random() < 0.1:
        return draw.choice(VALUES)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw.choice(keys)
    how = draw.random()
    if how < 0.12:
        value = value.copy()
        del value[key]
        return value
    if how < 0.2 and isinstance(value, dict):
        return value | {str(draw.choice(VALUES))[:50]: value[key]}
    new = draw.choice(VALUES) if how < 0.5 else _changed(value[key], draw)
    if isinstance(value, dict):
        return value | {key: new}
    return [*value[:key], new, *value[key + 1 :]]


BYTES: tuple[Mutation, ...] = (flip_bits, flip_bits, cut, splice, shuffle)
TEXT: tuple[Mutation, ...] = (*BYTES, splice, change_lines, change_lines)
JSON: tuple[Mutation, ...] = (*BYTES, change_json, change_json, change_json, change_json)
JSON_LINES: tuple[Mutation, ...] = (*BYTES, change_lines, *[change_json_line] * 4)
SAFETENSORS: tuple[Mutation, ...] = (*BYTES, *[change_header] * 3, change_number)
