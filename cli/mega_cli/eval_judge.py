"""`mega eval --judge`: answers of a model, judged by another model over OpenAI's API."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_cli.model_options import EvalPrecision
from mega_common.atomic_files import write_json_atomically
from mega_common.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mega_eval.judge_scores import JudgedPrompt

KEY_VARIABLES = ("MEGA_JUDGE_API_KEY", "OPENAI_API_KEY")
REFERENCE = "reference"  # value of --against


@dataclass(frozen=True)
class JudgeOptions:
    """Options of `mega eval --judge`.

    Attributes:
        model: model whose answers are judged.
        url, judge: address and name of the judge.
        prompts: JSON lines file.
        against: model whose answers are compared with; `reference`: the prompts' references; None: answers are scored.
        max_new_tokens: maximum length of an answer in tokens.
        limit: number of prompts, or None.
        system_instruction: system message before each prompt, or None.
        output, csv_file, picture: result files, or None.
        precision, device, tokenizer, batch_size, extensions: how the models run.
    """

    model: str
    url: str
    judge: str | None
    prompts: Path
    against: str | None
    max_new_tokens: int
    limit: float | None
    system_instruction: str | None
    output: Path | None
    csv_file: Path | None
    picture: Path | None
    precision: EvalPrecision
    device: str
    tokenizer: Path | None
    batch_size: int
    extensions: Sequence[str]


def evaluate_by_judge(options: JudgeOptions) -> None:
    """Generate answers, have them judged, print the means and write the result files.

    Raises:
        ConfigError: for a prompt without a reference with --against reference, or a judge that refuses the request.
        DataError: when prompts cannot be read or answered, or no verdict is valid.
        TrainingError: when the judge does not answer.
    """
    from mega_common.errors import ConfigError
    from mega_eval.judge_scores import JudgeClient, compare_answers, read_judged_prompts, score_answers
    from mega_eval.result_reports import check_picture_file, format_metric_table, plot_task_results, write_results_csv

    if options.picture is not None:
        check_picture_file(options.picture)
    key = next((value for name in KEY_VARIABLES if (value := os.environ.get(name))), None)
    if not options.url.startswith(("http://", "https://")):
        address = f"http://{options.url.rstrip('/').removesuffix('/v1')}/v1"
        raise ConfigError(f"--judge {options.url} must begin with http:// or https://", hint=f"--judge {address}")
    client = JudgeClient(options.url, options.judge, key)
    client = replace(client, model=client.get_judge_model_name())  # before the work of answering
    prompts = _select_prompts(read_judged_prompts(options.prompts), options)
    others = None if options.against is None else _answer_prompts(options.against, prompts, options)
    answers = _answer_prompts(options.model, prompts, options)
    if others is None:
        results = score_answers(client, prompts, answers)
    else:
        results = compare_answers(client, prompts, answers, others)
    results["config"] |= {"model_args": _describe_models(options)}
    if options.output is not None:
        write_json_atomically(options.output, results)
    if options.csv_file is not None:
        write_results_csv(options.csv_file, results)
    if options.picture is not None:
        plot_task_results(options.picture, results, f"{options.model}, judged by {client.model}")
    print(format_metric_table(results))


def _select_prompts(prompts: Sequence[JudgedPrompt], options: JudgeOptions) -> list[JudgedPrompt]:
    """Return the prompts that are used, with the system message."""
    if options.limit is not None and (options.limit < 1 or options.limit != int(options.limit)):
        raise ConfigError(f"--limit {options.limit} must be a number of prompts with --judge", hint="--limit 100")
    chosen = list(prompts[: None if options.limit is None else int(options.limit)])
    if options.against == REFERENCE and any(one.reference is None for one in chosen):
        raise ConfigError(
            f"--against reference requires a reference in each line of {options.prompts}",
            hint="add them, or leave it out",
        )
    if options.system_instruction is None:
        return chosen
    if any(one.plain is not None for one in chosen):
        raise ConfigError(
            "--system-instruction requires prompts with 'messages'",
            hint='write {"messages": [{"role": "user", "content": TEXT}]} in place of {"prompt": TEXT}',
        )
    first = {"role": "system", "content": options.system_instruction}
    return [replace(one, messages=[first, *one.messages]) for one in chosen]


def _answer_prompts(model: str, prompts: Sequence[JudgedPrompt], options: JudgeOptions) -> list[str]:
    """Return the greedy answer of a model to each prompt, or the references."""
    from mega_data.chat.chat_records import Conversation
    from mega_eval.chat_session import load_chat_template
    from mega_eval.language_model import LanguageModel

    if model == REFERENCE:
        return [str(one.reference) for one in prompts]
    own = model == options.model
    loaded = LanguageModel.load(
        model, precision=options.precision, device=options.device, tokenizer=options.tokenizer if own else None,
        extensions=options.extensions,
    )  # fmt: skip
    try:
        template = load_chat_template(model, options.tokenizer if own else None, extensions=options.extensions)
    except DataError:
        if any(one.plain is None for one in prompts):
            raise
        template = None
    inputs: list[Any] = []
    for one in prompts:
        if template is None:
            inputs.append(str(one.plain))
        else:
            conversation = Conversation(one.format_question(), [], None, {})
            inputs.append(loaded.tokenizer.encode(template.render_prompt(conversation)))
    found = loaded.generate(
        inputs, max_new_tokens=options.max_new_tokens, batch_size=options.batch_size, temperature=0.0
    )
    return [one.text for one in found]


def _describe_models(options: JudgeOptions) -> dict[str, Any]:
    """Return the facts about the models for the results file."""
    against = {} if options.against is None else {"against": options.against}
    return {"model": options.model, "precision": str(options.precision), "max_new_tokens": options.max_new_tokens, **against}  # fmt: skip
