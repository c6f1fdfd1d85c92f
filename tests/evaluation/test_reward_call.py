"""One reward is asked: what it may look like and return, how it may fail, how it judges frames of
videos, and how its networks rest on the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scorerkit import SCORERS
from torch import Tensor, nn
from toykit import redness, toy
from weightkit import Weights

from flowrl.api.arguments import config_of
from flowrl.config.calls import Call
from flowrl.core.abilities import (
    asks_people,
    differentiable,
    ignores_quality,
    judges_singly,
)
from flowrl.core.errors import ConfigError, DataError, FlowRLError, RewardError
from flowrl.core.prompts import PromptSet, check_records
from flowrl.core.types import RewardBatch
from flowrl.evaluation.held_out import evaluate_prompts
from flowrl.evaluation.reward_call import (
    PerFrame,
    Resting,
    ask,
    check_arguments,
    fitting,
    networks_of,
    probe_rewards,
    resting,
    rewards_of,
)
from flowrl.models.toy import LinearFlow
from flowrl.training.trainer import Trainer
from rewards.latent_preference import LatentJudge, load_transformer
from rewards.novelty import novelty
from rewards.votes import votes

NAN = math.nan


def batch() -> RewardBatch:
    images = torch.arange(3.0)[:, None, None, None].expand(3, 3, 2, 2) / 4
    meta: list[dict[str, Any]] = [{"prompt": "a", "tag": "x"}, {"prompt": "b"}, {"prompt": "c"}]
    return RewardBatch(images.clone(), ["a", "b", "c"], torch.arange(3), meta, torch.zeros(3))


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        ([0.5, 1, True], [0.5, 1, 1]),
        ((0.5, None, 2.0), [0.5, NAN, 2]),
        ([torch.tensor(0.5), np.float32(1), 2], [0.5, 1, 2]),
        (np.array([0.5, NAN, 2]), [0.5, NAN, 2]),
        (np.array([3, 2, 1])[::-1], [1, 2, 3]),
        (torch.tensor([1, 2, 3], dtype=torch.int32), [1, 2, 3]),
        (torch.ones(3, requires_grad=True) * 2, [2, 2, 2]),
        (0.25, [0.25] * 3),
        (np.float64(0.25), [0.25] * 3),
        (7, [7] * 3),
    ],
)
def test_what_a_reward_may_return(answer: Any, want: list[float]) -> None:
    """The numbers are those that stand in the answer; a single one counts for every image."""
    got = ask("it", lambda batch: answer, batch(), "here")
    assert got.dtype == torch.float32 and not got.requires_grad
    torch.testing.assert_close(got, torch.tensor(want).float(), equal_nan=True)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1.0, 2.0], r"expected 3 numbers, one per image, got shape \[2\]"),
        ([10**400] * 3, "expected 3 numbers, one per image, got list: int too large to convert"),
        (torch.ones(3, dtype=torch.complex64), "got Tensor: complex numbers have no order"),
        (torch.ones(3, device="meta"), "expected 3 numbers, one per image, got Tensor: "),
        (torch.ones(3, 1), r"got shape \[3, 1\]"),
        ("good", "got str: no tensor, array, list or number"),
        (["1", "2", "3"], "got list: the text '1' is no number"),
        ({"score": 1}, "got dict"),
        (None, "got NoneType"),
        ([[1, 2], [3], 4], "got list"),
        (np.array(["a", "b", "c"]), "got ndarray"),
        ([1.0, math.inf, 2.0], "gave inf for image 1, prompt 'b'"),
    ],
)
def test_what_it_may_not(answer: Any, said: str) -> None:
    with pytest.raises(RewardError, match=f"^here: reward 'it'.*{said}"):
        ask("it", lambda batch: answer, batch(), "here")


def with_records(images: Tensor, **record: list[Any]) -> list[float]:
    assert record == {"prompts": ["a", "b", "c"], "tag": ["x", None, None]}
    return images.mean((1, 2, 3)).tolist()


def by_name(prompts: list[str], images: Tensor, *, tag: list[Any]) -> Tensor:
    assert (prompts, tag) == (["a", "b", "c"], ["x", None, None])
    return images.mean((1, 2, 3))


def without_records(images: Tensor, prompts: list[str]) -> Tensor:
    return images.mean((1, 2, 3))


def of_images(images: Tensor) -> Tensor:
    return images.mean((1, 2, 3))


def of_tags(tag: list[Any], images: Tensor) -> Tensor:
    assert tag == ["x", None, None]
    return images.mean((1, 2, 3))


def annotated(them: RewardBatch) -> Tensor:
    return them.images.mean((1, 2, 3))


class Object:
    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        return images.mean((1, 2, 3))


def brightness(batch: RewardBatch, scale: float = 1.0) -> Tensor:
    return scale * batch.images.mean((1, 2, 3))


WAYS = [with_records, by_name, without_records, of_images, of_tags, annotated, Object(), brightness]


@pytest.mark.parametrize("way", WAYS)
def test_how_a_reward_is_called(way: Callable[..., Any]) -> None:
    """Image i is i / 4 everywhere."""
    assert ask("it", way, batch(), "here").tolist() == [0, 0.25, 0.5]


def test_one_reward_cannot_change_what_the_next_sees() -> None:
    """What it writes into lists and mappings of a record, however deep, stays its own; what is no
    plain JSON is copied too, and values come back as they are."""

    def vandal(batch: RewardBatch) -> Tensor:
        record = batch.meta[1]
        assert record["list"] == [{"deep": [1, 2]}] and record["pair"] == ([3],)
        assert record["none"] is None
        record["list"][0]["deep"].append(9)
        record["array"][0] = 7.0
        record["pair"][0].append(9)
        record["new"] = True
        batch.meta[0]["tag"] = "y"
        batch.prompts.clear()
        for rows in (batch.images, batch.group, batch.sigma):
            rows.add_(5)
        return torch.ones(3)

    shown = batch()
    kept: dict[str, Any] = {"list": [{"deep": [1, 2]}], "array": np.zeros(2), "pair": ([3],)}
    shown.meta[1].update(kept, none=None)
    ask("vandal", vandal, shown, "here")
    assert kept["list"] == [{"deep": [1, 2]}] and kept["pair"] == ([3],)
    assert kept["array"].tolist() == [0.0, 0.0]
    assert [*shown.meta[1]] == ["prompt", "list", "array", "pair", "none"]
    assert (shown.group.tolist(), shown.sigma.tolist()) == ([0, 1, 2], [0, 0, 0])
    shown.meta[1] = {"prompt": "b"}
    assert ask("next", with_records, shown, "here").tolist() == [0, 0.25, 0.5]


def wrong(*_: Any, **__: Any) -> None:
    raise KeyError("gone")


def leaving(*_: Any) -> None:
    raise SystemExit("no licence")


def of_a_batch(batch: Any) -> Any:
    return batch.mean((1, 2, 3))


def with_metadata(images: Tensor, prompts: list[str], metadata: list[Any]) -> Tensor:
    return images.mean((1, 2, 3))


CLASS = type("Broken", (), {"__init__": lambda self: wrong()})
WITH = type("With", (), {"__call__": wrong, "probe": wrong, "check_record": wrong})
HERE = rf"KeyError: 'gone' \({Path(__file__).name}, line \d+\)"
PROMPTS = PromptSet(["a"], [{"prompt": "a"}], "p", "p.txt", ["p.txt, line 1"])


@pytest.mark.parametrize(
    ("action", "kind", "said"),
    [
        (
            lambda: rewards_of({"it": Call("rewards.it", "x", "x", {}, function=CLASS)}),
            ConfigError,
            f"making reward 'it' failed with {HERE}",
        ),
        (
            lambda: probe_rewards({"it": WITH()}),
            RewardError,
            f"the probe of reward 'it' failed.*{HERE}",
        ),
        (
            lambda: check_records(PROMPTS, {"it": WITH()}),
            DataError,
            f"p.txt, line 1: the check_record of reward 'it' failed with {HERE}",
        ),
        (lambda: ask("it", wrong, batch(), "here"), RewardError, f"here: reward 'it'.*{HERE}"),
        (
            lambda: ask("it", of_a_batch, batch(), "here"),
            RewardError,
            r"AttributeError.* gets a RewardBatch; write f\(images, prompts\)$",
        ),
        (
            lambda: ask("it", with_metadata, batch(), "here"),
            RewardError,
            r"'it': its argument 'metadata' is nothing that a reward gets; .* Write f\(images, ",
        ),
        (lambda: ask("it", leaving, batch(), "here"), RewardError, "SystemExit: no licence"),
    ],
)
def test_every_failure_is_one_message_that_names_the_line(
    action: Callable[[], Any], kind: type[FlowRLError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        action()


# ------------------------------------------------------------------------------- images without one


def test_the_limit_of_unscored_images_is_that_of_the_whole_iteration(tmp_path: Path) -> None:
    """All images of one of four parts are a quarter of the iteration's."""
    parts = ("train.prompts=4", "train.parts=4", "rewards.red={fn: toykit.blind, prompt: X}")
    probe = Trainer(toy(tmp_path, *parts))
    word = probe.train_set.texts[probe.rows()[1]]
    config = [*parts, f"rewards.red.prompt={word}"]
    metrics = Trainer(toy(tmp_path, *config, "train.max_unscored=0.25")).step()
    assert metrics["trained"] > 0
    with pytest.raises(RewardError, match=rf"prompt '{word}' \(4 of 16 images have no finite"):
        Trainer(toy(tmp_path, *config, "train.max_unscored=0.24")).step()


