"""How long an iteration will take, by what two prompts took."""

from __future__ import annotations

from flowrl.cost.overhead import PHASES
from flowrl.doctor.examined_run import ExaminedRun
from flowrl.doctor.findings import ReportSection


def look_at_time(examined: ExaminedRun) -> ReportSection:
    """Scale the seconds of two prompts to those of an iteration. The first calls are slow, so this
    is an upper estimate."""
    section, t = ReportSection("time"), examined.config.train
    factor = t.prompts / len(examined.rows)
    seconds = {name: examined.clock.seconds[name] * factor for name in PHASES}
    whole = sum(seconds.values())
    section.figures = {**seconds, "iteration": whole, "hours": whole * t.iterations / 3600}
    parts = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
    section.lines.append(
        f"an iteration takes about {whole:.3g} s ({parts}), {t.iterations} iterations about "
        f"{whole * t.iterations / 3600:.3g} h, without evaluations"
    )
    return section
