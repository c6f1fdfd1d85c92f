"""Tables and figures are made by one command, and what is committed is what it would write."""

from __future__ import annotations

import json
import re
from graphlib import CycleError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from comparisonkit import config, result
from docskit import PAGES
from scriptkit import script_module

from flowrl.config.axes import AXES
from flowrl.config.load import load_config
from flowrl.config.schema import functions
from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import list_configs
from flowrl.core.version import __version__
from flowrl.runs.catalogue import load_methods
from flowrl.runs.compare.summary import summarize_result

ROOT = Path(__file__).resolve().parents[2]
# what a config had when it was compared, where it was mended since; its page says so
THEN: dict[tuple[str, str], dict[str, Any]] = {
    ("shapes/gardo", "compare-steps"): {"divide_by": "std"},
    ("shapes/zo_rank_sgd", "compare-own-noise"): {"spread": 0.7, "seed": 0},
    ("shapes/rwr_guided", "compare-imitation"): {"decay": 70},
}


def test_regenerate_and_compare() -> None:
    """The committed files against what the command would write now."""
    tables = script_module("tables")
    stale = sorted(path.relative_to(ROOT).as_posix() for path in tables.stale())
    assert stale == [], "run python scripts/research/tables.py"
    made = {path.name for path in tables.targets()}
    pages = {"README.md", "compare.md", "factorial.md", "memory.md", "architecture.md"}
    assert pages <= made


