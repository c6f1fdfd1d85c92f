"""The suites by name: prompts, rewards, and what stands in their place."""

from __future__ import annotations

import pytest

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.core.prompt_files import PUBLISHED
from flowrl.core.prompts import load_prompts
from flowrl.evaluation.suites.catalogue import SUITES, headline_of, overrides_of

# with the package datasets and without it
UNREACHED = r'hub:sayakpaul/drawbench.*(HF_HUB_OFFLINE|"\.\[hub\]").*--prompts'


def test_every_suite_has_prompts_and_rewards_that_bind() -> None:
    for name, suite in SUITES.items():
        given = (
            None if suite.prompts else "hub:none" if suite.reader else "assets/shapes/test.jsonl"
        )
        config = load_config("sd3/flow_grpo", overrides_of(name, given))
        assert [*config.rewards] == [*suite.rewards] and config.headline == [*suite.rewards][0]
        assert config.eval.images == suite.images
        here = not suite.reader and (given or suite.prompts) not in PUBLISHED
        assert not here or len(load_prompts(config.prompts.test)) > 100
        # as the headline of a comparison: the training is the config's own
        own = load_config("shapes/awm", headline_of(name, given))
        known = load_config("shapes/awm").rewards
        assert own.rewards[own.headline].mix == 0 and own.eval.images == suite.images
        assert {n: own.rewards[n] for n in known} == known
        assert own.rewards[own.headline].fn == next(iter(suite.rewards.values()))["fn"]
    with pytest.raises(ConfigError, match="clip_score.*--prompts"):
        overrides_of("clip_score", None)
    with pytest.raises(ConfigError, match=UNREACHED):
        load_prompts(load_config("shapes/awm", overrides_of("drawbench", None)).prompts.test)
    with pytest.raises(ConfigError, match="no suite 'genevl'; did you mean 'geneval'"):
        overrides_of("genevl", None)
