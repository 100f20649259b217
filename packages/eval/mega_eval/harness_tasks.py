"""Downstream tasks and metrics of EleutherAI's lm-evaluation-harness, and its interface of a model.

Requests are encoded, truncated and windowed as in the harness's own `hf` model, so that scores agree sample by sample.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from mega_common.atomic_files import open_atomic_file
from mega_common.bounded_parsing import check_yaml_file_limits, read_settings_file
from mega_common.errors import ConfigError, DataError
from mega_common.extension_entries import Sampler
from mega_common.progress_logging import ProgressBar, logger
from mega_data.chat.chat_records import Conversation
from mega_data.chat.chat_template import ChatTemplate
from mega_eval.multi_rank_inference import ModelReplicas
from mega_eval.sampling import Sampling
from mega_eval.score import ContextContinuation, split_into_scoring_windows
from mega_eval.text_stream import GenerationLimits

NEW_TOKENS = 256  # default of tasks without max_gen_toks, as in the harness
DRAWN = {"temperature", "top_p", "top_k", "min_p"}  # settings without effect in greedy decoding


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """Model interface of the lm-evaluation-harness (class LM) for a model loaded by mega.

    Args:
        replicas: copies of the model.
        ends: tokens that end a text.
        template: chat template, if any.
        max_length: maximum number of tokens of an input; longer ones lose their start.
        samplers: samplers of extensions, which generation settings may name.

    Raises:
        DataError: when the tokenizer has no end-of-text token.
    """

    def __init__(
        self,
        replicas: ModelReplicas,
        ends: frozenset[int],
        template: ChatTemplate | None,
        max_length: int,
        samplers: Mapping[str, Sampler] | None = None,
    ) -> None:
        super().__init__()
        self.replicas, self.ends, self.template, self.max_length = replicas, ends, template, max_length
        self._samplers = samplers or {}
        self.text = replicas.prompts
        self.has_encoder = replicas.model.config.encoder is not None
        self.backend = "seq2seq" if self.has_encoder else "causal"  # selects how the harness encodes pairs
        if self.text.tokenizer.eos_id is None:
            raise DataError(
                f"{self.text.tokenizer.path}: tasks require an end-of-text token, and the tokenizer has none",
                hint='set "eos_token" in tokenizer_config.json',
            )

    @property
    def eot_token_id(self) -> int | None:
        """Id of the token that ends a text; None if the tokenizer has none."""
        return self.text.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int | None:
        """Id of the token that precedes a text without context; None if the tokenizer has no begin or end token."""
        return self.text.prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        """Fingerprint of the tokenizer, by which the harness names it in caches of encoded requests."""
        return self.text.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text, with the tokenizer's special tokens unless switched off.
        The special tokens of the tokenizer's template are added unless `add_special_tokens` is False.
        """
        return self.text.encode(string, add_special_tokens=add_special_tokens is not False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the fingerprint of the model's chat template, for the harness to record, or None.
        It is None without a template or if `chat_template` is False.
        """
        return self.template.fingerprint if self.template and chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt text that the model's chat template renders for a chat history.
        A template that refuses system messages is retried without them.
        """
        assert self.template is not None
        try:
            return self.template.render_prompt(
                _make_conversation(chat_history), add_generation_prompt=add_generation_prompt
            )
        except DataError:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            return self.template.render_prompt(_make_conversation(rest), add_generation_prompt=add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would produce it."""
        pairs = [self._truncate_pair(context, continuation) for _, context, continuation in requests]
        answers: dict[int, tuple[float, bool]] = {}
        with ProgressBar("scoring", total=len(pairs), unit="continuations") as bar:
            for number, found in self.replicas.score_pairs(pairs):
                answers[number] = found.logprob, found.greedy
                self.cache_hook.add_partial("loglikelihood", requests[number][0], answers[number])
                bar.advance(1)
        return [answers[number] for number in range(len(pairs))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of the whole text of each request, of any length, as the sum over windows."""
        texts = [
            split_into_scoring_windows(self.tok_encode(request.args[0]), self.prefix_token_id or 0, self.max_length)
            for request in requests
        ]
        owners = [owner for owner, pairs in enumerate(texts) for _ in pairs]
        parts: list[dict[int, float]] = [{} for _ in texts]
        with ProgressBar("scoring", total=len(owners), unit="windows") as bar:
            for number, found in self.replicas.score_pairs([pair for pairs in texts for pair in pairs]):
                owner = owners[number]
                parts[owner][number] = found.logprob
                if len(parts[owner]) == len(texts[owner]):
                    self.cache_hook.add_partial(
                        "loglikelihood_rolling", requests[owner].args, math.fsum(parts[owner].values())
                    )
                bar.advance(1)
        return [math.fsum(part.values()) for part in parts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the generated continuation of each request's context, up to the first of its stop strings."""
        by_settings: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        answers: dict[int, str] = {}
        for numbers in by_settings.values():
            settings = requests[numbers[0]].args[1]
            found = self._generate([requests[number].args[0] for number in numbers], settings)
            for number, text in zip(numbers, found, strict=True):
                answers[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return [answers[number] for number in range(len(requests))]

    def _generate(self, contexts: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
        """Return continuations of contexts that share the same generation settings."""
        rest = dict(normalize_gen_kwargs(dict(settings), NEW_TOKENS))
        eos = self.text.decode([self.eot_token_id or 0])
        stops = [stop for stop in handle_stop_sequences(rest.pop("until", None), eos=eos) if stop]
        new, drawn = rest.pop("max_gen_toks"), rest.pop("do_sample")
        if new >= self.max_length and not self.has_encoder:
            raise DataError(
                f"max_gen_toks of the task must be below the context length {self.max_length}, but is {new}",
                hint="raise --seq-length if the model supports it, or lower max_gen_toks in the task",
            )
        rest = rest if drawn else {key: value for key, value in rest.items() if key not in DRAWN}
        # the harness's KEY=VALUE,... has no nested settings
        own = {key.partition(".")[2]: rest.pop(key) for key in list(rest) if key.startswith("sampler_options.")}
        rest |= {"sampler_options": own} if own else {}
        sampling = Sampling.parse(rest, source="generation_kwargs of the task").bind_token_sampler(self._samplers)
        limits = GenerationLimits(new, tuple(stops), self.ends)
        longest = self.max_length - (0 if self.has_encoder else new)
        found = self.replicas.generate_completions(contexts, longest, limits, sampling)
        texts = [self.text.decode(one.tokens, skip_special_tokens=True) for one in found]
        return [postprocess_generated_text(text, stops, None) for text in texts]

    def _truncate_pair(self, context: list[int], continuation: list[int]) -> ContextContinuation:
        """Return the end of a (context, continuation) pair that is too long for the model."""
        length = len(continuation)
        context_room = self.max_length - (0 if self.has_encoder else length - 1)
        if min(context_room, self.max_length + 1 - length) < 1:
            raise DataError(
                f"a continuation of {length} tokens is longer than the context length {self.max_length}",
                hint="raise --seq-length if the model supports it",
            )
        return context[-context_room:], continuation


def _make_conversation(messages: list[dict[str, str]]) -> Conversation:
    """Return the messages as a conversation."""
    return Conversation([dict(message) for message in messages], [], None, {})


def fingerprint_model(model: HarnessModel) -> str:
    """Return a hash of the parts of a model that determine its answers.
    They are a sample of each weight, the tokenizer, the chat template and the maximum length.
    """
    template = model.template.fingerprint if model.template else ""
    digest = hashlib.sha256(f"{model.text.tokenizer.fingerprint} {template} {model.max_length}".encode())
    for name, parameter in model.replicas.model.named_parameters():
        values = parameter.detach().flatten()
        some = values[:: max(1, len(values) // 256)].to(torch.float64).cpu().numpy().tobytes()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode() + some)
    return digest.hexdigest()[:16]


Results = dict[str, Any]  # the harness's own


@dataclass(frozen=True)
class HarnessTaskOptions:
    """Options for running tasks of the lm-evaluation-harness.

    Attributes:
        include_path: folder with additional tasks.
        num_fewshot: solved examples before each question; None: default of the task.
        limit: number of samples of each task, or, below 1, their share; None: all.
        apply_chat_template: render each question as a chat message.
        log_samples: keep each sample with its request, answer and score under "samples".
        cache: folder of cached answers, or None.
        chat_template_name: one of the model's named chat templates instead of its default one.
        system_instruction: system message before each question.
        fewshot_as_multiturn: with a chat template, solved examples are turns of the chat, not part of the question.
        gen_kwargs: generation settings, "key=value,...", that replace those of the tasks.
    """

    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: float | None = None
    apply_chat_template: bool = False
    log_samples: bool = False
    cache: Path | None = None
    chat_template_name: str | None = None
    system_instruction: str | None = None
    fewshot_as_multiturn: bool = True
    gen_kwargs: str | None = None


def load_harness_task_manager(names: Sequence[str], include_path: Path | None = None) -> TaskManager:
    """Return an index of lm-evaluation-harness tasks that contains the named ones; a ConfigError if one is unknown.
    `names` are tasks or groups of the harness, patterns such as `mmlu_*`, or YAML files.

    Raises:
        ConfigError: when a task, file or folder does not exist.
    """
    if include_path is not None and not include_path.is_dir():
        raise ConfigError(f"--include-path {include_path}: the folder does not exist")
    for name in names:
        if _is_file(name) and not Path(name).is_file():
            raise ConfigError(f"{name}: the task file does not exist")
    for file in _task_files(names, include_path):
        check_yaml_file_limits(file)
    others = [name for name in names if not _is_file(name)]
    # a group in a file can name other tasks
    groups = [name for name in names if _is_file(name) and re.search(r"(?m)^group\s*:", read_settings_file(Path(name)))]
    manager = TaskManager(include_path=include_path, include_defaults=False)
    if groups or not all(manager.match_tasks([name]) for name in others):
        logger.info("reading the harness's index of tasks")  # takes seconds
        manager = TaskManager(include_path=include_path)
    for name in others:
        if not manager.match_tasks([name]):
            raise unknown_task_error(name, manager.all_tasks)
    return manager


def unknown_task_error(name: str, known: Sequence[str]) -> ConfigError:
    """Return the error for the unknown task `name`; its hint suggests the nearest of the `known` names."""
    near = difflib.get_close_matches(name, known, 1)
    suggestion = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(
        f"task {name!r} does not exist",
        hint=f"{suggestion}for a task of your own, pass a path ending in .yaml, or --include-path FOLDER",
    )


def run_harness_tasks(
    model: HarnessModel,
    names: Sequence[str],
    options: HarnessTaskOptions,
    model_info: Mapping[str, Any] | None = None,
    manager: TaskManager | None = None,
) -> Results:
    """Run tasks of the lm-evaluation-harness on a model and return its results.
    It is called on rank 0, while the other ranks run `repeat_rank_zero_calls`.

    Args:
        model: the model.
        names: names of tasks, as for `load_harness_task_manager`.
        options: options for running tasks.
        model_info: fields to add under "config" of the results.
        manager: result of `load_harness_task_manager` for these names; found if None.

    Raises:
        ConfigError: when a task does not exist.
        DataError: when the data of a task cannot be loaded, or a required chat template is missing.
    """
    if options.apply_chat_template and model.template is None:
        raise DataError(
            f"{model.text.tokenizer.path.parent}: --apply-chat-template requires a chat template, and there is none",
            hint="leave out --apply-chat-template",
        )
    if options.chat_template_name is not None and model.template is not None:
        model.template = model.template.select_template(options.chat_template_name)
    manager = manager or load_harness_task_manager(names, options.include_path)
    results: Results = simple_evaluate(
        model, tasks=_load_tasks(manager, names), task_manager=manager, num_fewshot=options.num_fewshot,
        limit=options.limit if options.limit is None or options.limit < 1 else int(options.limit),
        use_cache=None if options.cache is None else str(options.cache / fingerprint_model(model)),
        apply_chat_template=options.apply_chat_template, log_samples=options.log_samples,
        system_instruction=options.system_instruction, gen_kwargs=options.gen_kwargs,
        fewshot_as_multiturn=options.fewshot_as_multiturn,
    )  # fmt: skip
    results["config"] |= {"model": "mega", **(model_info or {})}
    return results


def format_results_table(results: Results) -> str:
    """Return results of the lm-evaluation-harness as text tables: first tasks, then groups of tasks."""
    tables = [make_table(results), *([make_table(results, "groups")] if results.get("groups") else [])]
    return "\n".join(str(one) for one in tables)


def write_task_results(path: Path, results: Results) -> None:
    """Write results as a JSON file in the format of the lm-evaluation-harness."""
    with open_atomic_file(path, text=True) as stream:
        json.dump(results, stream, indent=2, default=handle_non_serializable, ensure_ascii=False)


def _task_files(names: Sequence[str], include_path: Path | None) -> list[Path]:
    """Return the YAML files of the user's own tasks, with those that they may include."""
    named = [Path(name) for name in names if _is_file(name)]
    including = {path.parent for path in named if re.search(r"(?m)^include\s*:", read_settings_file(path))}
    includable = [file for folder in including for file in folder.glob("*.y*ml")]
    return sorted({*named, *includable, *(include_path.rglob("*.y*ml") if include_path else ())})


def _is_file(name: str) -> bool:
    """Return whether a task name is a YAML file."""
    return name.endswith((".yaml", ".yml"))


def _load_tasks(manager: TaskManager, names: Sequence[str]) -> list[Any]:
    """Return the tasks and groups of these names, with their data."""
    found: list[Any] = []
    for name in names:
        try:
            loaded = manager.load([name] if _is_file(name) else manager.match_tasks([name]))
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise DataError(
                f"task {name} cannot be loaded ({lines[0]})",
                hint="without access to the HuggingFace hub its data must be in HuggingFace's cache: run the same command on"
                " a machine with access, or use local files in a task of your own (dataset_path: json)",
            ) from error
        groups = loaded["groups"].values()
        inner = {child for group in groups for child in group.child_names}
        found += [one for one in (*groups, *loaded["tasks"].values()) if _task_name(one) not in inner]
    return found


def _task_name(one: Any) -> str:
    """Return the name of a task or group."""
    return str(one.task_name if hasattr(one, "task_name") else one.name)
