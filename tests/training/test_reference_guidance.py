"""`train.reference_guidance`: the base model that is measured from is guided, the policy is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guidekit import FORWARD, config_of
from toykit import toy
from trainkit import watch

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.cost.estimate import estimate
from flowrl.training.guidance import guides_reference
from flowrl.training.rehearsal import check_plan
from flowrl.training.trainer import Trainer

SCALE = 3.0
GUIDES = f"train.reference_guidance={SCALE}"


@pytest.mark.integration
def test_the_base_model_alone_is_guided(tmp_path: Path) -> None:
    """Oracle: the same weights loaded with that guidance, and without, at the states that were
    trained. Before the first step all weights are the base model's."""
    run = Trainer(config_of(tmp_path, GUIDES))
    throughout = Trainer(config_of(tmp_path, guidance=SCALE)).model
    without = Trainer(config_of(tmp_path)).model
    seen = watch(run, "kl")
    metrics = run.step()
    assert seen
    gaps = []
    for data in seen:
        x, sigma, cond = data.batch.x, data.batch.sigma, data.batch.cond
        with torch.no_grad():
            guided, plain = (model.velocity(x, sigma, cond) for model in (throughout, without))
        now, ref, slow = data.now.v, data.under["ref"].v, data.under["slow"].v
        assert now is not None and ref is not None and slow is not None
        assert torch.equal(ref, guided) and torch.equal(now.detach(), plain)
        assert torch.equal(slow, plain) and not torch.equal(guided, plain)
        gaps.append((plain - guided).square().flatten(1).mean(1))
    # shapes/awm weighs the distance to the base model by 0.05
    assert metrics["kl"] == pytest.approx(0.05 * float(torch.cat(gaps).mean()), rel=1e-5)


@pytest.mark.integration
def test_it_costs_one_more_evaluation_of_each_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: rows that went through the network, counted at its door."""
    here, without = Trainer(config_of(tmp_path, GUIDES)), Trainer(config_of(tmp_path))
    rows = {}
    for name, trainer in (("here", here), ("without", without)):
        network = trainer.model._network  # type: ignore[attr-defined]
        rows[name] = 0

        def noted(x: torch.Tensor, *rest: Any, name: str = name, network: Any = network) -> Any:
            rows[name] += len(x)
            return network(x, *rest)

        monkeypatch.setattr(trainer.model, "_network", noted)
    metrics, plain = here.step(), without.step()
    states = check_plan(here.config).states
    assert rows["here"] - rows["without"] == states > 0
    assert metrics["nfe"] - plain["nfe"] == states
    assert check_plan(here.config).calls - check_plan(without.config).calls == states
    assert any("train.reference_guidance" in line for line in here.cost.lines())
    assert not any("train.reference_guidance" in line for line in without.cost.lines())


@pytest.mark.integration
def test_both_guidances_of_a_run(tmp_path: Path) -> None:
    """Images are those of a run that samples with guidance alone; its base model is the guided one
    of the other key."""
    run = Trainer(config_of(tmp_path, GUIDES, "train.guidance=2.0"))
    samples = Trainer(config_of(tmp_path, "train.guidance=2.0"))
    throughout = Trainer(config_of(tmp_path, guidance=SCALE)).model
    rows = run.rows()
    assert torch.equal(run.sample(rows).x, samples.sample(rows).x)
    seen = watch(run, "kl")
    run.step()
    batch, ref = seen[0].batch, seen[0].under["ref"].v
    with torch.no_grad():
        assert ref is not None
        assert torch.equal(ref, throughout.velocity(batch.x, batch.sigma, batch.cond))


def test_an_estimate_counts_it_in_training_alone(tmp_path: Path) -> None:
    """Its rows stand beside the policy's activations; the work of sampling is the same."""
    here, without = estimate(config_of(tmp_path, GUIDES)), estimate(config_of(tmp_path))
    training = [phase.name for phase in here.phases].index("training")
    assert here.phases[training].extra >= without.phases[training].extra
    assert here.flops["training"] > without.flops["training"]
    assert here.flops["sampling"] == without.flops["sampling"]
    texts = {part.name: part.bytes for part in here.parts}
    fewer = {part.name: part.bytes for part in without.parts}
    name = "prompt conditioning"
    assert texts[name] == 2 * fewer[name]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("shapes/flow_grpo", "loss ppo_clip measures from no base model"),
        ("flux2/diffusion_nft", "is told its guidance as a number"),
    ],
)
def test_what_has_no_use_for_it(config: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)guidance.*{says}"):
        check_plan(load_config(config, [GUIDES]))


def test_a_scale_that_guides_nothing_and_a_model_that_cannot(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a scale above 1, got 0.5"):
        check_plan(load_config("shapes/awm", ["train.reference_guidance=0.5"]))
    with pytest.raises(
        ConfigError, match=r"train.reference_guidance=3: model toykit.linear has no"
    ):
        Trainer(toy(tmp_path, *FORWARD, GUIDES))


def test_a_guided_policy_pays_nothing_more(tmp_path: Path) -> None:
    """The reference has another scale then, in as many network rows."""
    config = config_of(tmp_path, GUIDES, guidance=2.0)
    assert not guides_reference(config)
    assert check_plan(config).calls == check_plan(config_of(tmp_path, guidance=2.0)).calls
    run = Trainer(config)
    seen = watch(run, "kl")
    run.step()
    now, ref = seen[0].now.v, seen[0].under["ref"].v
    assert now is not None and ref is not None and not torch.equal(now.detach(), ref)


def test_published_config_of_crd() -> None:
    """Flow-Factory's example of CRD (kl_cfg 4.5, guidance_scale 1 in sampling)."""
    config = load_config("sd3/crd")
    assert config.train.reference_guidance == 4.5 and config.train.guidance == 0
    assert guides_reference(config)