def test_an_evaluation_counts_its_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 prompts with 2 images each, the model breaks the last image and the reward skips the
    first prompt: 3 of 8. The mean is that of the other images, task by task."""
    decode, texts = LinearFlow.decode, ["one", "two", "three", "four"]
    records = [{"prompt": text, "tag": "ab"[i % 2]} for i, text in enumerate(texts)]
    prompts = PromptSet(texts, records, "p", "p.txt")
    options: dict[str, Any] = {"height": 16, "width": 16, "steps": 2, "images": 2}
    shown: list[int] = []

    def partly(batch: RewardBatch) -> Tensor:
        shown.append(len(batch.images))
        assert bool(batch.images.isfinite().all())
        keep = torch.tensor([text != "one" for text in batch.prompts])
        return torch.where(keep, redness(batch), NAN)

    whole = evaluate_prompts(LinearFlow(), prompts, {"red": redness}, headline="red", **options)
    monkeypatch.setattr(
        LinearFlow,
        "decode",
        lambda self, x: torch.cat([decode(self, x)[:-1], torch.full((1, 3, 16, 16), NAN)]),
    )
    options |= {"headline": "red", "max_unscored": 0.375}
    found = evaluate_prompts(LinearFlow(), prompts, {"red": partly, "all": redness}, **options)
    assert shown == [7] and found["unscored"] == {"red": 3, "all": 1}
    assert {tag: task["images"] for tag, task in found["tasks"].items()} == {"a": 2, "b": 3}
    assert found["red"] != whole["red"] and math.isfinite(found["rewards"]["all"])
    with pytest.raises(RewardError, match=r"'red' gave no score for an image of 'one' \(3 of 8"):
        evaluate_prompts(
            LinearFlow(), prompts, {"red": partly}, **{**options, "max_unscored": 0.37}
        )


def trl(prompts: list[str], completions: list[str]) -> list[float]:
    return [float(len(completion)) for completion in completions]


FOREIGN = [
    (trl, "completions"),
    (lambda samples: [len(sample) for sample in samples], "samples"),
    (lambda imgs, prompts, tag: [0.0] * len(tag), "imgs'.*did you mean 'images'"),
    (lambda images, prompts, prompt_metadata: [0.0] * 3, "prompt_metadata"),
]


@pytest.mark.parametrize(("function", "said"), FOREIGN)
def test_a_function_of_another_library_is_refused(function: Any, said: str, tmp_path: Path) -> None:
    """Where it is asked, and in a run before the model is made."""
    form = r"images, prompts.*Write f\(images, prompts, \*\*record\)"
    with pytest.raises(RewardError, match=f"here: reward 'it': its argument '{said}.*{form}"):
        ask("it", function, batch(), "here")
    config = config_of(toy(tmp_path), rewards={"it": function})
    with pytest.raises(ConfigError, match=f"reward 'it': its argument '{said}.*{form}"):
        Trainer(config)


def test_a_key_that_only_other_prompts_have_is_none() -> None:
    """Known from the whole list, so that a batch without it is no surprise in the middle of a
    run."""

    def of_counts(images: Tensor, count: list[Any]) -> list[float]:
        return [float(one or 0) for one in count]

    with pytest.raises(RewardError, match="'count' is nothing that a reward gets"):
        ask("it", of_counts, batch(), "here")
    check_arguments({"it": of_counts}, [{"prompt": "a"}, {"prompt": "b", "count": 3}])
    assert ask("it", of_counts, batch(), "here").tolist() == [0, 0, 0]


# ---------------------------------------------------------------------------- rewards of a program


def test_rewards_that_are_handed_over(tmp_path: Path) -> None:
    config = toy(tmp_path, "rewards.red.weight=0.5", "rewards.red.transform={fn: rank}")
    changed = config_of(config, rewards={"red": without_records, "more": Object()})
    assert list(changed.rewards) == ["red", "more"]
    assert changed.reward_weights == {"red": 0.5, "more": 1.0}
    assert len(changed.rewards["red"].transform) == 1 and changed.headline == "red"
    metrics = Trainer(changed).step()
    assert metrics["reward/red"] == pytest.approx(metrics["reward/more"])
    with pytest.raises(ConfigError, match="rewards.red: expected a function, .* got 3"):
        config_of(config, rewards={"red": 3})  # type: ignore[dict-item]


def motion(batch: RewardBatch) -> Tensor:
    return batch.images.diff(dim=1).abs().mean((1, 2, 3, 4))


motion.judges_videos = True  # type: ignore[attr-defined]


def videos(*frames: list[float]) -> RewardBatch:
    """Return videos of frames of one grey each."""
    count = len(frames)
    levels = torch.tensor(frames, dtype=torch.float32)[:, :, None, None, None].expand(
        -1, -1, 3, 2, 2
    )
    meta: list[dict[str, Any]] = [{"prompt": str(i)} for i in range(count)]
    names = [record["prompt"] for record in meta]
    return RewardBatch(levels, names, torch.tensor([0] * count), meta, torch.zeros(count))


@pytest.mark.parametrize(
    ("way", "expected"),
    [("mean", [0.5, 0.5]), ("min", [0.25, 0.0]), ("first", [0.25, 1.0]), ("last", [0.75, 0.5])],
)
def test_an_image_reward_judges_frames_as_the_config_says(way: str, expected: list[float]) -> None:
    """By hand: frames of grey .25 .5 .75 and 1 0 .5."""
    batch = videos([0.25, 0.5, 0.75], [1.0, 0.0, 0.5])
    assert ask("grey", PerFrame(brightness, way), batch, "here").tolist() == expected


def test_a_frame_without_a_score_and_a_wrong_number_of_scores() -> None:
    def some(batch: RewardBatch) -> list[float | None]:
        return [None if value == 0 else value for value in brightness(batch).tolist()]

    scores = ask("some", PerFrame(some, "mean"), videos([0.5, 0.5], [1.0, 0.0]), "here")
    assert scores[0] == 0.5 and scores[1].isnan()
    with pytest.raises(RewardError, match="reward 'one': expected 4 numbers, one per frame"):
        ask("one", PerFrame(lambda batch: torch.ones(2), "min"), videos([0, 0], [0, 0]), "here")


def test_prompts_records_and_groups_follow_the_frames() -> None:
    """A prompt's frames of one time are compared with each other: 2 prompts of 2 videos."""
    seen: list[RewardBatch] = []

    class Spy:
        judges_singly = True
        differentiable = True

        def __call__(self, batch: RewardBatch) -> Tensor:
            seen.append(batch)
            return brightness(batch)

    reward, batch = PerFrame(Spy(), "mean"), videos([0, 0], [0, 0], [0, 0], [0, 0])
    reward(batch._replace(group=torch.tensor([0, 0, 1, 1])))
    assert judges_singly(reward) and differentiable(reward)
    assert seen[0].prompts == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert [record["prompt"] for record in seen[0].meta] == seen[0].prompts
    assert seen[0].group.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


