"""Files that flowrl reads: good ones, how they are damaged, and another reader to compare with."""

from __future__ import annotations

import io
import json
import math
import random
import zipfile
from pathlib import Path
from typing import Any

import torch
import yaml
from fuzzimages import OTHERS, PNGS, damage_image, plain_pixels
from fuzzkit import Target, damage_bytes, damage_json, damage_value
from toykit import toy

from flowrl.config.load import load_config
from flowrl.core.errors import FlowRLError
from flowrl.core.prompts import load_prompts
from flowrl.cost.report import dry_run
from flowrl.evaluation.image_files import find_images, read_image
from flowrl.training import checkpoint
from flowrl.training.checkpoint import MANIFEST, _seal
from flowrl.training.trainer import Trainer

SHIPPED = ("flow_grpo", "diffusion_nft", "tp_grpo", "vgpo", "branch_grpo", "awm")

# ------------------------------------------------------------------------------------------ configs


def configs(home: Path) -> Target:
    """The toy's config and some shipped ones; a value that is read must be the one written."""
    good = [toy(home).dump().encode()] * 3
    good += [load_config(f"shapes/{name}").dump().encode() for name in SHIPPED]

    def damage(data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.4:
            return damage_bytes(data, rng)
        tree = damage_value(yaml.safe_load(data), rng)
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
        return text.encode("utf-8", "replace")

    def read(data: bytes, folder: Path) -> Any:
        file = folder / "case.yaml"
        file.write_bytes(data)
        config = load_config(file, (), ("toykit",))
        dry_run(config)
        return config.to_dict()

    return Target(good, damage, read, (FlowRLError,), same_numbers)


def same_numbers(data: bytes, found: Any) -> str:
    """Compare numbers with the texts that stand in the file."""

    def walk(text: Any, value: Any, key: str) -> str:
        if isinstance(text, dict) and isinstance(value, dict):
            for name in text:
                wrong = walk(text[name], value.get(name), f"{key}.{name}")
                if wrong:
                    return wrong
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(text, str) and number and text not in ("null", "~", ""):
            try:
                said = text.lower().replace(".inf", "inf")  # as YAML spells it
                says = float(int(said, 16) if said[:2] == "0x" else float(said))
            except ValueError:
                return f"{key}: {text!r} became {value!r}"
            if says != value and not (math.isnan(says) and math.isnan(value)):
                return f"{key}: {text!r} became {value!r}"
        return ""

    return walk(yaml.load(data.decode("utf-8-sig"), Loader=yaml.BaseLoader), found, "")


# ------------------------------------------------------------------------------------------ prompts

RECORDS = [
    {
        "prompt": "a red circle",
        "tag": "single_object",
        "include": [{"class": "circle", "count": 1}],
    },
    {"prompt": "zwei grüne Quadrate", "tag": "counting", "exclude": [{"class": "x", "count": 3}]},
    {"prompt": '日本語, \u2028 and "quotes"', "id": 7, "weights": [0.5, None, True]},
]
TABLE = 'prompt,tag\n"a red, round circle",one\nwithout,two\n"of ""two""\nlines",three\n'
PROMPTS = {
    ".jsonl": "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in RECORDS),
    ".json": json.dumps(RECORDS, indent=1),
    ".txt": "a red circle\n\n  a blue square \n\ufeffzwei grüne Quadrate\n",
    ".csv": TABLE,
    ".tsv": TABLE.replace(",", "\t"),
}


def prompts(suffix: str) -> Target:
    """A prompt file; what is read of JSON lines and texts is compared line by line."""

    def read(data: bytes, folder: Path) -> Any:
        file = folder / f"case{suffix}"
        file.write_bytes(data)
        return load_prompts(file)

    def check(data: bytes, found: Any) -> str:
        text = data.decode().lstrip("\ufeff")
        lines = [line.strip().lstrip("\ufeff").strip() for line in text.split("\n")]
        lines = [line for line in lines if line]
        wanted = found.records
        # JSON under the ending of the other kind, or of another shape, is what "wild prompts" are
        if suffix == ".jsonl" and lines[0].startswith("["):
            return ""
        if suffix == ".json" and not text.lstrip().startswith("["):
            return ""
        if suffix == ".jsonl":
            wanted = [json.loads(line) for line in lines]
        elif suffix == ".json":
            every = json.loads(text)
            wanted = [{"prompt": each} if isinstance(each, str) else each for each in every]
        elif suffix == ".txt":
            wanted = [{"prompt": line} for line in lines]
        # a prompt under another name stands under "prompt", too
        for want, got in zip(wanted, found.records, strict=False):
            if "prompt" not in want and got["prompt"] in want.values():
                want["prompt"] = got["prompt"]
        empty = any(not record["prompt"].strip() for record in found.records)
        return "" if repr(wanted) == repr(found.records) and not empty else f"got {found.records}"

    damage = damage_json if suffix == ".json" else damage_bytes
    return Target([PROMPTS[suffix].encode()], damage, read, (FlowRLError,), check)


# -------------------------------------------------------------------------------------- checkpoints


def checkpoints(home: Path) -> Target:
    """The folder of a checkpoint in a zip file. With an intact manifest what is read must be what
    was saved; with a manifest made anew for the damaged files it may differ."""
    trainers = [Trainer(toy(home, f"train.ema={ema}", "eval.weights=current")) for ema in (0.9, 0)]
    good = []
    for number, trainer in enumerate(trainers):
        trainer.step()
        trainer.save(home / f"c{number}")
        good.append(_zipped({f.name: f.read_bytes() for f in (home / f"c{number}").iterdir()}))
    saved = checkpoint.load(home / "c0")

    def damage(data: bytes, rng: random.Random) -> bytes:
        files = _files(data)
        name = rng.choice([*files])
        how = rng.randrange(5)
        if how == 0:
            del files[name]
        elif how == 1:
            files[name] = files[rng.choice([*files])]
        elif how == 2:
            files[f"{rng.choice(('extra', 'ema', 'reward-red', 'ref'))}.safetensors"] = files[name]
        elif name.endswith(".json"):
            files[name] = damage_json(files[name], rng)
        else:
            files[name] = damage_bytes(files[name], rng)
        if rng.random() < 0.5:  # as one who changes a checkpoint would
            files.pop(MANIFEST, None)
        return _zipped(files)

    def read(data: bytes, folder: Path) -> Any:
        case = folder / "case"
        case.mkdir(exist_ok=True)
        for old in case.iterdir():
            old.unlink()
        for name, content in _files(data).items():
            (case / name).write_bytes(content)
        sealed = (case / MANIFEST).exists()
        if not sealed:
            _seal(case)
        trainers[0].load(case)
        return sealed, trainers[0]

    def check(data: bytes, found: Any) -> str:
        sealed, trainer = found
        bad = [k for k, p in trainer.params.items() if not bool(p.isfinite().all())]
        if bad:
            return f"weights that are not finite: {bad}"
        if not isinstance(trainer.iteration, int) or trainer.iteration < 0:
            return f"iteration {trainer.iteration!r}"
        same = all(torch.equal(p, saved[0]["current"][k]) for k, p in trainer.params.items())
        return "" if same or not sealed else "other weights than were saved"

    return Target(good, damage, read, (FlowRLError,), check)


def _files(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _zipped(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), content)
    return out.getvalue()


# ------------------------------------------------------------------------------------------- images


def images() -> Target:
    """Files of all kinds, as `flowrl score` reads them: not whole, or the pixels of another
    reader."""

    def read(data: bytes, folder: Path) -> Any:
        file = folder / "case.png"
        file.write_bytes(data)
        (found,) = find_images([file])
        return found, *read_image(found)

    def check(data: bytes, found: Any) -> str:
        header, pixels, notes = found
        if tuple(pixels.shape[1:]) != header.size:
            return f"{tuple(pixels.shape)} of an image of {header.size}"
        wanted = plain_pixels(data)
        if isinstance(wanted, str):
            return wanted
        if notes or wanted.shape != pixels.shape or not data.startswith(b"\x89PNG"):
            return ""  # turned, or laid on white: tests/evaluation/test_image_files.py
        return "" if (wanted.int() - pixels.int()).abs().max() <= 1 else "other pixels"

    return Target([*PNGS.values(), *OTHERS.values()], damage_image, read, (FlowRLError,), check)
