"""The aesthetic predictor's file: its fingerprint, and MLPs that only look like it."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from weightkit import Weights

from flowrl.core.errors import ConfigError, ModelError
from rewards.aesthetic import (
    FILE,
    PUBLISHED,
    Fingerprint,
    aesthetic,
    check_published,
    collapse,
    differences,
)

State = dict[str, Tensor]


def fingerprint_of(state: State) -> Fingerprint:
    """Compute a fingerprint by numpy, from the layers' matrices."""
    known = {name: value.double().numpy() for name, value in state.items()}
    matrix, offset = np.eye(768), np.zeros(768)
    for n in (0, 2, 4, 6, 7):
        weight, bias = known[f"layers.{n}.weight"], known[f"layers.{n}.bias"]
        matrix, offset = weight @ matrix, weight @ offset + bias
    sums = {name: float(known[name].sum()) for name in PUBLISHED.sums}
    w = matrix[0]
    norm, total, first = float(np.linalg.norm(w)), float(w.sum()), tuple(w[:6].tolist())
    return Fingerprint("0" * 64, sums, float(offset[0]), norm, total, first)


def test_published_numbers_fit_each_other() -> None:
    """Scores of four embeddings in the reference, 4.1: e_0, ones / sqrt(768), w / |w|, -w / |w|."""
    known = PUBLISHED
    assert known.b + known.first[0] == pytest.approx(4.545052400553648, abs=1e-8)
    assert known.b + known.total / math.sqrt(768) == pytest.approx(4.883284854377319, abs=1e-12)
    assert known.b + known.norm == pytest.approx(23.232270621, abs=1e-8)
    assert known.b - known.norm == pytest.approx(-12.758978932, abs=1e-8)


def test_a_fingerprint_tells_mlps_apart(weights: Weights, tmp_path: Path) -> None:
    state = weights.mlp
    known, other = fingerprint_of(state), {name: value + 1 for name, value in state.items()}
    assert differences(state, known) == []
    assert len(differences(other, known)) == len(PUBLISHED.sums) + 3 + 6
    for name in state:  # also in the tensors without a published sum: the affine map sees them
        spoilt = {key: value.clone() for key, value in state.items()}
        spoilt[name].view(-1)[0] += 1e-2
        assert differences(spoilt, known), name
    # another container of the same MLP passes
    save_file(state, tmp_path / "a.safetensors")
    check_published(tmp_path / "a.safetensors", state, known)
    # another MLP does not, but for the hash
    file = tmp_path / "b.safetensors"
    save_file(other, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    said = rf"sha256 {digest[:16]}.*16 numbers differ.*verify: false"
    with pytest.raises(ModelError, match=said):
        check_published(file, other, known)
    check_published(file, other, known._replace(sha256=digest))


def test_another_mlp_is_refused_unless_the_user_says_so(weights: Weights) -> None:
    given = dict(weights.aesthetic)
    assert aesthetic(**given).b == pytest.approx(fingerprint_of(weights.mlp).b, abs=1e-9)
    del given["verify"]
    for options in (given, given | {"verify": True}):
        with pytest.raises(ModelError, match="expected the published predictor"):
            aesthetic(**options)


def prefixed(state: State) -> State:
    return {f"mlp.{name}": value for name, value in state.items()}


def with_activations(state: State) -> State:
    """Linear, ReLU, Dropout, ...: the other net of the same repository."""
    return {name.replace("layers.7", "layers.9"): value for name, value in state.items()}


def without_a_bias(state: State) -> State:
    return {name: value for name, value in state.items() if name != "layers.4.bias"}


def narrower(state: State) -> State:
    return state | {"layers.0.weight": torch.zeros(1024, 512)}


def test_other_layouts_are_refused(weights: Weights, tmp_path: Path) -> None:
    for change, message in (
        (prefixed, r"10 missing .*10 unexpected \['mlp.layers.0.bias'"),
        (with_activations, r"2 missing \['layers.7.bias'.*2 unexpected \['layers.9.bias'"),
        (without_a_bias, r"1 missing \['layers.4.bias'\]"),
        (narrower, r"layers.0.weight: expected \[1024, 768\], got \[1024, 512\]"),
    ):
        torch.save(change(weights.mlp), tmp_path / FILE)
        with pytest.raises(ModelError, match=message):
            aesthetic(path=str(tmp_path))
    kit, given = weights.clip, weights.aesthetic
    other = {"clip": str(kit.file), "architecture": kit.architecture}
    with pytest.raises(ConfigError, match="embeddings of 768 numbers, and 'tiny-clip' makes 24"):
        aesthetic(**given | other)
    with pytest.raises(ModelError, match="tiny-wide"):
        aesthetic(**given | {"clip": str(kit.file)})


@pytest.mark.skipif(
    "FLOWRL_AESTHETIC" not in os.environ, reason="FLOWRL_AESTHETIC names the published file"
)
def test_the_real_file() -> None:
    """Fixtures: the reference, section 4.1 (numpy float64 on the published file)."""
    file = Path(os.environ["FLOWRL_AESTHETIC"])
    state = torch.load(file, map_location="cpu", weights_only=True)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == PUBLISHED.sha256
    assert not differences(state, PUBLISHED)
    w, b = collapse(state)
    wave = torch.arange(1, 769, dtype=torch.float64).sin()
    assert (w @ wave / wave.norm() + b).item() == pytest.approx(5.483880132144336, abs=1e-9)
    assert (w.argmax().item(), w.argmin().item()) == (288, 669)
