"""A run.yaml in the making: each key with where it comes from, and a note for every flag."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from mega_cli.megatron_args.deepspeed import DeepSpeedFile
from mega_cli.megatron_args.flags import Arguments, Given
from mega_cli.megatron_args.shell import MARK, shown

Kind = Literal["translated", "not needed", "changes meaning", "no equivalent", "open"]
DEFAULT = "Megatron's default"
# Keys for which null means something: what is not known stands there as a text, which `mega train --check` refuses.
OPTIONAL = frozenset({
    "model.layers", "model.moe.latent_size",
    "model.num_kv_heads", "model.head_dim", "model.sliding_window", "model.full_attention_layers",
    "model.activation_limit", "model.rope.mscale", "model.rope.mscale_all_dim", "model.rope.original_max_position",
    "model.mla.q_lora_rank", "model.moe.layers", "model.moe.capacity_factor",
    "parallel.pipeline_layout", "parallel.zero3_shard", "lr_schedule.warmup_samples", "lr_schedule.decay_steps",
    "lr_schedule.cooldown_steps", "optimizer.decoupled_lr", "optimizer.muon.weight_decay", "recompute.layers",
    "fp8.format", "checkpoint.keep_every", "train.exit_after_minutes", "train.exit_interval",
})  # fmt: skip

# Words of flags in no table which say that these keys are not Megatron's defaults.
TELLING = {
    "model.activation": re.compile(r"glu|gelu|relu|silu|swish|activation-f"),
    "model.norm": re.compile(r"rms-?norm|layernorm$|normalization|norm-type"),
    "model.position": re.compile(r"alibi|rotary|rope\b|position-embedding"),
}
# Keys of the model that no checkpoint of Megatron-LM gives.
OF_THE_RUN = ("dropout", "init")


@dataclass(frozen=True)
class Note:
    """What became of a flag, or something else to know.

    Attributes:
        kind: what of it mega has; `open` is what the user has to fill in or to look at.
        text: one sentence or clause.
        flag, line: the flag as given and its line in the script; none for notes of no single flag.
        key: the key of run.yaml that it gives.
    """

    kind: Kind
    text: str
    flag: str | None = None
    line: int | None = None
    key: str | None = None


class Draft:
    """Collects keys and notes while the arguments are gone through.

    Attributes:
        arguments: the settings of the command.
        ranks: number of ranks, if the script says it.
        program: name of the Python file that trains, if the script says it.
        deepspeed_file: DeepSpeed's own file of settings, as far as it is there.
        run: the content of run.yaml so far.
        origins: by dotted key, the flags that it comes from.
    """

    def __init__(
        self, arguments: Arguments, ranks: int | None, program: str = "", deepspeed_file: DeepSpeedFile | None = None
    ) -> None:
        self.arguments, self.ranks, self.program = arguments, ranks, program
        self.deepspeed_file = deepspeed_file or DeepSpeedFile()
        self.run: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self._flags: dict[str, Note] = {}
        self._general: list[Note] = []

    def __getitem__(self, dest: str) -> Any:
        return self.arguments[dest]

    def __contains__(self, dest: str) -> bool:
        return dest in self.arguments

    def get(self, dest: str, default: Any) -> Any:
        """A setting as it is given, or `default`."""
        return self.arguments[dest] if dest in self.arguments.given else default

    def wants(self, dest: str) -> bool:
        """Whether a setting is on: not zero and not empty, or given and not known."""
        return bool(self[dest]) or self.unknown(dest)

    def unknown(self, dest: str) -> bool:
        """Whether a setting is given, but not to what."""
        given = self.arguments.given.get(dest)
        return given is not None and bool(given.unknown)

    @property
    def deepspeed(self) -> bool:
        """Whether the command is one of Megatron-DeepSpeed."""
        return any(name in self for name in ("deepspeed", "deepspeed_config", "zero_stage"))

    @property
    def from_checkpoint(self) -> bool:
        """Whether the model is that of a checkpoint, other than one that the run itself saved."""
        return bool(self["use_checkpoint_args"]) and self["load"] != self["save"]

    @property
    def notes(self) -> list[Note]:
        """General notes, then one for each of the flags in the order of the command."""
        flags = [self._flags[dest] for dest in self.arguments.given if dest in self._flags]
        once = {(note.flag, note.line): note for note in reversed(flags)}
        return self._general + list(reversed(once.values())) + [_other(given) for given in self.arguments.others]

    def put(
        self, key: str, value: Any, *dests: str, because: str = "", ask: str = "not in the script", instead: str = ""
    ) -> None:
        """Set a key to what the settings `dests` give.

        `None` is left for the user to fill in, who is told `ask`, or what is wrong with the settings; `instead` stands for
        it where null would mean something.
        """
        found = [given for dest in dests if (given := self.arguments.given.get(dest))]
        self.origins[key] = because or ", ".join(map(str, found)) or DEFAULT
        for given in found:
            self._flags.setdefault(given.flag.dest, Note("translated", key, str(given), given.line, key))
        if not found and (doubt := self._doubt(key)):
            value, ask = None, doubt
        if value is None:
            reason = self._ask(key, found, ask)
            value = (instead or _shown_values(found) or reason) if key in OPTIONAL else None
        if unset := dict.fromkeys(map(shown, _marks(value))):
            self.tell("open", f"{', '.join(unset)} {'is' if len(unset) == 1 else 'are'} not set in the script", key=key)
        node = self.run
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = _plain(value)

    def put_filed(self, key: str, path: str, value: Any, *dests: str, flags: Any = None) -> None:
        """Set a key to what DeepSpeed's file says at `path`, which counts where the flags' value is another."""
        self.put(key, value, *dests, because=f"{path} of {self.deepspeed_file.name}")
        if any(dest in self for dest in dests) and flags != value:
            self.tell("changes meaning", f"{path} of {self.deepspeed_file.name} counts, which is {value}", *dests)

    def _doubt(self, key: str) -> str:
        """Why Megatron's default of a key may not be what it is."""
        if key in TELLING:
            for given in self.arguments.others:
                if TELLING[key].search(given.flag.name):
                    return f"{given} may say it"
        of_model = key.startswith("model.") and not any(word in key for word in OF_THE_RUN)
        return "that of the checkpoint, for --use-checkpoint-args" if of_model and self.from_checkpoint else ""

    def _ask(self, key: str, found: Sequence[Given], ask: str) -> str:
        """Leave a key to be filled in, with the reason, which is returned."""
        faults = [fault for given in found if (fault := given.unknown or given.odd)]
        reason = faults[0] if faults else ask
        self.origins[key] = ", ".join(["to be filled in", *map(str, found)])
        self.tell("open", f"{reason}; to be filled in", key=key)
        return reason

    def tell(self, kind: Kind, text: str, *dests: str, key: str | None = None) -> None:
        """Note something on the settings `dests` as far as they are given, or in general without any."""
        for given in filter(None, map(self.arguments.given.get, dests)):
            before = self._flags.get(given.flag.dest)
            note = Note(kind, text, str(given), given.line, before.key if before else key)
            self._flags[given.flag.dest] = note
        if not dests:
            self._general.append(Note(kind, text, key=key))

    def remark(self, line: int, text: str) -> None:
        """Note something about a line of the script."""
        self._general.append(Note("open", f"line {line}: {text}", line=line))

    def refuse(self, dest: str, rule: str) -> None:
        """Note that the value of a flag cannot be understood, which is told with all other such problems."""
        self.arguments.refuse(self.arguments.given[dest], rule)

    def finish(self) -> None:
        """Note what becomes of the flags that no key came from."""
        handling = load_handling()
        for dest, given in self.arguments.given.items():
            if dest not in self._flags:
                self._flags[dest] = _handled(given, handling)


