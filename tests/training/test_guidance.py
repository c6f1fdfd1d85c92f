"""Another guidance than the model's own: `train.guidance` of what is sampled, and
`train.reference_guidance` of the base model that is measured from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapterkit import ADAPTERS, GUIDED, PROMPTS, Folders
from guidekit import FORWARD, config_of, texts_encoded_ahead
from modelkit import noise
from scriptkit import module_of
from toykit import toy
from trainkit import watch

from flowrl.algorithms.forest import trained_nodes
from flowrl.config.compose import Composition
from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.core.seeds import NodeStreams
from flowrl.cost.estimate import estimate
from flowrl.models.flux import flux
from flowrl.models.sd3 import sd3
from flowrl.models.sd15 import sd15
from flowrl.models.wan import wan
from flowrl.runs.composed import composed
from flowrl.training.guidance import guides_reference
from flowrl.training.rehearsal import check_plan
from flowrl.training.trainer import Trainer

SCALE = 3.0


@pytest.mark.parametrize("name", [name for name in ADAPTERS if GUIDED[name]])
def test_a_model_can_have_another_guidance_for_a_while(folders: Folders, name: str) -> None:
    """Oracle: the model that is loaded with it, whose parity with the pipeline is tested
    elsewhere."""
    (scale,) = GUIDED[name].values()
    guided, plain = folders.load(name, **GUIDED[name]), folders.load(name)
    x, sigma = noise(plain, 2), plain.sigmas(4, 64, 64)[:2]

    def seen(model: Any) -> Any:
        with torch.no_grad():
            return model.velocity(x, sigma, model.encode(PROMPTS[:2]))

    without = seen(plain)
    with plain.guiding(scale):
        assert torch.equal(seen(plain), seen(guided))
        both = plain.encode(PROMPTS[:2])
    assert torch.equal(seen(plain), without)
    # training without guidance is given what sampling encoded, both prompts
    assert any(key.startswith("negative_") for key in both)
    with torch.no_grad():
        assert torch.equal(plain.velocity(x, sigma, both), without)
    assert not torch.equal(without, seen(guided))


def test_both_experts_of_wan_take_it() -> None:
    """A scale of the second expert's own gives way: it would be the model's, not this one."""
    options = wan.options(path="x", guidance=2.0, guidance_2=4.0)  # type: ignore[attr-defined]
    other = options.guided_by(SCALE)
    assert (other.guidance, other.guidance_2) == (SCALE, None)


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (sd3, {"guidance": 4.5, "negative_prompt": "blurry"}),
        (flux, {"true_cfg_scale": 3.0, "negative_prompt": "blurry"}),
        (sd15, {"guidance": 7.5, "guidance_rescale": 0.7}),
    ],
)
def test_a_teacher_without_guidance(fn: Any, options: dict[str, Any]) -> None:
    """Options that only two branches have are no mistake of his."""
    alone = fn.options(path="x", **options).guided_by(1.0, off=True)
    assert not alone.guided and alone.negative_prompt == ""


def test_a_distilled_model_has_none(folders: Folders) -> None:
    klein = folders.load("flux2_klein distilled", tune="none")
    distilled = pytest.raises(ConfigError, match="is distilled, and its pipeline ignores guidance")
    with distilled, klein.guiding(SCALE):
        pytest.fail("guided")
    with klein.guiding(1.0, off=True):  # as it is
        assert not klein.guided


@pytest.mark.parametrize("key", ["guidance", "reference_guidance"])
def test_its_negative_prompt_is_encoded_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """No text encoder works in the first iteration, which samples, or asks the base model, with
    both prompts."""
    run = Trainer(config_of(tmp_path, f"train.{key}={SCALE}"))
    asked = texts_encoded_ahead(run, monkeypatch)
    assert "" in asked and set(run.train_set.texts) <= set(asked)


def test_speed_is_measured_with_it(tmp_path: Path) -> None:
    """Random weights of real sizes can be guided as the adapter can."""
    config = config_of(tmp_path, f"train.guidance={SCALE}")
    model = module_of("bench", "random_model").random_model(config)
    assert not model.adapter.guided
    with model.guiding(SCALE):
        assert any(key.startswith("negative_") for key in model.encode(["a red dot"]))
    assert not model.adapter.guided


def rows_of(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Note each network call of a trainer: its rows, and whether it keeps a graph."""
    calls, model = [], trainer.model
    network = model._network  # type: ignore[attr-defined]

    def noted(x: torch.Tensor, *rest: Any) -> Any:
        calls.append((len(x), torch.is_grad_enabled()))
        return network(x, *rest)

    monkeypatch.setattr(model, "_network", noted)
    return calls


