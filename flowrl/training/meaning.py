"""What a checkpoint belongs to: settings that change what its tensors mean without changing a
shape, and what a run's draws follow from.

A checkpoint keeps them, and whoever reads its tensors into a model compares them: what an adapter
adds is scaled by alpha / rank, a network with other heads or another base computes something else
with the same numbers, and a copy or companion was made by its own settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.config.load import Config, flat
from flowrl.core.abilities import ExtendsModel
from flowrl.core.errors import CheckpointError
from flowrl.core.prompts import PromptSet, prompts_hash
from flowrl.training.checkpoint_state import CheckpointState
from flowrl.training.method import Method

KEY = "meaning"  # in a checkpoint's state
COPIES = ("old", "slow", "fake", "surrogate")  # copies of the weights, and models trained along
# where a model is, and how it computes; LoRA's size and scale are in the model's own words
FREE = ("path", "device", "dtype", "seed", "runtime", "decode_batch", "lora", "layers")
OF_MODEL = ("network.", "scheduler.", "vae.", "base model")
_NOTHING = object()


def meaning_of(config: Config, method: Method, model: Any) -> dict[str, Any]:
    """Return the settings that a run's tensors depend on, by dotted key, as plain JSON."""
    found, data = identity_of(model), config.to_dict()
    options = {key: value for key, value in data["model"].items() if key not in FREE}
    found |= flat({"model": options})
    for section in COPIES:
        rows = flat({section: data.get(section)})
        found |= {key: value for key, value in rows.items() if not key.endswith(".lr")}
    found["train.ema"] = config.train.ema
    found["loss.teachers"] = config.loss.kwargs.get("teachers")
    if isinstance(method.likelihood, ExtendsModel):  # it has parameters of its own
        found |= flat({"likelihood": data["likelihood"]})
    return dict(json.loads(json.dumps(found, default=str)))


def identity_of(model: Any) -> dict[str, Any]:
    """Return what a model says of its trained numbers; {} of one around no pipeline."""
    return dict(getattr(model, "identity", {}))


def check_meaning(state: Mapping[str, Any], now: Mapping[str, Any], where: Path | str) -> None:
    """Raise CheckpointError if tensors of a checkpoint with that state would mean something else
    under the settings `now`. Settings of a network that the state does not have are not compared:
    another version of diffusers may know more."""
    if KEY not in state:
        return
    kept = state[KEY]
    if not isinstance(kept, Mapping):
        raise CheckpointError(f"{where}: {KEY}: expected an object, got {_shown(kept)}")
    for key, value in now.items():
        own = key.startswith(OF_MODEL)
        then = kept.get(key, value if own else _NOTHING)
        if then is _NOTHING and any(name.startswith(f"{key}.") for name in kept):
            raise CheckpointError(
                f"{where} was trained with the section {key}, which the config has not: set it "
                "back, or train anew"
            )
        if then is _NOTHING:
            raise CheckpointError(f"{where}: {KEY}: {key} is missing; take another checkpoint")
        if then != value or isinstance(then, bool) != isinstance(value, bool):
            raise CheckpointError(
                f"{key}: {'the model' if own else 'the config'} says {_shown(value)}, and {where} "
                f"was trained with {_shown(then)}: its numbers would mean something else; set it "
                "back, or train anew"
            )


def draws_of(config: Config, train: PromptSet) -> dict[str, Any]:
    """Return what all draws of a run follow from, beside the iteration."""
    return {"seed": config.seed, "prompts_hash": prompts_hash(train)}


def check_draws(state: CheckpointState, config: Config, train: PromptSet, where: Path) -> None:
    """Raise CheckpointError where a run would go on with the draws of another one."""
    now, other = draws_of(config, train), "begin a new run from these weights with train.start"
    if state.seed not in (None, now["seed"]):
        raise CheckpointError(
            f"seed: {where} was trained with {state.seed}, and the config says {now['seed']}: the "
            f"run would be neither of the two; give the seed back, or {other}"
        )
    if state.prompts_hash not in (None, now["prompts_hash"]):
        raise CheckpointError(
            f"prompts.train: {train.path} is another list than that which {where} was trained on "
            f"(prompts_hash was {state.prompts_hash}, and is {now['prompts_hash']}): bring the "
            f"list back, or {other}"
        )


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