@cache
def load_handling() -> tuple[tuple[str, Kind, str], ...]:
    """What becomes of flags without a key, from `handling.yaml`: (pattern of the flag's name, kind, why)."""
    text = (files("mega_cli.megatron_args") / "handling.yaml").read_text(encoding="utf-8")
    table: Mapping[Kind, Mapping[str, str]] = yaml.safe_load(text)
    return tuple(
        (pattern, kind, why) for kind, rows in table.items() for why, flags in rows.items() for pattern in flags.split()
    )


def _other(given: Given) -> Note:
    hint = f" ({given.flag.dest})" if given.flag.dest else ""
    text = f"no flag of Megatron-LM's; see whether it changes the model or the run{hint}"
    return Note("open", text, str(given), given.line)


def _handled(given: Given, handling: Iterable[tuple[str, Kind, str]]) -> Note:
    found = ((kind, why) for pattern, kind, why in handling if fnmatchcase(given.flag.name, pattern))
    kind, why = next(found, ("open", given.unknown or "what it changes here is not known"))
    note = Note(kind, why, str(given), given.line)
    if kind == "no equivalent" and not given.unknown and given.value() == given.flag.default_value():
        return replace(note, kind="not needed", text="this is what Megatron does without it")
    return note


def _shown_values(found: Sequence[Given]) -> str:
    return " ".join(shown(value) for given in found if given.unset for value in given.values)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _marks(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from (mark[0] for mark in MARK.finditer(value))
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _marks(item)
