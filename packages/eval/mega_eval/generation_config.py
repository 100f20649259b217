"""Settings of generation_config.json: those that `Sampling` applies as transformers does, and those that are not
supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mega_ckpt.families.config_entries import split_words

# Applied whenever they are given, with the values that mean "off".
_ALWAYS: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
}
# Applied with `do_sample`. Transformers uses top_k = 50 if it is absent or null, and writes 0 to disable it.
_DRAWN = ("temperature", "top_k", "top_p", "min_p")
_DRAWN_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_k": 50}
# Not supported although they change the text, with their neutral values.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "constraints": (),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": (),
    "stop_strings": (),
    "token_healing": (False,),
    "watermarking_config": (),
}
# Not supported with `do_sample`, with their neutral values.
_UNSUPPORTED_DRAWN: Mapping[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "typical_p": (1,),
}
# Do not change the text, or correspond to an option of mega's commands (such as the maximum length).
_HARMLESS = split_words(
    """_from_model_config assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind
    bos_token_id cache_config cache_implementation compile_config continuous_batching_config decoder_start_token_id
    disable_compile do_sample early_stopping eos_token_id is_assistant length_penalty low_memory max_cache_len max_length
    max_matching_ngram_size max_new_tokens num_assistant_tokens num_assistant_tokens_schedule output_attentions
    output_hidden_states output_logits output_scores pad_token_id prefill_chunk_size prompt_lookup_num_tokens
    remove_invalid_values renormalize_logits return_dict_in_generate speculation_type target_lookbehind transformers_version
    trust_remote_code use_cache use_mtp"""
)
GENERATION_KEYS = frozenset({*_ALWAYS, *_DRAWN, *_UNSUPPORTED, *_UNSUPPORTED_DRAWN, "do_sample", "eos_token_id"})


def parse_sampling_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Sampling` that a parsed generation_config.json gives; temperature, top_k and the like
    only if it has `do_sample`.
    """
    found = {name: raw[name] for name, off in _ALWAYS.items() if _is_set(raw, name, off)}
    if raw.get("min_new_tokens") is not None:  # takes precedence, as in transformers
        found.pop("min_length", None)
    ends = parse_token_ids(raw.get("eos_token_id"))
    if found.keys() & {"min_length", "min_new_tokens"}:
        found["min_length_ends"] = ends
    if isinstance(words := found.get("bad_words_ids"), list):  # transformers never bans a single end token
        found["bad_words_ids"] = [word for word in words if word not in [[end] for end in ends]]
    if raw.get("do_sample"):
        drawn = {**_DRAWN_DEFAULTS, **{name: raw[name] for name in _DRAWN if raw.get(name) is not None}}
        found |= {name: value for name, value in drawn.items() if value}
    return found


def list_unsupported_settings(raw: Mapping[str, Any]) -> list[str]:
    """Return the unsupported settings of a generation_config.json that would change the text, as `name = value`."""
    drawn = bool(raw.get("do_sample"))
    refused = {**_UNSUPPORTED, **_UNSUPPORTED_DRAWN}
    known = {*_ALWAYS, *_DRAWN, *_HARMLESS, *(() if drawn else _UNSUPPORTED_DRAWN)}
    names = sorted(name for name in raw if name not in known and _is_set(raw, name, refused.get(name, ())))
    return [f"{name} = {raw[name]!r:.60}" for name in names]


def parse_token_ids(value: object) -> list[int]:
    """Return as a list the token ids of a generation_config.json field that is a token id, a list of them or null."""
    return list(_iterate_token_ids(value))


def _iterate_token_ids(value: object) -> Iterator[int]:
    """Yield the integers of a value or of a list of values."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int):
            yield item


def _is_set(raw: Mapping[str, Any], name: str, off: tuple[Any, ...]) -> bool:
    """Return whether a setting is given with a value other than its neutral ones."""
    return raw.get(name) is not None and raw[name] not in off
