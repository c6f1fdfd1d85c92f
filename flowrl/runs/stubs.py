"""Stubs of what a user adds to flowrl, outside of the package: a file, a test that passes, and the
command that trains with it at once.

Each is whole and does something, so that it can be changed line by line with a test at hand. The
word ``NAME`` in a text stands for the name, ``CLASS`` for it in capitals.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path
from typing import NamedTuple

from flowrl.core.errors import ConfigError, unknown
from flowrl.core.files import write_text
from flowrl.core.shipped_files import config_file

BASE = "shapes/flow_grpo"  # the config that stubs run on


class Stub(NamedTuple):
    """One kind of stub."""

    code: str  # of NAME.py; "" = there is none
    override: str  # of a config, which then uses it; "" = the config does
    test: str  # what test_NAME.py checks beside a rehearsal


METHOD = '''"""NAME: a policy gradient whose ratio is cut off from above."""

from flowrl.core.needs import needs
from flowrl.core.types import LossInput
from torch import Tensor


@needs("old_log_prob")
def NAME(data: LossInput, *, most: float = 1.01) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -advantage * log-prob, weighted by its ratio or by `most` if that is less -> [B]."""
    ratio = (data.now.log_prob - data.old_log_prob).exp().detach()
    loss = -data.batch.advantage * ratio.clamp_max(most) * data.now.log_prob
    return loss, {"ratio": ratio, "capped": (ratio > most).float()}
'''
METHOD_TEST = '''
def test_the_ratio_is_cut_off() -> None:
    """Log-probs 0 and 1 where both were 0: ratios 1 and e, of which the second is 1.5 at most."""
    batch = SimpleNamespace(advantage=torch.tensor([1.0, 2.0]))
    now = SimpleNamespace(log_prob=torch.tensor([0.0, 1.0]))
    data = SimpleNamespace(batch=batch, now=now, old_log_prob=torch.zeros(2))
    loss, metrics = NAME(data, most=1.5)
    assert loss.tolist() == [0.0, -3.0] and metrics["capped"].tolist() == [0.0, 1.0]
'''
REWARD = '''"""NAME: reward bright images."""

from typing import Any

from torch import Tensor


def NAME(images: Tensor, prompts: list[str], **record: Any) -> Tensor:
    """Score images [L, 3, H, W] in [0, 1] by their mean -> [L]; NaN is "not scored".

    `record` has each key of the prompts' records as a list with one entry per image.
    """
    return images.mean(dim=(1, 2, 3))
'''
REWARD_TEST = '''
def test_a_bright_image_is_better() -> None:
    """Black is 0, white is 1."""
    images = torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8)])
    assert NAME(images, ["a", "b"]).tolist() == [0.0, 1.0]
'''
MODEL = '''"""NAME: a velocity field over latents of 3 channels, one for each 8 x 8 pixels."""

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

FACTOR = 8  # pixels per latent
TEXT = 4  # length of a prompt's vector


