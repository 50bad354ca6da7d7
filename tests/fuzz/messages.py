"""Messages that are nearly right: valid ones with bits, lengths, types, numbers and nesting changed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, Final

import msgspec

from maru_core.protocol import encode

INTEGERS: Final = (
    0, 1, -1, 2, 63, 64, 255, 4095, 4096, 4097, 65_535, 65_536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63),
)  # fmt: skip
FLOATS: Final = (0.0, -0.0, 1e-300, 1e300, -1.0, float("nan"), float("inf"), float("-inf"))
TEXTS: Final = ("", "kv", "\0", "x" * 49, "x" * 300, "ü", "\u202e", "../../etc", "%s%n", "a\nb", "lru")


def number(chance: random.Random) -> int:
    return chance.choice([chance.choice(INTEGERS), chance.randrange(1 << 16), chance.getrandbits(64)])


def blob(chance: random.Random) -> bytes:
    """Packed arrays of all lengths, also such that no element size divides."""
    kind = chance.randrange(6)
    if kind == 0:
        return chance.choice([b"", bytes(32), b"\xff" * 32, bytes(31), bytes(33), bytes(64)])
    if kind == 1:
        return chance.randbytes(chance.choice([1, 4, 8, 12, 16, 32, 64, 96]))
    if kind == 2:
        return chance.randbytes(32) * chance.choice([2, 3, 100])
    if kind == 3 and chance.random() < 0.1:
        return chance.randbytes(32 * chance.choice([4095, 4096, 4097, 5000]))
    return chance.randbytes(chance.randrange(200))


def deep(chance: random.Random) -> Any:
    value: Any = chance.choice([0, [], {}, b"", "x"])
    for _ in range(chance.choice([3, 30, 600])):
        value = [value] if chance.random() < 0.8 else {"a": value}
    return value


def anything(chance: random.Random) -> Any:
    makers: list[Callable[[random.Random], Any]] = [
        number, blob, lambda c: c.choice(TEXTS), lambda c: c.choice(FLOATS), lambda c: c.choice([None, True, False]),
        lambda c: [c.choice(TEXTS) for _ in range(c.choice([0, 1, 2, 65, 70]))], lambda c: {c.choice(TEXTS): number(c)},
        lambda c: [[number(c), number(c), number(c)]] * c.choice([1, 2, 70]),
    ]  # fmt: skip
    return chance.choice(makers)(chance)


def changed(value: Any, chance: random.Random) -> Any:
    """Another value, mostly of the same type."""
    if chance.random() < 0.15:
        return anything(chance)
    if isinstance(value, bool) or value is None:
        return chance.choice([True, False, None, number(chance)])
    if isinstance(value, int):
        return chance.choice([number(chance), value + chance.choice([-1, 1]), value ^ (1 << chance.randrange(64))])
    if isinstance(value, float):
        return chance.choice([chance.choice(FLOATS), value * chance.uniform(-2, 2)])
    if isinstance(value, bytes):
        way = chance.randrange(5)
        if way == 0 and value:
            at = chance.randrange(len(value))
            return value[:at] + bytes([value[at] ^ 1 << chance.randrange(8)]) + value[at + 1 :]
        if way == 1:
            return value[: chance.randrange(len(value) + 1)]
        if way == 2:
            return (
                value + value[:32] if chance.random() < 0.5 else value + chance.randbytes(chance.choice([1, 4, 8, 32]))
            )
        if way == 3 and len(value) >= 64:
            return value[32:64] + value[:32] + value[64:]
        return blob(chance)
    if isinstance(value, str):
        return chance.choice([chance.choice(TEXTS), value + chance.choice("x\0ü"), value[:-1]])
    if isinstance(value, list):
        more = [changed(item, chance) for item in value]
        return chance.choice([more, more[:-1], more + more, [*more, anything(chance)]])
    if isinstance(value, dict):
        return {
            chance.choice(TEXTS) if chance.random() < 0.3 else key: changed(item, chance) for key, item in value.items()
        }
    return anything(chance)


def mutate(message: msgspec.Struct, chance: random.Random, *, keep: int = 0) -> bytes:
    """The message as bytes, changed in one way or several.

    Args:
        keep: so many of its first fields (the tag is the first) stay as they are, mostly.
    """
    data = encode(message)
    if chance.random() < 0.75:
        fields = msgspec.msgpack.decode(data)
        for _ in range(chance.choice([1, 1, 1, 2, 4])):
            way = chance.randrange(14)
            first = min(keep if chance.random() < 0.95 else 0, len(fields))
            if way == 0:
                del fields[chance.randrange(first, len(fields) + 1) :]
            elif way == 1:
                fields.append(anything(chance))
            elif way == 2 and len(fields) > first:
                fields[chance.randrange(first, len(fields))] = deep(chance)
            elif len(fields) > first:
                at = chance.randrange(first, len(fields))
                with contextlib.suppress(RecursionError):  # it was nested too deep to be walked through
                    fields[at] = changed(fields[at], chance)
        try:
            return msgspec.msgpack.encode(fields)
        except (OverflowError, RecursionError):
            return data[:-1]  # an integer beyond msgpack's, or nested too deep to be written
    changed_bytes = bytearray(data)
    for _ in range(chance.choice([1, 2, 8])):
        changed_bytes[chance.randrange(len(changed_bytes))] ^= 1 << chance.randrange(8)
    way = chance.randrange(5)
    if way == 0:
        del changed_bytes[chance.randrange(len(changed_bytes)) :]
    elif way == 1:
        # The head of an array or a string that promises more than there is.
        changed_bytes[0:1] = chance.choice(
            [b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff"]
        )
    elif way == 2:
        changed_bytes += data
    elif way == 3:
        changed_bytes = bytearray(b"\x91" * chance.choice([10, 1000, 100_000]))
    return bytes(changed_bytes)
