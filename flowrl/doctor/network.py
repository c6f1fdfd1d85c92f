"""Does the network answer the same, whoever asks: again, with a gradient, alone? And does each
prompt get its own text encoding, with all of it read?"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.algorithms.forest import cond_of
from flowrl.doctor.examined_run import ExaminedRun
from flowrl.doctor.findings import ReportSection
from flowrl.models.adapter import PipelineModel
from flowrl.models.prompt_encoding import Reader, cut_off, readers_of

ROWS = 8
TIMES = ("timestep", "timesteps", "t")  # what networks call their time
READ = 4000  # prompts whose length is looked at


def look_at_network(examined: ExaminedRun) -> ReportSection:
    """Ask for velocities of the same rows again: as before, with a gradient, and row by row."""
    section, run, ro = ReportSection("network"), examined.trainer, examined.rollout
    # about `ROWS` nodes that are not clean yet
    inner = (ro.tree.step < len(ro.sigmas) - 1).nonzero().flatten()
    inner = inner[:: -(-len(inner) // ROWS)]  # of all steps
    x, cond = ro.x[inner].float(), cond_of(ro, inner)
    sigma = ro.sigmas[ro.tree.step[inner]]

    def ask(rows: slice = slice(None)) -> Tensor:
        some = {name: value[rows] for name, value in cond.items()}
        return run.model.velocity(x[rows], sigma[rows], some).detach().float()

    # as in sampling, and each row in a call of its own; then as in training
    network = getattr(run.model, "network", None)
    networks = [network] if isinstance(network, torch.nn.Module) else []
    with torch.no_grad(), noted(networks) as sampled:
        first, again = ask(), ask()
        alone = torch.cat([ask(slice(i, i + 1)) for i in range(len(x))])
    with torch.enable_grad(), noted(networks) as trained:
        graded = ask()
    # asked twice it must say the same to the bit; otherwise a few roundings are allowed
    slack = examined.rounding
    gaps = [relative(rows, first) for rows in (again, graded, alone)]
    section.figures = dict(zip(("again", "with_gradient", "alone"), gaps, strict=True))
    if gaps[0] > 0:
        found = f"asked twice, velocities differ by {gaps[0]:.2g}"
        layers = _random_layers(run.model)
        if layers:
            found += f"; in training mode: {', '.join(layers[:3])}"
        section.find("ratio/random", found)
    asked = sampled.times[:1] + trained.times[:1]
    if len(asked) == 2 and not torch.equal(*asked):
        worst = float((asked[0] - asked[1]).abs().max())
        section.find("ratio/time", f"the network's times differ by up to {worst:.3g}")
    if gaps[1] > slack:
        section.find("ratio/grad-mode", f"with a gradient, velocities differ by {gaps[1]:.2g}")
    if gaps[2] > slack:
        section.find(
            "ratio/batch-shape", f"alone, rows differ by {gaps[2]:.2g} from a batch of {len(x)}"
        )
    # the first is the cause: what follows may only be its consequence
    section.findings = section.findings[:1]
    section.lines.append(
        f"velocities of {len(x)} rows: asked again {gaps[0]:.1e}, with a gradient {gaps[1]:.1e}, "
        f"one by one {gaps[2]:.1e} (relative differences)"
    )
    return section


class Inputs(NamedTuple):
    """What networks were given: the time of each call, and rows by the name of their argument."""

    times: list[Tensor]
    rows: dict[str, list[Tensor]]


@contextmanager
def noted(networks: Iterable[torch.nn.Module]) -> Iterator[Inputs]:
    """Note what networks are given while the block runs: the time of each call, the rest of what
    the first calls are given at the first time."""
    into = Inputs([], {})

    def note(network: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Keep what a call was given."""
        given = inspect.signature(network.forward).bind_partial(*args, **named).arguments
        named = {**given, **named}  # also where a network takes any names
        time = next(torch.as_tensor(named[name]) for name in TIMES if name in named)
        into.times.append(time.detach().float().cpu().flatten())
        # of one step, or all would stay in memory
        if bool((into.times[-1][0] == into.times[0][0]).all()):
            for name, rows in _rows(named):
                into.rows.setdefault(name, []).extend(rows)

    with ExitStack() as hooks:
        for network in dict.fromkeys(networks):
            hook = network.register_forward_pre_hook(note, with_kwargs=True)
            hooks.callback(hook.remove)
        yield into


