"""Cards: their memory, their peaks, and how long work takes on them.

A network reaches a share of a card's peak. What it was on an H200, for images of Stable Diffusion
3.5 and FLUX, is the range of all times here: assets/results/performance-queue.json has the rows.
"""

from __future__ import annotations

from typing import NamedTuple

MOST, LEAST = 0.36, 0.14  # of the peak that bfloat16 work reached
DISK = (2e9, 2e8)  # bytes that a disk writes in a second: a fast NVMe, and a slow network drive


class Card(NamedTuple):
    """A card's data sheet."""

    name: str
    pattern: str  # of torch's name of it
    sold: int  # GB that it is sold with
    short: float  # TFLOP/s of dense bfloat16 products with sums in float32, without sparsity
    wide: float  # TFLOP/s in float32 without TF32, which PyTorch takes only if it is told to


CARDS = (
    Card("RTX 3090", "NVIDIA GeForce RTX 3090", 24, 71.0, 35.6),
    Card("A10", "NVIDIA A10", 24, 125.0, 31.2),
    Card("L4", "NVIDIA L4", 24, 121.0, 30.3),
    Card("RTX 4090", "NVIDIA GeForce RTX 4090", 24, 165.2, 82.6),
    Card("RTX A6000", "NVIDIA RTX A6000", 48, 154.8, 38.7),
    Card("L40S", "NVIDIA L40S", 48, 362.05, 91.6),
    Card("A100", r"NVIDIA A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe", 80, 312.0, 19.5),
    Card("H100 PCIe", "NVIDIA H100 PCIe", 80, 756.0, 51.2),
    Card("H100", "NVIDIA H100 80GB HBM3", 80, 989.4, 66.9),
    Card("H200", "NVIDIA H200", 141, 989.4, 66.9),
)
"""Sources: NVIDIA's data sheets (H100, H200, A100, L40S, L4, A10) and white papers (Ada and Ampere
GA102: GeForce, RTX A6000)."""


class Work(NamedTuple):
    """What something takes, whatever the card."""

    short: float = 0  # operations in 16 bits
    wide: float = 0  # operations in float32
    written: float = 0  # bytes to the disk

    @property
    def operations(self) -> float:
        """Return the operations of both widths."""
        return self.short + self.wide

    def seconds(self, card: Card, *, slow: bool) -> float:
        """Return the seconds that it takes on a card, at the slow or at the fast end."""
        share, disk = (LEAST, DISK[1]) if slow else (MOST, DISK[0])
        busy = self.short / card.short + self.wide / card.wide
        return busy / 1e12 / share + self.written / disk


def cards_of(gigabytes: float) -> list[Card]:
    """Return the cards that are sold with so much memory or the next size above, the slowest first;
    beyond all sizes those of the largest. Cards have a little less than they are sold with."""
    sizes = sorted({card.sold for card in CARDS})
    sold = next((size for size in sizes if size >= gigabytes - 1), sizes[-1])
    return sorted((card for card in CARDS if card.sold == sold), key=lambda card: card.short)


def time_text(seconds: tuple[float, float]) -> str:
    """Say a range of seconds in the unit that suits its longer end: "7.1 to 18 h"."""
    unit, length = "s", 1
    if seconds[1] >= 90 * 60:
        unit, length = "h", 3600
    elif seconds[1] >= 90:
        unit, length = "min", 60
    low, high = (_figures(end / length) for end in seconds)
    return f"{low} to {high} {unit}"


def _figures(value: float) -> str:
    """Write a number with two figures; a larger one is rounded to a whole one."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.1 or value == 0 else f"{value:.1g}"
