"""Where the time of many iterations goes, by floating-point work: sampling, decoding, rewards,
training, evaluations.

A share of work is a share of time where all of it runs at one speed, which it does roughly.
"""

from __future__ import annotations

from flowrl.core.prompts import prompts_if_there
from flowrl.core.tables import flop
from flowrl.cost.estimate import MOST_UNKNOWN, Estimate, evaluated_at_once, judged
from flowrl.cost.memory import network_numbers
from flowrl.cost.meta_run import meta_run, workload_of

ITERATIONS = 1000
# operations of a reward's network on one image: a multiplication and an addition for each number
# and token, of the 257 tokens of CLIP ViT-L/14 at 224 pixels
REWARD_TOKENS = 257
SPEED = 100e12  # operations in a second, to turn work into hours


def work_of_iterations(found: Estimate, iterations: int = ITERATIONS) -> dict[str, int]:
    """Return the operations of so many iterations by what they are for; {} where an iteration's
    could not be counted."""
    if not found.flops:
        return {}
    c = found.config
    work = {name: count * iterations for name, count in found.flops.items()}
    # every image of an iteration, and every held-out one, is scored by all rewards
    times = 2 + (iterations // c.eval.every if c.eval.every else 0)
    grids = 2 + (iterations // c.samples.every if c.samples.every else 0)
    prompts = prompts_if_there(c.prompts.test)
    images = (len(prompts) if prompts else MOST_UNKNOWN) * c.eval.images * c.eval.best_of * times
    each = 2 * REWARD_TOKENS * network_numbers(c)
    work["rewards"] = each * found.forecast.work.images * iterations
    # held-out images and those of the image grids, in the size that is judged
    changed = judged(c)
    made, size = meta_run(workload_of(changed)), min(c.eval.batch, evaluated_at_once(c))
    batch = min(int(c.model.kwargs["decode_batch"]), evaluated_at_once(c))
    call = made.velocity(size).flops // size
    sides = {"height": changed.image.height, "width": changed.image.width}
    decoded = made.decoding(batch, batch=batch, **sides).flops // batch
    drawn = images + grids * c.samples.prompts
    work["evaluations"] = drawn * (c.eval.steps * call + decoded) + images * each
    return work


def time_lines(found: Estimate) -> list[str]:
    """Say where the time of 1,000 iterations is, the largest share first."""
    work = work_of_iterations(found)
    if not work:
        return []
    total = sum(work.values())
    shares = []
    for name, count in sorted(work.items(), key=lambda item: -item[1]):
        shares.append(f"{name} {100 * count / total:.1f} %" if count else f"{name} none counted")
    hours = total / SPEED / 3600
    return [
        f"time       of {ITERATIONS:,} iterations by work: {', '.join(shares)}",
        f"           {flop(total)} in all, {hours:.3g} hours at {flop(int(SPEED))} a second",
    ]
