"""What holds for every test: no network, one thread, and a tier."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING

os.environ["HF_HUB_OFFLINE"] = (
    "1"  # read when huggingface_hub is imported, so before any test module is
)

for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"):  # where the tests run is none of it
    os.environ.pop(name, None)

import pytest  # noqa: E402
import torch  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from adapterkit import Folders
    from exportkit import ExportedRun
    from startkit import Starts

pytest_plugins = ("fakepackages", "rewardkit")  # fixtures that several files share

TIERS = ("unit", "integration", "learning")
ROUNDS = (20_000, 20, 20)  # of the garbage collector; Python's own are of 700 objects
LONGEST = ("test_learning_methods.py", "test_shards.py", "test_processes.py", "test_kills.py")

gc.disable()  # until all is imported: its rounds would take longer than the imports
torch.set_num_threads(1)  # the tensors are tiny, and sums come out the same on every machine


def pytest_configure(config: pytest.Config) -> None:
    """The toy's two prompt lists are one; only the test of that warning wants to hear of it."""
    config.addinivalue_line(
        "filterwarnings", "ignore:prompts.test .* and prompts.train:UserWarning"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Call a test without a tier a unit test, so that ``-m unit`` selects it; a test cannot be in
    two tiers. The longest come first, so that at the end no process waits for another's."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        found = {mark.name for mark in item.iter_markers() if mark.name in TIERS}
        if len(found) > 1:
            raise pytest.UsageError(
                f"{item.nodeid} is in several tiers: {', '.join(sorted(found))}"
            )
        if not found:
            item.add_marker("unit")


def pytest_collection_finish() -> None:
    """Leave what was imported out of the garbage collector's later rounds: it stays to the end."""
    gc.freeze()
    gc.set_threshold(*ROUNDS)
    gc.enable()


def pytest_sessionfinish() -> None:
    """Let the interpreter end as usual: some libraries count what is left."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests allow apart from what the user has allowed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _undrawn() -> Iterator[None]:
    """Lay the curves of finished runs out without drawing them. `home` draws them, as commands in
    processes of their own do; tests/runs/test_report.py looks at what is drawn."""
    if "flowrl.runs.train" not in sys.modules:  # nothing that was collected trains
        yield
        return
    from quickfigures import undrawn

    with undrawn():
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Tiny pipelines, saved once for all tests of the adapters."""
    from adapterkit import Folders  # only where it is asked for: it imports diffusers

    return Folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """Tiny pipelines whose prompts start from images, saved once for all tests of them."""
    from startkit import Starts  # only where it is asked for: it imports diffusers

    return Starts(tmp_path_factory.mktemp("starts"))


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts, toy.yaml and `whole`, one finished run of 4 iterations."""
    from runkit import make_home  # only where it is asked for: it imports all of flowrl

    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ExportedRun:
    """A tiny SD3 that was trained for two iterations, and exported in all formats."""
    from exportkit import exported_run

    return exported_run(tmp_path_factory.mktemp("exported"))
