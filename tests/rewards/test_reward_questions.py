"""Benchmarks by a judge: fixtures of the published code, a stand-in server, and files that are
wrong."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_server import Act, Seen, brightness, grey, says, serving
from runkit import rows
from toykit import toy

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.prompts import load_prompts
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.catalogue import overrides_of
from flowrl.runs.suite import run_suite
from rewards._judge.answer import Answer
from rewards.questions import questions
from rewards.questions.points import POINTS
from rewards.questions.protocols import Dpg, GenEval2, Slips, UniGenBench

HEAD = "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,"
HEAD += "question_natural_language\n"


def chain(*order: int) -> dict[str, Any]:
    """Make a record whose questions 1 <- 2 <- 3 are listed in an order."""
    parents: dict[int, list[int]] = {1: [], 2: [1], 3: [2]}
    asked = []
    for one in order:
        asked.append({"id": one, "question": "?", "tuple": "x (y)", "parents": parents[one]})
    return {"prompt": "p", "questions": asked}


def test_dpg_fixtures_of_the_published_code() -> None:
    """The reference's table (addendum 4.2). A failed parent fails all below it; the code, walking
    the list once, misses a child that is listed first."""
    dpg, code = Dpg(Slips()), Dpg(Slips(zeroes_in_listed_order=True))
    for values, expected in [((0, 1, 1), 0), ((1, 1, 1), 1), ((1, 0, 1), 1 / 3)]:
        assert dpg.score(chain(1, 2, 3), values) == pytest.approx(expected)
        assert code.score(chain(1, 2, 3), values) == pytest.approx(expected)
    assert code.score(chain(3, 2, 1), (1, 1, 0)) == pytest.approx(1 / 3)
    assert dpg.score(chain(3, 2, 1), (1, 1, 0)) == 0
    two = chain(1, 2, 3)
    two["questions"][1]["parents"], two["questions"][2]["parents"] = [], [1, 2]
    assert dpg.score(two, (1, 0, 1)) == pytest.approx(1 / 3)
    # categories: answers as they are, over all images, or of the last one as published
    record = {"prompt": "p", "asked": ["attribute - color (sky)", "entity - whole (sky)"]}
    told = [{**record, "answers": [1.0, 0.0], "score": 1.0}]
    told.append({**record, "answers": [0.0, 1.0], "score": 0.0})
    found = dpg.tables(told)
    assert found["dpg"] == 50 and found["1: attribute"] == found["2: entity - whole"] == 0.5
    assert Dpg(Slips(categories_of_last_image=True)).tables(told)["1: entity"] == 1.0
    for text, value in [("Yes.", 1.0), (" no", 0.0), ("yes and no", "neither yes nor no")]:
        assert dpg.read(Answer(text, []), record, 0) == value
    assert Dpg(Slips(other_answers_mean_no=True)).read(Answer("maybe", []), record, 0) == 0


def test_unigenbench_answers_and_tables() -> None:
    """27 points in 10 primaries; apostrophes do no harm, quoted scores count, another length does
    not; accuracies are pooled over images, then primaries averaged."""
    assert len(POINTS) == 27 and len({name.partition(" - ")[0] for name in POINTS}) == 10
    bench = UniGenBench()
    points = ["Style", "Action - Hand (Character/Anthropomorphic)", "Action-Animal"]
    record = {"prompt": "p", "testpoints": points, "descriptions": ["a", "b", "c"]}
    bench.check(record, "here")
    (asked,) = bench.ask(record)
    assert "2. Action - Hand (Character/Anthropomorphic) (an action of hands" in asked
    text = "<analysis>['it's fine', 'no', 'no']</analysis><score>[1, '0', 1]</score>"
    values = bench.read(Answer(text, []), record, 0)
    assert values == [1.0, 0.0, 1.0] and bench.score(record, [values]) == pytest.approx(2 / 3)
    for wrong, said in [("[1, 0]", "2 scores for 3"), ("[1, 2, 0]", "other than 0 and 1")]:
        assert said in bench.read(Answer(f"<score>{wrong}</score>", []), record, 0)
    assert bench.read(Answer("looks good", []), record, 0) == "no <score>[...]</score>"
    row = {"asked": bench.names(record), "answers": [values], "score": 2 / 3}
    found = bench.tables([row, {**row, "answers": [[0.0, 1.0, 1.0]]}])
    assert found["2: Action - Hand"] == 0.5 and found["1: Action"] == 0.75
    assert found["1: Style"] == 0.5 and found["unigenbench"] == pytest.approx(0.625)
    with pytest.raises(DataError, match="expected test points of UniGenBench, got .'Taste'"):
        bench.check({**record, "testpoints": ["Style", "Taste", "Style"]}, "here")


def test_soft_tifa_fixtures() -> None:
    """The reference's numbers (addendum-2026, 6): (.9, .99, .95, .2) has AM .76, GM .6414427; any 0
    has GM 0. Probabilities of all forms are summed; what is not listed may not matter."""
    values = (0.9, 0.99, 0.95, 0.2)
    assert GenEval2(False).score({}, values) == pytest.approx(0.76)
    assert GenEval2(True).score({}, values) == pytest.approx(0.6414427, abs=1e-7)
    assert GenEval2(True).score({}, (0.5, 0.0)) == 0
    record = {"prompt": "p", "vqa_list": [["How many?", "two"], ["Red?", "Yes"]]}
    bench = GenEval2(False)

    def read(number: int, **shares: float) -> Any:
        top = [(token.replace("_", " "), math.log(share)) for token, share in shares.items()]
        return bench.read(Answer("", top), record, number)

    own = {"two": 0.5, "_2": 0.25, "Two": 0.1, "three": 0.1, "x": 0.049, "y": 0.001}
    assert read(0, **own) == pytest.approx(0.85)
    assert read(1, Yes=0.6, _yes=0.1, No=0.2999, z=0.0001) == pytest.approx(0.7)
    assert "open" in read(1, No=0.5, Nope=0.3)  # yes could be up to 0.2
    assert read(1) == "no log-probs of the first token"
    row = {"asked": ["count", "attribute"], "answers": [0.25, 1.0], "tag": "2 atoms"}
    found = bench.tables([row, {**row, "answers": [1.0, 1.0]}])
    assert found["soft-TIFA AM"] == pytest.approx(81.25) and found["AM, count"] == 62.5
    assert found["GM, 2 atoms"] == pytest.approx(75) == found["soft-TIFA GM"]


def test_files_of_the_benchmarks(tmp_path: Path) -> None:
    """In their own formats, with the line of what is wrong."""
    dpg = tmp_path / "dpg.csv"
    one = "0,a red sky,k,1,0,b,c,entity - whole (sky),Is there a sky?\n"
    two = '0,a red sky,k,2,"1",b,c,attribute - color (sky; red),Is the sky red?\n'
    other = "5,a cat,k,1,0,b,c,entity - whole (cat),Is there a cat?\n"
    dpg.write_text(HEAD + one + two + other)
    found = load_prompts(f"dpg:{dpg}")
    assert found.texts == ["a red sky", "a cat"] and found.places[1].endswith("dpg.csv, line 4")
    first = found.records[0]["questions"]
    assert [q["parents"] for q in first] == [[], [1]]
    assert Dpg(Slips(skips_first_question=True)).ask(found.records[0]) == [
        "Is the sky red? Answer with yes or no alone."
    ]
    for bad, said in [
        ("9", "line 2: prompt 0: expected questions"),
        ("x", "line 3: expected whole"),
    ]:
        dpg.write_text(HEAD + one + two.replace('"1"', bad))
        with pytest.raises(DataError, match=said):
            load_prompts(f"dpg:{dpg}")
    unigen = tmp_path / "unigen.csv"
    told = json.dumps({"Testpoints": ["Style"], "Testpoint Description": ["ink"]})
    cell = '"' + told.replace('"', '""') + '"'
    unigen.write_text(f'index,prompt_en,sub_dims_en\n0,a fox,{cell}\n1,an ox,{cell[:-3]}"\n')
    with pytest.raises(DataError, match="unigen.csv, line 3: column sub_dims_en: expected JSON"):
        load_prompts(f"unigenbench:{unigen}")
    line = {"prompt": "four cows", "atom_count": 2, "vqa_list": [["How many?", "four"]]}
    second = tmp_path / "g2.jsonl"
    second.write_text(
        json.dumps({**line, "skills": ["count"]}) + "\n" + json.dumps({"prompt": "x"})
    )
    with pytest.raises(DataError, match='g2.jsonl, line 2: expected an object with a "vqa_list"'):
        load_prompts(f"geneval2:{second}")
    # a folder of lists: each is a task
    (tmp_path / "styles").mkdir()
    (tmp_path / "styles" / "anime.json").write_text('["a girl", "a boy"]')
    (tmp_path / "styles" / "photo.txt").write_text("a street\n")
    styles = load_prompts(tmp_path / "styles")
    assert [record["tag"] for record in styles.records] == ["anime", "anime", "photo"]


def test_prompts_of_the_hub(tmp_path: Path) -> None:
    """A local data set by the library itself; a hub that is not in reach (tests are offline)."""
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("Prompts,Category\na red car,Colors\n,Colors\n")
    with pytest.raises(DataError, match="set, row 2: expected a text"):
        load_prompts(f"hub:{tmp_path / 'set'}")
    (tmp_path / "set" / "train.csv").write_text("Prompts,Category\na red car,Colors\n")
    found = load_prompts(f"hub:{tmp_path / 'set'}@train")
    assert found.records[0] == {"Prompts": "a red car", "Category": "Colors", "prompt": "a red car"}
    with pytest.raises(ConfigError, match="hub:nobody/nothing: the data set cannot be read"):
        load_prompts("hub:nobody/nothing")


def test_files_and_rows_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files from a cache as huggingface_hub keeps it, with the network off; a benchmark's own rows
    in a local data set; without the package, what to install."""
    commit, home = "0" * 40, tmp_path / "datasets--zhwang--HPDv2"
    folder = home / "snapshots" / commit / "benchmark"
    folder.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"hub:zhwang/HPDv2/benchmark/\*.json: .*no file"):
        load_prompts("hpdv2/test")
    (folder / "anime.json").write_text('["a girl", "a boy"]')
    (folder / "photo.json").write_text('["a street"]')
    found = load_prompts("hpdv2/test")
    assert [record["tag"] for record in found.records] == ["anime", "anime", "photo"]
    assert found.places[1] == "hub:zhwang/HPDv2/benchmark/anime.json, entry 2"
    assert found.name == "hpdv2-test"
    with pytest.raises(ConfigError, match="hub:nobody/set/x.txt: .* --prompts FILE"):
        load_prompts("hub:nobody/set/x.txt")
    with pytest.raises(ConfigError, match="from the hub: drawbench.*did you mean 'drawbench'"):
        load_prompts("drawbenc")
    # rows
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    points = {"Testpoints": ["Style"], "Testpoint Description": ["ink"]}
    row = json.dumps({"index": 0, "prompt_en": "a cat", "sub_dims_en": json.dumps(points)})
    (tmp_path / "set" / "train.jsonl").write_text(row + "\n")
    (record,) = load_prompts(f"unigenbench:hub:{tmp_path / 'set'}").records
    assert (record["prompt"], record["testpoints"]) == ("a cat", ["Style"])
    with pytest.raises(DataError, match="expected columns item_id"):
        load_prompts(f"dpg:hub:{tmp_path / 'set'}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install.*hub.*--prompts FILE"):
        load_prompts("partiprompts")


