"""Does each prompt get its own text encoding, and is all of it read."""

from __future__ import annotations

import torch

from flowrl.doctor.examined_run import ExaminedRun
from flowrl.doctor.findings import ReportSection
from flowrl.doctor.network import relative
from flowrl.models.adapter import PipelineModel
from flowrl.models.prompt_encoding import Reader, cut_off, readers_of

READ = 4000  # prompts whose length is looked at


def look_at_texts(examined: ExaminedRun) -> ReportSection:
    """Encode prompts together and alone; count those that are cut."""
    section = ReportSection("texts")
    texts = list(dict.fromkeys(examined.texts))
    groups = [examined.texts.index(text) for text in texts]
    with torch.no_grad():
        together = examined.encode(groups)
        alone = [examined.encode([group]) for group in groups]
    # row i has to be prompt i's
    for name, rows in together.items():
        for i, row in enumerate(rows):
            gaps = [relative(row.float(), one[name][0].float()) for one in alone]
            near = min(range(len(gaps)), key=lambda k: gaps[k])
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
    return sorted(readers_of(tokenizers, t5_tokens=tokens), key=lambda reader: reader.limit)
