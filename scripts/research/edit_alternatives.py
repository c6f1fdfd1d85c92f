"""What the editor of shapes reaches without training: more steps, guidance, best of 8.

    python scripts/research/edit_alternatives.py

Steps and guidance are chosen on the validation edits, by the share of right ones; the choice and
the best of 8 by the graded reward are judged on the test edits, with the images per edit of
learning.py. Writes assets/results/edits-alternatives.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flowrl.cli.options import quiet_libraries
from flowrl.config.load import load_config
from flowrl.core.environment import environment
from flowrl.core.files import write_json
from flowrl.runs.evaluate import evaluate

CONFIG = "assets/shapes-edits/awm.yaml"
LISTS = {name: f"assets/shapes-edits/{name}.jsonl" for name in ("validation", "test")}
RESULT = Path("assets/results/edits-alternatives.json")
GUIDANCE, STEPS = (1.0, 1.5, 2.5), (5, 10, 20)


def judged(prompts: str, steps: int, guidance: float, best_of: int = 1) -> dict[str, Any]:
    """Judge the editor as it is shipped on a list of edits."""
    changes = [
        f"prompts.test={LISTS[prompts]}",
        f"eval.steps={steps}",
        f"model.true_cfg_scale={guidance}",
        f"eval.best_of={best_of}",
        "eval.best_by=edit",
    ]
    config = load_config(CONFIG, changes)
    found = evaluate(config.call("model")(), config)
    calls = steps * best_of * (1 if guidance == 1 else 2)
    row = {"prompts": prompts, "steps": steps, "guidance": guidance, "best_of": best_of}
    row |= {"nfe": calls, "strict": found["strict"], "interval": found["interval"]}
    print(row, flush=True)
    return row


def main() -> None:
    """Search on validation, judge on test, write the file."""
    torch.set_num_threads(1)
    quiet_libraries()
    tried = [judged("validation", steps, scale) for scale in GUIDANCE for steps in STEPS]
    best = max(tried, key=lambda row: row["strict"])
    result = {
        "environment": environment(),
        "command": "python scripts/research/edit_alternatives.py",
        "tried": tried,
        "base": judged("test", 10, 1.0),
        "best_settings": judged("test", best["steps"], best["guidance"]),
        "best_of_8": judged("test", 10, 1.0, 8),
    }
    write_json(RESULT, result)


if __name__ == "__main__":
    main()
