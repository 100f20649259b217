"""`mega eval`: score a model on held-out data or on downstream tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mega_cli.model_options import Device, EvalPrecision, ExtensionOption, Model, PrecisionOption, TokenizerOption
from mega_common.errors import CheckpointError, ConfigError
from mega_common.progress_logging import logger

if TYPE_CHECKING:
    from mega_data.tokenizer import Tokenizer
    from mega_eval.dataset_scores import DatasetScore, PreferenceAccuracy

EXAMPLES = """Examples:

    mega eval runs/llama3-8b --data data/held-out --seq-length 4096

    mega eval out/hf --data data/held-out --precision bf16 --json eval.json --per-sample eval.jsonl

    mega eval out/bert --data data/held-out --mask-share 0

    mega eval out/t5 --data data/held-out --seq-length 512

    mega eval out/hf --tasks hellaswag,arc_easy --output results.json --log-samples

    mega eval runs/llama3-8b --tasks tasks/mine.yaml --num-fewshot 5 --limit 100 --offline

    mega eval runs/llama3-8b --tasks mmlu --nproc 8 --tp 2 --precision bf16 --cache eval-cache

    mega eval out/hf --judge http://127.0.0.1:8000/v1 --prompts prompts.jsonl --output judged.json --picture judged.png

    mega eval out/hf --judge http://127.0.0.1:8000/v1 --prompts prompts.jsonl --against base/hf