def sees(seen: Seen) -> Act:
    """Say yes of bright images, and nonsense of black ones."""
    level = brightness(seen.images[0])
    return says("a fine image" if level == 0 else "Yes" if level > 100 else "No.")


@pytest.mark.integration
def test_a_suite_by_a_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Grey images of 200 and 40: yes and no; a nonsensical answer is a missing score, and the error
    quotes it; a suite has the benchmark's own numbers."""
    record = chain(1, 2, 3)
    with serving(sees) as server:
        reward = questions(protocol="dpg", url=server.url, backoff=0.01, cache=str(tmp_path / "c"))
        batch = RewardBatch(
            grey([200, 40]), ["p"] * 2, torch.arange(2), [record] * 2, torch.zeros(2)
        )
        scores, told = reward.explain(batch)
        assert scores.tolist() == [1.0, 0.0] and told[1]["answers"] == [0.0, 0.0, 0.0]
        asked = len(server.seen)
        assert reward(batch).tolist() == [1.0, 0.0] and len(server.seen) == asked  # from the cache
        black = batch._replace(images=grey([0, 200]))
        with pytest.raises(RunError, match="neither yes nor no in the answer 'a fine image'"):
            reward(black)
        lenient = questions(protocol="dpg", url=server.url, backoff=0.01, max_failed=0.9)
        with pytest.warns(UserWarning, match="questions failed"):
            assert lenient(black).isnan().tolist() == [True, False]
        # the suite
        file = tmp_path / "prompts.jsonl"
        file.write_text(json.dumps(record) + "\n")
        call = f'rewards={{dpg: {{fn: questions, protocol: dpg, url: "{server.url}"}}}}'
        config = toy(tmp_path / "toy", call, f"prompts.test={file}", "eval.score=''")
        server.models = Act(json.dumps({"data": [{"id": "judge"}]}).encode())
        report = run_suite(config.call("model")(), config, "dpg", tmp_path / "out", target="toy")
    values = [line["scores"]["dpg"] for line in rows(tmp_path / "out" / "scores.jsonl")]
    assert report["dpg"] == pytest.approx(sum(values) / len(values))
    assert report["tables"]["dpg"]["dpg"] == pytest.approx(100 * report["dpg"])
    assert set(report["table_intervals"]["dpg"].values()) == {None}  # there is one prompt
    assert len(rows(tmp_path / "out" / "dpg.jsonl")) == len(values) == 2


