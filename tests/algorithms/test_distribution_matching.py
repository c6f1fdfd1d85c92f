"""TDM-R1's parts, held to the reference's worked numbers of the published port."""

from __future__ import annotations

import pytest
import torch
from losskit import D_REF, PAIRS, A, D, fitting, loss_input, numbers
from rolloutkit import run

from flowrl.algorithms.companions.fake import score
from flowrl.algorithms.companions.surrogate import preference
from flowrl.algorithms.likelihoods._queries import Queries, noised_again
from flowrl.algorithms.likelihoods.generated import generated
from flowrl.algorithms.losses._common import pull
from flowrl.algorithms.losses.distillation import tdm, tdm_r1
from flowrl.algorithms.plans.solvers import few_step, ode
from flowrl.algorithms.selection.select import one_step
from flowrl.algorithms.transitions import cps
from flowrl.core.errors import ConfigError
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Eval, SelectInput
from flowrl.models.toy import LinearFlow

X, REAL, FAKE = (
    numbers(*row)[None]
    for row in ((0.5, -1, 0.25, 2), (0.6, -0.8, 0.2, 1.5), (0.55, -0.9, 0.3, 1.7))
)


@pytest.mark.parametrize(
    ("sigma", "level", "own", "fresh"),
    [
        (0.5, 0.75, 0.33333, 0.94281),
        (0.75, 0.9, 0.33333, 0.94281),
        (0.9, 0.95, 0.47368, 0.88070),
        (0.0, 0.5, 0.0, 1.0),
    ],
)
def test_how_much_of_the_noise_is_new(sigma: float, level: float, own: float, fresh: float) -> None:
    """The reference's mixing weights; and at the state's own level nothing is new."""
    one, none = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    here, there = torch.tensor([sigma]), torch.tensor([level])
    _, first = noised_again(none, one, here, there, none)
    _, second = noised_again(none, none, here, there, one)
    assert float(first) == pytest.approx(own, abs=1e-5)
    assert float(second) == pytest.approx(fresh, abs=1e-5)
    if sigma > 0:
        same, _ = noised_again(2 * one, one, here, here, 9 * one)
        assert float(same) == pytest.approx((1 - sigma) * 2 + sigma)


@pytest.mark.parametrize(
    ("form", "value", "gradient"),
    [
        ("squared", 0.0367647059, (-0.0588235, -0.1176471, 0.1176471, 0.2352941)),
        ("huber", 0.5247323515, None),
    ],
)
def test_the_pull_has_the_published_numbers(
    form: str, value: float, gradient: tuple[float, ...] | None
) -> None:
    x = X.clone().requires_grad_()
    loss = pull(x, REAL - FAKE, REAL, form, 1e-3)
    assert float(loss) == pytest.approx(value, abs=1e-9)
    (found,) = torch.autograd.grad(loss.sum(), x)
    if gradient is not None:
        torch.testing.assert_close(found[0], numbers(*gradient), atol=1e-7, rtol=0)


def test_tdm_r1_is_tdm_and_the_surrogates_pull() -> None:
    """By `pull` on the reference's arrays, with a surrogate in the fake model's place."""
    none = torch.zeros(1, dtype=torch.float64)
    data = loss_input(none, none, none, mean=X)
    batch = data.batch._replace(query=none)
    under = {name: Eval(none, x, none) for name, x in (("ref", REAL), ("fake", FAKE))}
    data = data._replace(batch=batch, under={**under, "surrogate": Eval(none, FAKE, none)})
    plain, metrics = tdm(data)
    assert float(plain) == pytest.approx(0.0367647059, abs=1e-9)
    assert float(metrics["fake_gap"]) == pytest.approx(0.0625 / 4)
    expected = plain + 0.7 * pull(X, FAKE - REAL, FAKE, "squared", 1e-3)
    assert float(tdm_r1(data, reward=0.7)[0]) == pytest.approx(float(expected))
    # below `least` there is no pull of the surrogate's
    levels = torch.tensor([0.49, 0.5], dtype=torch.float64)
    two = data._replace(batch=batch._replace(query=levels))
    found, _ = tdm_r1(two, reward=0.7, least=0.5)
    torch.testing.assert_close(found, torch.cat([plain, expected]))
    for least in (-0.1, 1.0):
        with pytest.raises(ConfigError, match="0 <= least < 1"):
            tdm_r1(data, least=least)
    with pytest.raises(ConfigError, match="likelihood generated"):
        tdm(data._replace(batch=data.batch._replace(query=None)))