"""
LONGEST_DEFAULT = 4096  # tokens
MODE_OPTIONS: Mapping[str, Sequence[str]] = {
    "data": ("seq_length", "check_tokenizer", "json_file", "mask_share", "per_sample"),
    "tasks": (
        "seq_length", "include_path", "num_fewshot", "limit", "apply_chat_template", "chat_template_name", "system_instruction",
        "fewshot_as_multiturn", "gen_kwargs", "csv_file", "picture_file", "log_samples", "output", "cache", "offline", "nproc",
        "tp", "ep", "pp",
    ),
    "judge": (
        "prompts", "judge_model", "against", "max_new_tokens", "limit", "system_instruction", "csv_file", "picture_file",
        "output",
    ),
}  # fmt: skip
"""Options of `mega eval` that need --data, --tasks or --judge."""


def eval_command(
    ctx: typer.Context,
    model: Model,
    data: Annotated[
        Path | None,
        typer.Option(metavar="PREFIX", help="Held-out data set, e.g. data/held-out for data/held-out.bin and .idx."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Tasks of lm-evaluation-harness: names, groups, patterns such as 'mmlu_*', or YAML files; e.g. hellaswag,arc_easy.",
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Address of OpenAI's API, e.g. http://127.0.0.1:8000/v1, whose model judges answers to --prompts. "
            "Its API key: environment variable MEGA_JUDGE_API_KEY or OPENAI_API_KEY.",
        ),
    ] = None,
    judge_model: Annotated[
        str | None, typer.Option(help="With --judge: name of the judge; default: the server's first model.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="With --judge: JSON lines file with 'prompt' or 'messages', and 'reference' if there is one."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="With --judge: compare with the answers of this model, or with 'reference'; default: score each answer.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="With --judge: maximum length of an answer.")] = 512,
    seq_length: Annotated[
        int | None,
        typer.Option(min=1, help="Context length in tokens; default: the model's maximum, with --data at most 4096."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences per batch on a GPU; prompts per batch on any device.")
    ] = 8,
    precision: PrecisionOption = EvalPrecision.FP32,
    device: Device = "auto",
    tokenizer: TokenizerOption = None,
    extension: ExtensionOption = None,
    check_tokenizer: Annotated[
        bool, typer.Option(help="Require that the data set was made with the model's tokenizer.")
    ] = True,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="With --data: JSON file for the result; - for standard output."),
    ] = None,
    per_sample: Annotated[
        Path | None, typer.Option(help="With --data: JSON lines file for the loss of each sequence.")
    ] = None,
    mask_share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.5,
            help="With --data, encoder: share of tokens masked per pass, so that each token is masked once; 0 masks one "
            "at a time, for pseudo-perplexity. Encoder-decoder: share of tokens in corrupted spans.",
            show_default="0.15",
        ),
    ] = None,
    include_path: Annotated[Path | None, typer.Option(help="With --tasks: folder with your own task files.")] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(min=0, help="With --tasks: solved examples before each question; default: as the task sets."),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(help="With --tasks or --judge: samples per task, e.g. 100; below 1 a fraction of them, e.g. 0.1."),
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="With --tasks: format each question as a chat message.")
    ] = False,
    chat_template_name: Annotated[
        str | None,
        typer.Option(
            help="With --tasks: one of the tokenizer's named chat templates, e.g. tool_use; implies --apply-chat-template."
        ),
    ] = None,
    system_instruction: Annotated[
        str | None, typer.Option(help="With --tasks or --judge: system message before each question.")
    ] = None,
    fewshot_as_multiturn: Annotated[
        bool,
        typer.Option(help="With --tasks and a chat template: solved examples are turns of the chat, not one message."),
    ] = True,
    gen_kwargs: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="With --tasks: generation settings in place of the tasks', e.g. temperature=0.7,max_gen_toks=512.",
        ),
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="With --tasks or --judge: CSV file with one line for each metric.")
    ] = None,
    picture_file: Annotated[
        Path | None,
        typer.Option("--picture", help="With --tasks or --judge: picture of the results, .png, .svg or .pdf."),
    ] = None,
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="With --tasks: keep each sample in the results, for `mega compare`.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="With --tasks or --judge: JSON file for the results, in the format of the harness."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="With --tasks: folder that caches answers; after an interruption, the same command resumes."),
    ] = None,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline", help="With --tasks: do not use the network; data sets must be in the hub's cache or in files."
        ),
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --tasks: ranks to start on this machine, e.g. 8; samples are distributed over the copies of the model.",
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="With --tasks: tensor-parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="With --tasks: expert-parallel ranks.")] = 1,
    pp: Annotated[
        int,
        typer.Option(min=1, help="With --tasks: pipeline-parallel ranks, for a model that does not fit on one device."),
    ] = 1,
) -> None:
    """Score a model on held-out tokens (--data), on downstream tasks (--tasks), or by a judge model (--judge).

    --data reports loss, perplexity and bits per byte: a decoder predicts every token except the first once, in consecutive sequences; an encoder predicts each
    token once while it is masked (--mask-share), and an encoder-decoder predicts corrupted spans. A reward model reports
    how often the chosen answer of a preference pair has the higher score. To compare two models, use --per-sample with
    --data, or --log-samples and `mega compare` with --tasks. With --judge, another model scores the answers to --prompts
    from 1 to 10, or compares them with those of --against in both orders; its verdicts are in the results.
    """
    _check_option_use(ctx)
    if judge is not None:
        from mega_cli.eval_judge import JudgeOptions, evaluate_by_judge

        assert prompts is not None
        evaluate_by_judge(JudgeOptions(
            model, judge, judge_model, prompts, against, max_new_tokens, limit, system_instruction, output, csv_file, picture_file,
            precision, device, tokenizer, batch_size, extension or [],
        ))  # fmt: skip
        return
    if tasks is not None:
        from mega_cli.eval_ranks import TaskEvalOptions, evaluate_tasks, import_lm_eval

        import_lm_eval(offline=offline)
        from mega_eval.harness_tasks import HarnessTaskOptions
        from mega_eval.multi_rank_inference import ReplicaLayout
        from mega_eval.result_reports import check_picture_file

        if picture_file is not None:
            check_picture_file(picture_file)
        asked = TaskEvalOptions(
            model, tokenizer, precision, device, batch_size, seq_length, output, csv_file, picture_file, extension or []
        )
        options = HarnessTaskOptions(
            include_path, num_fewshot, limit, apply_chat_template or chat_template_name is not None, log_samples, cache,
            chat_template_name, system_instruction, fewshot_as_multiturn, gen_kwargs,
        )  # fmt: skip
        evaluate_tasks(tasks.split(","), asked, options, ReplicaLayout(tp, ep, pp), nproc)
        return
    assert data is not None
    result = _score_data_set(
        model, data, seq_length, batch_size, precision, device, tokenizer, extension or [], mask_share, per_sample,
        check_tokenizer=check_tokenizer,
    )  # fmt: skip
    if json_file == Path("-"):
        print(json.dumps(result.as_json(), indent=1))
        return
    if json_file is not None:
        from mega_common.atomic_files import write_json_atomically

        write_json_atomically(json_file, result.as_json())
    print("\n".join(f"{name:<14}{value}" for name, value in result.summary_lines()))


def _score_data_set(
    model: str, data: Path, seq_length: int | None, batch_size: int, precision: EvalPrecision, device: str,
    tokenizer: Path | None, extensions: Sequence[str], mask_share: float | None, per_sample: Path | None, *, check_tokenizer: bool,
) -> DatasetScore | PreferenceAccuracy:  # fmt: skip
    """Return the score of a model on a data set, by the kind of the model."""
    from mega_eval.dataset_scores import evaluate_perplexity, evaluate_preferences
    from mega_eval.encoder_losses import SHARE, evaluate_masked_lm, evaluate_span_corruption
    from mega_eval.model_loading import PRECISIONS, load_inference_model, select_device

    loaded = load_inference_model(
        model,
        dtype=PRECISIONS[precision],
        device=select_device(device),
        kinds=("decoder", "encoder", "encoder-decoder", "reward model"),
        extensions=extensions,
    )
    length = seq_length or min(loaded.config.max_position, LONGEST_DEFAULT)
    masked = loaded.config.encoder is not None or not loaded.config.causal
    if not masked and mask_share is not None:
        raise ConfigError(f"--mask-share requires an encoder, but {model} is a decoder", hint="leave out --mask-share")
    if loaded.config.score:
        return evaluate_preferences(loaded, data)
    if not masked:
        expected = _find_model_tokenizer(model, tokenizer, extensions) if check_tokenizer else None
        return evaluate_perplexity(
            loaded, data, length, batch_size=batch_size, tokenizer=expected, per_sample=per_sample
        )
    share = SHARE if mask_share is None else mask_share
    evaluate_hidden = evaluate_span_corruption if loaded.config.encoder else evaluate_masked_lm
    return evaluate_hidden(
        loaded, data, length, _load_model_tokenizer(model, tokenizer, extensions), share=share, batch_size=batch_size,
        same_tokenizer=check_tokenizer, per_sample=per_sample,
    )  # fmt: skip


def _check_option_use(ctx: typer.Context) -> None:
    """Require one of --data, --tasks and --judge, and reject options of the others."""
    given = [mode for mode in MODE_OPTIONS if ctx.params[mode] is not None]
    if len(given) != 1:
        raise ConfigError(
            f"--{given[0]} conflicts with --{given[1]}: one is run at a time"
            if given
            else "mega eval requires --data or --tasks, or --judge",
            hint="--data PREFIX scores tokens, --tasks NAME,... runs tasks, --judge URL judges answers; see mega eval --help",
        )
    if given == ["judge"] and ctx.params["prompts"] is None:
        raise ConfigError(
            "--judge requires --prompts", hint='--prompts FILE with lines such as {"prompt": "some text"}'
        )
    for mode, names in MODE_OPTIONS.items():
        for name in names:
            source = ctx.get_parameter_source(name)
            if name not in MODE_OPTIONS[given[0]] and source is not None and source.name == "COMMANDLINE":
                option = name.removesuffix("_file").replace("_", "-")  # json_file: --json
                raise ConfigError(f"--{option} requires --{mode}, found --{given[0]}", hint=f"leave out --{option}")


def _load_model_tokenizer(model: str, given: Path | None, extensions: Sequence[str]) -> Tokenizer:
    """Return the model's tokenizer."""
    from mega_data.tokenizer import Tokenizer
    from mega_eval.model_loading import load_tokenizer

    return load_tokenizer(model, extensions=extensions) if given is None else Tokenizer(given)


def _find_model_tokenizer(model: str, given: Path | None, extensions: Sequence[str]) -> Tokenizer | None:
    """Return the model's tokenizer to compare the data with, or None for weights without one."""
    try:
        return _load_model_tokenizer(model, given, extensions)
    except CheckpointError as error:
        logger.warning("%s; only the vocabulary size is compared with the data", error.message)
        return None