def test_a_reward_that_asks_people_still_does_frame_by_frame() -> None:
    """The two that ship and say so: people are left alone by evaluations, and a reward of how
    frames differ may like a damaged one."""
    people = PerFrame(votes(folder="unused"), "first")
    assert asks_people(people) and not ignores_quality(people)
    unlike = PerFrame(object.__new__(novelty), "mean")
    assert ignores_quality(unlike) and not asks_people(unlike)
    assert not asks_people(PerFrame(brightness, "mean"))


def test_rewards_and_models_that_do_not_fit(tmp_path: Path) -> None:
    plain = Call("rewards.pick", "pickscore", "", {})
    whole = Call("rewards.move", "motion", "", {})
    assert fitting(plain, brightness, 1) is brightness and fitting(whole, motion, 5) is motion
    with pytest.raises(ConfigError, match=r"rewards.pick: pickscore judges images, .* 5 frames. "):
        fitting(plain, brightness, 5)
    with pytest.raises(ConfigError, match="rewards.move: motion judges videos, but .* images"):
        fitting(whole, motion, 1)
    both = Call("rewards.move", "motion", "", {}, frames="mean")
    with pytest.raises(ConfigError, match=r"rewards.move.frames: .* 'mean' has no effect"):
        fitting(both, motion, 5)
    # one frame has no mean, and nothing else is to be chosen from it
    ways = Call("rewards.pick", "pickscore", "", {}, frames="mean")
    with pytest.raises(ConfigError, match=r"rewards.pick.frames: the model makes images, .*'mean'"):
        fitting(ways, brightness, 1)
    learned = SimpleNamespace(
        update=0, state_dict=0, load_state_dict=0, trains_policy=0, __call__=0
    )
    learned_type = type("Learned", (), vars(learned))
    with pytest.raises(ConfigError, match="trained along on images"):
        fitting(Call("rewards.adv", "adversarial", "", {}, frames="mean"), learned_type(), 5)
    # as a config says it
    config = toy(tmp_path, "rewards.red.frames=min")
    assert config.rewards["red"].frames == "min"
    assert config.to_dict()["rewards"]["red"]["frames"] == "min"
    with pytest.raises(ConfigError, match="rewards.red.frames: expected"):
        toy(tmp_path, "rewards.red.frames=median")


