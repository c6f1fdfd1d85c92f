"""Damaged inputs: each is one message or is read as another reader reads it. Those that once were a
traceback, a hang or a wrong value are kept."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from fuzzfiles import PROMPTS, checkpoints, configs, images, prompts
from fuzzimages import bomb, plain_pixels
from fuzzkit import HOSTILE, Refused, Target, Verdict, damage_bytes, damage_value, judge
from fuzzruns import lora_files, runs, schedulers, suites, view_requests, votes, wild_prompts
from fuzzservers import addresses, answers, judge_texts, judges, requests
from reportkit import answer_here

from flowrl.core.errors import DataError
from flowrl.core.pixels import png_bytes, png_needs

DIGITS = b"9" * 5000  # more than Python turns into a number


def targets(home: Path) -> dict[str, Callable[[], Target]]:
    """Return what makes each target, by name; `home` is for what they write."""
    return {
        "configs": partial(configs, home),
        **{f"prompts{suffix}": partial(prompts, suffix) for suffix in PROMPTS},
        "checkpoints": partial(checkpoints, home),
        "requests": requests,
        "addresses": addresses,
        "answers": answers,
        "judges": judges,
        "judge texts": judge_texts,
        "images": images,
        "runs": partial(runs, home),
        "view requests": partial(view_requests, home),
        "suites": partial(suites, home),
        "votes": partial(votes, home),
        "wild prompts": wild_prompts,
        "LoRA files": partial(lora_files, home),
        "scheduler folders": partial(schedulers, home),
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    """Make all targets once."""
    home = tmp_path_factory.mktemp("fuzz")
    return {name: make() for name, make in targets(home).items()}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_here(monkeypatch)


def config(key: str, value: str) -> Callable[[Target], bytes]:
    """Write a value into the toy's config as it stands in a file, unquoted."""

    def written(target: Target) -> bytes:
        tree = yaml.safe_load(target.good[0])
        *above, last = key.split(".")
        node = tree
        for part in above:
            node = node[part]
        node[last] = "HERE"
        return yaml.safe_dump(tree).replace("HERE", value).encode()

    return written


def files(**changes: str | None) -> Callable[[Target], bytes]:
    """Leave files of a checkpoint out (None), or put others in their place; without a manifest,
    which is then made anew."""

    def changed(target: Target) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(target.good[0])) as old, zipfile.ZipFile(out, "w") as new:
            for name in old.namelist():
                source = changes.get(name.partition(".")[0], name)
                if source is not None and name != "manifest.json":
                    new.writestr(name, old.read(source))
        return out.getvalue()

    return changed


def body(data: bytes) -> Callable[[Target], bytes]:
    return lambda target: data


LOGPROB = b'{"choices": [{"message": {"content": "Yes"}, "logprobs": {"content": [{"top_logprobs": '
LOGPROB += b'[{"token": "Yes", "logprob": 1' + b"0" * 400 + b"}]}]}}]}"
ABOVE = LOGPROB.replace(b'"Yes", "logprob": 1' + b"0" * 400, b'"3", "logprob": 2147483648')
BETA = b'"beta_end": 0.012'
DEEP_SETTING = b'{"beta_end": ' + b"[" * 100_000
FOUND: dict[str, tuple[str, Callable[[Target], bytes], str]] = {
    "an advantage beyond float32": (
        "configs",
        config("loss.max_advantage", "1.0e+300"),
        "tried out without a model and failed with RuntimeError: value cannot be converted",
    ),
    "an octal number": ("configs", config("seed", "010"), "ambiguous number '010'"),
    "a number to the base 60": ("configs", config("seed", "1:30"), "ambiguous number '1:30'"),
    "a fraction to the base 60": ("configs", config("optimizer.lr", "1:30.5"), "ambiguous number"),
    "no weights": ("checkpoints", files(current=None), "not what a run saves: KeyError: 'current'"),
    "an optimizer as weights": (
        "checkpoints",
        files(ema="optimizer.safetensors"),
        "ema",
    ),
    "a record with a long number": (
        "prompts.jsonl",
        body(b'{"prompt": "a", "n": ' + DIGITS + b"}"),
        "case.jsonl, line 1: expected JSON, got what cannot be read",
    ),
    "a judge that counts": ("judge texts", body(b'{"winner": ' + DIGITS + b"}"), ""),
    "a judge without a space": ("judge texts", body(b"a" * 50_000), ""),
    "a log-prob beyond floats": ("judges", body(LOGPROB), "expected a chat completion"),
    "a log-prob above 0": ("judges", body(ABOVE), "at most 0, got 2.1.*e.09 for the token '3'"),
    "a deep answer": ("judges", body(b"[" * 100_000), "expected a chat completion"),
    "a noise level that is no number": (
        "scheduler folders",
        lambda target: target.good[0].replace(BETA, b'"beta_end": NaN'),
        "noise must rise with every training timestep, but one step adds only nan",
    ),
    "a deep setting of a scheduler": (
        "scheduler folders",
        body(DEEP_SETTING),
        "scheduler_config.json: not valid JSON: .*nested too deeply",
    ),
    "a weight that is no number": (
        "LoRA files",
        lambda target: target.good[0][:-4] + b"\xff\xff\xff\x7f",
        "holds a value that is not finite",
    ),
    "rows that are missing": ("images", body(bomb(40, 30, bytes(121 * 29))), "3630 .* got 3509"),
    "no rows": ("images", body(bomb(40, 30)), "3630 bytes of pixels, got 0"),
}
"""What -> its target, the input, and what the message says; "" if it is taken."""


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_is_one_message(made: dict[str, Target], tmp_path: Path, what: str) -> None:
    name, written, says = FOUND[what]
    verdict = judge(made[name], written(made[name]), tmp_path)
    assert verdict.kind == ("refused" if says else "accepted"), verdict.text
    pytest.raises(Refused, _say, verdict).match(says)


