"""Curves of the stages `vae` and `flow`, drawn from their logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def plot(out: Path) -> None:
    """Draw `training.png`: the VAE's error, the loss of the flow, and the strict accuracy."""
    vae, flow = _rows(out / "vae_log.jsonl"), _rows(out / "flow_log.jsonl")
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    psnr, loss, accuracy = figure.subplots(1, 3)
    # errors
    _line(psnr, vae, "psnr")
    psnr.set(title="VAE", xlabel="batches of 32", ylabel="PSNR of fresh scenes, dB")
    _line(loss, flow, "loss")
    loss.set(title="flow matching", xlabel="batches of 64", yscale="log")
    loss.set(ylabel="mean squared error of v")
    # accuracy by guidance
    keys = [key for key in flow[-1] if key.startswith("g") and key.count(".") == 1]
    for key in keys:
        scored = [row for row in flow if key in row]
        _line(accuracy, scored, key, marker="o", label=f"guidance {key[1:]}")
    accuracy.set(title="validation prompts, averaged weights", xlabel="batches of 64")
    accuracy.set(ylabel="strict accuracy", ylim=(0, 1))
    accuracy.legend(frameon=False)
    for axes in (psnr, loss, accuracy):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / "training.png", dpi=110)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _line(axes: Axes, rows: list[dict[str, Any]], key: str, **style: Any) -> None:
    steps = [row["step"] for row in rows]
    axes.plot(steps, [row[key] for row in rows], **style)
