"""Translation of a Megatron-LM launch script into a run.yaml."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mega_cli.megatron_args.batch_section import (
    translate_batch_flags,
    translate_lr_schedule_flags,
    translate_train_flags,
)
from mega_cli.megatron_args.bert_and_t5 import is_t5_script, translate_bert_flags, translate_t5_flags
from mega_cli.megatron_args.data_section import translate_data_flags
from mega_cli.megatron_args.flag_tables import (
    MegatronCommandSettings,
    load_megatron_flag_specs,
    parse_megatron_arguments,
)
from mega_cli.megatron_args.model_section import translate_model_flags
from mega_cli.megatron_args.run_draft import (
    DeepSpeedConfigValues,
    FlagTranslationNote,
    NoteKind,
    RunYamlDraft,
    parse_deepspeed_config,
)
from mega_cli.megatron_args.shell_words import format_unknown_placeholders
from mega_cli.megatron_args.training_command import NOTHING, MegatronTrainingCommand, find_training_command
from mega_cli.megatron_args.training_sections import (
    note_deepspeed_file,
    ranks_per_model,
    translate_checkpoint_flags,
    translate_log_flags,
    translate_optimizer_flags,
    translate_parallel_flags,
    translate_precision_flags,
    translate_recompute_flags,
)
from mega_common.errors import ConfigError

SIZES = ("num_layers", "encoder_num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True)
class RunYamlTranslation:
    """Translation of a launch script or another trainer's settings to the content of a run.yaml.
    It includes notes for the header of the run.yaml.

    Attributes:
        run: the content of run.yaml, with None for required values that the script does not set.
        notes: a note for every flag of the command, and general notes.
        origins: flags that set each dotted key of `run`.
        launch: description of the launch (nodes, ranks); empty if unknown.
        source: description of the source.
    """

    run: dict[str, Any]
    notes: list[FlagTranslationNote]
    origins: dict[str, str]
    launch: str
    source: str = "a launch script of Megatron-LM"


def translate_launch_script(
    script_text: str,
    *,
    path: Path | None = None,
    define: Mapping[str, str] = NOTHING,
    arguments: Sequence[str] = (),
    strict: bool = False,
) -> RunYamlTranslation:
    """Translate a Megatron-LM launch script, or a bare list of arguments, to the content of a run.yaml.
    The script runs `pretrain_gpt.py`, `pretrain_bert.py` or `pretrain_t5.py`.

    Megatron's defaults are written out, because mega's differ. Nothing of the script is executed.

    Args:
        path: path of the script; files that it sources are read from its folder.
        define: variables that override assignments of the script.
        arguments: arguments of the script: `$1`, `$2`, ...
        strict: reject flags and values unknown to Megatron-LM.

    Raises:
        ConfigError: with all problems and their line numbers: no training command, no model, values of a wrong type.
    """
    launch = find_training_command(script_text, path=path, define=define, arguments=arguments)
    _refuse_vision(launch)
    given = parse_megatron_arguments(launch.arguments, load_megatron_flag_specs(), strict=strict)
    given.raise_problems()
    if not any(dest in given for dest in SIZES):
        raise ConfigError(
            f"{launch.program or 'the list of arguments'} requires flags with the sizes of the model",
            hint="add flags such as --num-layers and --hidden-size; if a checkpoint defines the model, convert it with"
            " `mega ckpt convert` and write `model: {from: folder}`",
        )
    draft = RunYamlDraft(given, launch.world_size, launch.program, _deepspeed_file(given, launch))
    for section in (
        translate_model_flags, translate_data_flags, translate_bert_flags, translate_parallel_flags, translate_batch_flags, translate_train_flags, translate_optimizer_flags,
        translate_lr_schedule_flags, translate_precision_flags, translate_recompute_flags, translate_checkpoint_flags, translate_log_flags, note_deepspeed_file,
    ):  # fmt: skip
        section(draft)
    if is_t5_script(draft):
        translate_t5_flags(draft)
    given.raise_problems()
    for line, text in sorted([*launch.remarks, *given.remarks]):
        draft.add_line_remark(line, text)
    _note_differences(draft)
    draft.note_untranslated_flags()
    return RunYamlTranslation(draft.run, draft.translation_notes, draft.origins, _launch(launch, draft))


def _refuse_vision(launch: MegatronTrainingCommand) -> None:
    """Reject Megatron's multimodal example, which sets the sizes of vision encoder and projector in its code."""
    for text, line in launch.arguments:
        flag, _, value = text.partition("=")
        if flag in ("--vision-model-type", "--language-model-type"):
            raise ConfigError(
                f"line {line}: {flag} {value}".rstrip()
                + " belongs to Megatron's multimodal example, whose flags do not define its model",
                hint="write `model: {from: folder}` for a HuggingFace folder of it, or a preset such as llava-1.5-7b, and"
                " train.freeze for --freeze-LM and --freeze-ViT",
            )


