"""``batchq``: the group of commands. A command's file is imported when the command is used, and no sooner.

So ``batchq call`` does not pay for what ``batchq demo`` needs, and ``batchq --help`` pays for nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final, NoReturn

import click

from batchq_cli.common import (
    EXIT_CODES,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    CliError,
    Described,
    exit_code,
    one_line,
)

COMMANDS: Final = {
    "worker": "Run a model on the requests of a queue.",
    "call": "Send one request and print its answer.",
    "stats": "Show a queue's depth, rates and workers.",
    "queues": "List the queues of a Redis.",
    "ping": "Check that a Redis is fit for batchq.",
    "dead": "Look at, run again or drop dead letters.",
    "bench": "Measure batchq on this machine.",
    "demo": "See what batching does, on real data.",
}
"""Each command and its short help; its click command is ``batchq_cli.<name>.<name>``."""


class Commands(Described, click.Group):
    """A group that imports a command when it is used, and prints batchq's errors as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands that are installed."""
        return [name for name in COMMANDS if importlib.util.find_spec(f"batchq_cli.{name}") is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = getattr(importlib.import_module(f"batchq_cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from their short help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn what the user can mend into one line and an exit code."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx is not None else ctx.command_path
            _fail(ctx, f"{error.format_message().rstrip('.')}; see {path} --help", EXIT_USAGE)
        except CliError as error:
            _fail(ctx, str(error), error.exit_code)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)
        except Exception as error:
            from batchq.errors import BatchqError  # where one is raised, this is loaded already

            if not isinstance(error, BatchqError):
                raise
            code = exit_code(error)
            # a setting's message names it; of other errors the type is what a program would catch
            public = next(cls for cls in type(error).__mro__ if cls.__module__ == BatchqError.__module__)
            _fail(ctx, str(error) if code == EXIT_USAGE else f"{public.__name__}: {error}", code)


def _fail(ctx: click.Context, message: str, code: int) -> NoReturn:
    click.echo(f"error: {one_line(message)}", err=True)
    ctx.exit(code)


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from batchq import __version__

    click.echo(f"batchq {__version__}")
    ctx.exit()


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    examples=[
        "batchq worker --model mymodel:load",
        "batchq call '\"what a day\"'",
        "batchq stats --watch 1",
        "batchq ping",
    ],
    exit_codes=EXIT_CODES,
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Batch single requests from many processes onto few models, through Redis.

    An option whose help shows an env var can be set by it; the command line wins over the environment.
    """
