"""Sampling of the next token: greedy, or with temperature, top-k, top-p (arXiv:1904.09751) and min-p
(arXiv:2407.01082).

The tokens of all rows of a batch are chosen at once. A draw is a function of (seed, sample, step) alone. It uses one uniform
random number from the CPU, regardless of the model's device, so a sample's text depends neither on the rest of the batch nor
on the device.

Legend: M rows, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt, PrivateAttr
from torch import Tensor

from mega_ckpt.families.config_entries import split_words
from mega_common.errors import CheckpointError, ConfigError, DataError
from mega_common.extension_entries import Sampler
from mega_common.strict_config import StrictConfig, format_setting_value
from mega_trainer.distributed.device import to_device
from mega_trainer.distributed.rng import seeded_generator

SMALLEST = 1e-300  # lower bound of temperature and of top-p times the sum of probabilities
CPU_ELEMENTS = 1 << 18  # most scores that are sampled at once on a CPU, so that they stay in its cache
NOT_A_NUMBER, NO_CHOICE, CHOSEN_LATER = -1, -2, -3  # in place of a token id


@dataclass(frozen=True)
class BoundSampler:
    """Sampler of an extension with its options: a function of next-token scores [V] and the tokens before it."""

    name: str
    adjust: Callable[..., Tensor]

    def __call__(self, scores: Tensor, prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
        """Return the changed scores [V].

        Raises:
            DataError: when the extension raises, or returns anything else.
        """
        try:
            found = self.adjust(scores, list(prompt), list(generated))
        except Exception as error:
            raise DataError(f"sampler {self.name} raised {type(error).__name__}: {error}") from error
        if not isinstance(found, Tensor) or found.shape != scores.shape:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise DataError(f"sampler {self.name} must return scores {list(scores.shape)}, found {shape}")
        return found


class Sampling(StrictConfig):
    """Settings that choose the next token from the logits.
    Penalties, the sampler of an extension, temperature, `top_k`, `top_p` and `min_p` are applied in this order.
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
    sampler: str | None = Field(None, description="sampler of an extension, applied after penalties and grammars")
    sampler_options: dict[str, Any] = Field({}, description="settings of `sampler`")
    _bound_sampler: BoundSampler | None = PrivateAttr(None)

    def bind_token_sampler(self, samplers: Mapping[str, Sampler]) -> Sampling:
        """Return a copy of these settings with the extension's function that `sampler` names; themselves if it names none.

        Raises:
            ConfigError: when `sampler` is none of `samplers`, or does not accept the options.
        """
        if self.sampler is None and self.sampler_options:
            raise ConfigError("sampler_options requires sampler", hint="name the sampler of an extension")
        if self.sampler is None:
            return self
        if self.sampler not in samplers:
            known = ", ".join(samplers)
            hint = f"use one of {known}" if known else "name the extension that has it with --extension FILE"
            raise ConfigError(f"sampler = {self.sampler!r:.60} is not a sampler of a loaded extension", hint=hint)
        entry, bound = samplers[self.sampler], self.model_copy()
        options = entry.options.parse(self.sampler_options, source=f"sampler_options of {self.sampler}")
        bound._bound_sampler = BoundSampler(self.sampler, partial(entry.adjust, options=options))
        return bound

    @property
    def bound_sampler(self) -> BoundSampler | None:
        """Sampler bound by `bind_token_sampler`, None if the settings name none; a ConfigError if the named one is not bound.

        Raises:
            ConfigError: when the settings name a sampler, and `bind_token_sampler` was not called.
        """
        if self.sampler is not None and self._bound_sampler is None:
            raise ConfigError(f"sampler = {self.sampler!r:.60} is not supported here", hint="leave out sampler")
        return self._bound_sampler

    @property
    def is_greedy(self) -> bool:
        """True if the sampling settings choose the most likely token from unmodified scores."""
        return self.temperature == 0 and not self.modifies_scores and self.sampler is None

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


