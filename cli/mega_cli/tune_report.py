"""Report of `mega tune`: held-out loss and answers before and after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_common.errors import DataError

if TYPE_CHECKING:
    from mega_data.data_config import DataConfig
    from mega_trainer.config.run_config import RunConfig

ANSWERS, ANSWER_TOKENS = 3, 64
PROMPT_CHARACTERS = 200  # of a plain text that is continued
SHOWN = 400  # characters of a cell


@dataclass(frozen=True)
class HeldOutPrompt:
    """Prompt from the held-out data, as messages or as the start of a plain text, and the answer in the data."""

    messages: list[dict[str, Any]]
    text: str
    answer: str

    @property
    def question(self) -> str:
        """Content of the last message of a held-out prompt; for a prompt without messages, its plain text."""
        return str(self.messages[-1].get("content")) if self.messages else self.text


@dataclass(frozen=True)
class TuningComparison:
    """Validation loss before and after a tuning, and the base and tuned models' answers to held-out prompts.
    A row has the question, the data's answer, and those of both models.
    """

    loss_before: float | None
    loss_after: float | None
    answers: list[list[str]]


def report_tuning(config: RunConfig, output: Path) -> None:
    """Print the comparison of base and tuned model, which is made once and kept in `output`/comparison.json."""
    from mega_common.atomic_files import write_json_atomically
    from mega_common.bounded_parsing import read_json_file
    from mega_common.progress_logging import logger

    kept = output / "comparison.json"
    if kept.exists():
        found = TuningComparison(**read_json_file(kept, DataError))
    else:
        logger.info("generating answers to held-out prompts by the base and by %s", output / "model")
        found = compare_base_and_tuned_models(config, output / "model")
        write_json_atomically(kept, asdict(found))
    _print_comparison(found, output, adapter=config.lora is not None)


def compare_base_and_tuned_models(config: RunConfig, tuned: Path) -> TuningComparison:
    """Return losses and answers to 3 held-out prompts of a finished run's base model and of the model `tuned`."""
    prompts = list(islice(read_held_out_prompts(config.data), ANSWERS))
    template = config.data.raw.chat_template
    answers = [generate_answers(str(model), prompts, template) for model in (config.init_from, tuned)]
    rows = [
        [prompt.question, prompt.answer, before, after] for prompt, before, after in zip(prompts, *answers, strict=True)
    ]
    return TuningComparison(*read_validation_losses(Path(config.output) / "metrics.jsonl"), rows)


def read_validation_losses(metrics: Path) -> tuple[float | None, float | None]:
    """Return the validation loss before the first step and the lowest one of metrics.jsonl; None if not logged."""
    from mega_trainer.pages.run_log import read_jsonl_records

    lines = list(read_jsonl_records(metrics))
    before = [line["initial_valid_loss"] for line in lines if "initial_valid_loss" in line]
    after = [line["valid_loss"] for line in lines if "valid_loss" in line]
    return (before[0] if before else None), min(after, default=None)


def read_held_out_prompts(data: DataConfig) -> Iterator[HeldOutPrompt]:
    """Yield the prompts of the held-out part of the first raw data set, in order."""
    from mega_data.chat.chat_records import parse_chat_record
    from mega_data.preprocessing.token_cache import tokenize_raw_source
    from mega_data.raw_data_config import CHAT_KINDS
    from mega_data.reading.corpus_sources import WHOLE, find_corpus_sources
    from mega_data.reading.documents import Document
    from mega_data.reading.source_readers import read_documents
    from mega_data.sampling.dataset_parts import compute_split_bounds
    from mega_data.token_files.dataset_info import read_dataset_info

    source = data.train[0]
    kind = source.kind or data.kind
    info = read_dataset_info(tokenize_raw_source(source, data))
    bounds = compute_split_bounds(data.split_shares)[0]
    trained = 0 if info is None or bounds is None else round(bounds[1] * float(info.documents))
    key = WHOLE if kind in CHAT_KINDS else source.map.get("text", "text")
    items = (item for each in find_corpus_sources([source.input_name], key) for item in read_documents(each, key))
    for item in islice((item for item in items if isinstance(item, Document)), trained, None):
        if kind not in CHAT_KINDS:
            yield HeldOutPrompt([], item.text[:PROMPT_CHARACTERS], item.text[PROMPT_CHARACTERS:][:SHOWN])
            continue
        try:
            chat = parse_chat_record(
                item.text, pairs=kind == "pairs", loss_on="answers", columns=dict[str, str](source.map.items())
            )[0]
        except DataError:  # a record that was skipped
            continue
        first = next((at for at, message in enumerate(chat.messages) if message["role"] == "assistant"), None)
        if first is None:  # a rated answer that is missing
            yield HeldOutPrompt(chat.messages, "", "")
        elif first:
            yield HeldOutPrompt(chat.messages[:first], "", str(chat.messages[first].get("content", "")))


def generate_answers(model: str, prompts: Sequence[HeldOutPrompt], chat_template: Path | None = None) -> list[str]:
    """Return the answer of a model to each prompt, by greedy decoding of at most 64 tokens.
    A file `chat_template` replaces the model's template.
    """
    from mega_cli.model_options import EvalPrecision
    from mega_cli.serve import load_served_model
    from mega_data.chat.chat_records import Conversation
    from mega_eval.chat_session import load_chat_template
    from mega_eval.engine_requests import EngineRequest
    from mega_eval.sampling import Sampling
    from mega_eval.text_stream import GenerationLimits

    template = load_chat_template(model, None, chat_template) if any(prompt.messages for prompt in prompts) else None
    found = load_served_model(model, EvalPrecision.FP32, "auto", None, None, None, max(1, len(prompts)))
    sampling = Sampling.parse({"temperature": 0.0}, source="mega tune")
    answers: dict[int, str] = {}
    for prompt in prompts:
        text = prompt.text
        if template is not None and prompt.messages:
            text = template.render_prompt(Conversation(prompt.messages, [], None, {}))
        tokens = found.tokenizer.encode(text)[-(found.max_length - ANSWER_TOKENS) :]
        limits = GenerationLimits(ANSWER_TOKENS, (), found.ends)
        answers[found.engine.add_request(EngineRequest(tokens, limits, sampling))] = ""
    while found.engine.num_waiting or found.engine.num_running:
        for event in found.engine.step():
            answers[event.request] += event.text
    return list(answers.values())


def _print_comparison(found: TuningComparison, output: Path, *, adapter: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if found.answers:
        table = Table(title="held-out prompts", title_justify="left", show_lines=True)
        for column in ("prompt", "data", "before", "after"):
            table.add_column(column, ratio=1, overflow="fold")
        for row in found.answers:
            table.add_row(*(_shorten(cell) for cell in row))
        console.print(table)
    if found.loss_before is not None and found.loss_after is not None:
        console.print(f"held-out loss: {found.loss_before:.4f} before, {found.loss_after:.4f} after", highlight=False)
    console.print(f"model: {output}/model" + (f", adapter: {output}/adapter" if adapter else ""), highlight=False)
    console.print(f"Next: mega chat {output}/model", highlight=False)


def _shorten(text: str) -> str:
    from rich.markup import escape

    return escape(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
