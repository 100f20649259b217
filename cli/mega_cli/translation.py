"""Translation of launch scripts and settings of other trainers into the text of a run.yaml."""

from __future__ import annotations

from pathlib import Path

from mega_cli import moving_in
from mega_cli.megatron_args import render_run_yaml, translate_launch_script
from mega_cli.megatron_args.flag_tables import SOURCE
from mega_common.bounded_parsing import MAX_SETTINGS_BYTES, explain_read_error, read_file_start
from mega_common.errors import ConfigError


def translate_megatron_script(script: Path, define: list[str], arguments: list[str], *, strict: bool) -> str:
    """Return the text of a run.yaml translated from a Megatron-LM launch script.

    Raises:
        ConfigError: if the script or a definition is invalid.
    """
    try:
        text = read_file_start(script, MAX_SETTINGS_BYTES).decode("utf-8", errors="replace")  # comments: any encoding
    except OSError as error:
        raise ConfigError(f"{script}: cannot be read ({explain_read_error(error)})") from None
    variables = dict(_parse_definition(text) for text in define)
    try:
        found = translate_launch_script(text, path=script, define=variables, arguments=arguments, strict=strict)
    except ConfigError as error:
        named = error.message.startswith(SOURCE)
        message = error.message.replace(SOURCE, str(script), 1) if named else f"{script}: {error.message}"
        raise ConfigError(message, hint=error.hint) from None
    return render_run_yaml(found)


def translate_deepspeed_or_hf_config(deepspeed: Path | None, hf_args: Path | None, ranks: int | None) -> str:
    """Return the text of a run.yaml translated from another trainer's settings.
    They are a DeepSpeed configuration file, or a settings file with HuggingFace's names.

    Raises:
        ConfigError: if both are given, or the file is invalid.
    """
    if deepspeed is not None and hf_args is not None:
        raise ConfigError(
            "--from-deepspeed conflicts with --from-hf-args", hint="translate one of them; each prints a run.yaml"
        )
    if deepspeed is not None:
        return render_run_yaml(moving_in.translate_deepspeed(deepspeed, ranks))
    assert hf_args is not None
    return render_run_yaml(moving_in.translate_hf_training_args(hf_args, ranks))


def _parse_definition(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"--define must have the form NAME=VALUE, found {text!r}", hint="--define GPUS_PER_NODE=8")
    return name, value
