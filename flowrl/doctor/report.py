"""A checkup in words and tables, and as plain data."""

from __future__ import annotations

import math
from typing import Any

from flowrl.core.tables import text_table
from flowrl.doctor.findings import CATALOGUE, Checkup


def checkup_text(checkup: Checkup, width: int | None = None) -> str:
    """Say what was seen, section by section, and the findings last."""
    lines: list[str] = []
    # what was looked at, with figures
    for section in checkup.sections:
        lines.append(f"{section.name} ({section.seconds:.1f} s)")
        if section.skipped:
            lines.append(f"  not looked at: {section.skipped}")
        lines += [f"  {line}" for line in section.lines]
        if len(section.table) > 1:
            inner = None if width is None else width - 2
            drawn = text_table(section.table, width=inner)
            lines += ["", *(f"  {line}".rstrip() for line in drawn.splitlines())]
        lines.append("")
    # what to change
    findings = checkup.findings
    if not findings:
        return "\n".join([*lines, "nothing to change was found"])
    lines.append(f"{len(findings)} to change, causes first")
    for finding in findings:
        lines += ["", f"{finding.id}  {CATALOGUE[finding.id].means}"]
        lines += [f"  found   {finding.found}", f"  change  {finding.change}"]
    return "\n".join(lines)


def checkup_as_json(checkup: Checkup) -> dict[str, Any]:
    """Return a checkup as plain data; numbers that JSON does not have are null."""
    sections = {}
    # by name, so that a program finds a figure without counting
    for section in checkup.sections:
        sections[section.name] = {
            "seconds": round(section.seconds, 2),
            "skipped": section.skipped,
            "lines": section.lines,
            "table": section.table,
            "figures": _plain(section.figures),
        }
    findings = [finding._asdict() for finding in checkup.findings]
    known = list(checkup.known)
    return {
        "config": checkup.config,
        "findings": findings,
        "known": known,
        "sections": sections,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
