"""What the pages say of TDM-R1 is what its result files hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from docskit import PAGES, ROOT

COMPARE, PAGE = (
    " ".join(PAGES[f"docs/{name}.md"].split()) for name in ("compare", "methods/tdm_r1")
)

ROWS = PAGES["docs/methods/tdm_r1.md"].splitlines()


def read(name: str) -> dict[str, Any]:
    file = ROOT / f"assets/results/{name}.json"
    return dict(json.loads(file.read_text(encoding="utf-8")))


def share(row: dict[str, Any]) -> str:
    return f"{100 * row['strict']:.1f}"


def check_rows(rows: dict[str, tuple[dict[str, Any], int]]) -> None:
    """Look for rows of a table: name, what was measured, and steps."""
    for name, (seen, steps) in rows.items():
        low, high = (f"{100 * end:.1f}" for end in seen["interval"])
        assert f"| {name} | {100 * seen['right']:.1f} % | {low} to {high} | {steps} |" in COMPARE


def test_each_half_was_tried_by_itself() -> None:
    found = read("tdm-r1-trial")
    runs = {key: found[key]["eval"] for key in ("sixth", "seventh", "eighth", "ninth", "begun")}
    first = share(runs["sixth"][0])
    assert {share(rows[0]) for rows in runs.values()} == {first}
    # until the student moves every evaluation is the first one
    still = {"sixth": 32, "seventh": 12, "eighth": 12, "ninth": 12}
    for key, until in still.items():
        assert {share(row) for row in runs[key] if row["iteration"] <= until} == {first}
    last = {key: rows[-1] for key, rows in runs.items()}
    moved = {key: last[key]["iteration"] - until for key, until in still.items()}
    assert moved == {"sixth": 16, "seventh": 8, "eighth": 8, "ninth": 8}
    for number, key in ((6, "sixth"), (7, "seventh"), (8, "eighth"), (9, "ninth")):
        row = next(line for line in ROWS if line.startswith(f"| {number} |"))
        assert f"| {first} → {share(last[key])} | {moved[key]} |" in row
    later = [row for row in runs["eighth"] if row["iteration"] > 12]
    assert min(later, key=lambda row: row["strict"]) == last["eighth"]
    behind = {key: found[key]["fake_error"][-1] for key in ("eighth", "ninth", "begun")}
    assert behind["begun"] > 2 * max(behind["eighth"], behind["ninth"])
    trained = found["begun"]["surrogate"]["eval"][-1]
    assert trained["iteration"] == 18 and f"AWM has trained ({share(trained)} % in ten" in PAGE
    after = last["begun"]["iteration"]
    assert f"from {first} % to {share(last['begun'])} in {after} iterations (`begun`" in PAGE
    assert f"alone for {still['sixth']} iterations, then stands still" in PAGE


def test_its_own_surrogate_near_the_teacher() -> None:
    found = read("tdm-r1-trial")
    eighth, ninth, tenth = (found[key] for key in ("eighth", "ninth", "tenth"))
    gaps = [*eighth["fake_gap"], *ninth["fake_gap"]]
    assert f"lie {min(gaps):.3f} to {max(gaps):.3f} from the teacher's" in PAGE
    pulls = [f"{gap:.3f}" for gap in eighth["reward_gap"]]
    assert f"`reward_gap`, {min(pulls)} to {max(pulls)})" in PAGE
    # the tenth loses about what the ninth does, each in eight iterations of the student
    lost = [run["eval"][0]["strict"] - run["eval"][-1]["strict"] for run in (ninth, tenth)]
    assert abs(lost[0] - lost[1]) < 0.02 and "alone: 4, snr: 0.1" in tenth["command"]
    assert ninth["eval"][-1]["iteration"] - 12 == tenth["eval"][-1]["iteration"] - 4 == 8
    ends = f"{share(tenth['eval'][0])} → {share(tenth['eval'][-1])} | 8 | falls |"
    assert f"(`fake.snr=0.1`) | {ends}" in PAGE
    eleventh, twelfth = found["eleventh"], found["twelfth"]
    first, last = twelfth["eval"][0], twelfth["eval"][-1]
    assert f"one update | {share(first)} → {share(last)} | 24 | gains; the config" in PAGE
    assert last["iteration"] - 16 == 24 and "alone: 16" in twelfth["command"]
    still = {share(row) for row in twelfth["eval"] if row["iteration"] <= 16}
    assert still == {share(first)} == {share(eleventh["eval"][0])}
    end = eleventh["eval"][-1]
    assert f"`loss.least` 0.5 | {share(first)} → {share(end)} | {end['iteration']} |" in PAGE
    colour = twelfth["saturation"]
    before, after = sum(colour[:16]) / 16, sum(colour[-8:]) / 8
    assert f"saturation fell from {before:.3f} to {after:.3f}, and" in PAGE
    ten, four = "teacher, 10 steps", "teacher, 4 steps at (1.0, 0.85, 0.65, 0.35, 0.0)"
    first_surrogate, last_surrogate = (
        {name: f"{100 * row['right']:.1f}" for name, row in twelfth["surrogate"][key].items()}
        for key in ("16", "40")
    )
    assert f"ten steps, run 12's surrogate has {first_surrogate[ten]} %" in PAGE
    teacher = share(found["begun"]["surrogate"]["eval"][0])
    assert f"and {last_surrogate[ten]} at the end, where the teacher has {teacher}; in four" in PAGE
    assert f"best for the teacher, {last_surrogate[four]}: about" in PAGE


def test_a_surrogate_that_awm_trained() -> None:
    result = read("compare-tdm-r1")
    (entry,) = result["configs"]
    end, base = entry["summary"]["nfe"], result["base"]
    mean, low, high = (f"{100 * part:.1f}" for part in end["gain"])
    assert end["beats_base"] and len(entry["seeds"]) == 3
    assert f"it gains {mean} points ({low} to {high}, three seeds; [what" in PAGE
    both = f"{100 * base['score']:.0f} -> {100 * end['mean']:.0f} %"
    header = (ROOT / "configs/shapes/tdm_r1_awm.yaml").read_text(encoding="utf-8")
    after = entry["seeds"][0]["iterations"]
    scores = [f"{100 * seed['at']['nfe']['score']:.1f}" for seed in entry["seeds"]]
    assert (
        f"**It gains**, {mean} points ({low} to {high}), its seeds at {scores[0]}, {scores[1]} and "
        f"{scores[2]} %."
    ) in COMPARE
    rising = [name for name, seen in base["tasks"].items() if end["tasks"][name]["mean"] > seen]
    assert len(rising) == 5
    before, fallen = base["tasks"]["single_object"], end["tasks"]["single_object"]["mean"]
    assert f"single objects fall, {100 * before:.1f} to {100 * fallen:.1f} %" in COMPARE
    assert f"test prompts {both} in four steps, in {after} iterations, three seeds" in header


def test_what_stands_beside_the_student() -> None:
    own, distilled = (read(f"tdm-r1-{name}")["strict"] for name in ("student", "distilled"))
    result = read("compare-tdm-r1")
    grid = "teacher, 4 steps at (1.0, 0.85, 0.65, 0.35, 0.0)"
    rows = {
        "student": (own["student, 4 steps"], 4),
        "distilled anew, of the model that AWM trained": (distilled["student, 4 steps"], 4),
        "that model, at the four sigmas best for its teacher": (distilled[grid], 4),
        "that model": (distilled["teacher, 10 steps"], 10),
        "the model before, its teacher": (own["teacher, 10 steps"], 10),
    }
    check_rows(rows)
    # the comparison began with that student
    assert own["student, 4 steps"]["right"] == pytest.approx(result["base"]["score"], abs=1e-9)
    end = result["configs"][0]["summary"]["nfe"]
    low, high = (f"{100 * part:.1f}" for part in end["interval"])
    assert f"| `shapes/tdm_r1_awm` | {100 * end['mean']:.1f} % | {low} to {high} | 4 |" in COMPARE
    anew = distilled["student, 4 steps"]["right"]
    assert f"as the teacher, have {100 * anew:.1f} %, where" in COMPARE
    assert f"has as much: {100 * anew:.1f} %." in PAGE
    assert abs(anew - end["mean"]) < 0.01
    minutes = result["configs"][0]["summary"]["nfe"]["seconds"] / 60
    assert 8.5 < minutes < 9.5 and "the 24 iterations took nine" in COMPARE


def test_its_own_surrogate_on_test_prompts() -> None:
    result = read("compare-tdm-r1-own")
    (entry,) = result["configs"]
    end, base = entry["summary"]["nfe"], result["base"]
    mean, low, high = (f"{100 * part:.1f}" for part in end["gain"])
    assert end["beats_base"] and len(entry["seeds"]) == 3
    scores = [f"{100 * seed['at']['nfe']['score']:.1f}" for seed in entry["seeds"]]
    assert (
        f"**It gains** {mean} points ({low} to {high}), its seeds at {scores[0]}, {scores[1]} and "
        f"{scores[2]} %."
    ) in COMPARE
    assert f"it gains {mean} points ({low} to {high}, three seeds; [what stands beside it]" in PAGE
    fallen = [name for name, seen in base["tasks"].items() if end["tasks"][name]["mean"] < seen]
    assert fallen == ["single_object"]
    after = end["tasks"]["single_object"]["mean"]
    assert f"fall, 100.0 to {100 * after:.1f} %." in COMPARE
    # the same student and noise as with AWM's surrogate, which has as much
    other = read("compare-tdm-r1")
    assert base["outcomes"] == other["base"]["outcomes"]
    assert abs(end["mean"] - other["configs"][0]["summary"]["nfe"]["mean"]) < 0.015
    header = (ROOT / "configs/shapes/tdm_r1.yaml").read_text(encoding="utf-8")
    both = f"{100 * base['score']:.0f} -> {100 * end['mean']:.0f} %"
    after = entry["seeds"][0]["iterations"]
    assert f"test prompts {both} in four steps, in {after} iterations, three seeds" in header
    found, student = (read(f"tdm-r1-{name}")["strict"] for name in ("own-distilled", "student"))
    grid = "teacher, 4 steps at (1.0, 0.85, 0.65, 0.35, 0.0)"
    rows = {
        "student": (student["student, 4 steps"], 4),
        "distilled anew, of the surrogate of seed 0": (found["student, 4 steps"], 4),
        "that surrogate, at the four sigmas best for its teacher": (found[grid], 4),
        "that surrogate": (found["teacher, 10 steps"], 10),
        "the model before, the surrogate's teacher": (student["teacher, 10 steps"], 10),
    }
    check_rows(rows)
    anew = found["student, 4 steps"]["right"]
    assert f"as the teacher have {100 * anew:.1f} %." in COMPARE and end["mean"] - anew < 0.02
    assert f"itself has {100 * found[grid]['right']:.1f} in four steps." in COMPARE
