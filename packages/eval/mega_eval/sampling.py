"""Sampling of the next token: greedy, or with temperature, top-k, top-p (arXiv:1904.09751) and min-p
(arXiv:2407.01082).

A draw is a function of (seed, sample, step) alone. It uses one uniform random number from the CPU, regardless of the
model's device, so a sample's text depends neither on the rest of the batch nor on the device.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from mega_ckpt.families.config_entries import split_words
from mega_common.errors import ConfigError, DataError
from mega_common.strict_config import StrictConfig
from mega_trainer.distributed.rng import seeded_generator

SMALLEST = 1e-300  # lower bound of temperature and of top-p times the sum of probabilities


class Sampling(StrictConfig):
    """Settings that choose the next token from the logits.
    Penalties, then temperature, `top_k`, `top_p` and `min_p` are applied in this order.
    """

    temperature: float = Field(0.0, ge=0, allow_inf_nan=False, description="0 is greedy decoding")
    top_k: PositiveInt | None = Field(None, description="draw only from the k most likely tokens")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the fewest tokens whose probabilities sum to this")
    min_p: float = Field(
        0.0, ge=0, le=1, description="draw from tokens with at least this share of the highest probability"
    )
    repetition_penalty: float = Field(
        1.0,
        ge=1e-9,
        le=1e9,
        allow_inf_nan=False,
        description="divides positive scores of earlier tokens, multiplies negative ones",
    )
    presence_penalty: float = Field(
        0.0,
        ge=-1e9,
        le=1e9,
        allow_inf_nan=False,
        description="subtracted from the score of a token that was generated before",
    )
    frequency_penalty: float = Field(
        0.0,
        ge=-1e9,
        le=1e9,
        allow_inf_nan=False,
        description="subtracted from the score of a token for each earlier time it was generated",
    )
    no_repeat_ngram_size: NonNegativeInt = Field(0, description="no n-gram of this size appears twice, prompt included")
    logit_bias: dict[NonNegativeInt, float] = Field({}, description="added to the scores of tokens, by token id")
    allowed_token_ids: list[NonNegativeInt] | None = Field(None, description="the only tokens that may be chosen")
    bad_words_ids: list[Annotated[list[NonNegativeInt], Field(min_length=1)]] = Field(
        [], description="token sequences that never appear, even if they would start in the prompt"
    )
    suppress_tokens: list[int] = Field([], description="tokens that are never chosen")
    begin_suppress_tokens: list[int] = Field([], description="tokens that are never the first new token")
    forced_bos_token_id: NonNegativeInt | None = Field(
        None, description="second token of a sequence, after a prompt of one token or an encoder-decoder's start token"
    )
    min_length: NonNegativeInt = Field(0, description="minimum number of tokens, prompt included")
    min_new_tokens: NonNegativeInt = Field(0, description="minimum number of new tokens")
    min_length_ends: list[int] = Field([], description="end tokens that `min_length` and `min_new_tokens` exclude")
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """True if the sampling settings choose the most likely token from unmodified scores."""
        return self.temperature == 0 and not self.modifies_scores

    @property
    def modifies_scores(self) -> bool:
        """True if the sampling settings change the scores before temperature.
        They do by penalties, biases or restrictions.
        """
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return self.restricts_tokens or bool(penalties or self.logit_bias)

    @property
    def restricts_tokens(self) -> bool:
        """True if the sampling settings exclude some tokens at some positions."""
        shorter = self.min_length_ends and (self.min_length or self.min_new_tokens)
        lists = self.bad_words_ids or self.suppress_tokens or self.begin_suppress_tokens
        single = self.forced_bos_token_id is not None or self.allowed_token_ids is not None
        return bool(self.no_repeat_ngram_size or lists or shorter or single)


def apply_penalties(logits: Tensor, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
    """Return the scores [V] of the next token after penalties, biases and restrictions.
    They are in fp64, where no penalty within its bounds makes them infinite; the logits themselves if the settings have
    none.

    The repetition penalty counts prompt tokens, as in transformers (arXiv:1909.05858); presence and frequency penalties do
    not, as in OpenAI's API.
    """
    if not sampling.modifies_scores:
        return logits
    scores, device = logits.to(torch.float64, copy=True), logits.device
    seen = torch.tensor(sorted({*prompt, *generated}), device=device)
    before = scores[seen]
    scores[seen] = torch.where(before < 0, before * sampling.repetition_penalty, before / sampling.repetition_penalty)
    if generated:
        tokens, counts = (
            torch.tensor(column, device=device) for column in zip(*Counter(generated).items(), strict=True)
        )
        scores[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * counts.to(scores.dtype)
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    return apply_token_restrictions(scores, sampling, prompt, generated) if sampling.restricts_tokens else scores


def apply_token_restrictions(
    scores: Tensor, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]
) -> Tensor:
    """Return the scores [V] of the next token after the exclusion of tokens by the settings.
    Tokens that the settings exclude have the least finite number (in transformers -inf), and tokens outside
    `allowed_token_ids` have -inf.

    The lowest finite number, unlike -inf, leaves these tokens available if a grammar or `allowed_token_ids`, which set
    other scores to -inf, permit nothing else.
    """
    if sampling.allowed_token_ids is not None:
        allowed = torch.tensor(sorted(set(sampling.allowed_token_ids)), device=scores.device)
        scores = torch.full_like(scores, float("-inf")).index_copy(0, allowed, scores[allowed])
    forced, lowest = sampling.forced_bos_token_id, torch.finfo(scores.dtype).min
    begins = forced is not None and forced < len(scores) and len(prompt) + len(generated) == 1
    if begins and bool(scores[forced].isfinite()):
        others = torch.arange(len(scores), device=scores.device) != forced
        scores = scores.where(~others | scores.isinf(), lowest)
    banned = {token for token in _iterate_banned(sampling, prompt, generated) if 0 <= token < len(scores)}
    if not banned:
        return scores
    return scores.index_fill(0, torch.tensor(sorted(banned), device=scores.device), lowest)


def _iterate_banned(sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> Iterator[int]:
    """Yield the tokens that may not follow."""
    tokens = [*prompt, *generated]
    if size := sampling.no_repeat_ngram_size:
        last = tokens[len(tokens) - size + 1 :]
        for start in range(len(tokens) - size + 1):
            if tokens[start : start + size - 1] == last:
                yield tokens[start + size - 1]
    for *before, token in sampling.bad_words_ids:
        if len(before) < len(tokens) and tokens[len(tokens) - len(before) :] == before:
            yield token
    if len(tokens) < sampling.min_length or len(generated) < sampling.min_new_tokens:
        yield from sampling.min_length_ends
    yield from sampling.suppress_tokens
    if len(generated) == int(len(prompt) <= 1 and sampling.forced_bos_token_id is not None):
        yield from sampling.begin_suppress_tokens


def select_most_likely(logits: Tensor) -> list[int]:
    """Return the id of the most likely token in each row of logits [M, V]; -1 for a row with NaN."""
    values, tokens = logits.max(-1)
    found: list[int] = tokens.where(~values.isnan(), -1).tolist()
    return found


def compute_probabilities(scores: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities of the next token, fp64 [V], from scores after penalties.
    They follow from the scores by temperature, `top_k`, `top_p` and `min_p`.

    Raises:
        DataError: when the largest of the scores [V] is infinite or not a number.
    """
    if not bool(scores.amax().isfinite()):
        raise DataError("no token can be chosen: the scores of all tokens are masked, infinite or not a number")
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(-1), len(scores)).double()
    wide = scores.double()
    # a GPU multiplies by the reciprocal, which overflows for smaller temperatures
    p = ((wide - wide.amax()) / max(sampling.temperature, SMALLEST)).softmax(-1)
    if sampling.top_k is not None and sampling.top_k < len(p):
        p = p.where(p >= p.topk(sampling.top_k).values[-1], 0.0)
    if sampling.top_p < 1:
        p = _keep_top_p(p, (sampling.top_p * p.sum()).clamp(min=SMALLEST))
    if sampling.min_p:
        p = p.where(p >= sampling.min_p * p.amax(), 0.0)
    return p / p.sum()


