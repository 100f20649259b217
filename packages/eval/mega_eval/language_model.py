"""Python interface for inference with a model.

from mega_eval.language_model import LanguageModel

model = LanguageModel.load("out/hf")
(one,) = model.generate(["The capital of France is"], max_new_tokens=20)
print(one.text)
print(model.chat([{"role": "user", "content": "What is the capital of France?"}]).text)
print(model.score(["Paris is in France.", "Paris is in Spain."]))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mega_common.errors import ConfigError
from mega_common.extension_entries import Sampler
from mega_common.object_store import Location
from mega_data.chat.chat_records import Conversation
from mega_data.chat.chat_template import ChatTemplate
from mega_data.tokenizer import Tokenizer
from mega_eval.chat_session import load_chat_template
from mega_eval.drafters import DraftSource
from mega_eval.generate import Completion, GenerationPrompt, generate_completions, stream_completion
from mega_eval.model_loading import (
    PRECISIONS,
    LoraAdapterSet,
    ModelKind,
    find_end_tokens,
    load_inference_model,
    load_sampling_settings,
    load_tokenizer,
    select_device,
    warn_unsupported_settings,
)
from mega_eval.sampling import Sampling
from mega_eval.score import Score, score_continuations
from mega_eval.text_stream import GenerationLimits
from mega_trainer.config.extensions import load_extensions
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.model.decoder import Decoder
from mega_trainer.parallel.lora_layers import PerRowAdapterSelection


@dataclass(frozen=True)
class LanguageModel:
    """Loaded model with its tokenizer and generation settings, for generation, chat and scoring.

    Attributes:
        path: source of the model.
        model: decoder in eval mode.
        tokenizer: tokenizer of the model.
        ends: tokens that end a text.
        settings: settings of `Sampling` from its generation_config.json; defaults that a call can override.
        draft: source of draft tokens (speculative decoding), which does not change the text.
        adapters: LoRA adapters kept separate from the weights; each engine request may select one.
        samplers: samplers of extensions, by name.
        extensions: extensions that may have the family of the folder.
    """

    path: str | Location
    model: Decoder
    tokenizer: Tokenizer
    ends: frozenset[int]
    settings: Mapping[str, Any]
    draft: DraftSource | None = None
    adapters: PerRowAdapterSelection | None = None
    samplers: Mapping[str, Sampler] = field(default_factory=dict)
    extensions: Sequence[str] = ()

    @classmethod
    def load(
        cls,
        path: str | Location,
        *,
        precision: str = "fp32",
        device: str = "auto",
        tokenizer: Path | None = None,
        draft: str | None = None,
        groups: ParallelGroups | None = None,
        adapter: str | Location | None = None,
        adapters: Mapping[str, str] | None = None,
        extensions: Sequence[str] = (),
    ) -> LanguageModel:
        """Load a model for inference from a checkpoint or a folder of another format.
        The source is a mega checkpoint, the latest checkpoint of a run folder, a HuggingFace folder or a GGUF file.

        Args:
            path: file, folder or URL.
            precision: fp64, fp32, bf16 or fp16.
            device: auto, cpu, cuda or cuda:N.
            tokenizer: tokenizer to use instead of the one stored with the weights.
            draft: source of draft tokens for speculative decoding: `ngrams`, `mtp` (the model's own MTP layers), `none`,
                or the path of a smaller model of the same vocabulary; None: as `drafters.choose_default_drafter`.
            groups: process groups of the ranks that share the model, all of which load it.
            adapter: LoRA adapter, of a run or a PEFT folder, to merge into the weights.
            adapters: folders of LoRA adapters by name, kept separate from the weights; each request may select one.
            extensions: extensions with the code of the model's own layers, the family of the folder, or samplers.

        Raises:
            CheckpointError: when there is no complete model, or no tokenizer.
            ConfigError: for an unknown device or precision, or when the model lacks the MTP layers that `mtp` requires.
        """
        if precision not in PRECISIONS:
            raise ConfigError(
                f"precision must be one of {', '.join(PRECISIONS)}, but is {precision!r}", hint="use fp32 or bf16"
            )
        if adapters and draft == "mtp":
            raise ConfigError(
                f"{path}: draft = mtp is not supported with LoRA adapters that stay separate from the weights",
                hint="use draft = ngrams",
            )
        dtype, where = PRECISIONS[precision], select_device(device)
        own_tokenizer = Tokenizer(tokenizer) if tokenizer else load_tokenizer(path, adapter, extensions)
        named: dict[str | None, DraftSource | None] = {None: None, "ngrams": "ngrams", "mtp": "mtp", "none": "none"}
        source = named[draft] if draft in named else load_inference_model(
            str(draft), dtype=dtype, device=where, extensions=extensions
        )  # fmt: skip
        lora_adapters = LoraAdapterSet.open_adapters(path, adapters) if adapters else None
        kinds: tuple[ModelKind, ...] = ("decoder", "encoder-decoder")
        model = load_inference_model(
            path, dtype=dtype, device=where, groups=groups, kinds=kinds, adapter=adapter, lora_adapters=lora_adapters,
            mtp=draft == "mtp", extensions=extensions,
        )  # fmt: skip
        selection = None if lora_adapters is None else lora_adapters.pool.selection
        if groups is None or groups.tp.rank == groups.pp.rank == 0:
            warn_unsupported_settings(path, extensions)
        ends = find_end_tokens(path, own_tokenizer, extensions)
        settings = load_sampling_settings(path, extensions)
        samplers = load_extensions(extensions).entries("samplers")
        return cls(path, model, own_tokenizer, ends, settings, source, selection, samplers, extensions)

    def sampling(self, **settings: Any) -> Sampling:
        """Return a `Sampling` with the given settings and the model's defaults for others.
        The defaults are in the generation_config.json of the model's folder.

        Minimum lengths apply to every token that ends a text.

        Raises:
            ConfigError: when a setting is unknown or invalid.
        """
        own = {**self.settings, "min_length_ends": sorted(self.ends)}
        return Sampling.parse({**own, **settings}, source="sampling").bind_token_sampler(self.samplers)

    def generate(
        self,
        prompts: Sequence[GenerationPrompt],
        *,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        batch_size: int = 8,
        logprobs: int | None = None,
        grammar: str | None = None,
        **settings: Any,
    ) -> list[Completion]:
        """Return a continuation of each prompt of at most `max_new_tokens` tokens.
        It ends at a text in `stop`. `settings` are fields of `Sampling` such as temperature, and `grammar` is a JSON
        schema or Lark grammar.

        Raises:
            DataError: when a prompt cannot be continued.
            ConfigError: when a setting is unknown or invalid.
        """
        return generate_completions(
            self.model, self.tokenizer, prompts, GenerationLimits(max_new_tokens, stop, self.ends), self.sampling(**settings),
            batch_size=batch_size, logprobs=logprobs, grammar=grammar, draft=self.draft,
        )  # fmt: skip

    def stream(
        self,
        prompt: GenerationPrompt,
        *,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        grammar: str | None = None,
        **settings: Any,
    ) -> Iterator[str]:
        """Continue one prompt and yield text as it becomes final.
        `settings` are fields of `Sampling` such as temperature, and `grammar` is a JSON schema or Lark grammar.
        """
        limits = GenerationLimits(max_new_tokens, stop, self.ends)
        return stream_completion(
            self.model, self.tokenizer, prompt, limits, self.sampling(**settings), grammar=grammar, draft=self.draft
        )

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Completion:
        """Return the model's answer to a list of chat messages {"role", "content"}.
        `options` are arguments of `generate`.

        Raises:
            DataError: when the model has no chat template, or its template rejects the messages.
        """
        text = self._template.render_prompt(Conversation([dict(message) for message in messages], [], None, {}))
        (answer,) = self.generate([self.tokenizer.encode(text)], **options)
        return answer

    @cached_property
    def _template(self) -> ChatTemplate:
        """Chat template of the model."""
        return load_chat_template(self.path, extensions=self.extensions)

    def score(self, texts: Sequence[str], *, contexts: Sequence[str] | None = None) -> list[Score]:
        """Return the log-likelihood of each text, given its context.
        Without `contexts`, it is given the begin token or, if the tokenizer adds none, the text's first token.

        Raises:
            DataError: when a text has too few tokens.
            ConfigError: when the model has an encoder and no contexts are given.
        """
        if self.model.config.encoder and contexts is None:
            raise ConfigError(
                f"{self.path}: scoring with an encoder-decoder model requires contexts, which the encoder reads",
                hint="pass contexts, one for each text",
            )
        pairs = []
        for number, text in enumerate(texts):
            before = [] if contexts is None else self.tokenizer.encode(contexts[number], add_special_tokens=True)
            tokens = self.tokenizer.encode(text, add_special_tokens=not before)
            pairs.append((before, tokens) if before else (tokens[:1], tokens[1:]))
        return score_continuations(self.model, pairs)
