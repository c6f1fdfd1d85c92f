"""Tables are made by one command, and what is committed is what it would write; printed figures
do not hang on the last bits of a sum."""

from __future__ import annotations

import json
import math
import re
from graphlib import CycleError
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from comparisonkit import config, result
from scriptkit import script_module

from flowrl.config.axes import AXES
from flowrl.config.schema import functions
from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import list_configs
from flowrl.runs.catalogue import load_methods

ROOT = Path(__file__).resolve().parents[2]


def test_regenerate_and_compare() -> None:
    """The committed files against what the command would write now."""
    tables = script_module("results/tables")
    stale = sorted(path.relative_to(ROOT).as_posix() for path in tables.stale())
    assert stale == [], "run python scripts/results/tables.py"
    drawn = [picture.path.name for picture in tables.stale_pictures()]
    assert drawn == [], "run python scripts/results/tables.py"
    made = {path.name for path in tables.targets()}
    assert {"README.md", "results.md", "shapes.md", "memory.md", "architecture.md"} <= made


# ---------------------------------------------------------------------- what the catalogue says


def test_the_table_of_methods_is_written_anew() -> None:
    """A row that was wrong, gone or in another place comes back; a page without a table stays."""
    module = script_module("results/method_docs")
    old = "| old | `shapes/vgpo` | ? | ? | ? |\n| gone | `shapes/gone` | | | |\n"
    text = module.table(f"a\n\n{module.HEAD}{old}\nb\n", "docs/methods/")
    assert text.startswith("a\n\n") and text.endswith("\n\nb\n") and "gone" not in text
    assert text.count("\n|") == 2 + len(load_methods())
    assert module.table(text, "docs/methods/") == text
    (slas,) = (line for line in text.splitlines() if line.startswith("| [SLAS]"))
    assert slas.startswith("| [SLAS](docs/methods/slas.md) | `shapes/slas`")
    assert "3 seeds: `shapes/slas`" in slas
    assert module.table("no table", "") == "no table"


def test_the_head_of_a_method_page() -> None:
    """Every method is on one page; what stands around the marks stays."""
    module = script_module("results/method_docs")
    empty = f"# VGPO\n\n{module.BEGIN}\n{module.END}\n\nMore.\n"
    text = module.page(empty, "vgpo")
    assert text.startswith(f"# VGPO\n\n{module.BEGIN}\n- **VGPO**: [Anchoring Values")
    assert text.endswith(f"\n{module.END}\n\nMore.\n") and module.page(text, "vgpo") == text
    assert "arXiv 2512.12387, 2025. Status: reconstruction." in " ".join(text.split())
    for name in ("nothing", "vgpo"):
        with pytest.raises(ConfigError, match=f"docs/methods/{name}.md: expected the page"):
            module.page("# No marks\n", name)
    pages = {path.stem for path, _ in module.targets() if path.parent.name == "methods"}
    assert pages == {method.page_name for method in load_methods()}


def test_levels_come_from_the_rows_of_gains() -> None:
    """A config without a row is at "dry run"; a row on equal terms comes before an older one; what
    stands in the catalogue by hand is replaced."""
    module = script_module("results/method_docs")
    levels = module.levels()
    assert levels.keys() == set(list_configs())
    assert levels["sd3/awm"].words == "dry run"
    equal = module.methods_table.by_config()
    for row in [*module.gains.rows(), *equal.values()]:
        kept = equal.get(row["config"], row)
        file = "methods.json" if row["config"] in equal else "gains.json"
        level = levels[row["config"]]
        assert (level.seeds, level.results) == (kept["seeds"], file)
        assert level.level == ("once" if kept["seeds"] == 1 else "seeds")
    false = "- slug: awm\n  name: AWM\n  verified:\n    sd3/awm: {level: seeds}\n\n"
    text = module.catalogue(false)
    assert text.startswith("- slug: awm\n  name: AWM\n") and text.endswith("\n\n")
    assert "sd3/awm" not in text and "shapes/awm: {level: seeds, " in text


def test_why_pairs_are_refused_is_said_once() -> None:
    """Two methods share a reason; of the one that has two, the models are named."""
    module = script_module("results/pairs")
    composed = {method.slug: "composed: x" for method in load_methods()}
    on_sd3 = {"awm": "refused: sd3/awm: loss: no", "dgpo": "refused: sd3/dgpo: loss: no"}
    on_wan = {
        "awm": "refused: sd3/awm on wan: loss: no",
        "dgpo": "refused: sd3/dgpo on wan: model wan makes videos",
    }
    found = {"sd3": {**composed, **on_sd3}, "wan": {**composed, **on_wan}}
    said = "- `awm`, `dgpo` (sd3): loss: no\n- `dgpo` (wan): the model makes videos"
    assert module.why_not(found) == said


