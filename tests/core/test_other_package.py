"""Another distribution called flowrl beside this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.core.installation import other_package

SCRIPT = "[console_scripts]\nflowrl = {}\n"


def installed(folder: Path, command: str) -> None:
    """Write what pip leaves of a distribution flowrl 0.2.0."""
    about = folder / "flowrl-0.2.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flowrl\nVersion: 0.2.0\n")
    (about / "entry_points.txt").write_text(SCRIPT.format(command))


def test_it_is_named_with_its_place_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, "flowrl.train:main")
    monkeypatch.syspath_prepend(tmp_path)
    found = other_package()
    assert found is not None and f"flowrl (0.2.0) is installed in {tmp_path}/flowrl" in found
    assert "`pip uninstall flowrl`" in found and "--no-deps -e .` in a checkout" in found


def test_this_project_under_its_earlier_name_is_not_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, "flowrl.cli.main:command")
    monkeypatch.syspath_prepend(tmp_path)
    assert other_package() is None
