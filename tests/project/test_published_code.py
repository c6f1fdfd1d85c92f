"""The functions that were run beside published code agree with it, and a source reads only what it
names."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from docskit import ROOT
from scriptkit import script_module

RESULT = ROOT / "assets/results/published-code.json"


def test_they_agree_to_rounding() -> None:
    """float32 has 24 bits, so a sum of a few hundred numbers is off by some 1e-7 of its size; the
    solvers add up ten to 25 steps. DDPO divides states, of size 1, by a std that is .02 at the
    end."""
    cases = json.loads(RESULT.read_text(encoding="utf-8"))["cases"]
    assert len(cases) == 13
    assert cases.keys() == script_module("bench/published_code/compare").CASES.keys()
    for name, case in cases.items():
        for what, found in case["gaps"].items():
            least = 1e-5 if name == "ddpo" else 1e-6
            assert 0 <= found["difference"] < least * found["value"], (name, what)
            assert found["value"] > 1e-3 or "gradient" in what


def test_only_what_is_named_is_run(tmp_path: Path) -> None:
    module = script_module("bench/published_code/sources")
    text = (
        "import nowhere\n\nraise SystemExit\n\n"
        "def scale(x: Nothing) -> Nothing:\n    return math.sqrt(x)\n\n"
        "def other():\n    return scale(4)\n"
    )
    clone = tmp_path / "a+b"
    clone.mkdir()
    git = ["git", "-C", str(clone), "-c", "user.name=t", "-c", "user.email=t@t"]
    (clone / "file.py").write_text(text)
    for command in (["init", "-q"], ["add", "file.py"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    (clone / ".git").rename(tmp_path / "git")
    (clone / "file.py").unlink()
    clone.rmdir()
    (tmp_path / "git").rename(clone)
    head = subprocess.run(
        ["git", f"--git-dir={clone}", "rev-parse", "HEAD"], check=True, capture_output=True
    )
    source = module.Source("a/b", head.stdout.decode().strip(), "file.py", ("other", "scale"))
    found = module.load(source, tmp_path)
    assert found["other"]() == 2.0 and found.keys() == {"other", "scale"}
    with pytest.raises(LookupError, match="has no missing"):
        module.load(source._replace(names=("missing",)), tmp_path)
