"""`mega eval`: score a model on held-out data or on downstream tasks."""

from __future__ import annotations

import json
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
"""
LONGEST_DEFAULT = 4096  # tokens
DATA_OPTIONS = ("check_tokenizer", "json_file", "mask_share", "per_sample")  # of `mega eval`, with --data only
TASK_OPTIONS = (
    "include_path", "num_fewshot", "limit", "apply_chat_template", "chat_template_name",
    "system_instruction", "fewshot_as_multiturn", "gen_kwargs", "csv_file", "log_samples", "output", "cache", "offline", "nproc",
    "tp", "ep", "pp",
)  # fmt: skip


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
        typer.Option(help="With --tasks: samples per task, e.g. 100; below 1 a fraction of them, e.g. 0.1."),
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
        str | None, typer.Option(help="With --tasks: system message before each question.")
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
        Path | None, typer.Option("--csv", help="With --tasks: CSV file with one line for each metric.")
    ] = None,
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="With --tasks: keep each sample in the results, for `mega compare`.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="With --tasks: JSON file for the results, in the format of the harness.")
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
    """Score a model on held-out tokens (--data: loss, perplexity, bits per byte) or on downstream tasks (--tasks).

    With --data, a decoder predicts every token except the first once, in consecutive sequences; an encoder predicts each
    token once while it is masked (--mask-share), and an encoder-decoder predicts corrupted spans. A reward model reports
    how often the chosen answer of a preference pair has the higher score. To compare two models, use --per-sample with
    --data, or --log-samples and `mega compare` with --tasks.
    """
    _check_option_use(ctx, data, tasks)
    if tasks is not None:
        from mega_cli.eval_ranks import TaskEvalOptions, evaluate_tasks, import_harness

        import_harness(offline=offline)
        from mega_eval.harness_tasks import HarnessTaskOptions
        from mega_eval.multi_rank_inference import ReplicaLayout

        asked = TaskEvalOptions(
            model, tokenizer, precision, device, batch_size, seq_length, output, csv_file, extension or []
        )
        options = HarnessTaskOptions(
            include_path, num_fewshot, limit, apply_chat_template or chat_template_name is not None, log_samples, cache,
            chat_template_name, system_instruction, fewshot_as_multiturn, gen_kwargs,
        )  # fmt: skip
        evaluate_tasks(tasks.split(","), asked, options, ReplicaLayout(tp, ep, pp), nproc)
        return
    assert data is not None
    from mega_common.atomic_files import write_json_atomically
    from mega_eval.dataset_scores import evaluate_perplexity
    from mega_eval.encoder_losses import SHARE, evaluate_masked_lm, evaluate_span_corruption
    from mega_eval.model_loading import PRECISIONS, load_inference_model, select_device

    loaded = load_inference_model(
        model,
        dtype=PRECISIONS[precision],
        device=select_device(device),
        kinds=("decoder", "encoder", "encoder-decoder", "reward model"),
        extensions=extension or [],
    )
    length = seq_length or min(loaded.config.max_position, LONGEST_DEFAULT)
    masked = loaded.config.encoder is not None or not loaded.config.causal
    if not masked and mask_share is not None:
        raise ConfigError(f"--mask-share requires an encoder, but {model} is a decoder", hint="leave out --mask-share")
    result: DatasetScore | PreferenceAccuracy
    if loaded.config.score:
        from mega_eval.dataset_scores import evaluate_preferences

        result = evaluate_preferences(loaded, data)
    elif not masked:
        expected = _find_model_tokenizer(model, tokenizer) if check_tokenizer else None
        result = evaluate_perplexity(
            loaded, data, length, batch_size=batch_size, tokenizer=expected, per_sample=per_sample
        )
    else:
        share = SHARE if mask_share is None else mask_share
        evaluate_hidden = evaluate_span_corruption if loaded.config.encoder else evaluate_masked_lm
        result = evaluate_hidden(
            loaded, data, length, _load_model_tokenizer(model, tokenizer), share=share, batch_size=batch_size,
            same_tokenizer=check_tokenizer, per_sample=per_sample,
        )  # fmt: skip
    if json_file == Path("-"):
        print(json.dumps(result.as_json(), indent=1))
        return
    if json_file is not None:
        write_json_atomically(json_file, result.as_json())
    print("\n".join(f"{name:<14}{value}" for name, value in result.summary_lines()))


def _check_option_use(ctx: typer.Context, data: Path | None, tasks: str | None) -> None:
    """Reject options of --tasks with --data, and options of --data with --tasks."""
    if (data is None) == (tasks is None):
        raise ConfigError(
            "mega eval requires --data or --tasks"
            if data is None
            else "--data conflicts with --tasks: one is run at a time",
            hint="--data PREFIX scores tokens, --tasks NAME,... runs tasks; see mega eval --help",
        )
    mode, other, misplaced = (
        ("--data", "--tasks", TASK_OPTIONS) if tasks is None else ("--tasks", "--data", DATA_OPTIONS)
    )
    for name in misplaced:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = name.removesuffix("_file").replace("_", "-")  # json_file: --json
            raise ConfigError(f"--{option} requires {other}, found {mode}", hint=f"leave out --{option}")


def _load_model_tokenizer(model: str, given: Path | None) -> Tokenizer:
    """Return the model's tokenizer."""
    from mega_data.tokenizer import Tokenizer
    from mega_eval.model_loading import load_tokenizer

    return load_tokenizer(model) if given is None else Tokenizer(given)


def _find_model_tokenizer(model: str, given: Path | None) -> Tokenizer | None:
    """Return the model's tokenizer to compare the data with, or None for weights without one."""
    try:
        return _load_model_tokenizer(model, given)
    except CheckpointError as error:
        logger.warning("%s; only the vocabulary size is compared with the data", error.message)
        return None
