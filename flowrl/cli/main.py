"""The command line, ``flowrl COMMAND``: the files here parse and print, nothing else."""

from __future__ import annotations

import errno
import itertools
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from flowrl.cli.compare import compare, tune
from flowrl.cli.configs import configs, methods, new, pairs, schema, tiny
from flowrl.cli.estimate import bench, doctor, estimate
from flowrl.cli.evaluate import evaluate, measure, sweep
from flowrl.cli.export import export
from flowrl.cli.grammar import Command, Commands
from flowrl.cli.report import grid, report, view
from flowrl.cli.sample import sample
from flowrl.cli.score import score, serve_rewards
from flowrl.cli.start_up import interrupt_as_usual, say_when_loading, was_interrupted
from flowrl.cli.train import train
from flowrl.core.errors import ConfigError, FlowRLError, printable

# what the system refuses and a user can mend: a full disk, a name that is too long, no rights
MENDABLE = {errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS}
MENDABLE |= {errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
STOPPED = "stopped at once; what was saved before is whole"

_usual_warning = warnings.formatwarning

Function = Callable[..., int | None]
GROUPS: dict[str, dict[str, Function]] = {
    "Train": {
        "doctor": doctor,
        "train": train,
        "compare": compare,
        "tune": tune,
        "estimate": estimate,
        "bench": bench,
        "pairs": pairs,
        "tiny": tiny,
        "new": new,
    },
    "Look at a model": {
        "eval": evaluate,
        "sweep": sweep,
        "measure": measure,
        "sample": sample,
        "grid": grid,
        "report": report,
        "view": view,
        "export": export,
    },
    "Rewards": {"score": score, "serve-rewards": serve_rewards},
    "What is shipped": {"configs": configs, "methods": methods, "schema": schema},
}
"""Group of the help -> its commands."""


app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _group, _commands in GROUPS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_group, cls=Command)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from flowrl.core.installation import DISTRIBUTION
        from flowrl.core.version import __version__

        print(f"{DISTRIBUTION} {__version__}")
        raise typer.Exit


@app.callback()
def flowrl(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="print the version"),
    ] = False,
) -> None:
    """Align diffusion and flow models with rewards by reinforcement learning."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command -> exit code.

    0 done, 1 a self-test failed or the doctor found something, 2 a mistake that can be mended, 130
    stopped. A mistake is one message on stderr, without a traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # without arguments the help is printed, but nothing was done: exit code 2
    try:
        _check_values(arguments)
        code = _run([*arguments] or ["--help"])
        sys.stdout.flush()
        return code if arguments else 2
    # mistakes in the arguments, then flowrl's own errors
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "flowrl"
        return _fail(f"{error.format_message()}\n`{path} --help` lists the arguments", 2)
    except FlowRLError as error:
        from flowrl.runs.stop import Interrupted

        return _fail(str(error), 130 if isinstance(error, Interrupted) else 2)
    # endings from outside: Ctrl-C, and a reader of the output that has gone
    except KeyboardInterrupt:
        return _fail(STOPPED, 130)
    except BrokenPipeError:  # `flowrl configs | head`
        _drop_output()
        return 0
    # the rest: after a Ctrl-C a library may raise anything
    except Exception as error:
        if was_interrupted():
            return _fail(STOPPED, 130)
        return _refused(error)


def _check_values(arguments: Sequence[str]) -> None:
    """Raise ConfigError for an option with an empty value, as ``--run "$UNSET"`` gives one: as a
    path it would be the working folder."""
    for option, value in itertools.pairwise([*arguments, "end"]):
        joined = re.fullmatch(r"--[\w-]+=", option)
        if joined or (value == "" and re.fullmatch(r"--[\w-]+", option)):
            raise ConfigError(
                f"{option.rstrip('=')}: expected a value, got an empty text; is a variable of the "
                "shell not set?"
            )


def _refused(error: Exception) -> int:
    """Say what the system refused and a user can mend -> exit code; raise what is no such thing."""
    if not isinstance(error, OSError) or error.errno not in MENDABLE:
        raise error
    if error.filename is not None:
        return _fail(f"{str(error.filename)[:80]}: {error.strerror}", 2)
    _drop_output()
    return _fail(f"standard output: {error.strerror}", 2)


def _plain_warning(message: Warning | str, category: type[Warning], *where: object) -> str:
    """Say a warning of ours without the line of source that gave it."""
    if category.__module__.startswith("flowrl."):
        return f"flowrl: warning: {message}\n"
    return _usual_warning(message, category, *where)  # type: ignore[arg-type]


def command() -> int:
    """Run the command of this process -> exit code; one of several processes ends here."""
    from flowrl.core.installation import other_package

    warnings.formatwarning = _plain_warning  # type: ignore[assignment]
    found = other_package()
    if found:
        print(f"flowrl: {found}", file=sys.stderr)
    code = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from flowrl.core.processes import end_process

        end_process(code)
    return code


def _run(arguments: list[str]) -> int:
    """Run a command -> what it returns. Ends the process where a shell asks for a completion."""
    group = typer.main.get_command(app)
    if "_FLOWRL_COMPLETE" in os.environ:
        group.main(args=arguments, prog_name="flowrl")
    try:
        with group.make_context("flowrl", arguments) as context:
            interrupt_as_usual()
            if "--quiet" not in arguments:
                say_when_loading(f"flowrl {arguments[0]}: loading ...")
            return group.invoke(context) or 0
    except typer.Exit as done:  # after --help and --version
        return done.exit_code


def _drop_output() -> None:
    """Let what is still to be printed go nowhere: the interpreter would try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    # files and servers of others have their words in it
    print(f"\nflowrl: {printable(message)}", file=sys.stderr)
    return code