class NAME(nn.Module):
    """v = eps - x0, linear in the latent, the prompt's vector and sigma."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.mix = nn.Parameter(0.1 * torch.randn(3, 3, generator=generator))
        self.text = nn.Parameter(0.1 * torch.randn(3, TEXT, generator=generator))
        self.time = nn.Parameter(0.1 * torch.randn(3, generator=generator))

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """Return the sigma grid [steps + 1], 1 -> 0."""
        return torch.linspace(1, 0, steps + 1, dtype=torch.float64)

    def encode(self, prompts: list[str]) -> dict[str, Tensor]:
        """Return what `velocity` needs of the prompts: {name: [G, ...]}, one row per prompt."""
        rows = []
        for prompt in prompts:
            seed = sum(prompt.encode())
            rows.append(torch.randn(TEXT, generator=torch.Generator().manual_seed(seed)))
        return {"text": torch.stack(rows)}

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        """Return the velocity at x [B, 3, h, w] and sigma [B] -> as x."""
        x, sigma, text = x.float(), sigma.float(), cond["text"].float()
        offset = text @ self.text.T + sigma[:, None] * self.time
        return torch.einsum("dc,bchw->bdhw", self.mix, x) + offset[:, :, None, None]

    def decode(self, x0: Tensor) -> Tensor:
        """Return images [B, 3, H, W] in [0, 1]."""
        return interpolate((x0.float() * 0.5 + 0.5).clamp(0, 1), scale_factor=FACTOR)

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Return the shape of one latent."""
        return (3, height // FACTOR, width // FACTOR)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return what the optimizer may change, in a fixed order."""
        return dict(self.named_parameters())
'''
MODEL_TEST = '''
def test_shapes() -> None:
    """Latents of 8 x 8 pixels, images in [0, 1]."""
    model = NAME()
    x = torch.randn(2, *model.latent_shape(32, 16))
    v = model.velocity(x, torch.ones(2), model.encode(["a", "b"]))
    images = model.decode(x)
    assert v.shape == x.shape == (2, 3, 4, 2) and images.shape == (2, 3, 32, 16)
    assert images.min() >= 0 and images.max() <= 1
'''
PART = '''"""NAME: a part of the training loop that stops where the reward is high enough."""

from typing import Any

import flowrl


class CLASS(flowrl.Part):
    """Stop after an iteration whose mean reward is above `above`."""

    def __init__(self, *, above: float = 0.9) -> None:
        self.above = above

    def after_iteration(self, run: Any, it: Any) -> None:
        """Note how far the reward is from the bound, and stop above it."""
        it.metrics["NAME/missing"] = self.above - it.metrics["reward"]
        if it.metrics["reward"] > self.above:
            run.state.stop = f"the reward is above {self.above:g}"
'''
PART_TEST = '''
def test_it_stops_above_the_bound() -> None:
    """A reward of 0.5 is above 0.4 and below 0.6."""
    for above, stops in ((0.4, True), (0.6, False)):
        run = SimpleNamespace(state=SimpleNamespace(stop=""))
        it = SimpleNamespace(metrics={"reward": 0.5})
        CLASS(above=above).after_iteration(run, it)
        assert bool(run.state.stop) is stops
'''
CONFIG_TEST = '''
def test_it_loads() -> None:
    """Its name is the file's."""
    assert flowrl.load_config(CONFIG, plugins=PLUGINS).name == "NAME".replace("_", "-")
'''
STUBS = {
    "method": Stub(METHOD, "loss={fn: NAME.NAME, most: 1.01}", METHOD_TEST),
    "reward": Stub(REWARD, "rewards={NAME: {fn: NAME.NAME}}", REWARD_TEST),
    "config": Stub("", "", CONFIG_TEST),
    "model": Stub(MODEL, "model={fn: NAME.NAME}", MODEL_TEST),
    "part": Stub(PART, "parts.NAME={fn: NAME.CLASS, above: 0.9}", PART_TEST),
}
"""Kind -> its stub."""

REHEARSAL = '''

def test_a_rehearsal() -> None:
    """One iteration on a tiny model."""
    found = rehearse(CONFIG, OVERRIDES, PLUGINS, quiet=True)
    assert found.summary["iterations"] == 1
'''


class Written(NamedTuple):
    """The files of a stub, and the commands that use them from their folder."""

    files: list[Path]
    train: list[str]  # the words of the command that trains with it
    test: list[str]


def write_stub(kind: str, name: str, folder: Path, *, base: str = BASE) -> Written:
    """Write a stub of a kind into a folder; of a config a copy of `base`.

    Raises ConfigError for an unknown kind, for a name that Python or flowrl has taken, and where a
    file would be written over.
    """
    if kind not in STUBS:
        raise ConfigError(f"new: flowrl {unknown(kind, STUBS, 'stub')}")
    _check_name(name, folder)
    stub = STUBS[kind]
    # the code, or a config; a reward that takes the place of all is also the headline
    texts = {f"{name}.py": _named(stub.code, name)} if stub.code else {}
    overrides = [_named(stub.override, name)] if stub.override else []
    overrides += [f"eval.score={name}"] if kind == "reward" else []
    config = base
    if kind in ("method", "config"):
        config = f"{name}.yaml"
        texts[config] = _config(kind, name, base)
    own = [] if kind == "method" else overrides
    plugins = [name] if stub.code else []
    texts[f"test_{name}.py"] = _test(stub, name, config, own, plugins)
    # nothing is written over
    taken = [file for file in texts if (folder / file).exists()]
    if taken:
        raise ConfigError(f"new: {folder / taken[0]} is there already; choose another name")
    for file, text in texts.items():
        write_text(folder / file, text)
    options = ["--plugin", name] if plugins else []
    train = ["flowrl", "train", config, *own, *options]
    return Written([folder / file for file in texts], train, ["pytest", f"test_{name}.py"])


def _check_name(name: str, folder: Path) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"new: expected a name like my_reward, got {name!r}")
    found = importlib.util.find_spec(name)
    if found is not None and Path(found.origin or "").parent != folder.resolve():
        raise ConfigError(f"new: {name!r} is the name of an installed package; choose another")


def _named(text: str, name: str) -> str:
    """Put the name in: "my_part", and "MyPart" for a class."""
    words = "".join(word.capitalize() for word in name.split("_"))
    return text.replace("NAME", name).replace("CLASS", words)


def _config(kind: str, name: str, base: str) -> str:
    """Return a copy of a config with its own name, and of a method with the stub's loss."""
    path = Path(base) if base.endswith((".yaml", ".yml")) else config_file(base)
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^name:.*$", f"name: {name.replace('_', '-')}", text, flags=re.MULTILINE)
    # the schema is found beside shipped configs alone
    text = re.sub(r"^# yaml-language-server:.*\n", "", text)
    if kind != "method":
        return text
    call = _named(STUBS[kind].override, name).partition("=")[2]
    changed, count = re.subn(
        r"^loss:.*\n(?:[ #].*\n)*", f"loss: {call}\n", text, flags=re.MULTILINE
    )
    if count != 1:
        raise ConfigError(f"new: expected a config with a loss section, got {path}")
    return changed


def _test(stub: Stub, name: str, config: str, overrides: list[str], plugins: list[str]) -> str:
    """Return the text of the stub's test."""
    body = _named(stub.test, name)
    blocks: list[list[str]] = [[], [], []]  # of the standard library, of packages, of the stub
    if ".yaml" in config:
        blocks[0].append("from pathlib import Path")
    if "SimpleNamespace" in body:
        blocks[0].append("from types import SimpleNamespace")
    blocks[1] += ["import flowrl"] if "flowrl." in body else []
    blocks[1] += ["import torch"] if "torch." in body else []
    blocks[1].append("from flowrl.runs.rehearse import rehearse")
    if stub.code:
        what = re.findall(r"^(?:def|class) (\w+)", _named(stub.code, name), re.MULTILINE)[0]
        blocks[2].append(f"from {name} import {what}")
    # the constants, then the tests
    place = f'f"{{Path(__file__).parent}}/{config}"' if ".yaml" in config else f'"{config}"'
    names = {"CONFIG": place, "OVERRIDES": repr(overrides), "PLUGINS": repr(plugins)}
    values = [f"{key} = {value}".replace("'", '"') for key, value in names.items()]
    head = [f'"""Tests of {name}."""']
    for block in (*blocks, values):
        head += ["", *block] if block else []
    return "\n".join([*head, "", body]) + REHEARSAL
