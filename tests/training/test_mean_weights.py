"""A run that begins with the mean of several: tensors, adapters, and what cannot be averaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from toykit import toy

from flowrl.config.load import load_config
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.cost.report import absent_files
from flowrl.training.checkpoint import save
from flowrl.training.checkpoint_state import KEY
from flowrl.training.start_weights import check_start, low_rank, mean_weights, start_from
from flowrl.training.trainer import Trainer

A, B = "net.to_q.lora_A.default.weight", "net.to_q.lora_B.default.weight"


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_full_weights_are_averaged() -> None:
    """(1 + 2 + 6) / 3 = 3 and (0 + 3 - 3) / 3 = 0, exact in float32; bfloat16 is averaged there."""
    runs = []
    for kind, (one, two) in enumerate([(1.0, 0.0), (2.0, 3.0), (6.0, -3.0)]):
        runs.append((str(kind), {"w": torch.tensor([one, two], dtype=torch.bfloat16)}))
    found = mean_weights(runs)
    assert found["w"].tolist() == [3.0, 0.0] and found["w"].dtype == torch.float32


def test_a_mean_of_low_rank_is_found_exactly() -> None:
    """Two adapters of rank 4 that share two directions of two each: their mean has rank 4 at most,
    so nothing is lost. The means of A and of B by themselves are far from it."""
    up, down = drawn(6, 4, seed=0), drawn(4, 5, seed=1)
    ones = torch.zeros(4, 4)
    ones[0, 0], ones[1, 1] = 2.0, 1.0
    other = torch.zeros(4, 4)
    other[2, 2], other[3, 3] = 3.0, 0.5
    runs = [("one", {A: ones @ down, B: up}), ("two", {A: other @ down, B: up})]
    found = mean_weights(runs)
    mean = (up @ ones @ down + up @ other @ down) / 2
    torch.testing.assert_close(found[B] @ found[A], mean, rtol=1e-5, atol=1e-5)
    assert found[A].shape == (4, 5) and found[B].shape == (6, 4)
    # one run twice is itself
    twice = mean_weights([runs[0], runs[0]])
    torch.testing.assert_close(twice[B] @ twice[A], up @ ones @ down, rtol=1e-5, atol=1e-5)
    a = [drawn(2, 5, seed=2), drawn(2, 5, seed=3)]
    b = [drawn(6, 2, seed=4), drawn(6, 2, seed=5)]
    apart = (b[0] + b[1]) / 2 @ ((a[0] + a[1]) / 2)
    exact = (b[0] @ a[0] + b[1] @ a[1]) / 2
    new_a, new_b = low_rank(a, b)
    assert (new_b @ new_a - exact).norm() < 0.5 * (apart - exact).norm()


def test_a_mean_of_higher_rank_keeps_its_largest_part() -> None:
    """By hand: the mean of an adapter's diag(8, 2, 0) and another's diag(0, 0, 6) is diag(4, 1, 3),
    of which rank 2 keeps diag(4, 0, 3). Rows of A are orthogonal and as long as the given ones are
    on average, (8 + 2 + 6 + 0) / 4 = 4. For random ones: the truncated SVD of the whole product."""
    eye = torch.eye(3)
    a = [torch.tensor([[8.0, 0, 0], [0, 2.0, 0]]), torch.tensor([[0, 0, 6.0], [0, 0, 0]])]
    b = [eye[:, :2], eye[:, [2, 0]]]
    new_a, new_b = low_rank(a, b)
    torch.testing.assert_close(new_b @ new_a, torch.diag(torch.tensor([4.0, 0, 3])))
    torch.testing.assert_close(new_a @ new_a.T, 16 * torch.eye(2))
    downs = [drawn(3, 7, seed=n) for n in range(4)]
    ups = [drawn(9, 3, seed=9 + n) for n in range(4)]
    u, s, v = torch.linalg.svd(torch.stack(ups).bmm(torch.stack(downs)).mean(0))
    best = u[:, :3] @ torch.diag(s[:3]) @ v[:3]
    made_a, made_b = low_rank(downs, ups)
    torch.testing.assert_close(made_b @ made_a, best, rtol=1e-4, atol=1e-4)


def test_adapters_that_add_nothing_can_still_learn() -> None:
    """B = 0, as before the first step: nothing is added, and A is not 0, so B has a gradient."""
    new_a, new_b = low_rank([drawn(2, 5, seed=0)] * 2, [torch.zeros(6, 2)] * 2)
    assert not bool(new_b.any()) and bool((new_a.norm(dim=1) > 0.5).all())
    wide_a, wide_b = low_rank([torch.ones(4, 2)] * 2, [torch.ones(3, 4)] * 2)  # rank above a side
    torch.testing.assert_close(wide_b @ wide_a, torch.full((3, 2), 4.0))


def test_adapters_of_convolutions_are_averaged_in_their_shapes() -> None:
    """A [r, in, k, k] and B [out, r, 1, 1]: the mean of the two changes of the convolution, which
    has rank 4, made of two of rank 2 that are kept in four rows each."""
    zero = torch.zeros(2, 3, 3, 3)
    a = [torch.cat([drawn(2, 3, 3, 3, seed=n), zero]) for n in range(2)]
    b = [drawn(5, 4, 1, 1, seed=7 + n) for n in range(2)]
    runs = [(str(n), {A: a[n], B: b[n]}) for n in range(2)]
    found = mean_weights(runs)
    assert (found[A].shape, found[B].shape) == ((4, 3, 3, 3), (5, 4, 1, 1))
    changes = [torch.einsum("orxy,rijk->oijk", b[n], a[n]) for n in range(2)]
    made = torch.einsum("orxy,rijk->oijk", found[B], found[A])
    torch.testing.assert_close(made, (changes[0] + changes[1]) / 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [A, "w"])
def test_weights_that_are_not_finite_are_named(name: str, value: float) -> None:
    good = {A: torch.ones(2, 5), B: torch.ones(6, 2), "w": torch.ones(2, 2)}
    bad = {**good, name: torch.full_like(good[name], value)}
    with pytest.raises(CheckpointError, match=f"train.start: two: {name}: expected finite numbers"):
        mean_weights([("one", good), ("two", bad)])


def saved(folder: Path, alpha: float) -> str:
    """Save a checkpoint of one adapter of that alpha -> the folder."""
    tensors = {A: torch.ones(2, 5), B: torch.ones(6, 2)}
    save(folder, {"current": tensors}, {"iteration": 0, KEY: {"model.lora.alpha": alpha}})
    return str(folder)


def test_runs_of_another_alpha_are_not_averaged(tmp_path: Path) -> None:
    """Alpha scales what an adapter adds, and no tensor has it: checkpoints do. A file says nothing,
    one in a checkpoint what that does."""
    params = {A: nn.Parameter(torch.zeros(2, 5)), B: nn.Parameter(torch.zeros(6, 2))}
    plain, same = saved(tmp_path / "plain", 64), saved(tmp_path / "same", 64.0)
    other, bare = saved(tmp_path / "other", 32), str(tmp_path / "bare.safetensors")
    save_file({name: torch.ones_like(p) for name, p in params.items()}, bare)
    start_from([plain, same, bare], params)
    torch.testing.assert_close(params[B] @ params[A], torch.full((6, 5), 2.0))
    for one in (other, f"{other}/current.safetensors"):
        said = f"{one} has LoRA of alpha 32, and .*plain of alpha 64"
        with pytest.raises(CheckpointError, match=f"train.start: .*{said}"):
            start_from([plain, bare, one], params)
        # and before a model is loaded
        with pytest.raises(CheckpointError, match=said):
            check_start([plain, bare, one])


def test_a_run_begins_with_the_mean_of_two(tmp_path: Path) -> None:
    """The policy has the mean, of a checkpoint's averaged weights and of a file; the reference has
    the model's own. A list of one is that one, to the bit."""
    first = Trainer(toy(tmp_path, "optimizer.lr=0.1"))
    own = {name: p.detach().clone() for name, p in first.params.items()}
    first.step()
    first.save(tmp_path / "kept")
    averaged = {name: rows.clone() for name, rows in first.weights.state_dict()["ema"].items()}
    file = tmp_path / "own.safetensors"
    save_file(own, file)
    kl = "kl={fn: velocity_kl, beta: 0.1}"
    both = Trainer(toy(tmp_path, kl, f"train.start=[{tmp_path}/kept, {file}]"))
    assert both.config.train.start == (f"{tmp_path}/kept", str(file))
    for name, p in both.params.items():
        torch.testing.assert_close(p.detach(), (averaged[name] + own[name]) / 2)
        assert torch.equal(both.weights.state_dict()["ref"][name], own[name])
    alone = Trainer(toy(tmp_path, f"train.start=[{tmp_path}/kept]"))
    assert all(torch.equal(p, averaged[name]) for name, p in alone.params.items())


