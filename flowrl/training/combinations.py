"""Refuse parts of a method that do not go together, before any weight is read."""

from __future__ import annotations

from torch import Tensor

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of
from flowrl.core.types import Plan, Rollout
from flowrl.training.guidance import KEYS, is_guided
from flowrl.training.iteration_cost import IterationCost
from flowrl.training.method import Method
from flowrl.training.real_images import fresh_of
from flowrl.training.refreshes import limits_of
from flowrl.training.stored_images import check_stored

ALONE = "flowrl.algorithms.losses.policy.penalty_alone"
NONZERO = "flowrl.algorithms.selection.select.nonzero"


def check_together(config: Config, method: Method, plan: Plan) -> None:
    """Raise ConfigError for a likelihood that does not go with plan, noise or penalty."""
    # what is trained decides what the plan has to offer: noise that differs, or every step
    trains = method.likelihood.trains
    if config.train.same_noise and trains == "roots":
        raise ConfigError(
            f"train.same_noise: likelihood {config.likelihood.fn} trains the initial noise, and "
            "images that start from one have none to compare; set it to false"
        )
    if trains == "steps" and not plan.every_step:
        raise ConfigError(
            f"plan {config.plan.fn}: likelihood {config.likelihood.fn} trains every step of a "
            "few-step sampler, and this plan does not keep them; take plan: {fn: few_step, steps: "
            "4}"
        )
    # the KL compares two policies on the same states, which a likelihood with a judge has not
    if hasattr(method.likelihood, "judge") and method.kl is not None:
        raise ConfigError(
            f"kl: likelihood {config.likelihood.fn} asks other weights about other states than the "
            "policy's, so their distance is none; leave the section kl out"
        )
    if "state" in needs_of(method.credit) and not hasattr(method.likelihood, "describe"):
        raise ConfigError(
            f"credit {config.credit.fn} judges the initial noise, and likelihood "
            f"{config.likelihood.fn} has none that is learned; take likelihood prior, or another "
            "credit, such as group_norm"
        )
    _check_whole_prompts(config, method)
    _check_data(config, method, plan)
    _check_noise(config, method, plan)
    _check_rescored(config, method)
    check_stored(plan, group=config.train.group, trains=trains)
    _check_empty_prompts(config, trains)
    _check_alone(config, method)


def _check_data(config: Config, method: Method, plan: Plan) -> None:
    """Raise ConfigError for a penalty on real images that has no rows, or no noise, to go by, or is
    taken for a distance to the base model; for a loss that leaves everything to a penalty without
    one."""
    if config.loss.path == ALONE and method.kl is None:
        raise ConfigError(
            f"loss {config.loss.fn}: learns from the section kl alone, and there is none with a "
            "beta above 0; add one, such as kl: {fn: data_velocity, beta: 1.0}"
        )
    if "data" not in method.needs:
        return
    if method.likelihood.trains not in ("draws", "leaves"):
        raise ConfigError(
            f"kl: real images are noised to the levels of what is trained, and likelihood "
            f"{config.likelihood.fn} trains {method.likelihood.trains}; take reverse or forward, "
            "or leave the section out"
        )
    if plan.stored is not None and fresh_of(config) == "none":
        raise ConfigError(
            f"kl.fresh=none: plan {config.plan.fn} samples nothing, so its images have no initial "
            "noise for the real ones; set it to noise or all"
        )
    # its value is an error, which has a floor that is no distance
    wants = [f"{name}.above" for name in limits_of(config)]
    wants += ["monitors.adaptive_kl"] if config.monitors.adaptive_kl else []
    if config.kl is not None and "data" in needs_of(config.kl.function) and wants:
        raise ConfigError(
            f"{wants[0]}: follows a distance to the base model, and kl {config.kl.fn} is an error "
            "on real images, which never comes near 0; leave the one or the other out"
        )


def _check_noise(config: Config, method: Method, plan: Plan) -> None:
    """Raise ConfigError for a likelihood that remembers the noise of images that were not
    sampled."""
    if plan.stored is not None and getattr(method.likelihood, "noise", "") == "initial":
        raise ConfigError(
            f"likelihood.noise=initial: plan {config.plan.fn} samples nothing, so its images have "
            "no initial noise; set it to fresh"
        )


def _check_rescored(config: Config, method: Method) -> None:
    """Raise ConfigError for a credit that reads the log-prob of a sampler with another guidance
    than what is trained."""
    read = {"moved", "log_prob"} & needs_of(method.credit)
    if read and config.train.guidance and getattr(method.likelihood, "rescores", False):
        raise ConfigError(
            f"credit {config.credit.fn}: reads the sampler's log-prob, which with train.guidance="
            f"{config.train.guidance:g} is that of a guided step, and likelihood "
            f"{config.likelihood.fn} trains without guidance; take another credit, or set "
            "train.guidance to 0"
        )


def check_alike(config: Config, made: Rollout) -> None:
    """Raise ConfigError if all images of a prompt are one: they start from the same noise, and no
    step of the plan adds any. `made`: one prompt's forest, by any model."""
    images = made.x[made.leaf]
    if not config.train.same_noise or len(images) < 2 or bool((images != images[0]).any()):
        return
    raise ConfigError(
        f"train.same_noise: all images of a prompt start from one noise, and plan {config.plan.fn} "
        "adds none on the way, so they would be the same image and nothing could be learnt from "
        "comparing them; set it to false, or take a plan whose steps have noise"
    )


