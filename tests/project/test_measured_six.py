"""What docs/six-methods.md says of six methods as published and as tuned is what its files hold."""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

import pytest
from docskit import PAGES, ROOT
from scriptkit import script_module

from flowrl.config.load import load_config
from flowrl.runs.compare.summary import error_model

RESULTS, SIX = ROOT / "assets/results", ROOT / "scripts/research/six"
SIX_PAGE = "docs/six-methods.md"
PAGE = " ".join(PAGES[SIX_PAGE].split())
METHODS = script_module("six_docs").METHODS
SHIPPED = {name: name.replace("-", "_") for name in METHODS} | {"flow-grpo": "flow_grpo_full"}


def read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return read("compare-six")


@pytest.mark.parametrize("name", METHODS)
def test_the_tuned_configs_have_the_best_of_eight_trials(name: str) -> None:
    found = read(f"tune-{name}")
    assert len(found["trials"]) == 8 and found["nfe"] == 60000 and found["seeds"] == [100]
    best = found["trials"][found["best"]]
    assert best["score"] == max(trial["score"] for trial in found["trials"])
    tuned = load_config(SIX / f"tuned_{name.replace('-', '_')}.yaml")
    own = load_config(
        f"shapes/{SHIPPED[name]}",
        [*best["changes"], "train.balance=tag", "train.warmup=2", "train.iterations=1000"],
    )
    for section in ("plan", "loss", "likelihood", "kl", "optimizer", "credit", "train", "model"):
        assert tuned.to_dict().get(section) == own.to_dict().get(section), section


def test_all_arms_ran_alike(result: dict[str, Any]) -> None:
    """Twelve arms of the same seeds, none failed, each judged on 16 images of 136 prompts."""
    arms = [f"{name}-{arm}" for name in METHODS for arm in ("published", "tuned")]
    assert {config["name"] for config in result["configs"]} == set(arms)
    for config in result["configs"]:
        assert [run["seed"] for run in config["seeds"]] == [0, 1, 2, 3]
        assert not any(run["failed"] for run in config["seeds"])
    assert (result["budgets"]["nfe"], result["budgets"]["seconds"]) == (160000, 0)
    assert result["base"]["images"] == 2176 and "four seeds" in PAGE
    assert read("tune-awm")["base"]["images"] == 528 and "66 validation prompts, 528 images" in PAGE


def test_what_it_says_of_time(result: dict[str, Any]) -> None:
    """In minutes of training, by the clock of a shared machine."""
    runs = [run for config in result["configs"] for run in config["seeds"]]
    first = [run["seconds"] / 60 for run in runs if run["seed"] < 2]
    assert round(mean(first)) == 6 and "about six minutes of one core with bfloat16" in PAGE
    gpus = [place["gpus"] for place in result["environments"]]
    fast = [run["seconds"] for run in runs if gpus[run["environment"]]]
    assert f"runs took {min(fast):.0f} to {max(fast):.0f} seconds of training" in PAGE
    assert len(fast) == 18 and "it had finished 18 runs of 24" in PAGE
    assert all(gpus[run["environment"]] in ([], ["NVIDIA H200"]) for run in runs)
    slow = [run for run in runs if run["seed"] > 1 and not gpus[run["environment"]]]
    assert len(slow) == 6 and len({run["environment"] for run in slow}) == 1
    for name in METHODS:
        trials = [trial["runs"][0]["seconds"] for trial in read(f"tune-{name}")["trials"]]
        assert 17.5 < sum(trials) / 60 < 22.5
    assert "20 minutes of one core per method" in PAGES[SIX_PAGE]


