"""Draft of a run.yaml from the flags of a launch script: its settings, a note for each flag, and DeepSpeed's file.

`--deepspeed-config` names the file, which configures DeepSpeed's engine in addition to the script's flags.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from mega_cli.megatron_args.flag_tables import MegatronCommandSettings, ParsedMegatronFlag
from mega_cli.megatron_args.shell_words import MARK, format_unknown_placeholders
from mega_common.bounded_parsing import parse_json_text

# Sections without effect on the numerics, or read here; optimizer and schedule are made by the script itself.
KNOWN = frozenset(
    {"fp16", "bf16", "bfloat16", "zero_optimization", "optimizer", "scheduler", "activation_checkpointing", "aio",
     "flops_profiler", "tensorboard", "wandb", "comet", "csv_monitor", "comms_logger", "nebula", "checkpoint"}
)  # fmt: skip


@dataclass(frozen=True)
class DeepSpeedConfigValues:
    """Values of the DeepSpeed configuration file that a launch script names; `name` is empty without a file.

    Attributes:
        name: path as given in the script.
        values: content of the file; None for values that the script does not set.
    """

    name: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def get_number(self, path: str) -> float | None:
        """Return the number at a dotted path of the DeepSpeed file, or None if there is none, as with `auto`."""
        value = self._at(path)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def get_integer(self, path: str) -> int | None:
        """Return the whole number at a dotted path of the DeepSpeed file, or None if there is none, as with `auto`."""
        value = self.get_number(path)
        return int(value) if value is not None and value == int(value) else None

    def is_section_enabled(self, section: str) -> bool:
        """Return True if a section of the DeepSpeed file has `enabled: true`."""
        return self._at(f"{section}.enabled") is True

    @property
    def offloads_optimizer(self) -> bool:
        """True if the DeepSpeed file offloads the optimizer state to host memory or disk."""
        device, old = self._at("zero_optimization.offload_optimizer.device"), self._at("zero_optimization.cpu_offload")
        return device in ("cpu", "nvme") or old is True

    @property
    def untranslated_sections(self) -> list[str]:
        """Names of the DeepSpeed file's enabled sections that have no counterpart in mega."""
        return [name for name in self.values if name not in KNOWN and self.is_section_enabled(name)]

    def _at(self, path: str) -> Any:
        node: Any = self.values
        for key in path.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        return node


def parse_deepspeed_config(name: str, text: str) -> DeepSpeedConfigValues | None:
    """Return the values in the text of a DeepSpeed configuration file, or None if it is not a JSON object.
    A template that a program fills is none.
    """
    try:
        values = parse_json_text(MARK.sub("null", text))
    except ValueError:
        return None
    return DeepSpeedConfigValues(name, values) if isinstance(values, dict) else None


NoteKind = Literal["translated", "not needed", "changes meaning", "no equivalent", "open"]
DEFAULT = "Megatron's default"
# Keys for which null is a valid value: unknown values are written as text, which `mega train --check` rejects.
OPTIONAL = frozenset({
    "model.layers", "model.moe.latent_size",
    "model.num_kv_heads", "model.head_dim", "model.sliding_window", "model.full_attention_layers",
    "model.activation_limit", "model.rope.mscale", "model.rope.mscale_all_dim", "model.rope.original_max_position",
    "model.mla.q_lora_rank", "model.moe.layers", "model.moe.capacity_factor",
    "parallel.pipeline_layout", "parallel.zero3_shard", "lr_schedule.warmup_samples", "lr_schedule.decay_steps",
    "lr_schedule.cooldown_steps", "optimizer.decoupled_lr", "optimizer.muon.weight_decay", "recompute.layers",
    "fp8.format", "checkpoint.keep_every", "train.exit_after_minutes", "train.exit_interval",
})  # fmt: skip

# Unknown flags with these words may change these keys from Megatron's defaults.
FLAG_HINTS = {
    "model.activation": re.compile(r"glu|gelu|relu|silu|swish|activation-f"),
    "model.norm": re.compile(r"rms-?norm|layernorm$|normalization|norm-type"),
    "model.position": re.compile(r"alibi|rotary|rope\b|position-embedding"),
}
# Keys of the model that checkpoints of Megatron-LM do not contain.
OF_THE_RUN = ("dropout", "init")


