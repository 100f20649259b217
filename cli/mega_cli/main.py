"""The `mega` command: the tree of subcommands, and the conversion of errors to messages and exit statuses.

Modules of commands import torch and all packages except `mega_common` inside their functions, so that `mega --help`
starts fast.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mega_cli import (
    __version__,
    chat,
    ckpt,
    compare,
    data,
    demo,
    doctor,
    embed,
    generate,
    launch,
    new,
    plan,
    report,
    scaling,
    serve,
    sweep,
    top,
    train,
    tune,
    verify,
    workflow,
)
from mega_cli import eval as evaluation
from mega_cli.file_digests import STACKS
from mega_common.atomic_files import convert_full_disk_error, describe_disk_error
from mega_common.errors import MegaError, MissingPackageError, TrainingInterrupted
from mega_common.progress_logging import configure_logging, logger

INTERRUPTED = 130


_OPTION_SYNONYMS = {  # options of mega's commands, and options of other programs of that meaning
    "--ranks": "--gpus --num-gpus --nproc-per-node", "--nproc": "--gpus --num-gpus --nproc-per-node",
    "--temperature": "--do-sample", "--max-new-tokens": "--max-tokens --max-length --max-completion-tokens",
    "--tp": "--tensor-parallel-size --tensor-parallel --tp-size", "--pp": "--pipeline-parallel-size --pp-size",
    "--max-length": "--max-model-len --context-length --max-seq-len", "--seq-length": "--max-length --max-seq-len",
    "--precision": "--dtype --torch-dtype", "--batch-size": "--max-num-seqs", "--name": "--served-model-name",
    "--adapter": "--enable-lora --lora-modules --lora", "--tokenizer": "--tokenizer-model", "--json-key": "--json-keys",
    "--draft": "--speculative-model --speculative-config --assistant-model", "--output": "--output-prefix --output-dir",
}  # fmt: skip
_ANY_LAYOUT = "Every layout loads every checkpoint: set parallel.tp, pp and so on in run.yaml, and run mega train."
# Commands of other programs, and what mega has instead of them.
_COMMAND_HINTS = {
    **dict.fromkeys(("reshard", "shard", "consolidate", "repartition", "split"), _ANY_LAYOUT),
    **dict.fromkeys(("export", "merge"), "Use mega ckpt convert --to hf, or mega ckpt merge-adapter for LoRA."),
    **dict.fromkeys(("finetune", "pretrain", "sft", "dpo", "resume"), "Use mega train run.yaml."),
}


class CommandTree(TyperGroup):
    """Typer command group `mega`, which words errors about values of options like errors about settings of run.yaml."""

    def invoke(self, ctx: Any) -> Any:
        """Run the `mega` command that the arguments name, with errors about options in the words of errors about settings.

        Raises:
            typer.BadParameter: for a value of an option that is not valid.
        """
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            from mega_common.strict_config import describe_pydantic_rule

            error.message = describe_pydantic_rule(error.message)
            raise
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":  # of click, which Typer contains from 0.26 on
                _explain_unknown_option(error)
            elif type(error).__name__ == "UsageError" and str(error).startswith("No such command"):
                _explain_unknown_command(error)
            elif type(error).__name__ == "UsageError" and str(error).startswith("Got unexpected extra argument"):
                _explain_extra_argument(error)
            raise


def _explain_unknown_option(error: Any) -> None:
    """Add what the user may have meant to click's error for an unknown option."""
    name, command = error.option_name.replace("_", "-"), error.ctx.command if error.ctx else None
    options = {option for each in command.params for option in each.opts} if command else set()
    if command and name in ("--config", "--config-file") and command.name in ("train", "plan", "verify", "sweep"):
        error.message = f"No such option: {name}; give the file alone: mega {command.name} run.yaml"
        error.possibilities = ()
        return
    error.possibilities = difflib.get_close_matches(error.option_name, error.possibilities or (), cutoff=0.75)
    if "--set" in options and not error.possibilities:
        from mega_common.strict_config import suggest_other_key
        from mega_trainer.config.run_config import RunConfig

        fix = suggest_other_key(RunConfig, [error.option_name.lstrip("-")], "VALUE")
        error.message += "" if fix.startswith("remove it") else "; settings are given as --set KEY=VALUE"
        error.message += fix and "; " + re.sub(r"\bset (?=\S+=)", "--set ", fix)
    if meant := [option for option in sorted(options) if name in _OPTION_SYNONYMS.get(option, "").split()]:
        error.possibilities = meant


def _explain_unknown_command(error: Any) -> None:
    """Add what the user may have meant to click's error for an unknown command."""
    name, group = error.message.split("'")[1], error.ctx.command if error.ctx else None
    if hint := _COMMAND_HINTS.get(name):
        error.message += f" {hint}"
    elif group and (not difflib.get_close_matches(name, group.commands)):
        error.message += f" The commands are {', '.join(group.commands)}."


