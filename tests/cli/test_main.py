from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mega_cli.main import build_typer_app, run_and_report_errors
from mega_common.errors import ConfigError, TrainingError


def mega(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-P", "-m", "mega_cli.main", *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=60,
        **options,  # type: ignore[call-overload]
    )


def test_help_imports_no_torch() -> None:
    script = """
import sys
from mega_cli.main import main
try:
    main(["--help"])
except SystemExit as end:
    heavy = {"torch", "numpy", "transformers", "tokenizers"} & set(sys.modules)
    print("HEAVY", sorted(heavy), "STATUS", end.code)
"""
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert "HEAVY [] STATUS 0" in done.stdout, done.stdout + done.stderr


def test_each_command_has_help_with_an_example() -> None:
    app = build_typer_app()
    root = typer.main.get_command(app)

    def leaves(node: object, words: list[str]) -> list[list[str]]:
        commands = getattr(node, "commands", None)
        if commands is None:
            return [words]
        return [leaf for name, inner in commands.items() for leaf in leaves(inner, [*words, name])]

    for words in leaves(root, []):
        result = CliRunner().invoke(app, [*words, "--help"])
        assert result.exit_code == 0
        assert f"mega {' '.join(words)}" in " ".join(result.output.split()), words
        assert "xample" in result.output, words


def test_no_arguments_shows_help() -> None:
    assert "Commands" in mega().stdout


def test_version() -> None:
    done = mega("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "mega")


def test_mistyped_command_names_the_nearest_and_is_the_users_mistake() -> None:
    done = mega("lanch", "slurm")
    assert done.returncode == 2
    assert "'launch'" in done.stderr


def test_a_user_error_is_one_message(tmp_path: Path) -> None:
    done = mega("run", str(tmp_path / "no.yaml"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "no.yaml" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_shows_the_traceback_wherever_it_stands(tmp_path: Path, place: int) -> None:
    args = ["run", str(tmp_path / "no.yaml")]
    done = mega(*args[:place], "--debug", *args[place:])
    assert done.returncode == 2
    assert "Traceback" in done.stderr


NAMED = {
    "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"
}  # the shell is the one that is named, wherever tests are started


def test_output_into_a_closed_pipe_is_quiet() -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "mega_cli.main", "--show-completion", "bash"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **NAMED},
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""


def fails(error: BaseException) -> None:
    raise error


class TestGuarded:
    @pytest.mark.parametrize(
        ("error", "status", "said"),
        [
            (ConfigError("run.yaml: bad", hint="do this"), 2, "error: run.yaml: bad\n  do this\n"),
            (TrainingError("loss is nan"), 1, "error: loss is nan\n"),
            (KeyboardInterrupt(), 130, "interrupted\n"),
            (SystemExit(3), 3, ""),
            (SystemExit(None), 0, ""),
            (
                FileNotFoundError(2, "No such file or directory", "x.bin"),
                1,
                "error: x.bin: no such file or folder\n",
            ),
            (
                ZeroDivisionError("division by zero"),
                1,
                "internal error: ZeroDivisionError: division by zero\nrun again with --debug for the traceback\n",
            ),
        ],
    )
    def test_statuses_and_words(
        self, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, said: str
    ) -> None:
        assert run_and_report_errors(lambda: fails(error)) == status
        assert capsys.readouterr().err == said

    def test_a_missing_package_of_ours_names_its_folders(self, capsys: pytest.CaptureFixture[str]) -> None:
        error = ModuleNotFoundError("No module named 'mega_data'", name="mega_data")
        assert run_and_report_errors(lambda: fails(error)) == 2
        assert "pip install packages/data" in capsys.readouterr().err

    def test_a_missing_library_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        error = ModuleNotFoundError("No module named 'zstandard'", name="zstandard")
        assert run_and_report_errors(lambda: fails(error)) == 2
        assert "'zstandard'" in capsys.readouterr().err

    def test_a_missing_module_inside_a_package_is_our_failure(self, capsys: pytest.CaptureFixture[str]) -> None:
        error = ModuleNotFoundError("No module named 'mega_data.gone'", name="mega_data.gone")
        assert run_and_report_errors(lambda: fails(error)) == 1
        assert "internal error" in capsys.readouterr().err
