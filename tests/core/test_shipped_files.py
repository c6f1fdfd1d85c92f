"""Where configs and assets are found: working folder, checkout, wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.core import shipped_files as resources
from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import list_configs, resource


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A working folder, a checkout and a wheel's package folder, each with one file of its own and
    a shared one."""
    out = {
        "cwd": tmp_path / "cwd",
        "checkout": tmp_path / "src",
        "wheel": tmp_path / "src" / "flowrl" / "_data",
    }
    for name, root in out.items():
        for file in (
            f"configs/{name}/one.yaml",
            "configs/shared.yaml",
            f"assets/{name}/prompts.txt",
        ):
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(name)
    monkeypatch.chdir(out["cwd"])
    monkeypatch.setattr(resources, "PACKAGE", tmp_path / "src" / "flowrl")
    return out


def test_the_order_is_working_folder_checkout_wheel(places: dict[str, Path]) -> None:
    seen = []
    for name in ("cwd", "checkout", "wheel"):
        found = resource("configs/shared.yaml")
        seen.append(found.read_text())
        (places[name] / "configs/shared.yaml").unlink()
    assert seen == ["cwd", "checkout", "wheel"]


def test_folders_and_absolute_paths(places: dict[str, Path]) -> None:
    assert resource("assets/wheel") == places["wheel"] / "assets/wheel"
    absolute = places["wheel"] / "configs/wheel/one.yaml"
    assert resource(str(absolute)) == absolute == resource(absolute)


def test_missing_lists_where_it_looked_and_near_names(places: dict[str, Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        resource("configs/wheel/onee.yaml")
    message = str(caught.value)
    assert all(str(root / "configs/wheel/onee.yaml") in message for root in places.values())
    assert "did you mean 'configs/wheel/one.yaml'" in message


@pytest.mark.parametrize("path", ["", "  ", "x" * 5000, "configs/\0.yaml", "/nowhere/at/all"])
def test_strange_paths(places: dict[str, Path], path: str) -> None:
    with pytest.raises(ConfigError):
        resource(path)


def test_list_configs_joins_checkout_and_wheel(places: dict[str, Path]) -> None:
    assert list_configs() == ["checkout/one", "shared", "wheel/one"]


def test_site_packages_is_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site-packages" / "configs").mkdir(parents=True)
    monkeypatch.setattr(resources, "PACKAGE", tmp_path / "site-packages" / "flowrl")
    assert resources.checkout() is None
    monkeypatch.setattr(resources, "PACKAGE", tmp_path / "empty" / "flowrl")
    assert resources.checkout() is None