# ----------------------------------------------------------------------------- what a config gained


def made_up() -> dict[str, Any]:
    """Return a comparison of one config with three seeds, of two prompts and two images each, of
    which the base model has one right and the runs 4, 3 and 3 of 4."""
    found = result(config("shapes-slas", [0.6, 0.7, 0.8], "NaN"))
    found["base"] |= {"tags": ["even", "odd_one"], "scenes": ["0", "1"], "outcomes": "10 00"}
    found["environments"] = [{"flowrl": "0.2.0", "commit": "abc"}]
    found["configs"][0]["file"] = "shapes/slas"
    for run, outcomes in zip(
        found["configs"][0]["seeds"], ("11 11", "11 10", "11 01", ""), strict=True
    ):
        run["environment"] = 0
        if run["at"]["nfe"]:
            run["at"]["nfe"]["outcomes"] = outcomes
    return found


def test_the_row_of_a_comparison() -> None:
    """By hand: the means are .6, .7 and .8, the base model has .2; beside guidance, which has half
    of either prompt's images right, the runs are at 5/6, 1/3 above."""
    module = script_module("results/gains")
    guided = {"by_prompt": {"odd_one": [0.5], "even": [0.5]}}
    (row,) = module.rows_of(made_up(), guided, module.TEST)
    assert (row["config"], row["seeds"], row["commits"]) == ("shapes/slas", 3, ["abc"])
    assert row["gain"] == pytest.approx(0.5) and row["right"] == pytest.approx(0.7)
    assert row["low"] < 0.5 < row["high"] and row["nfe"] == 100
    assert row["against_guidance"] == pytest.approx(1 / 3)
    (alone,) = module.rows_of(made_up(), None, module.TEST)
    assert alone["against_guidance"] is None
    # a new row takes the place of the old one of its config
    both = module.added([{"config": "shapes/slas", "gain": 0.1}, {"config": "shapes/awm"}], [row])
    assert [one["config"] for one in both] == ["shapes/awm", "shapes/slas"]
    assert both[1]["gain"] == 0.5 and both[1]["against_guidance"] == 0.333333


ROW = {"config": "shapes/x", "gain": 0.138, "low": 0.095, "high": 0.179, "right": 0.776}
ROW |= {"against_guidance": -0.01, "nfe": 64000.0, "iterations": 12.0, "seeds": 3}
Z = {"config": "shapes/z", "on": "the test prompts", "gain": 0.9, "nfe": 1.0, "seeds": 3}
Z |= {"low": None, "against_guidance": None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {},
            "`shapes/x`: +13.8 points (9.5 to 17.9, 3 seeds, 64,000 NFE); -1.0 against guidance.",
        ),
        (
            {"gain": 0.02, "low": -0.01, "high": 0.05, "against_guidance": None, "nfe": None},
            "`shapes/x`: +2.0 points (-1.0 to 5.0, 3 seeds, 12 iterations).",
        ),
        (
            {"gain": -0.3, "low": None, "high": None, "against_guidance": -0.4, "seeds": 1},
            "`shapes/x`: -30.0 points (1 seed, 64,000 NFE); -40.0 against guidance.",
        ),
        (
            {"on": "the test edits", "against_guidance": 0.05},
            "`shapes/x`: +13.8 points (9.5 to 17.9, 3 seeds, 64,000 NFE) on the test edits; "
            "+5.0 against guidance.",
        ),
        ({"config": "shapes/y"}, "Not measured on shapes."),
    ],
)
def test_the_line_of_a_method_page(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """Between its marks; the page around them stays, and so does one without marks."""
    module = script_module("results/gains")
    row = {**ROW, "on": module.TEST, **changes}
    mark, end = "<!-- gain: shapes/x -->", "<!-- gain: end -->"
    file = tmp_path / "x.md"
    file.write_text(f"# X\n\n{mark}\nold\n{end}\n\nMore.\n")
    text = module.method_page(file.read_text(), [row])
    inside = text.removeprefix(f"# X\n\n{mark}\n").removesuffix(f"\n{end}\n\nMore.\n")
    assert " ".join(inside.split()) == said and len(inside) < len(text)
    assert module.method_page(text, [row]) == text and max(map(len, text.splitlines())) <= 100
    assert module.method_page("# No mark\n", [row]) == "# No mark\n"
    # a mark of several configs: of those that were measured
    text = module.method_page(f"{mark[:-4]} shapes/z -->\nold\n{end}\n", [row])
    assert text == f"{mark[:-4]} shapes/z -->\n{inside}\n{end}\n"
    text = module.method_page(f"{mark[:-4]} shapes/z -->\nold\n{end}\n", [row, {**row, **Z}])
    if said.startswith("`shapes/x`"):
        first, second = (" ".join(one.split()) for one in text.split("\n- ")[1:])
        assert first == said and second == f"`shapes/z`: +90.0 points (3 seeds, 1 NFE). {end}"
        assert max(map(len, text.splitlines()[1:])) <= 100


def test_the_line_of_what_learning_measured(tmp_path: Path, monkeypatch: Any) -> None:
    """Two seeds that gained 4 and 6 points of a reward, from 10 %, where guidance makes 14 %."""
    module = script_module("results/gains")
    runs = []
    for seed, after in enumerate((0.14, 0.16)):
        scores = {"before": {"moving": 0.1}, "guided": {"moving": 0.14}, "after": {"moving": after}}
        runs.append({"seed": seed, **scores, "training": [0.1] * 7})
    gain = {"reward": "moving", "mean": 0.05, "interval": [-0.077, 0.177]}
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"gain": gain, "guidance": 3.0, "seeds": runs}))
    monkeypatch.setitem(module.LEARNT, "shapes/x", file)
    assert " ".join(module.line("shapes/x", []).split()) == (
        "`shapes/x`: +5.0 points of the reward `moving` (-7.7 to 17.7, 2 seeds, 7 iterations) on "
        "the test prompts; the base model has 10.0 %, with guidance 3 14.0 %."
    )