def test_a_result_stands_once_on_a_page() -> None:
    """Every mark of a page is filled, so that a copy of one would pass unseen."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        marks = re.findall(r"<!-- measured: \w+ -->", page.read_text(encoding="utf-8"))
        assert len(set(marks)) == len(marks), page


# ---------------------------------------------------------------------- what the catalogue says


def test_the_table_of_methods_is_written_anew() -> None:
    """A row that was wrong, gone or in another place comes back."""
    module = script_module("methods")
    old = "| old | `shapes/vgpo` | ? | ? | ? |\n| gone | `shapes/gone` | | | |\n"
    text = module.overview(f"a\n\n{module.HEAD}{old}\nb\n")
    assert text.startswith("a\n\n") and text.endswith("\n\nb\n") and "gone" not in text
    assert text.count("\n|") == 2 + len(load_methods()) and module.overview(text) == text
    (vgpo,) = (line for line in text.splitlines() if "`shapes/vgpo`" in line)
    assert vgpo == (
        "| [VGPO](methods/vgpo.md) | `shapes/vgpo`; sd3, flux | "
        "[2512.12387](https://arxiv.org/abs/2512.12387) | reconstruction | "
        "3 seeds (0.1.0): `shapes/vgpo`; else dry run |"
    )
    with pytest.raises(ConfigError, match="expected a table with the head"):
        module.overview("no table")


def test_the_head_of_a_method_page() -> None:
    """Every method is on one page; what stands around the marks stays."""
    module = script_module("methods")
    empty = f"# VGPO\n\n{module.BEGIN}\n{module.END}\n\nMore.\n"
    text = module.page(empty, "vgpo")
    assert text.startswith(f"# VGPO\n\n{module.BEGIN}\n- **VGPO**: [Anchoring Values")
    assert text.endswith(f"\n{module.END}\n\nMore.\n") and module.page(text, "vgpo") == text
    assert "arXiv 2512.12387, 2025. Status: reconstruction." in " ".join(text.split())
    for name in ("nothing", "vgpo"):
        with pytest.raises(ConfigError, match=f"docs/methods/{name}.md: expected the page"):
            module.page("# No marks\n", name)
    pages = {path.stem for path, _ in module.targets()} - {"methods"}
    assert pages == {method.page_name for method in load_methods()}


def test_levels_come_from_result_files() -> None:
    """Files of the three kinds, made by hand: finished seeds count, failed ones and trials of other
    configs do not."""
    module, known = script_module("verified"), {"shapes-awm": "shapes/awm"}
    runs = [{"seed": s, "failed": f, "environment": 0} for s, f in enumerate((None, "NaN", None))]
    entry = {"file": "shapes/awm", "seeds": runs}
    compared = {"kind": "flowrl comparison", "environments": [{"flowrl": "0.1.0"}]}
    gone = {**entry, "file": "shapes/gone"}
    read = dict(module.measured({**compared, "configs": [entry, gone]}, "a.json", known))
    assert read == {"shapes/awm": ({0, 2}, "0.1.0", "a.json", True)}
    other = {**entry, "config": {"rewards": {"shapes": {"fn": "shapes", "mode": "graded"}}}}
    ((_, then),) = module.measured({**compared, "configs": [other]}, "a.json", known)
    assert not then.today and module._more(read["shapes/awm"]._replace(seeds={0}), then)
    assert module.levels()["shapes/draft_lv"].results == "compare-gaussian.json"
    command = "x.py --runs runs/shapes-awm-seed3 runs/shapes-awm-seed4 runs/other-seed5"
    shown = {"kind": "flowrl demonstration", "command": command}
    assert dict(module.measured(shown, "b", known)) == {"shapes/awm": ({3, 4}, "", "b", True)}
    once = {"name": "shapes-awm", "seeds": [{"seed": 7, "environment": {"flowrl": __version__}}]}
    ((_, found),) = module.measured(once, "c", known)
    assert module._level(found).words == "once" and module._level(None).words == "dry run"
    assert [*module.measured([1], "d", known), *module.measured({"name": "x"}, "e", known)] == []
    # what stands in the catalogue by hand is replaced
    false = "- slug: awm\n  name: AWM\n  verified:\n    sd3/awm: {level: seeds}\n\n"
    text = module.catalogue(false)
    assert text.startswith("- slug: awm\n  name: AWM\n") and text.endswith("\n\n")
    assert "sd3/awm" not in text and "shapes/awm: {level: seeds, " in text


# -------------------------------------------------------------------------- the keys of a config


def test_every_argument_has_a_row_that_says_when_to_change_it() -> None:
    module = script_module("config_docs")
    page = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    table = {}
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
    module = script_module("config_docs")
    head = "| argument | type | default | when to change it |\n|---|---|---|---|\n"
    wide = "| `depth_norm.eps` | number from 0 | `1.0e-4` | wide |\n"
    same = "| `sibling_norm.eps` | number from 0 | `1.0e-4` | as `depth_norm.eps` |\n"
    other = "| `granular_norm.eps` | number from 0 | `1.0e-8` | as `depth_norm.eps` |\n"
    made = module.config_page(f"### `credit`\n\n{head}{wide}{same}{other}")
    assert "| `eps` of `depth_norm`, `sibling_norm` | number from 0 | `1.0e-4` | wide |\n" in made
    assert other in made and module.config_page(made) == made
    assert module.row_names("`eps` of `a`, `b`") == ["a.eps", "b.eps"]
    assert module.row_names("`a.eps`") == ["a.eps"]


def test_tables_of_keys_are_filled() -> None:
    """A row of a new key comes, one of an old key goes; text and what is said more exactly stay;
    what the code says otherwise is corrected."""
    module = script_module("config_docs")
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


# ------------------------------------------------------------------------ what was measured


@pytest.fixture(scope="module")
def measured() -> ModuleType:
    return script_module("measured")


def test_a_result_is_filled_in_once_and_replaced_by_the_next(measured: ModuleType) -> None:
    """Mean and interval of the made-up scores are those of flowrl.runs.compare.summary, tested
    there: the mean of .30, .32 and .34 is 32 %, and 2 configs have 2 places."""
    made = summarize_result(
        result(config("shapes-dance-grpo", [0.30, 0.32, 0.34]), config("shapes-vgpo", [0.2, 0.22]))
    )
    before = "x\n\n<!-- measured: dance_grpo -->\n`shapes/dance_grpo`: not compared yet.\n\ny\n"
    once = measured.page(before, made)
    assert "→ 32.0 %" in once and "place 1 of 2" in once and once.endswith("\n\ny\n")
    assert "not compared" not in once
    # again, and without the file: no number outlives it
    assert measured.page(once, made) == once and measured.page(once, None) == before
    both = " ".join(measured.page(before, made, [("elsewhere", made)]).split())
    assert both.index("`shapes/dance_grpo`, elsewhere: ") < both.index(
        ", version 0.1, on the noisy"
    )


def test_runs_that_failed_and_single_seeds_are_said(measured: ModuleType) -> None:
    made = summarize_result(
        result(config("shapes-vgpo", [0.2, 0.22], "NaN"), config("shapes-g2rpo", [0.3]))
    )
    text = {name: " ".join(measured.sentence(made, name).split()) for name in ("vgpo", "g2rpo")}
    assert ", 1 more failed, place 2 of 2" in text["vgpo"]
    assert "over 1 seed, place 1" in text["g2rpo"]
    made["budgets"]["clock"] = "processor"
    assert "processor seconds" in " ".join(measured.sentence(made, "vgpo").split())


def test_the_table_of_the_comparison(measured: ModuleType) -> None:
    made = summarize_result(
        result(config("shapes-vgpo", [0.2, 0.22]), config("shapes-g2rpo", [0.3, 0.34]))
    )
    bare = "a\n\n<!-- compare: table -->\n\n<!-- compare: end -->\n\nb\n"
    once = measured.compared(bare, made)
    assert "| g2rpo |" in once and "\n- (a) after 100 " in once and once.endswith("\n\nb\n")
    assert measured.compared(once, made) == once and measured.compared(once, None) == bare
    other = bare.replace("compare:", "own rates:")
    assert "| g2rpo |" in measured.compared(other, None, {"own rates": made})


def test_the_compared_configs_are_the_shipped_ones(measured: ModuleType) -> None:
    """Every axis and number of training that the result file has, but for the rate that was
    searched, and the warmup, which the command of a short comparison sets for all."""
    free = {"train": ("iterations", "threads", "warmup"), "optimizer": ("lr",)}
    files = [measured.RESULT, *(measured.RESULTS / later.file for later in measured.LATER)]
    results = {file.stem: measured.load(file) or {"configs": []} for file in files}
    compared_in = [(stem, one) for stem, found in results.items() for one in found["configs"]]
    for stem, compared in compared_in:
        there, shipped = compared["config"], load_config(compared["file"]).to_dict()
        then = THEN.get((compared["file"], stem), {})
        sections = ("plan", "transition", "credit", "segment", "select", "loss", "kl")
        for name in (*sections, "likelihood", *free):
            old, new = (calls(side.get(name)) for side in (there, shipped))
            pairs = zip(old, new, strict=True)
            wrong = [differing(one, {**other, **then}, free.get(name, ())) for one, other in pairs]
            assert not any(wrong), f"{compared['file']}: {name} {wrong}"
        # what a search began at, or found
        search = compared["search"]
        rates = () if search is None else (search["own_lr"], compared["lr"])
        assert search is None or shipped["optimizer"]["lr"] in rates


def calls(section: Any) -> list[dict[str, Any]]:
    """Return a section as a list: empty, one, or several calls. Where times have no limits, earlier
    files have 0 and 1, and a seed where nothing is drawn."""
    if isinstance(section, dict) and section.get("fn") == "forward":
        ends = {"low": section.get("low") or None, "high": section.get("high")}
        section = {**section, **ends, "high": None if ends["high"] == 1 else ends["high"]}
    if isinstance(section, dict) and section.get("start") == "zero":
        section = {**section, "seed": None}
    return section if isinstance(section, list) else [section] if section else []


def differing(old: dict[str, Any], new: dict[str, Any], free: tuple[str, ...]) -> dict[str, Any]:
    """Return what the result file has otherwise than the shipped config."""
    return {key: v for key, v in old.items() if key not in free and new.get(key) != v}


UNTIMED = """refl flow_dppo draft adv_grpo draft_lv ddpo ddpo_sdxl dense_grpo stepwise_flow_grpo
flash_grpo gardo diverse_grpo flash_grpo_prompts flow_opd find find_own find_narrow zo_rank_sgd spo
spo_finished tdm_r1 paco_rl spo_latent adv_grpo_gated pref_grpo align_prop align_prop_each
prior_grpo tdm_r1_awm uni_grpo direct_align drm qwen_recipe ddrl"""
MISSES = "rwr awm_tree diffusion_dpo best_of_n dpo_siblings sol_rl adv_awm dina_lrm"


def test_the_engine_s_table_has_every_shapes_config() -> None:
    module = script_module("bench_plans")
    untimed = {f"shapes/{name}" for name in UNTIMED.split()}
    wanted = {name for name in list_configs() if name.startswith("shapes/")} - untimed
    found = json.loads(module.RESULT.read_text(encoding="utf-8"))
    assert found.keys() == wanted
    page, forward = PAGES["docs/compare.md"], module.forward_rows(found)
    others = [row for name, row in found.items() if name not in forward]
    most = max(map(module.overhead, others))
    assert f"The highest of these {len(others)} is {most:.3f}, and of the" in page
    mine = max(map(module.overhead, forward.values()))
    assert f"{len(forward)} others {mine:.3f}." in page and most < 1.03 and mine < 1.10
    # over network calls alone, of the methods of the forward process: those that miss 1.10
    over = {n for n, row in forward.items() if module.over_network(row) > 1.10}
    assert over == {f"shapes/{name}" for name in MISSES.split()}
    assert f"Eight of {len(forward)} miss it" in page and len(over) == 8
    lines = module.forward_table(found).splitlines()
    assert len(lines) == 2 + len(forward) and all(line in page for line in lines)


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
    rooms = script_module("rooms")
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
    assert "| now | 3 | 5 | 3 | 3 |" in rooms.table(found)
    # top -> low follows from top -> mid -> low: the figure leaves it out
    assert len(re.findall("<path", rooms.figure(found).partition("</defs>")[2])) == 2
    write(tmp_path, low="import flowrl.top.x\n")
    with pytest.raises(CycleError):
        rooms.rooms(tmp_path)