def test_what_cannot_be_averaged_is_one_error(tmp_path: Path) -> None:
    params = {"w": nn.Parameter(torch.zeros(2))}
    files = [str(tmp_path / f"{name}.safetensors") for name in ("one", "two", "three")]
    save_file({"w": torch.ones(2)}, files[0])
    save_file({"w": torch.ones(3)}, files[1])
    save_file({"w": torch.ones(2), "u": torch.ones(1)}, files[2])
    with pytest.raises(CheckpointError, match=r"two.* and .*one.* different tensors, 1 in .*: w\)"):
        start_from(files[:2], params)
    with pytest.raises(CheckpointError, match=r"different tensors, 1 in name or shape .first: u\)"):
        start_from([files[0], files[2]], params)
    with pytest.raises(CheckpointError, match="do not fit this model"):
        start_from([files[2], files[2]], params)
    missing = f"train.start=[{files[0]}, {tmp_path}/nowhere]"
    with pytest.raises(ConfigError, match=r"train.start: .*nowhere"):
        Trainer(toy(tmp_path, "model={fn: toykit.unloadable}", missing))
    config = load_config("shapes/flow_opd", ["train.start=[runs/no-a, runs/no-b]"])
    told = [one.said for one in absent_files(config) if one.part == "start"]
    assert ["runs/no-a" in told[0], "runs/no-b" in told[1], len(told)] == [True, True, 2]
    for wrong in ("[]", "[1]", "['']"):
        with pytest.raises(ConfigError, match="train.start"):
            load_config("shapes/flow_opd", [f"train.start={wrong}"])
