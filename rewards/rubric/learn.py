"""Learn a rubric from preferences: rules are scored, weighed, kept, and new ones proposed where the
best ones still err (AutoRubric-T2I, 2605.17602; reconstruction)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flowrl.core.errors import DataError

from .._common.scorer import to_pil
from .._judge.answer import Answer
from .._judge.ask import Job, Judge, fill
from .reward import WHO, Checks, Rule

PROPOSE = (
    'Both images were made from this caption: "{prompt}"\nPeople prefer the first one. Name what '
    "makes it better as rules that one can check on a single image of any caption. One rule a "
    "line, beginning with 'Rule:', and nothing else."
)
LINE = re.compile(r"^\W*rule\W*:\s*(.+?)\s*$", re.IGNORECASE | re.MULTILINE)
Propose = Callable[["Preferences"], Sequence[str]]


class Preferences(NamedTuple):
    """Pairs of images, of which one is preferred."""

    better: Tensor  # [P, 3, H, W] in [0, 1]
    worse: Tensor  # [P, 3, H, W]
    prompts: list[str]  # [P]


class Round(NamedTuple):
    """What one round came to."""

    rules: list[Rule]  # kept
    asked: int  # rules that were weighed
    accuracy: float  # over the pairs that were scored
    unscored: int  # pairs of which an answer is missing


def learn(
    preferences: Preferences,
    rules: Sequence[str],
    checks: Checks,
    *,
    strength: float,
    keep: int = 20,
    rounds: int = 1,
    hard: int = 16,
    propose: Propose | None = None,
) -> list[Round]:
    """Learn from a pool of rules, round after round -> the rounds; the best is the most accurate.

    Each round scores both images of every pair by the rules that are new, fits the differences,
    divided by each rule's root mean square so that the penalty is the same for all, and keeps the
    `keep` largest weights. `propose` is then shown the `hard` pairs that are judged worst, and its
    rules join the kept ones. Pairs with a missing answer are left out. Raises DataError where that
    leaves none, or for rules that repeat.
    """
    pool = list(dict.fromkeys(rules))
    if not pool or len(pool) < len(rules):
        raise DataError(f"{WHO}: expected rules, each once, got {list(rules)!r:.200}")
    known: dict[str, Tensor] = {}
    found: list[Round] = []
    for number in range(rounds):
        # ask the judge only about rules that are new: gaps [P] of each are kept
        new = [rule for rule in pool if rule not in known]
        known |= dict(zip(new, _gaps(preferences, new, checks).T, strict=True))
        gaps = torch.stack([known[rule] for rule in pool], dim=1)
        # fit on the pairs with every answer, and keep the rules that weigh most
        whole = ~gaps.isnan().any(dim=1)
        if not bool(whole.any()):
            raise DataError(f"{WHO}: no pair has an answer to every rule")
        weights = weigh(gaps[whole], strength, keep)
        kept = [Rule(rule, float(w)) for rule, w in zip(pool, weights, strict=True) if w]
        kept.sort(key=lambda rule: -abs(rule.weight))
        right = accuracy(weights, gaps[whole])
        found.append(Round(kept, len(pool), right, int((~whole).sum())))
        # where the fit errs most, new rules may help: propose some, beside those that were kept
        if propose is None or number + 1 == rounds:
            break
        order = (gaps[whole] @ weights).argsort(stable=True)[:hard]
        rows = whole.nonzero()[:, 0][order]
        shown = Preferences(
            preferences.better[rows],
            preferences.worse[rows],
            [preferences.prompts[row] for row in rows.tolist()],
        )
        pool = list(dict.fromkeys([*(rule.text for rule in kept), *propose(shown)]))
    return found


def best_of(rounds: Sequence[Round]) -> Round:
    """Return the most accurate round, of equal ones that with fewest rules."""
    return max(rounds, key=lambda one: (one.accuracy, -len(one.rules)))


def weigh(gaps: Tensor, strength: float, keep: int) -> Tensor:
    """Fit differences [N, R], each rule's divided by its root mean square -> weights [R] of the
    rules themselves, 0 but for the `keep` largest contributions."""
    size = gaps.double().square().mean(0).sqrt()
    scaled = fit(gaps / size.clamp_min(1e-12), strength)
    out = torch.zeros_like(scaled)
    top = scaled.abs().argsort(descending=True, stable=True)[:keep]
    out[top] = (scaled / size.clamp_min(1e-12))[top]
    return out


def _gaps(preferences: Preferences, rules: Sequence[str], checks: Checks) -> Tensor:
    """Return what the better image's checks exceed the worse one's by [P, R]."""
    prompts = preferences.prompts
    both = torch.cat([preferences.better, preferences.worse])
    better, worse = checks(both, [*prompts, *prompts], rules).chunk(2)
    return better - worse


class ByJudge:
    """Let the judge itself propose rules, shown the better image first."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def __call__(self, preferences: Preferences) -> list[str]:
        """Return the rules of all pairs, each once."""
        images = [*to_pil(preferences.better), *to_pil(preferences.worse)]
        count, jobs = len(preferences.prompts), []
        for i, prompt in enumerate(preferences.prompts):
            text = fill(PROPOSE, prompt=prompt)
            jobs.append(Job(f"rules of {prompt[:80]!r}", (i, count + i), text))
        said = self.judge.ask(images, jobs, read_rules, written=True)
        return list(dict.fromkeys(rule for rules in said for rule in rules or ()))