@dataclass(frozen=True)
class TokenChoice:
    """Choice of one next token: the sampling settings and the tokens before it.

    Attributes:
        sampling: sampling settings.
        prompt, generated: token ids before the one to choose; the length of `generated` is the step of the draw.
        sample: index of the sample, which a draw depends on.
        constrain: maps scores [V] after penalties to scores with minus infinity for excluded tokens (a grammar), or None.
    """

    sampling: Sampling
    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()
    sample: int = 0
    constrain: Callable[[Tensor], Tensor] | None = None


def choose_tokens(logits: Tensor, choices: Sequence[TokenChoice | Literal["later"] | None]) -> list[int]:
    """Return the next token of each row of logits [M, V], or a negative code: NaN, no possible token, choice `later`.
    All are chosen at once; the host waits for the device once.

    Args:
        logits: scores of the next token.
        choices: settings of each row; None: greedy. A row that is `later` gets `CHOSEN_LATER`.

    Returns:
        token ids; `NOT_A_NUMBER` for a row with NaN, `NO_CHOICE` for a row whose scores exclude all tokens.
    """
    values, chosen = logits.max(-1)
    drawn = [(index, choice) for index, choice in enumerate(choices) if isinstance(choice, TokenChoice)]
    size = max(1, CPU_ELEMENTS // logits.shape[-1] if logits.device.type == "cpu" else len(drawn))
    for start in range(0, len(drawn), size):
        indices, some = zip(*drawn[start : start + size], strict=True)
        rows = to_device(torch.tensor(indices), logits.device)
        own = logits if len(rows) == len(logits) else logits.index_select(0, rows)
        chosen = chosen.index_copy(0, rows, _draw_tokens(own, some))
    found: list[int] = chosen.masked_fill_(values.isnan(), NOT_A_NUMBER).tolist()
    return [CHOSEN_LATER if choice == "later" else token for token, choice in zip(found, choices, strict=True)]


def check_chosen_tokens(chosen: Sequence[int], dtype: torch.dtype) -> None:
    """Raise CheckpointError if `choose_tokens` found NaN in logits of `dtype`, DataError if the only row has no token.

    Raises:
        CheckpointError: when a row of logits has NaN.
        DataError: when the only token is `NO_CHOICE`.
    """
    if NOT_A_NUMBER in chosen:
        raise CheckpointError(
            f"the model's output is not a number in {dtype}", hint="use a precision with a wider range, such as fp32"
        )
    if list(chosen) == [NO_CHOICE]:
        raise DataError("no token can be chosen: the scores of all tokens are masked, infinite or not a number")


def _draw_tokens(logits: Tensor, choices: Sequence[TokenChoice]) -> Tensor:
    """Return the next tokens int64 [M] by the settings of each row of logits [M, V], or `NO_CHOICE`."""
    scores = apply_penalties(logits, choices)
    for row, choice in enumerate(choices):
        if choice.constrain is not None:
            scores = scores.clone() if scores is logits else scores
            scores[row] = choice.constrain(scores[row])
    for row, choice in enumerate(choices):
        if (sampler := choice.sampling.bound_sampler) is not None:
            scores = scores.to(torch.float64, copy=scores is logits)
            scores[row] = sampler(scores[row], choice.prompt, choice.generated)
    p = compute_probabilities(scores, [choice.sampling for choice in choices])
    return draw_tokens(p, choices).masked_fill_(~scores.amax(-1).isfinite(), NO_CHOICE)


def apply_penalties(logits: Tensor, choices: Sequence[TokenChoice]) -> Tensor:
    """Return the scores of the next token after penalties, biases and restrictions, for rows of logits [M, V].
    They are in fp64, where no penalty within its bounds makes them infinite; the logits themselves if no row's settings
    change them.

    The repetition penalty counts prompt tokens, as in transformers (arXiv:1909.05858); presence and frequency penalties do
    not, as in OpenAI's API.
    """
    if not any(choice.sampling.modifies_scores for choice in choices):
        return logits
    scores = logits.to(torch.float64, copy=True)
    flat = scores.view(-1)
    if edits := _list_edits(choices, _list_repetitions, logits):
        indices, penalties = edits
        before = flat[indices]
        flat[indices] = torch.where(before < 0, before * penalties, before / penalties)
    if edits := _list_edits(choices, _list_repeat_counts, logits):
        flat.index_add_(0, *edits, alpha=-1)
    if edits := _list_edits(choices, lambda choice: choice.sampling.logit_bias, logits):
        flat.index_add_(0, *edits)
    for row, choice in enumerate(choices):
        if choice.sampling.restricts_tokens:
            scores[row] = _restrict_tokens(scores[row], choice)
    return scores


def _list_edits(
    choices: Sequence[TokenChoice], values_by_token: Callable[[TokenChoice], Mapping[int, float]], logits: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return the changes of scores in all rows: indices into the flat logits [M V] and values; None without any.

    Raises:
        DataError: for a token outside the vocabulary.
    """
    edits, vocab_size = [values_by_token(choice) for choice in choices], logits.shape[-1]
    if not any(edits):
        return None
    tokens = np.fromiter(chain.from_iterable(edits), np.int64)
    check_token_ids(tokens, vocab_size)
    indices = tokens + np.repeat(np.arange(len(edits)) * vocab_size, [len(own) for own in edits])
    values = np.fromiter(chain.from_iterable(own.values() for own in edits), np.float64)
    return to_device(torch.from_numpy(indices), logits.device), to_device(torch.from_numpy(values), logits.device)


def check_token_ids(tokens: np.ndarray, vocab_size: int) -> None:
    """Raise `DataError` if a token id of sampling settings is outside the vocabulary.

    Raises:
        DataError: when one is outside the vocabulary.
    """
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
        raise DataError(
            f"token {wrong[0]} of the sampling settings is outside the model's vocabulary of {vocab_size}",
            hint="use token ids of this model's tokenizer",
        )


def _list_repetitions(choice: TokenChoice) -> Mapping[int, float]:
    """Return the repetition penalty by token of the text."""
    penalty = choice.sampling.repetition_penalty
    return {} if penalty == 1 else dict.fromkeys([*choice.prompt, *choice.generated], penalty)


def _list_repeat_counts(choice: TokenChoice) -> Mapping[int, float]:
    """Return the sum of presence and frequency penalties by generated token."""
    presence, frequency = choice.sampling.presence_penalty, choice.sampling.frequency_penalty
    if not (presence or frequency):
        return {}
    return {token: presence + frequency * count for token, count in Counter(choice.generated).items()}


def _restrict_tokens(scores: Tensor, choice: TokenChoice) -> Tensor:
    """Return the scores [V] of one row's next token after the exclusion of tokens by the settings.
    Tokens that the settings exclude have the least finite number (in transformers -inf), and tokens outside
    `allowed_token_ids` have -inf.

    The lowest finite number, unlike -inf, leaves these tokens available if a grammar or `allowed_token_ids`, which set
    other scores to -inf, permit nothing else.
    """
    sampling, forced, lowest = choice.sampling, choice.sampling.forced_bos_token_id, torch.finfo(scores.dtype).min
    if sampling.allowed_token_ids is not None:
        ids = np.unique(np.array(sampling.allowed_token_ids, dtype=np.int64))
        check_token_ids(ids, len(scores))
        allowed = to_device(torch.from_numpy(ids), scores.device)
        scores = torch.full_like(scores, float("-inf")).index_copy(0, allowed, scores[allowed])
    if forced is not None and forced < len(scores) and len(choice.prompt) + len(choice.generated) == 1:
        others = torch.arange(len(scores), device=scores.device) != forced
        scores = scores.where(~(others & scores[forced].isfinite()) | scores.isinf(), lowest)
    tokens = _iterate_banned(sampling, choice.prompt, choice.generated)
    banned = {token for token in tokens if 0 <= token < len(scores)}
    if not banned:
        return scores
    return scores.index_fill(0, to_device(torch.tensor(sorted(banned)), scores.device), lowest)


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


def compute_probabilities(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return the probabilities of the next token, fp64 [M, V], from scores after penalties.
    They follow from the scores by each row's temperature, `top_k`, `top_p` and `min_p`; a row whose largest score is
    infinite or not a number has no meaningful ones.
    """

    def column(values: Iterable[float]) -> Tensor:
        return to_device(list(values), scores.device)[:, None]

    vocab_size, wide = scores.shape[-1], scores.double()
    # a GPU multiplies by the reciprocal, which overflows for smaller temperatures
    temperatures = column(max(one.temperature, SMALLEST) if one.temperature else 1.0 for one in samplings)
    p = ((wide - wide.amax(-1, keepdim=True)) / temperatures).softmax(-1)
    top_k = [min(one.top_k or vocab_size, vocab_size) for one in samplings]
    if kept := [k for k in top_k if k < vocab_size]:
        values = p.topk(max(kept)).values
        last = to_device(torch.tensor([min(k, max(kept)) - 1 for k in top_k]), p.device)[:, None]
        likely = p >= values.gather(-1, last)
        if len(kept) < len(top_k):
            likely |= to_device(torch.tensor([k == vocab_size for k in top_k]), p.device)[:, None]
        p = p.where(likely, 0.0)
    if any(one.top_p < 1 for one in samplings):
        shares = column(one.top_p for one in samplings)
        cut = _keep_top_p(p, (shares * p.sum(-1, keepdim=True)).clamp(min=SMALLEST))
        p = cut if all(one.top_p < 1 for one in samplings) else cut.where(shares < 1, p)
    if any(one.min_p for one in samplings):
        p = p.where(p >= column(one.min_p for one in samplings) * p.amax(-1, keepdim=True), 0.0)
    p = p / p.sum(-1, keepdim=True)
    if all(one.temperature for one in samplings):
        return p
    greedy = torch.nn.functional.one_hot(scores.argmax(-1), vocab_size).double()
    return greedy.where(column(one.temperature == 0 for one in samplings) > 0, p)


def _keep_top_p(p: Tensor, share: Tensor) -> Tensor:
    """Keep the fewest most likely tokens of each row whose sum reaches `share` [M, 1], and set the others to zero.
    On a CPU only as many as needed are sorted; on a GPU the host does not wait to know how many that are.
    """
    values, tokens = p.topk(min(256, p.shape[-1]) if p.device.type == "cpu" else p.shape[-1])
    likelier = values.cumsum(-1) - values
    cut = torch.zeros_like(p).scatter_(-1, tokens, values.where(likelier < share, 0.0))
    if values.shape[-1] < p.shape[-1] and bool((more := likelier[:, -1] < share[:, 0]).any()):
        values, tokens = p[more].topk(p.shape[-1])
        likelier = values.cumsum(-1) - values
        cut[more] = torch.zeros_like(p[more]).scatter_(-1, tokens, values.where(likelier < share[more], 0.0))
    return cut


def draw_tokens(p: Tensor, choices: Sequence[TokenChoice]) -> Tensor:
    """Draw one token id per row at random with given weights, fp64 [M, V] -> int64 [M].
    The weights of a row need not add up to 1; a draw depends only on the seed, the sample and the step.
    """
    cumulative = p.cumsum(-1)
    uniform = [draw_uniform(one.sampling.seed, one.sample, len(one.generated)) for one in choices]
    return torch.searchsorted(cumulative, to_device(uniform, p.device)[:, None] * cumulative[:, -1:])[:, 0]


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
    return [f"{name} = {format_setting_value(raw[name]):.60}" for name in names]


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