def _keep_top_p(p: Tensor, share: Tensor) -> Tensor:
    """Keep the fewest most likely tokens whose sum reaches `share`, and set the others to zero; only as many as needed
    are sorted.
    """
    for count in (min(256, len(p)), len(p)):
        values, tokens = p.topk(count)
        likelier = values.cumsum(-1) - values
        if count == len(p) or likelier[-1] >= share:
            break
    return torch.zeros_like(p).scatter_(0, tokens, values.where(likelier < share, 0.0))


def draw_token(p: Tensor, sampling: Sampling, sample: int, step: int) -> int:
    """Draw a token id at random with given weights, fp64 [V].
    The weights p need not add up to 1; the draw depends only on the seed, `sample` and `step`.

    Args:
        p: not all zero.
        sampling: settings with the seed.
        sample: index of the sample.
        step: number of tokens drawn before.
    """
    cumulative = p.cumsum(-1)
    return int(torch.searchsorted(cumulative, draw_uniform(sampling.seed, sample, step) * cumulative[-1:]))


def draw_uniform(seed: int, sample: int, step: int, use: str = "sample") -> float:
    """Return a pseudorandom number, uniform in (0, 1], that depends only on the arguments.
    Different purposes `use` give independent numbers.
    """
    return 1 - float(torch.rand(1, generator=seeded_generator("cpu", seed, use, sample, step), dtype=torch.float64))


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
    """Return the sampling settings that a parsed generation_config.json gives, as arguments of `Sampling`.
    Temperature, top_k and the like are included only if it has `do_sample`.
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


def list_unsupported_generation_settings(raw: Mapping[str, Any]) -> list[str]:
    """Return the unsupported settings of a generation_config.json that would change the text, as `name = value`."""
    drawn = bool(raw.get("do_sample"))
    refused = {**_UNSUPPORTED, **_UNSUPPORTED_DRAWN}
    known = {*_ALWAYS, *_DRAWN, *_HARMLESS, *(() if drawn else _UNSUPPORTED_DRAWN)}
    names = sorted(name for name in raw if name not in known and _is_set(raw, name, refused.get(name, ())))
    return [f"{name} = {raw[name]!r:.60}" for name in names]


def parse_token_ids(value: object) -> list[int]:
    """Return as a list the token ids of a generation_config.json field that is a token id, a list of them or null.

    Raises:
        ConfigError: if it is anything else, which would leave texts without an end.
    """
    found: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in found):
        raise ConfigError(
            f"eos_token_id = {value!r:.60} must be a token id, a list of token ids, or null",
            hint="correct it in the model's generation_config.json or config.json",
        )
    return found


def _is_set(raw: Mapping[str, Any], name: str, off: tuple[Any, ...]) -> bool:
    """Return whether a setting is given with a value other than its neutral ones."""
    return raw.get(name) is not None and raw[name] not in off
