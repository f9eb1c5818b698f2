"""The `jaxserve` command.

Commands are a table of modules, imported when chosen. The module of command `x` has `add_x_arguments(parser)` and
`run_x(args) -> exit code`. Nothing here imports jax, transformers or aiohttp: `--help` and `--version` answer at once.

Exit codes: 0 done, 1 failed, 2 wrong options, 130 interrupted.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn

from jaxserve import __version__
from jaxserve.config import ENVIRONMENT, ServeConfig, add_arguments, from_arguments, unknown_option
from jaxserve.errors import ConfigError, JaxserveError


@dataclass(frozen=True)
class Command:
    module: str
    doc: str
    usage: str = "[options]"


COMMANDS: dict[tuple[str, ...], Command] = {
    ("serve",): Command("jaxserve.cli", "serve a model behind the OpenAI API", "[MODEL] [options]"),
    ("run-batch",): Command(
        "jaxserve.run_batch", "answer a file of requests (OpenAI's batch format)", "-i IN -o OUT [MODEL] [options]"
    ),
    ("chat",): Command("jaxserve.repl", "chat with a running server"),
    ("complete",): Command("jaxserve.repl", "complete text with a running server"),
    ("bench", "latency"): Command("jaxserve.bench.latency", "offline: time of one batch", "[MODEL] [options]"),
    ("bench", "throughput"): Command("jaxserve.bench.throughput", "offline: tokens per second", "[MODEL] [options]"),
    ("bench", "serve"): Command("jaxserve.bench.serve", "load on a running OpenAI-compatible server"),
    ("bench", "kernels"): Command(
        "jaxserve.bench.kernels", "kernels alone, beside the device's best", "[MODEL] [options]"
    ),
    ("compile",): Command(
        "jaxserve.compile_ahead",
        "compile for TPUs on any CPU host; says what fits",
        "[MODEL] --topology NAME [options]",
    ),
    ("collect-env",): Command("jaxserve.collect_env", "print versions and hardware, for a bug report", ""),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong as all our errors are said."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')} (`{self.prog} --help` lists the options)")


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, ServeConfig)


def run_serve(args: argparse.Namespace) -> int:
    config = from_arguments(args, ServeConfig)
    return import_module("jaxserve.serve").main(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Expected errors are one line on stderr, without a traceback."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model says what the terminal's encoding may not have
    try:
        code = _run(argv)
        sys.stdout.flush()  # here, where a closed pipe is expected
        return code
    except ConfigError as error:
        return _fail(error.message, 2)
    except JaxserveError as error:
        return _fail(error.message, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left, as in `jaxserve ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: list[str]) -> int:
    if argv[:1] in (["--version"], ["-V"]):
        print(f"jaxserve {__version__}")
        return 0
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text(()))
        return 0 if argv else 2
    path = _find(argv)
    command, name = COMMANDS[path], path[-1].replace("-", "_")
    module = import_module(command.module)
    parser = _Parser(
        prog=" ".join(("jaxserve", *path)),
        usage=f"%(prog)s {command.usage}".rstrip(),
        description=command.doc[0].upper() + command.doc[1:] + ".",
        allow_abbrev=False,
    )
    getattr(module, f"add_{name}_arguments")(parser)
    args, unknown = parser.parse_known_intermixed_args(argv[len(path) :])
    if unknown:
        _refuse(unknown, parser)
    return getattr(module, f"run_{name}")(args)


def _refuse(unknown: list[str], parser: argparse.ArgumentParser) -> NoReturn:
    """Raises ConfigError for words that are no option of a command, naming the first."""
    flags = [word for word in unknown if word.startswith("-") and word.strip("-")]
    reason = f"unexpected {unknown[0]!r}"
    if flags:
        reason = unknown_option(flags[0], parser._option_string_actions)
    raise ConfigError(f"{reason} (`{parser.prog} --help` lists the options)")


def _find(argv: list[str]) -> tuple[str, ...]:
    """The command that the first words name. Exits with help for a group, and with what is known for a wrong word."""
    group: tuple[str, ...] = ()
    for word in argv:
        group = (*group, word)
        if group in COMMANDS:
            return group
        if not any(path[: len(group)] == group for path in COMMANDS):
            break
    else:
        _exit_with_help(group, 2)
    if group[-1] in ("-h", "--help", "help"):
        _exit_with_help(group[:-1], 0)
    known = ", ".join(dict.fromkeys(p[len(group) - 1] for p in COMMANDS if p[: len(group) - 1] == group[:-1]))
    raise ConfigError(f"unknown command {' '.join(group)!r}: known are {known}")


def _exit_with_help(group: tuple[str, ...], code: int) -> NoReturn:
    print(help_text(group), file=sys.stderr if code else sys.stdout)
    raise SystemExit(code)


def help_text(group: tuple[str, ...]) -> str:
    """What `jaxserve --help` and `jaxserve bench --help` print."""
    rows = {" ".join(path): command.doc for path, command in COMMANDS.items() if path[: len(group)] == group}
    width = max(map(len, rows))
    lines = [f"usage: {' '.join(('jaxserve', *group))} COMMAND [options]", "", "commands:"]
    lines += [f"  {name:{width}}  {doc}" for name, doc in rows.items()]
    lines += ["", "`jaxserve COMMAND --help` shows the options of one; `jaxserve --version` the version."]
    return "\n".join([*lines, "", ENVIRONMENT])


def _fail(message: str, code: int) -> int:
    print(f"jaxserve: error: {message}", file=sys.stderr)
    return code