def _deepspeed_file(given: MegatronCommandSettings, launch: MegatronTrainingCommand) -> DeepSpeedConfigValues:
    values = given.given["deepspeed_config"].values if "deepspeed_config" in given else ()
    text = launch.file(values[0]) if values else None
    found = parse_deepspeed_config(format_unknown_placeholders(values[0]), text) if text is not None else None
    return found or DeepSpeedConfigValues()


def _note_differences(draft: RunYamlDraft) -> None:
    """Add notes on differences between a run of mega and the same run of Megatron."""

    def add_difference(text: str) -> None:
        draft.add_note("changes meaning", text)

    if not draft["calculate_per_token_loss"]:
        add_difference(
            "loss: mega's gradient and log are means over tokens, as with --calculate-per-token-loss; Megatron's gradient is"
            " the mean of each micro-batch's mean, which differs if loss masks leave different numbers of tokens"
        )
    add_difference(
        "data.order: megatron gives Megatron's samples as long as steps, batch, split and seed are not changed; with"
        " `stable` a run can be made longer"
    )
    add_difference("initial weights: mega draws them by name, equal for every layout, so they differ from Megatron's")
    add_difference("vocabulary: mega pads it in memory only, and the softmax ignores the padding")
    if draft["hidden_dropout"] or draft["attention_dropout"]:
        add_difference("dropout: same rates, different random numbers")


def _launch(launch: MegatronTrainingCommand, draft: RunYamlDraft) -> str:
    ranks, copies = launch.world_size, ranks_per_model(draft)
    if not launch.program or ranks is None:
        return "the script does not set the number of ranks" if launch.program else ""
    if not copies:
        return f"{ranks} ranks"
    if ranks % copies:
        return f"{ranks} ranks, which is not a multiple of tp x pp x cp = {copies}"
    return f"{launch.nodes} x {launch.per_node} = {ranks} ranks, so dp = {ranks // copies}"


HEADINGS: dict[NoteKind, str] = {
    "open": "To check before the first run:",
    "no equivalent": "Without an equivalent in mega, left out:",
    "changes meaning": "Different in mega:",
    "not needed": "Not needed in mega:",
}
WIDTH = 118
LONGEST_COMMENT = 70


def render_run_yaml(translation: RunYamlTranslation) -> str:
    """Return the text of run.yaml for a translation: notes at the top, and the flags that set each key as comments."""
    lines = [*_header(translation), *_mapping(translation.run, "", translation.origins)]
    return "\n".join(lines) + "\n"


def _header(translation: RunYamlTranslation) -> Iterator[str]:
    yield f"# Translated from {translation.source}."
    if translation.launch:
        yield f"# Launch: {translation.launch}."
    for kind, heading in HEADINGS.items():
        notes = list(_group_notes([note for note in translation.notes if note.kind == kind]))
        if notes:
            yield "#"
            yield f"# {heading}"
        for note in notes:
            yield from textwrap.wrap(
                _comment_text(note), WIDTH, initial_indent="#   ", subsequent_indent="#     ", break_on_hyphens=False
            )
    yield ""


def _group_notes(notes: Sequence[FlagTranslationNote]) -> Iterator[str]:
    """Return the notes, with flags of the same reason together."""
    reasons: dict[str, list[str]] = {}
    for note in notes:
        reasons.setdefault(note.text, []).extend(filter(None, [note.flag or note.key]))
    for reason, names in reasons.items():
        yield f"{', '.join(names)}: {reason}" if names else reason


def _mapping(node: Mapping[str, Any], path: str, origins: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * (path.count(".") if path else 0)
    for key, value in node.items():
        full = path + key
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _mapping(value, full + ".", origins)
            continue
        comment = f"  # {textwrap.shorten(_comment_text(origins[full]), LONGEST_COMMENT, placeholder=' ...')}"
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield f"{indent}{key}:{comment}"
            yield from (f"{indent}  - {_inline_yaml(item)}" for item in value)
        else:
            yield f"{indent}{key}: {_inline_yaml(value)}{comment}"


def _inline_yaml(value: Any) -> str:
    """Return a value on one line."""
    text = yaml.dump(value, Dumper=_QuotingDumper, default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def _comment_text(text: str) -> str:
    """Return a text for a comment, without line breaks."""
    return "".join(char if char.isprintable() else " " for char in text)


class _QuotingDumper(yaml.SafeDumper):
    """YAML dumper that quotes everything except plain words: run.yaml is read as YAML 1.2, which parses more numbers."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = re.fullmatch(r"[A-Za-z_/$][\w/.$-]*", text, re.ASCII)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_QuotingDumper.add_representer(str, _text)
