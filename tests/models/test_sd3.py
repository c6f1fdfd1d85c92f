"""What only the SD3 adapter has to keep; what it shares is in the contract files."""

from __future__ import annotations

import pytest
import torch
from adapterkit import TOKENS, Folders
from diffusers import StableDiffusion3Pipeline
from torch import Tensor


def test_sigmas_are_the_doubly_shifted_grid(folders: Folders) -> None:
    """Closed form: S(s) = 3s / (1 + 2s) over linspace(1, S(1/1000), 10), then 0."""

    def shift(sigma: Tensor) -> Tensor:
        return 3 * sigma / (1 + 2 * sigma)

    low = float(shift(torch.tensor(0.001, dtype=torch.float64)))
    expected = [*shift(torch.linspace(1, low, 10, dtype=torch.float64)), 0]
    sigmas = folders.load("sd3").sigmas(10, 64, 64)
    assert sigmas[-1] == 0 and sigmas[0] == 1
    torch.testing.assert_close(sigmas.double(), torch.tensor(expected), rtol=0, atol=1e-6)


def test_dynamic_shift_depends_on_the_size_and_leaves_the_scheduler_alone(
    folders: Folders,
) -> None:
    model = folders.load("sd3 dynamic")
    before = model.pipeline().scheduler.sigmas.clone()
    assert not torch.equal(model.sigmas(5, 64, 64), model.sigmas(5, 64, 16))
    assert torch.equal(model.pipeline().scheduler.sigmas, before)


def test_without_t5_zero_tokens_stand_in_its_place(folders: Folders) -> None:
    """As diffusers loads the folder with text_encoder_3=None, which its docs show."""
    without = {"text_encoder_3": None, "tokenizer_3": None}
    bare = StableDiffusion3Pipeline.from_pretrained(folders["sd3.5"], **without)
    model = folders.load("sd3.5", t5=False)
    assert model.pipeline().text_encoder_3 is None and model.pipeline().tokenizer_3 is None
    options = {"do_classifier_free_guidance": False, "max_sequence_length": TOKENS}
    embeds, _, pooled, _ = bare.encode_prompt(["a cat"], None, None, **options)
    cond, whole = model.encode(["a cat"]), folders.load("sd3.5").encode(["a cat"])
    assert torch.equal(cond["embeds"], embeds) and torch.equal(cond["pooled"], pooled)
    assert cond["embeds"].shape[1] == 77 + TOKENS
    assert not cond["embeds"][:, -TOKENS:].any() and whole["embeds"][:, -TOKENS:].any()


def test_texts_in_memory_stay_within_their_bound(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folders.load("sd3")
    size = sum(tensor.numel() * 4 for tensor in model.encode(["x"]).values())
    monkeypatch.setattr("flowrl.models.prompt_encoding.CACHE_BYTES", 2 * size)
    many = model.encode([f"{i}" for i in range(5)])
    assert len(model._tuned.texts) == 2 and model._tuned.texts.bytes == 2 * size
    again = model.encode(["0"])["embeds"][0]
    assert torch.equal(again, many["embeds"][0])  # encoded again, to the bit