@dataclass(frozen=True)
class FlagTranslationNote:
    """Note in the header of run.yaml on the translation of a flag, or a general remark.

    Attributes:
        kind: result of the translation; `open` must be filled in or checked by the user.
        text: one sentence or clause.
        flag, line: the flag as given and its line in the script; None for general notes.
        key: the key of run.yaml that the flag sets.
    """

    kind: NoteKind
    text: str
    flag: str | None = None
    line: int | None = None
    key: str | None = None


class RunYamlDraft:
    """A run.yaml under translation from a Megatron training command: the keys set so far, and notes on the translation.

    Attributes:
        arguments: the settings of the command.
        ranks: number of ranks, None if unknown.
        program: name of the training program, empty if unknown.
        deepspeed_file: DeepSpeed's configuration file, empty without one.
        run: the content of run.yaml so far.
        origins: flags that set each dotted key.
    """

    def __init__(
        self,
        arguments: MegatronCommandSettings,
        ranks: int | None,
        program: str = "",
        deepspeed_file: DeepSpeedConfigValues | None = None,
    ) -> None:
        self.arguments, self.ranks, self.program = arguments, ranks, program
        self.deepspeed_file = deepspeed_file or DeepSpeedConfigValues()
        self.run: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self._flags: dict[str, FlagTranslationNote] = {}
        self._general: list[FlagTranslationNote] = []

    def __getitem__(self, dest: str) -> Any:
        return self.arguments[dest]

    def __contains__(self, dest: str) -> bool:
        return dest in self.arguments

    def get_megatron_setting(self, dest: str, default: Any) -> Any:
        """Return the value that the Megatron command gives setting `dest`, or `default` if it gives none."""
        return self.arguments[dest] if dest in self.arguments.given else default

    def is_megatron_setting_enabled(self, dest: str) -> bool:
        """Return whether Megatron setting `dest` is on: nonzero and nonempty, or given with an unknown value."""
        return bool(self[dest]) or self.is_megatron_setting_unknown(dest)

    def is_megatron_setting_unknown(self, dest: str) -> bool:
        """Return whether the Megatron command gives setting `dest` with an unknown value.
        An example is an unset shell variable.
        """
        given = self.arguments.given.get(dest)
        return given is not None and bool(given.unknown_value_reason)

    @property
    def is_megatron_deepspeed(self) -> bool:
        """True if the command has flags of Megatron-DeepSpeed."""
        return any(name in self for name in ("deepspeed", "deepspeed_config", "zero_stage"))

    @property
    def uses_checkpoint_args(self) -> bool:
        """True if `--use-checkpoint-args` defines the model by a checkpoint that the run itself did not save."""
        return bool(self["use_checkpoint_args"]) and self["load"] != self["save"]

    @property
    def translation_notes(self) -> list[FlagTranslationNote]:
        """General notes, then one note for each flag in the order of the command."""
        flags = [self._flags[dest] for dest in self.arguments.given if dest in self._flags]
        once = {(note.flag, note.line): note for note in reversed(flags)}
        return self._general + list(reversed(once.values())) + [_other(given) for given in self.arguments.others]

    def set_key(
        self, key: str, value: Any, *dests: str, because: str = "", ask: str = "not in the script", instead: str = ""
    ) -> None:
        """Set a dotted key of run.yaml to `value`, from Megatron settings `dests`; leave None for the user to fill in.
        `because` is the key's comment, by default the flags. A None gets a note: the fault of the flags, else `ask`;
        where null is a valid value of the key, the text `instead` is written for it.
        """
        found = [given for dest in dests if (given := self.arguments.given.get(dest))]
        self.origins[key] = because or ", ".join(map(str, found)) or DEFAULT
        for given in found:
            self._flags.setdefault(given.flag.dest, FlagTranslationNote("translated", key, str(given), given.line, key))
        if not found and (doubt := self._default_doubt(key)):
            value, ask = None, doubt
        if value is None:
            reason = self._leave_open(key, found, ask)
            value = (instead or _shown_values(found) or reason) if key in OPTIONAL else None
        if unset := dict.fromkeys(map(format_unknown_placeholders, _marks(value))):
            self.add_note(
                "open", f"{', '.join(unset)} {'is' if len(unset) == 1 else 'are'} not set in the script", key=key
            )
        node = self.run
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = _plain(value)

    def set_key_from_deepspeed_file(self, key: str, path: str, value: Any, *dests: str, flags: Any = None) -> None:
        """Set a dotted key of run.yaml to `value`, which DeepSpeed's configuration file has at the dotted `path`.
        If a flag of the Megatron settings `dests` is given and their value, `flags`, differs, a note is added.
        """
        self.set_key(key, value, *dests, because=f"{path} of {self.deepspeed_file.name}")
        if any(dest in self for dest in dests) and flags != value:
            self.add_note("changes meaning", f"{path} = {value} of {self.deepspeed_file.name} takes precedence", *dests)

    def _default_doubt(self, key: str) -> str:
        """Return why Megatron's default of a key may not apply."""
        if key in FLAG_HINTS:
            for given in self.arguments.others:
                if FLAG_HINTS[key].search(given.flag.name):
                    return f"{given} may set it"
        of_model = key.startswith("model.") and not any(word in key for word in OF_THE_RUN)
        return (
            "set by the checkpoint, because of --use-checkpoint-args" if of_model and self.uses_checkpoint_args else ""
        )

    def _leave_open(self, key: str, found: Sequence[ParsedMegatronFlag], ask: str) -> str:
        """Leave a key to be filled in, with the reason, which is returned."""
        faults = [fault for given in found if (fault := given.unknown_value_reason or given.invalid_value_reason)]
        reason = faults[0] if faults else ask
        self.origins[key] = ", ".join(["to be filled in", *map(str, found)])
        self.add_note("open", f"{reason}; to be filled in", key=key)
        return reason

    def add_note(self, kind: NoteKind, text: str, *dests: str, key: str | None = None) -> None:
        """Add a note of `kind` on Megatron flags that the command gives, or a general note.
        The flags are of the settings `dests`; without them, the note is general.
        """
        for given in filter(None, map(self.arguments.given.get, dests)):
            before = self._flags.get(given.flag.dest)
            note = FlagTranslationNote(kind, text, str(given), given.line, before.key if before else key)
            self._flags[given.flag.dest] = note
        if not dests:
            self._general.append(FlagTranslationNote(kind, text, key=key))

    def add_line_remark(self, line: int, text: str) -> None:
        """Add to run.yaml's header a note, for the user to decide, on a line of the launch script."""
        self._general.append(FlagTranslationNote("open", f"line {line}: {text}", line=line))

    def add_problem(self, dest: str, rule: str) -> None:
        """Record that the flag of setting `dest` violates `rule`; the errors of all flags are raised together later."""
        self.arguments.add_flag_problem(self.arguments.given[dest], rule)

    def note_untranslated_flags(self) -> None:
        """Add a note on each given flag of Megatron-LM that set no key of run.yaml and has no note yet."""
        handling = load_untranslated_flag_notes()
        for dest, given in self.arguments.given.items():
            if dest not in self._flags:
                self._flags[dest] = _handled(given, handling)