def check_segment(config: Config, method: Method, segment: Tensor | None, nodes: Tensor) -> None:
    """Raise ConfigError for a segment [V] that has no id for what is trained, nodes [N]: it would
    join the images of all prompts."""
    if segment is None or config.segment is None or not bool((segment[nodes] < 0).any()):
        return
    raise ConfigError(
        f"segment {config.segment.fn}: joins draws, and likelihood {config.likelihood.fn} trains "
        f"{method.likelihood.trains}, which are in none of its segments; set segment={{fn: "
        "prompt} for a loss that compares the images of a prompt, else leave the section out"
    )


def _check_whole_prompts(config: Config, method: Method) -> None:
    """Raise ConfigError for a loss that compares the images of a prompt where one of them may be
    missing, or noised in another way."""
    # without a segment the loss itself says what is missing first
    alike = config.segment is None or getattr(method.likelihood, "shared", True)
    if "shared_noise" in method.needs and not alike:
        raise ConfigError(
            f"loss {config.loss.fn}: all images of a prompt must have the same time and noise; set "
            "likelihood.shared=true"
        )
    # rewards decide which images it drops, so a rehearsal would not find it
    if "siblings" in method.needs and any(call.path == NONZERO for call in config.select):
        raise ConfigError(
            f"select nonzero: leaves out images of advantage 0, and loss {config.loss.fn} compares "
            "all images of a prompt, whose group would be torn; leave this selection out"
        )


def _check_alone(config: Config, method: Method) -> None:
    """Raise ConfigError if models that are trained along leave the policy no iteration."""
    for name, role in method.companions.items():
        if role.alone >= config.train.iterations:
            raise ConfigError(
                f"{name}.alone={role.alone}: the policy stands still in these iterations, and "
                f"train.iterations={config.train.iterations} leaves it none; lower the one or "
                "raise the other"
            )


def _check_empty_prompts(config: Config, trains: str) -> None:
    """Raise ConfigError where images cannot be trained on without their prompt, or are anyway."""
    share = config.train.empty_prompts
    if not share:
        return
    reason = ""
    if trains != "leaves":
        reason = (
            f"likelihood {config.likelihood.fn} trains what was drawn with the prompt; take a "
            "likelihood of finished images, such as forward"
        )
    elif is_guided(config):
        reason = "with guidance in training each row is seen with and without its prompt"
    if reason:
        raise ConfigError(f"train.empty_prompts={share:g}: {reason}, or leave it out")


def check_guidance(config: Config, method: Method, plan: Plan) -> None:
    """Raise ConfigError for a guidance of the sampled images, or of the reference, that the method
    or model has no use for."""
    for name, why in ((KEYS[0], _unsampled), (KEYS[1], _unmeasured)):
        scale: float = getattr(config.train, name)
        if not scale:
            continue
        reason = why(config, method, plan)
        if reason:
            raise ConfigError(f"train.{name}={scale:g}: {reason}; leave it out")
        options = getattr(config.model.function, "options", None)
        if options is not None:  # of a pipeline of diffusers
            options(**config.model.kwargs).guided_by(scale)


def _unsampled(config: Config, method: Method, plan: Plan) -> str:
    """Say why a guidance of sampling alone plays no part or does harm; empty: it may be."""
    if plan.stored is not None:
        return f"plan {config.plan.fn} samples nothing"
    rescores = getattr(method.likelihood, "rescores", False)
    if method.likelihood.trains != "leaves" and not rescores:
        return (
            f"likelihood {config.likelihood.fn} trains what the sampler drew, by the model's own "
            "guidance; take model.guidance, which is that of both, likelihood reverse_unguided, or "
            "a likelihood of finished images, such as forward"
        )
    return ""


def _unmeasured(config: Config, method: Method, plan: Plan) -> str:
    """Say why a guidance of the reference plays no part; empty: it plays one."""
    if "ref" in method.snapshots:
        return ""
    if not config.kl:
        return f"loss {config.loss.fn} measures from no base model, which it would guide"
    return (
        f"loss {config.loss.fn} and kl {config.kl.fn} measure from no base model, which it would "
        "guide"
    )


def check_scout(config: Config, plan: Plan, work: IterationCost) -> None:
    """Raise ConfigError for a scout section that does not go with the method."""
    if not config.scout.images:
        return
    # looking at more noises than are kept is the point: the best ones go on
    if config.scout.images <= work.roots:
        raise ConfigError(
            f"scout.images={config.scout.images}: it looks at more noises than are kept, which are "
            f"{work.roots} of a prompt; take more, or 0 to switch it off"
        )
    # there has to be a free choice of initial noises
    reason = ""
    if config.train.same_noise:
        reason = "train.same_noise has one noise for all images of a prompt"
    elif plan.stored is not None:
        reason = f"plan {config.plan.fn} samples nothing"
    elif work.trains == "roots":
        reason = f"likelihood {config.likelihood.fn} trains what noises are drawn from"
    if reason:
        raise ConfigError(f"scout: {reason}; leave the section out")