def test_every_row_says_what_it_needs() -> None:
    """Shipped configs, once each; a gain lies within its interval, and the commits are named."""
    rows = script_module("results/gains").rows()
    names = [row["config"] for row in rows]
    assert len(set(names)) == len(names) and set(names) <= set(list_configs())
    for row in rows:
        assert row["low"] is None or row["low"] <= row["gain"] <= row["high"], row["config"]
        assert (row["low"] is None) == (row["seeds"] == 1)
        assert row["commits"] and all(len(commit) >= 40 for commit in row["commits"])


# -------------------------------------------------------------------------- the keys of a config


def test_every_argument_has_a_row_that_says_when_to_change_it() -> None:
    module = script_module("results/config_docs")
    page = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    table: dict[str, str] = {}
    for first, said in re.findall(r"^\| (`[^|]*`) \|.* \| ?(.*) \|$", page, re.MULTILINE):
        table |= dict.fromkeys(module.row_names(first), said)
    for axis in AXES:
        named = functions(axis) if axis != "rewards" else {}  # they are in docs/rewards.md
        rows = [key.name for name in named for key in module.argument_keys(axis, name, f"{name}.")]
        assert [row for row in rows if not table.get(row)] == [], axis
        assert [name for name in named if f"`{name}`" not in page and f"`{name}." not in page] == []


def test_functions_that_take_an_argument_alike_share_a_row() -> None:
    """Same type, default and text, or a text that names another of them: `eps` of `sibling_norm` is
    1e-4, as that of `depth_norm`, but of `granular_norm` it is 1e-8."""
    module = script_module("results/config_docs")
    head = "| argument | type | default | when to change it |\n|---|---|---|---|\n"
    wide = "| `depth_norm.eps` | number from 0 | `1.0e-4` | wide |\n"
    same = "| `sibling_norm.eps` | number from 0 | `1.0e-4` | as `depth_norm.eps` |\n"
    other = "| `granular_norm.eps` | number from 0 | `1.0e-8` | as `depth_norm.eps` |\n"
    made = module.config_page(f"### `credit`\n\n{head}{wide}{same}{other}")
    assert "| `eps` of `depth_norm`, `sibling_norm` | number from 0 | `1.0e-4` | wide |\n" in made
    assert other in made and module.config_page(made) == made
    in_it = same.replace("as `depth_norm.eps`", "as in `depth_norm`")
    assert module.config_page(f"### `credit`\n\n{head}{wide}{in_it}{other}") == made
    assert module.row_names("`eps` of `a`, `b`") == ["a.eps", "b.eps"]
    assert module.row_names("`a.eps`") == ["a.eps"]


