"""Freed memory is kept for the next tensor, unless the user has set the allocator up."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping

import pytest

from flowrl.core.allocator import OWN, keep_freed_memory

MIB = 100
PROGRAM = f"""
import torch
from flowrl.core.allocator import keep_freed_memory

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) // 1024

done = keep_freed_memory()
large = torch.ones({MIB} * 2**18)  # 4 bytes each
before = resident()
del large
print(done, before - resident())
"""


def given_back(more: Mapping[str, str]) -> tuple[bool, int]:
    """Free a tensor of MIB in a process of its own: was the allocator set, and how many MiB did
    the system get back, by its own count of resident pages?"""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**plain, **more},
        capture_output=True,
        text=True,
        check=True,
    )
    done, mib = run.stdout.split()
    return done == "True", int(mib)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_kept() -> None:
    done, mib = given_back({})
    assert done
    assert mib < MIB // 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_ARENA_TEST"])
def test_a_users_own_settings_stay(name: str) -> None:
    done, mib = given_back({name: "" if name == "GLIBC_TUNABLES" else "8"})
    assert not done
    assert mib > MIB * 9 // 10


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(OWN):
            monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