def _rows(named: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the rows of each tensor that a network is given, by its name."""
    for name, value in named.items():
        if isinstance(value, Mapping):
            yield from _rows(value, f"{before}{name}.")
        elif isinstance(value, Tensor) and value.dim() > 1 or isinstance(value, list):
            rows = [row.detach().float().cpu() for row in value if isinstance(row, Tensor)]
            yield f"{before}{name}", rows


def _random_layers(model: Any) -> list[str]:
    network = getattr(model, "network", model)
    if not isinstance(network, torch.nn.Module):
        return []
    kinds = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d)
    return [name for name, m in network.named_modules() if isinstance(m, kinds) and m.training]


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of what is expected."""
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))


def cosine(one: Tensor, two: Tensor) -> float:
    """Return the cosine between two tensors as vectors; of two that are 0 it is 1."""
    norms = float(one.double().norm() * two.double().norm())
    if norms == 0:
        return float(float(one.norm()) == float(two.norm()))
    return float((one.double() * two.double()).sum() / norms)


def look_at_texts(examined: ExaminedRun) -> ReportSection:
    """Encode prompts together and alone; count those that are cut."""
    section = ReportSection("texts")
    texts = list(dict.fromkeys(examined.texts))
    groups = list(map(examined.texts.index, texts))
    with torch.no_grad():
        together = examined.encode(groups)
        alone = [examined.encode([group]) for group in groups]
    # row i has to be prompt i's
    for name, rows in together.items():
        for i, row in enumerate(rows):
            gaps = [relative(row.float(), one[name][0].float()) for one in alone]
            near = gaps.index(min(gaps))
            if gaps[i] > 0.01 and near != i and not section.findings:
                section.find(
                    "text/swapped",
                    f"encoded together, {texts[i]!r} has the {name} of {texts[near]!r}",
                )
    section.lines.append(f"{', '.join(together)}: each prompt has its own row")
    _sampled(examined, section)
    _lengths(examined, section)
    return section


def _sampled(examined: ExaminedRun, section: ReportSection) -> None:
    """The rollout's conditioning has to be that of its prompts."""
    ro = examined.rollout
    for place, group in enumerate(ro.group_ids.tolist()):
        own = examined.encode([group])
        for name, rows in ro.cond.items():
            gap = relative(rows[place].float(), own[name][0].float())
            if gap > 0.01 and not section.findings:
                section.find(
                    "text/swapped", f"{examined.texts[group]!r} was sampled with another {name}"
                )


def _lengths(examined: ExaminedRun, section: ReportSection) -> None:
    """Count the prompts that are longer than every text encoder reads."""
    readers = _readers(examined)
    if not readers:
        return
    trainer = examined.trainer
    texts = [*trainer.train_set.texts, *trainer.test_set.texts][:READ]
    cut = []
    for text in texts:
        if all(cut_off(text, reader) for reader in readers):
            cut.append(text)
    limits = ", ".join(f"{reader.name} reads {reader.limit} tokens" for reader in readers)
    section.figures = {"prompts": len(texts), "cut": len(cut)}
    section.lines.append(f"{len(cut)} of {len(texts)} prompts are too long; {limits}")
    if cut:
        rest = cut_off(cut[0], readers[-1])
        section.find("prompts/cut", f"{len(cut)} of {len(texts)} prompts, such as {rest!r} is lost")


def _readers(examined: ExaminedRun) -> list[Reader]:
    """Return what reads the prompts, the one that reads most last."""
    model = examined.model
    if not isinstance(model, PipelineModel):
        return []
    parts = model.pipeline().components
    tokenizers = [part for name, part in parts.items() if name.startswith("tokenizer") and part]
    tokens = getattr(model.options, "max_sequence_length", None)
    return sorted(readers_of(tokenizers, t5_tokens=tokens), key=attrgetter("limit"))
