"""Which tensors of a file did not fit the network that they were read into: transformers only warns
of them, and goes on with random ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_KINDS = ("missing", "unexpected", "mismatched")


def misfits(info: Mapping[str, Any], allowed: Collection[str] = ()) -> str:
    """Name what a ``from_pretrained(..., output_loading_info=True)`` says did not fit, "" if
    nothing; "missing", "unexpected" or "mismatched" may be allowed. Only with
    ``ignore_mismatched_sizes=True`` are those of another size named here, else they raise."""
    wrong = []
    for kind in _KINDS:
        names = sorted(map(str, info[f"{kind}_keys"]))
        if names and kind not in allowed:
            wrong.append(f"{len(names)} {kind} {names[:3]}")
    return ", ".join(wrong)