CUDA = torch.cuda.is_available()


class Moved(nn.Linear):
    """A layer that remembers where it was sent, and where it was when it was called."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.sent: list[str] = []
        self.away = False

    def to(self, *args: Any, **more: Any) -> Moved:
        self.sent.append(str(args[0]))
        return super().to(*args, **more)

    def forward(self, x: Tensor) -> Tensor:
        self.sent.append("asked")
        if bool(x.isnan().any()):
            raise ValueError("no number")
        return super().forward(x)


class Towers:
    def __init__(self) -> None:
        self.parts = {"it": [Moved()]}


class looks:
    judges_singly = True

    def __init__(self) -> None:
        self.towers = Towers()

    def __call__(self, batch: RewardBatch) -> Tensor:
        net = self.towers.parts["it"][0]
        found: Tensor = net(batch.images.mean((1, 2, 3))[:, None])[:, 0]
        return found


def batch_of(images: Tensor) -> RewardBatch:
    count = len(images)
    return RewardBatch(images, [""] * count, torch.arange(count), [{}] * count, torch.zeros(count))


def test_networks_are_away_but_while_it_scores() -> None:
    """Also after an error; what the reward promises stays, but for gradients."""
    call = Call("rewards.it", "looks", "looks", {}, function=looks, offload=True)
    (reward,) = rewards_of({"it": call}).values()
    (net,) = networks_of(reward)
    assert isinstance(reward, Resting) and isinstance(net, Moved)
    assert net.sent == ["cpu"] and reward.judges_singly and not reward.differentiable
    images = torch.rand(3, 3, 2, 2)
    scores = ask("it", reward, batch_of(images), "here")
    assert net.sent == ["cpu", "cpu", "asked", "cpu"]  # its home is this machine's CPU, too
    expected = images.mean((1, 2, 3)) * net.weight[0, 0] + net.bias[0]
    torch.testing.assert_close(scores, expected.detach())
    with pytest.raises(ValueError, match="no number"):
        reward(batch_of(images * torch.nan))
    assert net.sent[-2:] == ["asked", "cpu"]


def test_every_scorers_networks_are_found(weights: Weights) -> None:
    """All weights that a public layout has: nothing would be left on the device."""
    for name in ("clip, transformers", "dino"):
        reward = SCORERS[name](weights).make(device="cpu")
        held = sum(p.numel() for net in networks_of(reward) for p in net.parameters())
        assert held > 1000, name
    with pytest.raises(ConfigError, match="rewards.it.offload: jpeg has no network"):
        resting(Call.bind("rewards.it", {"fn": "jpeg", "offload": True}))
    call = Call.bind("rewards.it", {"fn": "jpeg", "offload": True})
    assert call.offload and call.to_dict()["offload"] is True


class Hung(nn.Module):
    """A network that keeps others without registering them, in a list of a part and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(1, 1)
        self.part.beside = {"it": [Moved()]}  # type: ignore[assignment]
        object.__setattr__(self, "frozen", Moved())
        self.library = torch  # a module of Python is nobody's network