def test_tables_of_keys_are_filled() -> None:
    """A row of a new key comes, one of an old key goes; text and what is said more exactly stay;
    what the code says otherwise is corrected."""
    module = script_module("results/config_docs")
    head = "| argument | type | default | when to change it |\n|---|---|---|---|\n"
    share = "| `fraction.share` | number in (0, 1] | required | mine |\n"
    gone = "| `fraction.gone` | number | `1` | old |\n"
    text = f"### `select`\n\n{head}{gone}{share}\n### `eval`\n\nNone.\n"
    made = module.config_page(text)
    assert share in made and gone not in made and made.endswith("### `eval`\n\nNone.\n")
    assert "| `best_of_n.top` | whole number | required |  |\n" in made
    assert "| `chunks.weighted` | `none`, `l1` or `softmax` | `none` |  |\n" in made
    keys = "| key | type | default | when to change it |\n|---|---|---|---|\n| `x` | y | z | |\n"
    made = module.config_page(f"### `checkpoint`\n\n{keys}")
    assert "|\n| `keep` | whole number >= 1 | `3` | newest ones kept; the best" in made
    made = module.config_page(
        f"### `kl`\n\n{head}| `transition_kl.divide_by` | text | `g` | why |\n"
    )
    assert "| `transition_kl.divide_by` | `std` or `g` | `std` | why |\n" in made


# ---------------------------------------------------------------------------------------- rooms


def write(root: Path, **sources: str) -> None:
    """Write modules: `a__b="..."` is flowrl/a/b.py."""
    for name, text in sources.items():
        file = root / "flowrl" / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def test_rooms_floors_and_arrows(tmp_path: Path) -> None:
    """Three rooms on three floors with 3 arrows, counted by hand: top uses both others, one of them
    inside a function; two files of one room make one arrow; the door does not count."""
    rooms = script_module("results/rooms")
    (tmp_path / "rewards").mkdir()
    write(tmp_path, low="X = 1\n", mid__y="from flowrl import low\n")
    (tmp_path / "flowrl/__init__.py").write_text("import flowrl.top.x\n", encoding="utf-8")
    write(
        tmp_path,
        mid__z="from flowrl.low import X\n",
        top__x="def f():\n    from flowrl.mid import y\n",
        top__w="import flowrl.low\nimport flowrl.top.x\n",
    )
    found = rooms.rooms(tmp_path)
    assert [(r.name, r.floor, r.files) for r in found] == [
        ("low", 1, 1),
        ("mid", 2, 2),
        ("top", 3, 2),
    ]
    assert "3 rooms, 5 files, 3 floors, 3 arrows." in rooms.table(found)
    write(tmp_path, low="import flowrl.top.x\n")
    with pytest.raises(CycleError):
        rooms.rooms(tmp_path)


# ------------------------------------------------------------------------------------------ figures


FIGURES = script_module("results/figures")


def test_a_tie_is_printed_alike_in_every_order_of_its_sum() -> None:
    """The same shares, added up from both ends, have a mean at a tie or a little beside it."""
    shares = [images / 48 for images in (20, 23, 28, 12, 4)]
    means = [20 * sum(shares), 20 * sum(reversed(shares)), 20 * math.fsum(shares)]
    assert {f"{mean:.1f}" for mean in means} == {"36.2", "36.3"}  # they differ in the last bits
    assert {FIGURES.fixed(mean) for mean in means} == {"36.3"}
    assert all(FIGURES.agrees("36.3", mean) for mean in means)
    moved = [1.25 + shift for shift in (-2e-16, -1e-12, 0.0, 1e-12, 3e-16)]
    assert {f"{value:.1f}" for value in moved} == {"1.2", "1.3"}
    assert {FIGURES.fixed(value) for value in moved} == {"1.3"}
    assert all(FIGURES.agrees(text, value) for text in ("1.2", "1.3") for value in moved)


@pytest.mark.parametrize(
    ("value", "sign", "text"),
    [(-1.25, "", "-1.3"), (1.24, "+", "+1.2"), (-0.03, "", "-0.0"), (-1e-12, "+", "+0.0")],
)
def test_signs(value: float, sign: str, text: str) -> None:
    assert FIGURES.fixed(value, sign=sign) == text


def test_what_is_further_than_half_a_digit_does_not_agree() -> None:
    assert not FIGURES.agrees("1.2", 1.2501) and not FIGURES.agrees("-3", 3.0)
    assert FIGURES.agrees("−1,234", -1234.4) and FIGURES.percent(0.1234) == "12.3 %"
    numbers = [FIGURES.fixed(value / 7) for value in range(8)]
    assert all(float(one) < float(other) for one, other in pairwise(numbers))
