"""The `data:` section of run.yaml."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mega_cli.megatron_args.run_draft import RunYamlDraft
from mega_cli.megatron_args.shell_words import MARK

OWN = ("train_data_path", "valid_data_path", "test_data_path")
SPLIT = "969, 30, 1"
NUMBER = re.compile(r"[.0-9]+")
PLAIN_SPLIT = re.compile(r"[\[('\"]*[.0-9]+([,/ ]+[.0-9]+)*,? *[\])'\"]*")


def translate_data_flags(draft: RunYamlDraft) -> None:
    """Add to `draft` the `data` section of a run.yaml (data sets, tokenizer, length), from Megatron-LM flags."""
    put = draft.set_key
    if any(name in draft for name in OWN):
        for name in OWN:
            if draft[name] or name == OWN[0]:
                _sources(draft, f"data.{name.partition('_')[0]}", name)
    else:
        _sources(draft, "data.train", "data_path")
        _write_split(draft)
    length = draft["seq_length"] if "seq_length" in draft else draft["encoder_seq_length"]
    put("data.seq_length", length, "seq_length", "encoder_seq_length")
    put("data.order", "megatron", because="samples in Megatron's order")
    _tokenizer(draft)
    _fim(draft)
    if draft["dataloader_type"] == "single":
        draft.add_note("not needed", "samples are read once, in the order of the data set", "dataloader_type")
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if draft[name]:
            put(f"data.{name}", True, name)
    if draft["data_cache_path"]:
        put("data.cache", draft["data_cache_path"], "data_cache_path")


def _write_split(draft: RunYamlDraft) -> None:
    """Write `data.split`: Megatron parses what looks like a number and ignores everything else."""
    text = draft["split"] or SPLIT
    if MARK.search(text):
        return draft.set_key("data.split", None, "split")
    numbers = NUMBER.findall(text)
    shares = [float(number) for number in numbers if number.count(".") < 2 and number != "."]
    if len(shares) < len(numbers) or not 0 < len(shares) <= 3 or not sum(shares):
        return draft.add_problem("split", "must be one to three shares such as 969,30,1, not all of them 0")
    draft.set_key("data.split", shares, "split")
    if not PLAIN_SPLIT.fullmatch(text):
        taken = ", ".join(numbers)
        draft.add_note(
            "changes meaning",
            f"Megatron reads the numbers {taken} from it, and ignores signs, letters and exponents",
            "split",
        )
    return None


def _fim(draft: RunYamlDraft) -> None:
    names = [f"fim_{name}_token" for name in ("prefix", "middle", "suffix")]
    if not draft["fim_data"]:
        draft.add_note("not needed", "has no effect without --fim-data", "fim_rate", "fim_spm_rate", *names)
        return
    draft.set_key("data.kind", "fim", "fim_data")
    draft.set_key("data.fim.rate", draft["fim_rate"], "fim_rate")
    draft.set_key("data.fim.spm_rate", draft["fim_spm_rate"], "fim_spm_rate")
    draft.set_key("data.fim.tokens", [draft[name] for name in names], *names)
    text = "mega draws other documents and cut positions for FIM; Megatron's draws depend on the reading order"
    draft.add_note("changes meaning", text, "fim_data")


def parse_megatron_data_path(words: Sequence[str]) -> list[dict[str, Any]]:
    """Return the items {path, weight} of run.yaml's `data.train` for the words of Megatron's `--data-path`.
    The words are weights and paths alternating, or paths alone.
    """
    weights = words[::2]
    if words and len(words) % 2 == 0 and all(_is_number(weight) for weight in weights):
        return [{"path": path, "weight": float(weight)} for weight, path in zip(weights, words[1::2], strict=True)]
    return [{"path": path} for path in words]


def _sources(draft: RunYamlDraft, key: str, dest: str) -> None:
    sources = parse_megatron_data_path(draft[dest])
    if len(sources) == 1:
        sources = [{"path": sources[0]["path"]}]
    elif sources and "weight" not in sources[0]:
        sources = [{**source, "weight": 1.0} for source in sources]
        text = "without weights Megatron reads every data set once; set the weights in run.yaml to the sizes of the data sets"
        draft.add_note("changes meaning", text, dest, key=key)
    draft.set_key(key, sources or None, dest)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _tokenizer(draft: RunYamlDraft) -> None:
    kind, path = draft["tokenizer_type"], draft["tokenizer_model"]
    if kind == "HuggingFaceTokenizer" and path:
        draft.set_key("data.tokenizer", path, "tokenizer_model", "tokenizer_type")
        draft.add_note(
            "translated", "data.tokenizer, which must be a local folder with tokenizer.json", "tokenizer_model"
        )
    elif kind == "NullTokenizer":
        draft.add_note("not needed", "data.tokenizer is not required", "tokenizer_type")
    else:
        text = (
            "mega only reads tokenizer.json; if the end-of-document token is required, set data.tokenizer to its folder"
        )
        draft.add_note("changes meaning", text, "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
