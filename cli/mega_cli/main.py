"""The `mega` command: all subcommands, and the one place that turns errors into messages and exit statuses.

A command's module is imported here, so it keeps heavy imports (torch, and every package but `mega_common`) inside its
functions: `mega --help` has to answer at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from mega_cli import __version__, ckpt, compare, data, demo, embed, launch, plan, report, serve, top, train, workflow
from mega_cli import eval as evaluation
from mega_cli.file_digests import STACKS
from mega_common.atomic_files import convert_full_disk_error, describe_disk_error
from mega_common.errors import MegaError, MissingPackageError, TrainingInterrupted
from mega_common.progress_logging import configure_logging, logger

INTERRUPTED = 130


def build_typer_app() -> typer.Typer:
    """Return the whole tree of commands."""
    app = typer.Typer(
        name="mega",
        help="Train large language models: text to tokens, 5D-parallel training, checkpoints, evaluation.",
        epilog="Examples: mega run workflow.yaml | mega launch slurm run.yaml --nodes 4 | mega COMMAND --help",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    app.add_typer(data.app, name="data")
    app.command("train", epilog=train.EXAMPLES)(train.train_command)
    app.add_typer(ckpt.app, name="ckpt")
    app.command("eval", epilog=evaluation.EVAL_EXAMPLES)(evaluation.eval_command)
    app.command("compare", epilog=compare.EXAMPLES)(compare.compare_command)
    app.command("generate", epilog=evaluation.GENERATE_EXAMPLES)(evaluation.generate_command)
    app.command("serve", epilog=serve.SERVE_EXAMPLES)(serve.serve_command)
    app.command("chat", epilog=serve.CHAT_EXAMPLES)(serve.chat_command)
    app.command("embed", epilog=embed.EXAMPLES)(embed.embed_command)
    app.command("run", epilog=workflow.EXAMPLES)(workflow.run_command)
    app.command("plan", epilog=plan.EXAMPLES)(plan.plan_command)
    app.command("report", epilog=report.EXAMPLES)(report.report_command)
    app.command("top", epilog=top.EXAMPLES)(top.top_command)
    app.command("demo", epilog=demo.EXAMPLES)(demo.demo_command)
    app.add_typer(launch.app, name="launch")
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mega {__version__}")
        raise typer.Exit


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Log more, and show tracebacks of errors.")] = False,
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    configure_logging(verbose=debug)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 user error, 1 internal error, 75 interrupted and saved, 130 interrupted."""
    given = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in given
    # Wherever it stands, --debug is an option of the root command.
    ordered = ["--debug"] * debug + [arg for arg in given if arg != "--debug"]
    app = build_typer_app()
    status = run_and_report_errors(lambda: app(ordered, prog_name="mega"), debug=debug)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A rank, and all is written: threads of torch that still wait for others may abort a process that ends as usual.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def run_and_report_errors(call: Callable[[], object], *, debug: bool = False) -> int:
    """Run `call` and return its exit status; print every error on standard error as one readable message."""
    try:
        status = _exit_status(call)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has gone (`mega ... | head`); what is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    except TrainingInterrupted as end:
        logger.info("%s", end)  # no error, and told once however many ranks there are
        return end.exit_status
    except Exception as error:  # noqa: BLE001 - the one place where nothing may pass
        if debug:
            traceback.print_exc()
        message, status = _describe_error(error)
        print(message, file=sys.stderr)
        if convert_full_disk_error(error):
            # Standard output may be what is full; what is still buffered must not raise at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if status == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return status


def _exit_status(call: Callable[[], object]) -> int:
    """Return the exit status of a SystemExit, by which Typer ends every command."""
    try:
        call()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _describe_error(error: Exception) -> tuple[str, int]:
    """Return the message of an error, and the exit status."""
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        error = _missing_package(error.name)
    full = convert_full_disk_error(error)
    if isinstance(error, MegaError):
        hint = f"\n  {full.hint}" if full and not error.hint else ""
        return f"error: {error}{hint}", error.exit_status
    if full is not None:
        return f"error: {full}", full.exit_status
    if isinstance(error, OSError) and error.filename:
        return f"error: {describe_disk_error(error)[0]}", 1
    what = f"{type(error).__name__}: {error}".removesuffix(": ")
    what = "\n  ".join([what, *getattr(error, "__notes__", ())])
    return f"internal error: {what}\nrun again with --debug for the traceback", 1


def _missing_package(name: str) -> MissingPackageError:
    """Return the folder of the repository that provides a missing module, if it is one of ours."""
    if name in STACKS:
        what = f"this command needs {name.replace('_', '-')}, which is not installed"
        folder = name.replace("mega_", "packages/")
        return MissingPackageError(what, hint=f"in the root of the repository: pip install {folder}")
    return MissingPackageError(f"this command needs the Python package {name!r}, which is not installed")


if __name__ == "__main__":
    main()