def read_rules(answer: Answer) -> list[str] | str:
    """Read the rules that a judge wrote, or say what is wrong."""
    found = LINE.findall(answer.text)
    return found if found else f"no line that begins with Rule: in {answer.text[:160]!r}"


def fit(features: Tensor, strength: float, *, tolerance: float = 1e-12) -> Tensor:
    """Minimise ``|w|_1 + C sum ln(1 + exp(-w . f))`` over w -> [R] float64; C is `strength`.

    features [N, R]: of each pair, what the better image's checks exceed the worse one's by. No
    intercept (AutoRubric-T2I, 2605.17602, in the form of scikit-learn's l1 logistic regression).
    Proximal gradient with steps 1/L, L = C/4 times the largest eigenvalue of F'F, accelerated
    (Beck and Teboulle 2009) and begun anew where the objective would rise.
    """
    f = features.double()
    # the steepest that the logistic loss can curve; no features, nothing to fit
    curvature = strength / 4 * torch.linalg.matrix_norm(f, 2).square()
    w = torch.zeros(f.shape[1], dtype=torch.float64)
    if not curvature > 0:
        return w
    ahead, pace, last = w, 1.0, objective(w, f, strength)
    # a gradient step on the logistic loss, then the l1 penalty pulls small weights to 0
    for _ in range(100_000):
        slope = -strength * f.T @ torch.sigmoid(-f @ ahead)
        step = ahead - slope / curvature
        new = step.sign() * (step.abs() - 1 / curvature).clamp_min(0)
        now = objective(new, f, strength)
        # momentum overshot: go back to the last point and begin anew without it
        if now > last and pace > 1:
            ahead, pace = w, 1.0
            continue
        # Nesterov's momentum, ever stronger; stop where weights hardly move
        faster = (1 + (1 + 4 * pace**2) ** 0.5) / 2
        ahead = new + (pace - 1) / faster * (new - w)
        moved = (new - w).abs().max()
        w, pace, last = new, faster, now
        if moved <= tolerance * (1 + w.abs().max()):
            break
    return w


def objective(w: Tensor, f: Tensor, strength: float) -> Tensor:
    """Return what `fit` minimises."""
    return w.abs().sum() + strength * softplus(-f @ w).sum()


def threshold(features: Tensor) -> float:
    """Return the strength up to which all weights are 0."""
    return float(2 / features.double().sum(0).abs().max())


def accuracy(w: Tensor, features: Tensor) -> float:
    """Return the share of pairs whose better image gets more; equal scores are half right."""
    gap = features.double() @ w
    return float(((gap > 0).double() + 0.5 * (gap == 0).double()).mean())