def _say(verdict: Verdict) -> None:
    raise Refused(verdict.text)


def test_a_length_that_only_looks_like_a_number(made: dict[str, Target], tmp_path: Path) -> None:
    """A superscript two is a digit to Python, and no number."""
    target = made["addresses"]
    good = target.good[0]
    for place in range(9):  # of the lengths of fuzzservers.addresses
        head = bytes([0, 0, place, 0, 0]) + bytes(11)
        verdict = judge(target, head + good[16:], tmp_path)
        assert not verdict.bad, (place, verdict.text)


@pytest.mark.parametrize("name", targets(Path()))
def test_good_inputs_are_taken_and_damaged_ones_judged(
    made: dict[str, Target], tmp_path: Path, name: str
) -> None:
    target = made[name]
    good = [judge(target, data, tmp_path) for data in target.good]
    assert name == "images" or {verdict.kind for verdict in good} <= {"accepted", "refused"}
    assert "accepted" in {verdict.kind for verdict in good}
    for number in range(8):
        rng = random.Random(f"test/{name}/{number}")
        verdict = judge(target, target.damage(rng.choice(target.good), rng), tmp_path)
        assert not verdict.bad, (number, verdict.text)


# ----------------------------------------------------------------------------- the tools themselves


def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of each kind that must not be."""
    monkeypatch.setattr("fuzzkit.SECONDS", 0.2)

    def endless(data: bytes, folder: Path) -> None:
        while True:
            pass

    def silent(data: bytes, folder: Path) -> None:
        raise DataError("?")

    readers = {"hang": endless, "mute": silent, "traceback": lambda data, _: data[10]}
    for kind, reader in readers.items():
        assert judge(Target([], damage_bytes, reader, (DataError,)), b"", tmp_path).kind == kind
    wrong = Target([], damage_bytes, lambda d, _: d, (DataError,), lambda d, found: "other")
    assert judge(wrong, b"", tmp_path).kind == "wrong"


def test_damage_is_damage() -> None:
    """Nearly every case differs from what it was made of, and a seed gives the same again."""
    tree = {"a": [1, {"b": 2}], "c": "d"}
    changed = [damage_value(tree, random.Random(seed)) for seed in range(100)]
    assert sum(repr(each) != repr(tree) for each in changed) > 80
    assert repr(changed) == repr([damage_value(tree, random.Random(seed)) for seed in range(100)])
    assert tree == {"a": [1, {"b": 2}], "c": "d"} and len(HOSTILE) > 40
    parts = [damage_bytes(b"abcdefgh", random.Random(seed)) for seed in range(100)]
    assert sum(part != b"abcdefgh" for part in parts) > 80


@pytest.mark.parametrize(("mode", "interlaced"), [("RGB", 0), ("L", 0), ("1", 0), ("P", 0)])
def test_rows_are_counted_as_pillow_writes_them(mode: str, interlaced: int) -> None:
    """What Pillow wrote is whole, by its own pixels."""
    from PIL import Image

    for size in ((1, 1), (7, 3), (16, 9)):
        out = io.BytesIO()
        Image.new(mode, size).save(out, "PNG")
        file = out.getvalue()
        assert png_bytes(file, png_needs(file)) == png_needs(file)
        assert not isinstance(plain_pixels(file), str)


def test_rows_of_an_interlaced_image() -> None:
    """Adam7 of 8 x 8 grey pixels: 1, 1, 2, 4, 8, 16 and 32 bytes in 1, 1, 1, 2, 2, 4 and 4 rows,
    each with one byte for its filter (PNG 1.2, 2.6)."""
    head = b"\x89PNG\r\n\x1a\n" + b"\x00\x00\x00\x0dIHDR" + (8).to_bytes(4, "big") * 2
    assert png_needs(head + bytes([8, 0, 0, 0, 1])) == 64 + 15
    assert png_needs(head + bytes([8, 0, 0, 0, 0])) == 8 * 9
    with pytest.raises(ValueError, match="no header"):
        png_needs(b"GIF89a")
