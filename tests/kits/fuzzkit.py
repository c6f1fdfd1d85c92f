"""Damage a good input at random, give it to what reads it, and judge what comes out."""

from __future__ import annotations

import copy
import json
import random
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

SECONDS = 10.0  # of the processor for one case; more is a hang
# values that no reader expects at every place
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**400, 0.5, -0.0, 1e-320),
    *(1e308, float("inf"), float("-inf"), float("nan"), "", " ", "0", "-1", "nan", "inf", "1e400"),
    *("010", "1:30", "0x10", "1_000", "yes", "null", "\x00", "\ud800", "\u2028", "ü" * 300, "a\nb"),
    *("../../etc", "{0}", "%s", "é", "\U0001f600", [], {}, [[]], [None], {"": None}, [1, 2, 3]),
    *({"fn": "full"}, {"fn": None}, [{}], "x" * 5000),
)


class Refused(Exception):
    """What is refused not by an error, but by an answer that says what is wrong."""


class Verdict(NamedTuple):
    """What came of a case."""

    kind: str  # "refused", "accepted", or what must not be: "traceback", "mute", "hang", "wrong"
    text: str

    @property
    def bad(self) -> bool:
        return self.kind not in ("refused", "accepted")


class Target(NamedTuple):
    """Something that reads what others have written."""

    good: list[bytes]  # inputs that it takes
    damage: Callable[[bytes, random.Random], bytes]
    read: Callable[[bytes, Path], Any]
    refusals: tuple[type[BaseException], ...]  # the errors that are one message
    # "", or what is wrong with what was read; by another reader than ours
    check: Callable[[bytes, Any], str] = lambda data, found: ""


class _Hang(BaseException):
    pass


def judge(target: Target, data: bytes, folder: Path) -> Verdict:
    """Read one input -> what came of it."""

    def too_long(number: int, frame: FrameType | None) -> None:
        raise _Hang

    before = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        found = target.read(data, folder)
        wrong = target.check(data, found)
        return Verdict("wrong", wrong) if wrong else Verdict("accepted", "")
    except target.refusals as error:
        # one that says something, and no repr of a stranger
        text = str(error)
        mute = len(text) < 15 or "Traceback" in text
        return Verdict("mute" if mute else "refused", text)
    except _Hang:
        return Verdict("hang", f"more than {SECONDS:g} s")
    except Exception:
        return Verdict("traceback", traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# ------------------------------------------------------------------------------------------- damage


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Change some bytes, cut, double or move a part."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(out) + 1)
        to = min(len(out), at + rng.choice((1, 2, 8, 64, 1000)))
        how = rng.randrange(7)
        if how == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del out[at:to]
        elif how == 2:
            del out[at:]
        elif how == 3:
            out[at:at] = out[at:to]
        elif how == 4:
            out[at:to] = bytes(rng.randrange(256) for _ in range(to - at))
        elif how == 5:
            out[at:at] = rng.choice(
                (b"\x00", b"\xff", b"\xef\xbb\xbf", b'"', b"{", b"]", b"\r", b"\n")
            )
        else:
            out[at:at] = rng.choice((b"9" * 5000, b"[" * 100_000, b'{"a":' * 5000, b" " * 10_000))
    return bytes(out)


def damage_value(value: Any, rng: random.Random) -> Any:
    """Change one value somewhere in a tree of objects and lists, or drop, double or rename it."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return rng.choice(HOSTILE)
    holder, key = rng.choice(places)
    how = rng.randrange(5)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[rng.choice((f"{key}s", key.upper(), "", "fn", "seed", f" {key}"))] = holder.pop(key)
    elif how == 2:
        other, name = rng.choice(places)
        holder[key] = copy.deepcopy(other[name])
    else:
        holder[key] = copy.deepcopy(rng.choice(HOSTILE))
    return value


def _places(value: Any) -> Any:
    """Yield all (holder, key) of a tree."""
    keys: Any = ()
    if isinstance(value, dict):
        keys = [*value]
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        yield from _places(value[key])


def damage_json(data: bytes, rng: random.Random) -> bytes:
    """Damage JSON as text or as a tree."""
    if rng.random() < 0.4:
        return damage_bytes(data, rng)
    tree = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = damage_value(tree, rng)
    return json.dumps(tree).encode()
