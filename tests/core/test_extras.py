"""The command that a message names for a missing package."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from flowrl.core.errors import ConfigError
from flowrl.core.installation import install
from flowrl.evaluation.pair_formats import convert_pairs

ROOT = Path(__file__).resolve().parents[2]


def test_it_is_for_a_checkout() -> None:
    assert install("quant") == 'pip install -e ".[quant]" in a checkout of flowrl'


def test_every_extra_that_a_message_names_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = [*(ROOT / "flowrl").rglob("*.py"), *(ROOT / "rewards").rglob("*.py")]
    sources = (file.read_text(encoding="utf-8") for file in files)
    named = {name for text in sources for name in re.findall(r"install\(['\"](\w+)['\"]\)", text)}
    assert {"hub", "metrics", "ocr", "pairs", "quant", "serve"} <= named
    assert named <= {*project["optional-dependencies"]}


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # importing it raises ImportError
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r'read by pyarrow: pip install -e "\.\[pairs\]"'):
        convert_pairs(tmp_path, tmp_path / "out")