def test_the_fake_models_loss() -> None:
    """min(SNR, 5) of the reference, and densities within 1/20 and 20; the error is 1."""
    level = torch.tensor([0.1, 0.2, 0.3, 0.5, 0.9, 0.5, 0.5, 0.5])
    ratio = numbers(0, 0, 0, 0, 0, 0.1, 9, -9)
    data = loss_input(ratio, ratio, ratio, mean=torch.zeros(8, 3))
    batch = data.batch._replace(x=torch.zeros(8, 3), target=torch.ones(8, 3), sigma=level)
    loss, _ = score().loss(data._replace(batch=batch))
    # e^0.1 by hand
    expected = numbers(5, 5, 5, 1, 0.0123457, 1.1051709, 20, 0.05)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("beta", "value"), [(10, -0.0053050455), (100, -0.0027365830)])
def test_the_surrogates_loss_is_dgpos(beta: float, value: float) -> None:
    """Without an anchor and as on the first update; the reference's table of DGPO."""
    data = fitting(D, A, PAIRS, ref=D_REF, slow=D)
    loss, _ = preference(beta=beta, anchor=0.0, weigh="even").loss(data)
    assert float(loss.mean()) == pytest.approx(value, abs=1e-9)


def test_the_surrogate_stops_what_is_far_away() -> None:
    """By hand: only row 0 is better than the teacher in A's sense and 0.3 away, 0.09 > 0.05; row 1
    left the slow copy, e^-0.1 < 0.999. The anchor's gradient, 2 anchor (d - d_ref), stays."""
    d = numbers(0.3, 0.5, 0.3, 0.5).requires_grad_()
    ref, slow = numbers(0.6, 0.5, 0.6, 0.5), numbers(0.3, 0.4, 0.3, 0.5)
    a = numbers(1, -1, -1, 1)
    role = preference(beta=1.0, anchor=0.001, weigh="even")
    loss, metrics = role.loss(fitting(d, a, torch.zeros(4, dtype=torch.int64), ref=ref, slow=slow))
    (gradient,) = torch.autograd.grad(loss.sum(), d)
    assert metrics["far_frac"].tolist() == [1, 0, 0, 0]
    assert metrics["clip_frac"].tolist() == [0, 1, 0, 0]
    free = numbers(0, 0, 1, 1)
    expected = metrics["weight"] * a * free + 0.002 * (d - ref)
    torch.testing.assert_close(gradient, expected.detach())


def test_weights_of_the_steps() -> None:
    """1/4 to 4/4 of four steps; the published code's run from 2/4 to 5/4."""
    step = torch.arange(4)
    assert preference()._step_weight(step).tolist() == [0.25, 0.5, 0.75, 1]
    assert preference(weigh="published")._step_weight(step).tolist() == [0.5, 0.75, 1, 1.25]


def test_the_surrogate_may_learn_from_finished_images_alone() -> None:
    """Two prompts, three images each. The last step of each image is left; noised up to pure noise
    (its own interval ends where the step began); a prompt's images have one level and one noise.
    The teacher's velocity is kl mean (v - v_ref)^2 away, by hand."""
    made = run(
        few_step(0, steps=4),
        model=LinearFlow(channels=2, seed=1),
        prompts=["a", "b"],
        shape=(2, 2, 2),
    )
    streams, zero = NodeStreams(made.tree.group, 0), torch.zeros(len(made.x))
    nodes, rng = (made.tree.parent >= 0).nonzero().flatten(), torch.Generator()
    role = preference(weigh="last", interval="reverse", shared=True)
    assert torch.equal(role.rows(made, nodes, rng).sort().values, made.leaf.sort().values)
    assert torch.equal(preference().rows(made, nodes, rng), nodes)
    batch = role.batch(made, zero, made.leaf, streams, Queries("trajectory", 1.0))
    group = made.tree.group[made.leaf]
    for one in (0, 1):
        mine = group == one
        assert len(batch.sigma[mine].unique()) == 1
        noise = batch.target[mine] + made.x[made.leaf][mine]
        torch.testing.assert_close(noise, noise[:1].expand_as(noise), atol=1e-6, rtol=0)
    assert len(batch.sigma.unique()) == 2
    assert role._step_weight(batch.step).tolist() == [1.0] * len(group)
    # the distance
    d = numbers(0.3, 0.5)
    data = fitting(d, numbers(1, -1), torch.zeros(2, dtype=torch.int64), ref=d, slow=d)
    ref = data.under["ref"]._replace(mean=data.now.mean + 0.2)
    data = data._replace(under={**data.under, "ref": ref})
    gap = preference(kl=3.0).loss(data)[0] - preference().loss(data)[0]
    torch.testing.assert_close(gap, numbers(0.12, 0.12))