@cache
def load_untranslated_flag_notes() -> tuple[tuple[str, NoteKind, str], ...]:
    """Return (glob pattern of the flag's name, kind of note, text) for Megatron flags that set no key of run.yaml.
    They are from mega's table `handling.yaml`.
    """
    text = (files("mega_cli.megatron_args") / "handling.yaml").read_text(encoding="utf-8")
    table: Mapping[NoteKind, Mapping[str, str]] = yaml.safe_load(text)
    return tuple(
        (pattern, kind, why) for kind, rows in table.items() for why, flags in rows.items() for pattern in flags.split()
    )


def _other(given: ParsedMegatronFlag) -> FlagTranslationNote:
    hint = f" ({given.flag.dest})" if given.flag.dest else ""
    text = f"is not a flag of Megatron-LM; check if it changes the model or the run{hint}"
    return FlagTranslationNote("open", text, str(given), given.line)


def _handled(given: ParsedMegatronFlag, handling: Iterable[tuple[str, NoteKind, str]]) -> FlagTranslationNote:
    found = ((kind, why) for pattern, kind, why in handling if fnmatchcase(given.flag.name, pattern))
    kind, why = next(
        found, ("open", given.unknown_value_reason or "is not translated; check if it changes the model or the run")
    )
    note = FlagTranslationNote(kind, why, str(given), given.line)
    if (
        kind == "no equivalent"
        and not given.unknown_value_reason
        and given.parsed_value() == given.flag.default_value()
    ):
        return replace(note, kind="not needed", text="this is Megatron's default")
    return note


def _shown_values(found: Sequence[ParsedMegatronFlag]) -> str:
    return " ".join(
        format_unknown_placeholders(value) for given in found if given.unset_shell_variables for value in given.values
    )


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return format_unknown_placeholders(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _marks(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from (mark[0] for mark in MARK.finditer(value))
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _marks(item)