def test_networks_that_a_network_does_not_register_are_found() -> None:
    """Two of them, and the network itself with its one part."""
    net = Hung()
    found = {id(one) for one in networks_of(net)}
    assert found == {id(net), id(net.frozen), id(net.part.beside["it"][0])}  # type: ignore[index]
    # also where the network itself has no weights
    empty = nn.Module()
    empty.held = [moved := Moved()]  # type: ignore[assignment]
    assert list(networks_of(empty)) == [moved]


def test_the_transformer_of_a_judge_of_latents_rests() -> None:
    """All that the judge computes with: its head, which is registered, and the frozen layers."""
    taps: dict[str, Any] = {"taps": [1, 3], "width": 32, "queries": 2}
    judge = LatentJudge(load_transformer("assets/shapes-sd3"), **taps)
    transformer = judge.transformer[0]
    assert {id(net) for net in networks_of(judge)} == {id(judge), id(transformer)}


class loads_at_once:
    """Load a network with the first image, another one when it is probed."""

    loads_late = True

    def probe(self) -> None:
        self.other = Moved()

    def __call__(self, batch: RewardBatch) -> Tensor:
        if not hasattr(self, "net"):
            self.net = Moved()
        found: Tensor = self.net(batch.images.mean((1, 2, 3))[:, None])[:, 0]
        return found


