"""What the docs' `flowrl compare` lines name can be compared: what has to be equal is."""

from __future__ import annotations

import shlex

import pytest
from docskit import PAGES, ROOT, blocks

from flowrl.config.load import load_config
from flowrl.runs.compare.records import different, setting


def compared() -> list[str]:
    """Return the lines of all pages that compare several configs."""
    found = []
    for text in PAGES.values():
        for block in blocks(text, "bash"):
            lines = block.replace("\\\n", " ").splitlines()
            found += [line for line in lines if line.startswith("flowrl compare ")]
    return sorted({" ".join(line.split()) for line in found})


def parts(line: str) -> tuple[list[str], list[str]]:
    """Return the configs of a line, and what it sets for all."""
    words = shlex.split(line.partition(" # ")[0])[2:]
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    sets: list[str] = []
    if "--set" in words:
        rest = words[words.index("--set") + 1 :]
        last = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
        sets = rest[:last]
    shipped = [word for word in words[:first] if (ROOT / f"configs/{word}.yaml").is_file()]
    return shipped, sets


@pytest.mark.parametrize("line", compared())
def test_configs_that_the_docs_compare_agree(line: str) -> None:
    names, sets = parts(line)
    configs = [load_config(name, sets) for name in names]
    for config in configs[1:]:
        assert different(setting(configs[0]), setting(config)) == []


def test_published_configs_that_agree() -> None:
    """As docs/compare.md has it; one of either group does not agree with the other."""
    page = " ".join(PAGES["docs/compare.md"].split())
    groups = []
    for group in ("flow_grpo_fast awm diffusion_nft", "flow_grpo flow_grpo_cps grpo_guard"):
        said = ", ".join(f"`{name}`" for name in group.split())
        assert said in page
        groups.append([setting(load_config(f"sd3/{name}")) for name in group.split()])
        assert all(one == groups[-1][0] for one in groups[-1])
    assert different(groups[0][0], groups[1][0]) == ["model.guidance (1.0 and 4.5)"]