def test_low_noise_levels_may_be_left_out() -> None:
    """Levels of finished images: none below `least`, and the same share of what is left."""
    made = run(few_step(0, steps=4), model=LinearFlow(channels=2, seed=1), shape=(2, 2, 2))
    streams, zero = NodeStreams(made.tree.group, 0), torch.zeros(len(made.x))
    every, noisy = (
        preference(weigh="last", interval="reverse", least=least)
        .batch(made, zero, made.leaf, streams, Queries("trajectory", 1.0))
        .sigma.double()
        for least in (0.0, 0.75)
    )
    torch.testing.assert_close(noisy, 0.75 + 0.25 * every, atol=1e-6, rtol=0)
    # a step that ended above it keeps its own interval
    first = made.tree.step[(made.tree.parent >= 0).nonzero().flatten()] == 1
    nodes = (made.tree.parent >= 0).nonzero().flatten()[first]
    plain, more = (
        Queries("trajectory", 1.0, least).draw(made, nodes, streams)[0] for least in (0, 0.5)
    )
    assert torch.equal(plain, more)
    with pytest.raises(ConfigError, match="least < 1"):
        preference(least=1.0)


def test_one_step_of_each_image() -> None:
    """Of four steps each image keeps one, by the selection and for the fake model; in 40 drawings
    every step of every image is among them."""
    made = run(
        few_step(0, steps=4), model=LinearFlow(channels=2, seed=1), group_size=3, shape=(2, 2, 2)
    )
    nodes = (made.tree.parent >= 0).nonzero().flatten()
    seen = torch.zeros(len(made.x))
    for seed in range(40):
        rng = torch.Generator().manual_seed(seed)
        factor = one_step(SelectInput(made, seen, None, 0, rng))
        assert float(factor.sum()) == len(made.leaf)
        kept = score(steps="one").rows(made, nodes, torch.Generator().manual_seed(seed))
        assert torch.equal(kept, factor.nonzero().flatten())
        seen += factor
    assert bool((seen[nodes] > 0).all())
    assert torch.equal(score().rows(made, nodes, rng), nodes)


def test_each_step_is_kept_and_taken_again() -> None:
    """What a step generates is on the line through its two stored states, so that the companion
    that reads them sees what the policy made; a query lies between them."""
    model = LinearFlow(channels=2, seed=1, scale=0.3)
    made = run(few_step(0, steps=4), model=model, group_size=3, shape=(2, 2, 2))
    likelihood = generated()
    nodes = (made.tree.parent >= 0).nonzero().flatten()
    assert len(nodes) == 4 * len(made.leaf) and len(made.x) == 5 * len(made.leaf)
    streams = NodeStreams(made.tree.group, 0)
    zero = torch.zeros(len(made.x))
    batch = likelihood.batch(made, zero, nodes, streams)
    now = likelihood.evaluate(model, batch, cps)
    seen = score().batch(made, zero, nodes, streams, Queries("trajectory", 1.0))
    torch.testing.assert_close(now.mean.detach(), seen.target, atol=1e-5, rtol=1e-5)
    assert batch.query is not None
    assert bool((batch.query > batch.sigma_next).all() and (batch.query < batch.sigma).all())
    # with one and the same model, judged where nothing is noised again, x0 is what it sees
    same = batch._replace(query=batch.sigma_next.clamp_min(1e-3), sigma_next=batch.sigma_next)
    assert likelihood.judge(model, same, now).mean.shape == now.mean.shape
    far = Queries("reverse", 3.0).draw(made, nodes, streams)[0]
    assert float(far.max()) > float(made.sigmas[1]) and bool((far > batch.sigma_next).all())
    with pytest.raises(ConfigError, match="few_step"):
        likelihood.batch(run(ode(0, steps=4)), zero, torch.tensor([2]), streams)
