"""docs/run-folder.md names the files and keys that a run writes, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from docskit import PAGES, ROOT, names

from flowrl.config.load import load_config
from flowrl.runs.train import train


class Run(NamedTuple):
    """A tiny run on a linear model."""

    folder: Path
    summary: dict[str, Any]

    def keys(self, name: str) -> set[str]:
        """Return the keys that the lines of a log have."""
        lines = (self.folder / name).read_text(encoding="utf-8").splitlines()
        return {key for line in lines for key in json.loads(line)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train two iterations with a KL and everything on; of a task one seen and one held-out
    prompt, and one that the toy's images differ in."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    lines = (ROOT / "assets/shapes/test.jsonl").read_text(encoding="utf-8").splitlines()
    task = [line for line in lines if json.loads(line)["tag"] == "counting"]
    marks = [json.loads(line)["held_out"] for line in task]
    chosen = [task[marks.index(False)], task[marks.index(True)]]
    chosen += [line for line in lines if json.loads(line)["tag"] == "single_object"]
    prompts = tmp_path_factory.mktemp("prompts") / "some.jsonl"
    prompts.write_text("\n".join(chosen) + "\n", encoding="utf-8")
    overrides = (
        "model={fn: flowrl.models.toy.LinearFlow}",
        "plan={fn: full, steps: 3, noise_scale: 0.5}",
        "transition={fn: flow_sde}",
        "kl={fn: transition_kl, beta: 0.1}",
        f"prompts={{train: {prompts}, test: {prompts}}}",
        "train={iterations: 2, prompts: 6, group: 4, updates: 2}",
        "eval={steps: 2, images: 2, score: strict, every: 1}",
        "samples={every: 1, prompts: 2}",
        "checkpoint={every: 1}",
    )
    return Run(folder, train(load_config("shapes/flow_grpo", overrides), folder, quiet=True))


@pytest.mark.integration
def test_files_and_logs_of_a_run_are_as_documented(run: Run) -> None:
    page = PAGES["docs/run-folder.md"]
    # files
    files = [f.relative_to(run.folder).as_posix() for f in run.folder.rglob("*") if f.is_file()]
    short = {re.sub(r"^tensorboard/.*", "tensorboard/", file) for file in files}
    assert set(names(page, "file")) == {re.sub(r"\d{6}", "<iteration>", file) for file in short}
    # metrics
    logged = {re.sub(r"/step\d+$", "/step<k>", key) for key in run.keys("metrics.jsonl")}
    general = {re.sub(r"/(shapes|strict)", "/<name>", key) for key in logged} - {"iteration"}
    assert set(names(page, "metric")) == general
    assert set(names(PAGES["docs/methods/flow_grpo.md"], "metric")) <= general
    # seconds
    assert set(names(page, "timing key")) == run.keys("timing.jsonl")
    # evaluations
    expected = {"strict" if key == "<score>" else key for key in names(page, "evaluation key")}
    assert run.keys("eval.jsonl") == expected == {*run.summary["before"], "by_prompt"}
    # summary and environment
    assert set(names(page, "summary key")) == {*run.summary} - {"run"}
    written = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
    assert run.summary == {**written, "run": str(run.folder)}
    environment = json.loads((run.folder / "environment.json").read_text(encoding="utf-8"))
    assert set(names(page, "environment key")) == set(environment)