def test_suites_read_the_benchmark_s_own_format() -> None:
    assert "prompts.test=dpg:x.csv" in overrides_of("dpg", "x.csv")
    assert "prompts.test=geneval2:x.jsonl" in overrides_of("geneval2", "x.jsonl")
    assert "prompts.test=own.jsonl" in overrides_of("unigenbench", "own.jsonl")
    assert "prompts.test=hub:a/b" in overrides_of("drawbench", "hub:a/b")
    assert "prompts.test=dpg:hub:a/b" in overrides_of("dpg", "hub:a/b")
    config = load_config("shapes/awm", overrides_of("unigenbench", "x.csv"))
    assert config.headline == "unigenbench" and config.prompts.test == "unigenbench:x.csv"


def test_equal_images_of_other_records_have_their_own_answers(tmp_path: Path) -> None:
    """The same question of two equal images, whose right answers differ: by the judge's
    probabilities .9 and .05, whichever comes first, also from the cache."""
    shares = {"two": 0.9, "three": 0.05, "four": 0.04, "x": 0.009, "y": 0.001}
    top = {token: math.log(share) for token, share in shares.items()}
    records: list[dict[str, Any]] = []
    for answer in ("two", "three"):
        records.append(
            {"prompt": "dogs", "vqa_list": [["How many dogs?", answer]], "skills": ["c"]}
        )
    images = torch.zeros(2, 3, 8, 8)
    with serving(lambda seen: says("two", top)) as server:
        reward = questions(protocol="geneval2", url=server.url, cache=str(tmp_path / "c"))
        for order in ((0, 1), (1, 0), (0, 1)):
            meta, none = [records[i] for i in order], torch.zeros(2)
            batch = RewardBatch(images, ["dogs"] * 2, none.long(), meta, none)
            expected = [(0.9, 0.05)[i] for i in order]
            assert reward(batch).tolist() == pytest.approx(expected, abs=0.002)