def test_what_its_sentences_say(result: dict[str, Any]) -> None:
    model = error_model(result["configs"], result["base"], "nfe")
    gain, low, end = {}, {}, {}
    for config in result["configs"]:
        name = config["name"]
        value, error = model.gain(name)
        gain[name], low[name] = 100 * value, 100 * (value - error.half())
        end[name] = 100 * model.score(name)[0]
    # as published
    forward = [f"{gain[f'{name}-published']:.1f}" for name in ("awm", "diffusion-nft")]
    assert f"AWM {forward[0]} points and DiffusionNFT {forward[1]}." in PAGE
    rest = ["flow-grpo", "mix-grpo", "branch-grpo", "diffusion-dpo"]
    some = sorted(gain[f"{name}-published"] for name in rest)
    assert f"gain {some[0]:.1f} to {some[-1]:.1f}, none of them clearly" in PAGE
    assert max(low[f"{name}-published"] for name in rest) < 0 < low["awm-published"]
    # as tuned
    awm = f"AWM ends at {end['awm-tuned']:.1f} %, {gain['awm-tuned']:.1f} points above the base"
    assert awm in PAGE
    guided = 100 * read("compare-six-guided")["strict"]
    assert [name for name in end if end[name] > guided] == ["awm-tuned"]
    seeds = ends_of(result, "awm-tuned")
    assert f"its four seeds lie between {seeds[0]:.1f} and {seeds[-1]:.1f} %" in PAGE
    both = [gain["mix-grpo-tuned"], gain["diffusion-dpo-tuned"]]
    assert all(11.5 < value < 12.5 for value in both)
    assert min(low["mix-grpo-tuned"], low["diffusion-dpo-tuned"]) > 0
    assert f"what BranchGRPO gains, {gain['branch-grpo-tuned']:.1f}, cannot be told" in PAGE
    assert max(low["branch-grpo-tuned"], low["flow-grpo-tuned"]) < 0
    # by an arm's own seeds
    own = {}
    for config in result["configs"]:
        value, error = error_model([config], result["base"], "nfe").gain(config["name"])
        own[config["name"]] = [100 * (value - error.half()), 100 * (value + error.half())]
    branch = own["branch-grpo-tuned"]
    assert f"BranchGRPO as tuned gains {branch[0]:.1f} to {branch[1]:.1f}, and of the" in PAGE
    may_be_none = [name for name in METHODS if own[f"{name}-published"][0] < 0]
    assert may_be_none == ["branch-grpo"]


def test_what_it_says_of_tuning(result: dict[str, Any]) -> None:
    model = error_model(result["configs"], result["base"], "nfe")
    more = {name: model.difference(f"{name}-tuned", f"{name}-published") for name in METHODS}
    bounds = {name: (value - e.half(), value + e.half()) for name, (value, e) in more.items()}
    low, high = (100 * bound for bound in bounds["awm"])
    awm = f"AWM {100 * more['awm'][0]:.1f} points more than its published settings"
    assert f"{awm} ({low:.1f} to {high:.1f}, not corrected for six looks" in PAGE
    assert f"DiffusionNFT {-100 * more['diffusion-nft'][0]:.1f} less" in PAGE
    assert bounds["diffusion-nft"][1] < 0
    rest = [name for name in METHODS if name not in ("awm", "diffusion-nft")]
    assert all(bounds[name][0] < 0 < bounds[name][1] for name in rest)
    some = sorted(100 * more[name][0] for name in rest)
    assert f"between {-some[0]:.1f} less and {some[-1]:.1f} more" in PAGE
    # the one that falls
    search = read("tune-diffusion-nft")
    best = search["trials"][search["best"]]
    assert (
        "optimizer.lr=2e-3" in best["changes"] and search["choices"]["optimizer.lr"][-1] == "2e-3"
    )
    assert f"{100 * best['score']:.1f} % of the validation prompts after 60,000" in PAGE
    (nft,) = (one for one in result["configs"] if one["name"] == "diffusion-nft-tuned")
    ends, flow = ends_of(result, "diffusion-nft-tuned"), ends_of(result, "flow-grpo-tuned")
    assert f"its seeds end at {ends[0]:.1f} to {ends[-1]:.1f} %" in PAGE
    said = f"three seeds end at {flow[1]:.1f} to {flow[-1]:.1f} %, one falls to {flow[0]:.1f}."
    assert said in PAGE
    assert f"end {ends[-1] - ends[0]:.0f} and {flow[-1] - flow[0]:.0f} points apart" in PAGE
    other = read("tune-flow-grpo")
    assert "optimizer.lr=1e-3" in other["trials"][other["best"]]["changes"]
    assert other["choices"]["optimizer.lr"][-1] == "1e-3"  # the highest that was tried
    for run in nft["seeds"]:
        course = run["trajectory"]["accuracy"]
        assert max(course) > 0.75 and course[-1] < 0.4


