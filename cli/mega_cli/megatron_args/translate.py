"""A Megatron-LM launch script as a run.yaml of mega."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mega_cli.megatron_args.bert import bert_section
from mega_cli.megatron_args.data import data_section
from mega_cli.megatron_args.deepspeed import DeepSpeedFile, read_deepspeed_file
from mega_cli.megatron_args.draft import Draft, Note
from mega_cli.megatron_args.flags import Arguments, load_flags
from mega_cli.megatron_args.launch import NOTHING, Launch, find_launch
from mega_cli.megatron_args.model import model_section
from mega_cli.megatron_args.parse import parse_arguments
from mega_cli.megatron_args.schedule import schedule_section
from mega_cli.megatron_args.shell import shown
from mega_cli.megatron_args.steps import batch_section, train_section
from mega_cli.megatron_args.t5 import is_t5, t5_section
from mega_cli.megatron_args.training import (
    checkpoint_section,
    deepspeed_section,
    log_section,
    model_ranks,
    optimizer_section,
    parallel_section,
    precision_section,
    recompute_section,
)
from mega_common.errors import ConfigError

SIZES = ("num_layers", "encoder_num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True)
class Translation:
    """What a launch script says of a run.

    Attributes:
        run: the content of run.yaml. `None` stands where the script does not say what mega has to know.
        notes: every flag of the command, and what else there is to know.
        origins: by dotted key of `run`, the flags that it comes from.
        launch: how the script starts the run, in words; empty if it does not say.
        what: it was translated from.
    """

    run: dict[str, Any]
    notes: list[Note]
    origins: dict[str, str]
    launch: str
    what: str = "a launch script of Megatron-LM"


def translate(
    script_text: str,
    *,
    path: Path | None = None,
    define: Mapping[str, str] = NOTHING,
    arguments: Sequence[str] = (),
    strict: bool = False,
) -> Translation:
    """Translate a launch script, or a bare list of arguments, for Megatron-LM's `pretrain_gpt.py` or `pretrain_bert.py`.

    Megatron's defaults are written out, for mega has others. Nothing of the script is executed.

    Args:
        path: where the script lies; files that it sources are read from beside it.
        define: variables of the script, which hold whatever it assigns to them itself.
        arguments: of the script: `$1` and on.
        strict: refuse flags and values that Megatron-LM does not have.

    Raises:
        ConfigError: for what cannot be understood (no training command, none that sets a model, values of a wrong type),
            all of it at once, with line numbers.
    """
    launch = find_launch(script_text, path=path, define=define, arguments=arguments)
    _refuse_sight(launch)
    given = parse_arguments(launch.arguments, load_flags(), strict=strict)
    given.check()
    if not any(dest in given for dest in SIZES):
        raise ConfigError(
            f"{launch.program or 'the list of arguments'} is given no size of a model",
            hint="expected flags such as --num-layers and --hidden-size; where the model is that of a checkpoint, convert it"
            " with `mega ckpt convert` and write `model: {from: folder}`",
        )
    draft = Draft(given, launch.ranks, launch.program, _deepspeed_file(given, launch))
    for section in (
        model_section, data_section, bert_section, parallel_section, batch_section, train_section, optimizer_section,
        schedule_section, precision_section, recompute_section, checkpoint_section, log_section, deepspeed_section,
    ):  # fmt: skip
        section(draft)
    if is_t5(draft):
        t5_section(draft)
    given.check()
    for line, text in sorted([*launch.remarks, *given.remarks]):
        draft.remark(line, text)
    _differences(draft)
    draft.finish()
    return Translation(draft.run, draft.notes, draft.origins, _launch(launch, draft))


def _refuse_sight(launch: Launch) -> None:
    """Megatron's multimodal example sizes tower and projector in its own code, by names, so that no flag says what they are."""
    for text, line in launch.arguments:
        flag, _, value = text.partition("=")
        if flag in ("--vision-model-type", "--language-model-type"):
            raise ConfigError(
                f"line {line}: {flag} {value}".rstrip()
                + " is of Megatron's multimodal example, whose flags do not say what its model is",
                hint="write `model: {from: folder}` for a HuggingFace folder of it, or a preset such as llava-1.5-7b, and"
                " train.freeze for --freeze-LM and --freeze-ViT",
            )


def _deepspeed_file(given: Arguments, launch: Launch) -> DeepSpeedFile:
    values = given.given["deepspeed_config"].values if "deepspeed_config" in given else ()
    text = launch.file(values[0]) if values else None
    found = read_deepspeed_file(shown(values[0]), text) if text is not None else None
    return found or DeepSpeedFile()


def _differences(draft: Draft) -> None:
    """What a run of mega does in another way than the same run of Megatron."""

    def tell(text: str) -> None:
        draft.tell("changes meaning", text)

    if not draft["calculate_per_token_loss"]:
        tell(
            "loss: mega's gradient and log are means over tokens, as with --calculate-per-token-loss; Megatron's gradient is"
            " a mean of each micro-batch's mean, which differs where masks leave uneven counts"
        )
    tell(
        "data.order: megatron draws the samples that Megatron draws, as long as steps, batch, split and seed stay as they are;"
        " `stable` would keep them when a run is made longer"
    )
    tell("initial weights: mega draws them by name, alike for every layout, so they are not those that Megatron draws")
    tell("vocabulary: mega pads it in memory only, and what it pads takes no part in the softmax")
    if draft["hidden_dropout"] or draft["attention_dropout"]:
        tell("dropout: the same rates, other random numbers")


def _launch(launch: Launch, draft: Draft) -> str:
    ranks, copies = launch.ranks, model_ranks(draft)
    if not launch.program or ranks is None:
        return "the script does not say how many ranks there are" if launch.program else ""
    if not copies:
        return f"{ranks} ranks"
    if ranks % copies:
        return f"{ranks} ranks, which are not a multiple of tp x pp x cp = {copies}"
    return f"{launch.nodes} x {launch.per_node} = {ranks} ranks, so dp = {ranks // copies}"