@pytest.mark.integration
def test_images_are_of_the_guided_model_and_training_is_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a run whose model is guided throughout draws the very same images; one without any
    guidance makes training calls of as many rows."""
    here = Trainer(config_of(tmp_path, f"train.guidance={SCALE}"))
    throughout = Trainer(config_of(tmp_path, guidance=SCALE))
    without = Trainer(config_of(tmp_path))
    rows = here.rows()
    made = here.sample(rows)
    assert torch.equal(made.x, throughout.sample(rows).x)
    assert not torch.equal(made.x, without.sample(rows).x)
    assert not here.model.guided  # type: ignore[attr-defined]
    # each velocity of sampling takes two rows, each one of training as many as without guidance
    mine, others = rows_of(here, monkeypatch), rows_of(without, monkeypatch)
    metrics, plain = here.step(), without.step()
    trained = [count for count, graph in mine if graph]
    assert trained and trained == [count for count, graph in others if graph]
    sampled = sum(count for count, graph in mine if not graph)
    assert sampled - sum(count for count, graph in others if not graph) == without.cost.nfe
    assert here.cost.nfe == 2 * without.cost.nfe
    assert metrics["nfe"] - plain["nfe"] == without.cost.nfe
    said = "each with and without the prompt (train.guidance)"
    assert any(said in line for line in here.cost.lines())


def test_an_estimate_counts_it_in_sampling_alone(tmp_path: Path) -> None:
    """Oracle: sampling is as that of a model that is guided throughout, training as that of one
    without guidance."""
    here = estimate(config_of(tmp_path, f"train.guidance={SCALE}"))
    throughout = estimate(config_of(tmp_path, guidance=SCALE))
    without = estimate(config_of(tmp_path))
    assert here.phases[0].name == "sampling"
    assert here.phases[0].extra == throughout.phases[0].extra > without.phases[0].extra
    assert here.flops["sampling"] == throughout.flops["sampling"]
    assert here.flops["training"] == without.flops["training"] < throughout.flops["training"]
    more = here.forecast.calls - without.forecast.calls
    assert more == without.forecast.work.nfe


TOLD = composed("sd3/diffusion_nft", "flux2")  # guidance is an input of its network


@pytest.mark.parametrize(
    ("key", "config", "says"),
    [
        ("", "shapes/flow_grpo", "likelihood reverse trains what the sampler drew.*model.guidance"),
        ("", "shapes/find", "likelihood prior trains what the sampler drew"),
        ("", "shapes/diffusion_dpo_offline", "plan pairs samples nothing"),
        ("", TOLD, "is told its guidance as a number"),
        ("reference_", "shapes/flow_grpo", "loss ppo_clip measures from no base model"),
        ("reference_", TOLD, "is told its guidance as a number"),
    ],
)
def test_what_has_no_use_for_it(key: str, config: str | Composition, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)guidance.*{says}"):
        check_plan(load_config(config, [f"train.{key}guidance={SCALE}"]))


@pytest.mark.parametrize("key", ["guidance", "reference_guidance"])
def test_a_scale_that_guides_nothing_and_a_model_that_cannot(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="expected a scale above 1, got 0.5"):
        check_plan(load_config("shapes/awm", [f"train.{key}=0.5"]))
    with pytest.raises(ConfigError, match=rf"train.{key}=3: model toykit.linear has no `guiding`"):
        Trainer(toy(tmp_path, *FORWARD, f"train.{key}={SCALE}"))


DRAWS = (
    "plan={fn: full, steps: 4, noise_scale: 0.5, ode_last: 1}",
    "transition={fn: dance_sde}",
    "loss={fn: ppo_clip, clip_low: 0.2, clip_high: 0.2}",
    "kl=null",
    "slow=null",
)
HYBRID = "likelihood={fn: reverse_unguided}"


@pytest.mark.integration
def test_guided_rollouts_and_unguided_updates_begin_with_a_ratio_of_one(tmp_path: Path) -> None:
    """Draws are those of a model that is guided throughout. Of the first update the ratio is 1 to
    the bit; the sampler's own log-probs are of another mean. Of the second it is that of the
    unguided network before and after the first, computed here, and no longer 1."""
    config = config_of(tmp_path, *DRAWS, HYBRID, f"train.guidance={SCALE}", "train.updates=2")
    run = Trainer(config)
    throughout = Trainer(config_of(tmp_path, *DRAWS, "likelihood={fn: reverse}", guidance=SCALE))
    rows = run.rows()
    made = run.sample(rows)
    assert torch.equal(made.x, throughout.sample(rows).x)
    nodes = trained_nodes(made, "draws")
    batch = run.method.likelihood.batch(
        made, torch.ones(len(made.x)), nodes, NodeStreams(made.tree.group, "test")
    )
    with torch.no_grad():
        now = run.method.likelihood.evaluate(run.model, batch, run.method.transition)
    assert float(batch.old_log_prob.abs().sum()) == 0
    assert float((now.log_prob - made.log_prob[nodes]).abs().max()) > 1e-4
    # the losses of an iteration: what each update is told, by the number of the update
    told = watch(run)
    metrics = run.step()
    gaps = [float((one.now.log_prob.detach() - one.old_log_prob).abs().max()) for one in told]
    first = gaps[: len(gaps) // 2]
    assert first == [0.0] * len(first) and max(gaps[len(gaps) // 2 :]) > 0
    assert metrics["on_policy_gap"] == 0.0


@pytest.mark.parametrize("credit", ["unlikely_norm", "single_stream, half: 2.0"])
def test_credits_of_log_probs_want_those_of_what_is_trained(credit: str) -> None:
    """The sampler's belong to its guided mean. Without another guidance in sampling they are the
    network's own."""
    changes = [HYBRID, f"credit={{fn: {credit}}}"]
    check_plan(load_config("shapes/flow_grpo", changes))
    with pytest.raises(ConfigError, match="reads the sampler's log-prob"):
        check_plan(load_config("shapes/flow_grpo", [*changes, f"train.guidance={SCALE}"]))


def test_draws_with_another_guidance_need_the_unguided_likelihood() -> None:
    """The message of the other names it; it is taken with a guidance and without."""
    with pytest.raises(ConfigError, match="likelihood reverse_unguided"):
        check_plan(load_config("shapes/flow_grpo", [f"train.guidance={SCALE}"]))
    for changes in ([f"train.guidance={SCALE}"], []):
        check_plan(load_config("shapes/flow_grpo", [*changes, HYBRID]))


# -------------------------------- the base model that is measured from is guided, the policy is not

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
    mine, others = (rows_of(trainer, monkeypatch) for trainer in (here, without))
    metrics, plain = here.step(), without.step()
    states = check_plan(here.config).states
    extra = sum(count for count, _ in mine)
    extra -= sum(count for count, _ in others)
    assert extra == states > 0
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


def test_an_estimate_counts_a_guided_reference_in_training_alone(tmp_path: Path) -> None:
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