@pytest.mark.parametrize("name", METHODS)
def test_the_method_pages_have_both_arms(result: dict[str, Any], name: str) -> None:
    """Also where tuning did harm."""
    model = error_model(result["configs"], result["base"], "nfe")
    page = " ".join(PAGES[f"docs/methods/{name.replace('-', '_')}.md"].split())
    for arm, words in (("published", "its published settings"), ("tuned", "tuned ones")):
        assert f"with {words} {100 * model.gain(f'{name}-{arm}')[0]:+.1f} (" in page


def test_what_readme_and_page_say_of_tuning_that_harms(result: dict[str, Any]) -> None:
    model = error_model(result["configs"], result["base"], "nfe")
    (nft, _), (flow, error) = (
        model.gain(f"{name}-tuned") for name in ("diffusion-nft", "flow-grpo")
    )
    readme = " ".join(PAGES["README.md"].split())
    said = f"({100 * nft:.1f} points), and Flow-GRPO as tuned loses {-100 * flow:.1f}, which may be"
    assert said in readme and flow + error.half() > 0
    search = read("tune-diffusion-nft")
    rate = search["choices"]["optimizer.lr"][-1]
    assert f"optimizer.lr={rate}" in search["trials"][search["best"]]["changes"]
    page = " ".join(PAGES["docs/methods/diffusion_nft.md"].split())
    said = f"its rate, {rate}, the highest that was tried, was chosen after {search['nfe']:,.0f}"
    assert said in page and f"up to {result['budgets']['nfe']:,.0f} it ruins" in page


def test_which_pairs_differ(result: dict[str, Any]) -> None:
    pairs = result["pairs"]["nfe"]
    assert (pairs["significant"], pairs["tests"]) == (16, 66)
    assert "Holm's correction over all 66, 16 pairs differ" in PAGE
    row = pairs["p_holm"][pairs["names"].index("awm-tuned")]
    same = {name for name, p in zip(pairs["names"], row, strict=True) if p and p > 0.05}
    tuned = {"mix-grpo-tuned", "diffusion-dpo-tuned", "branch-grpo-tuned"}
    assert same == {"awm-published", "diffusion-nft-published", *tuned}
    assert "but those of AWM and DiffusionNFT, not from the other tuned ones of" in PAGE
    assert "after Holm's correction over all pairs it may be chance" in PAGE


def ends_of(result: dict[str, Any], name: str) -> list[float]:
    """Return where the seeds of an arm end, in percent, the lowest first."""
    (config,) = (one for one in result["configs"] if one["name"] == name)
    return sorted(100 * run["at"]["nfe"]["score"] for run in config["seeds"])


def test_what_it_says_of_clipping(result: dict[str, Any]) -> None:
    shares: dict[str, list[float]] = {}
    for config in result["configs"]:
        for run in config["seeds"]:
            known = [value for value in run["trajectory"]["clip_frac"] if value is not None]
            shares.setdefault(config["name"], []).extend(known)
    said = []
    for name, digits in (("flow-grpo", 0), ("mix-grpo", 1), ("branch-grpo", 0)):
        said.append(f"{100 * mean(shares[f'{name}-published']):.{digits}f}")
        assert max(shares[f"{name}-tuned"]) == 0
        updates = load_config(SIX / f"published_{name.replace('-', '_')}.yaml").train.updates
        assert updates == {"flow-grpo": 2, "mix-grpo": 4, "branch-grpo": 36}[name]
    assert f"on {said[0]}, {said[1]} and {said[2]} % of the draws" in PAGE