def _explain_extra_argument(error: Any) -> None:
    """Add to click's error for one argument too many what the command takes."""
    taken = [
        (param.metavar or param.name.upper())
        for param in error.ctx.command.params
        if param.param_type_name == "argument"
    ]
    text = "; a text is given as --prompt TEXT" if error.ctx.command.name == "generate" else ""
    error.message += f"; the command takes {', '.join(taken) or 'options only'}{text}"


def build_typer_app() -> typer.Typer:
    """Return the Typer application `mega` with all of its commands."""
    app = typer.Typer(
        name="mega",
        cls=CommandTree,
        help="Train large language models: text to tokens, 5D-parallel training, checkpoints, evaluation.",
        epilog="Examples: mega run workflow.yaml | mega launch slurm run.yaml --nodes 4 | mega COMMAND --help",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    app.add_typer(data.app, name="data")
    app.command("train", epilog=train.EXAMPLES)(train.train_command)
    app.command("tune", epilog=tune.EXAMPLES)(tune.tune_command)
    app.add_typer(ckpt.app, name="ckpt")
    app.command("eval", epilog=evaluation.EXAMPLES)(evaluation.eval_command)
    app.command("compare", epilog=compare.EXAMPLES)(compare.compare_command)
    app.command("generate", epilog=generate.EXAMPLES)(generate.generate_command)
    app.command("serve", epilog=serve.EXAMPLES)(serve.serve_command)
    app.command("chat", epilog=chat.EXAMPLES)(chat.chat_command)
    app.command("embed", epilog=embed.EXAMPLES)(embed.embed_command)
    app.command("run", epilog=workflow.EXAMPLES)(workflow.run_command)
    app.command("plan", epilog=plan.EXAMPLES)(plan.plan_command)
    app.command("report", epilog=report.EXAMPLES)(report.report_command)
    app.command("scaling", epilog=scaling.EXAMPLES)(scaling.scaling_command)
    app.command("sweep", epilog=sweep.EXAMPLES)(sweep.sweep_command)
    app.command("top", epilog=top.EXAMPLES)(top.top_command)
    app.command("demo", epilog=demo.EXAMPLES)(demo.demo_command)
    app.command("new", epilog=new.EXAMPLES)(new.new_command)
    app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor_command)
    app.command("verify", epilog=verify.EXAMPLES)(verify.verify_command)
    app.add_typer(launch.app, name="launch")
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mega {__version__}")
        raise typer.Exit


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Log more, and print tracebacks of errors.")] = False,
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    configure_logging(verbose=debug)


def main(args: Sequence[str] | None = None) -> None:
    """Run the `mega` command line and exit with its exit status.
    The status is 0 for done, 2 user error, 1 internal error, 75 interrupted and saved, 130 interrupted.
    """
    given = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in given
    # --debug is an option of the root command, and is accepted at any position.
    ordered = ["--debug"] * debug + [arg for arg in given if arg != "--debug"]
    app = build_typer_app()
    status = run_and_report_errors(lambda: app(ordered, prog_name="mega"), debug=debug)
    if "RANK" in os.environ:
        # A rank exits without interpreter shutdown, in which torch's threads and communicators may wait for other ranks.
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
        # The reader of standard output has exited (`mega ... | head`); buffered output must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    except TrainingInterrupted as end:
        logger.info("%s", end)  # not an error; the log shows it once for all ranks
        return end.exit_status
    except Exception as error:  # noqa: BLE001 - every error becomes a message
        if debug:
            traceback.print_exc()
        message, status = _describe_error(error, debug=debug)
        print(message, file=sys.stderr)
        if convert_full_disk_error(error):
            # Standard output may be on the full disk; buffered output must not raise at exit.
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


def _describe_error(error: Exception, *, debug: bool) -> tuple[str, int]:
    """Return the message of an error, and the exit status."""
    from mega_common.extension_loader import find_extension_line

    how = [] if debug else ["run again with --debug for the traceback"]
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        error = _missing_package(error.name)
    full = convert_full_disk_error(error)
    if isinstance(error, MegaError):
        hint = f"\n  {full.hint}" if full and not error.hint else ""
        return f"error: {error}{hint}", error.exit_status
    if full is not None:
        return f"error: {full}", full.exit_status
    if isinstance(error, OSError) and error.filename:
        wrong_path = isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError)
        return f"error: {describe_disk_error(error)[0]}", 2 if wrong_path else 1
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    if place := find_extension_line(error):
        return f"error: an extension raised {text} {place}\n  " + "; ".join(["correct the extension", *how]), 2
    text = "\n  ".join([text, *getattr(error, "__notes__", ())])
    return "\n".join([f"internal error: {text}", *how]), 1


def _missing_package(name: str) -> MissingPackageError:
    """Return the error for a missing module, with the command that installs it if it is a package of mega."""
    if name in STACKS:
        folder = name.replace("mega_", "packages/")
        return MissingPackageError(
            f"this command requires the package {name.replace('_', '-')}, which is not installed",
            hint=f"in the root of the repository: pip install {folder}",
        )
    return MissingPackageError(f"this command requires the Python package {name!r}, which is not installed")


if __name__ == "__main__":
    main()