def test_networks_that_come_late_rest_from_then_on() -> None:
    call = Call("rewards.it", "late", "late", {}, function=loads_at_once, offload=True)
    reward: Any = resting(call)
    assert reward.networks == []
    reward.probe()
    assert reward.other.sent == ["cpu"]
    reward(batch_of(torch.rand(2, 3, 2, 2)))
    assert reward.net.sent == ["asked", "cpu"]
    reward(batch_of(torch.rand(2, 3, 2, 2)))
    assert reward.net.sent == ["asked", "cpu", "cpu", "asked", "cpu"]
    # home, away, home, away: each was taken in once
    assert reward.other.sent == ["cpu", "cpu", "cpu", "cpu", "cpu"]


def test_t2i_compbench_can_be_offloaded(weights: Weights) -> None:
    """It loads what its records need, here everything. The scores are those of the same reward
    where nothing rests."""
    scorer = SCORERS["t2i_compbench"](weights)
    plain = scorer.make(device="cpu")
    late = {"fn": "t2i_compbench", **weights.t2i_compbench, "device": "cpu", "offload": True}
    reward = resting(Call.bind("rewards.it", late))
    assert reward.networks == []
    torch.testing.assert_close(reward(scorer.batch()), plain(scorer.batch()))
    resting_ones, held = set(map(id, reward.networks)), set(map(id, networks_of(reward.reward)))
    assert resting_ones == held
    assert len(reward.networks) > 1


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_weights_leave_the_gpu(weights: Weights) -> None:
    scorer = SCORERS["clip, transformers"](weights)
    plain, away = scorer.make(device="cuda"), scorer.make(device="cuda")
    rested = Resting(away, list(networks_of(away)))
    assert all(p.device.type == "cpu" for net in rested.networks for p in net.parameters())
    torch.testing.assert_close(rested(scorer.batch()), plain(scorer.batch()))
    assert all(p.device.type == "cpu" for net in rested.networks for p in net.parameters())
