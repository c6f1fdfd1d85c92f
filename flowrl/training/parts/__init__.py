"""The parts of the training loop that ship with flowrl, one feature a file (`flowrl.core.part`),
and the list of those that a run has."""

from __future__ import annotations

import functools
import importlib
import operator
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

from flowrl.config.load import Config
from flowrl.config.values import show
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.needs import COMMON, needs_of
from flowrl.core.part import Part, PartState, asked_at
from flowrl.training.method import Method

PACKAGES = ("flowrl.training.parts", "flowrl.techniques")
"""Where parts are that a config brings in by what it asks for."""
Found = TypeVar("Found", bound=Part)


class Parts:
    """The parts of a run, in the order in which they are asked."""

    def __init__(self, parts: Sequence[Part] = ()) -> None:
        """Raises ConfigError for two parts of one name."""
        self._parts = sorted(parts, key=lambda part: part.rank)
        self._at: dict[str, list[Part]] = {}
        names = [part.title() for part in self._parts]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"parts: two parts are called {name!r}; give the class of one another name"
                )

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def at(self, place: str) -> list[Part]:
        """Return the parts that do something at a place."""
        if place not in self._at:
            self._at[place] = [part for part in self._parts if asked_at(part, place)]
        return self._at[place]

    def ask(self, place: str, *given: Any) -> None:
        """Ask all parts at a place."""
        for part in self.at(place):
            getattr(part, place)(*given)

    def first(self, place: str, *given: Any) -> Any:
        """Return the first answer at a place that is not None."""
        for part in self.at(place):
            found = getattr(part, place)(*given)
            if found is not None:
                return found
        return None

    def inside(self, place: str, *given: Any) -> AbstractContextManager[Any]:
        """Return a context that is those of all parts, one inside the other."""
        with ExitStack() as stack:
            for part in self.at(place):
                stack.enter_context(getattr(part, place)(*given))
            # where one cannot be entered, those before it are left again
            return stack.pop_all()

    def agree(self, place: str, *given: Any) -> bool:
        """Say whether all parts say yes at a place; all of them are asked."""
        said = True
        for part in self.at(place):
            said = bool(getattr(part, place)(*given)) and said
        return said

    def get(self, kind: type[Found]) -> Found | None:
        """Return the part of a class, if the run has it."""
        for part in self._parts:
            if isinstance(part, kind):
                return part
        return None

    def titles(self, place: str) -> list[str]:
        """Name the parts that do something at a place."""
        return [part.title() for part in self.at(place)]

    def states(self, run: Any) -> dict[str, PartState]:
        """Return what a checkpoint keeps, by part. Raises CheckpointError where two parts want a
        file of one name."""
        found: dict[str, PartState] = {}
        files: dict[str, str] = {}
        for part in self.at("state_dict"):
            state = part.state_dict(run)
            if state is None:
                continue
            found[part.title()] = state
            for name in state.files:
                if name in files:
                    raise CheckpointError(
                        f"parts {files[name]} and {part.title()} both keep a file {name!r}; one "
                        "has to name it otherwise"
                    )
                files[name] = part.title()
        return found

    def check_states(self, run: Any, names: Sequence[str], where: Any) -> None:
        """Raise CheckpointError unless a checkpoint has the states of just these parts."""
        wanted = sorted(self.states(run))
        if sorted(names) != wanted:
            raise CheckpointError(
                f"{where}: holds the state of the parts {sorted(names)}, this run has {wanted}; go "
                "on with the config, the plugins and the callbacks that the run began with"
            )


def parts_of(config: Config, method: Method, callbacks: Sequence[Any] = ()) -> Parts:
    """Make the parts of a run: of flowrl's those that the config asks for, those of its section
    ``parts``, and callbacks. Raises ConfigError for a callback that is no part, and for a need that
    nobody provides."""
    asked = _Asked(config, method)
    parts: list[Part] = [kind() for kind in shipped() if any(map(asked.for_, kind.when))]
    # a user's own, from the config and from a program
    for name, call in config.parts.items():
        made = call.make()
        check_part(made, f"parts.{name}: {call.path}")
        parts.append(made)
    for place, callback in enumerate(callbacks):
        check_part(callback, f"callbacks[{place}]")
        parts.append(callback)
    _check_provided(config, method, parts)
    return Parts(parts)


@functools.cache
def shipped() -> tuple[type[Part], ...]:
    """Return the classes of all parts of flowrl. Nothing of them is run."""
    found = []
    for package in PACKAGES:
        folder = importlib.import_module(package)
        for info in pkgutil.iter_modules(folder.__path__):
            module = importlib.import_module(f"{package}.{info.name}")
            for thing in vars(module).values():
                own = isinstance(thing, type) and thing.__module__ == module.__name__
                if own and issubclass(thing, Part) and thing.when:
                    found.append(thing)
    return tuple(found)


class _Asked:
    """What a config asks for."""

    def __init__(self, config: Config, method: Method) -> None:
        self.config, self.plan = config, method.plan(0)
        self.needs, self.credit = method.needs, needs_of(method.credit)
        learners = [call.function for call in config.rewards.values()]
        learners += [config.aggregate.function, method.credit]
        self.learns = any(hasattr(each, "update") for each in learners)

    def for_(self, when: str) -> bool:
        """Say whether it asks for what `Part.when` names."""
        kind, _, rest = when.partition(".")
        if kind in ("needs", "credit"):
            return rest in getattr(self, kind)
        if kind in ("always", "learns"):
            return kind == "always" or self.learns
        found = re.fullmatch(r"([\w.]+)(?:<(\d+))?", rest)
        assert found is not None, f"no condition of a part: {when!r}"
        value = operator.attrgetter(found[1])(getattr(self, kind))
        return value < int(found[2]) if found[2] else value not in (None, (), "", 0, False)


def check_part(made: Any, where: str) -> None:
    if isinstance(made, Part):
        return
    raise ConfigError(
        f"{where}: expected a part, an instance of a class on flowrl.Part, got {show(made)}; the "
        "places where it is asked are the methods of flowrl.Part"
    )


def _check_provided(config: Config, method: Method, parts: Sequence[Part]) -> None:
    """Raise ConfigError for a need of loss, penalty or credit that no part provides."""
    provided = set(COMMON)
    for part in parts:
        provided |= {when.partition(".")[2] for when in part.when} | set(part.provides)
    wanted: Mapping[str, frozenset[str]] = {
        f"loss {config.loss.fn}": needs_of(method.loss),
        f"kl {config.kl.fn if config.kl else ''}": needs_of(method.kl),
        f"credit {config.credit.fn}": needs_of(method.credit),
    }
    for who, names in wanted.items():
        strange = sorted(names - provided)
        if strange:
            raise ConfigError(
                f"{who}: needs {strange[0]!r}, which nothing in this run provides; add a part "
                "whose `provides` names it, or take another function"
            )
