"""`mega eval` and `mega generate`: score a model, and generate text."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mega_common.bounded_parsing import explain_read_error, parse_json_text, read_file_start, read_utf8_text
from mega_common.errors import CheckpointError, ConfigError, DataError
from mega_common.progress_logging import logger

if TYPE_CHECKING:
    from mega_data.tokenizer import Tokenizer
    from mega_eval.dataset_scores import DatasetScore, PreferenceAccuracy
    from mega_eval.generate import Completion

EVAL_EXAMPLES = """Examples:

    mega eval runs/llama3-8b --data data/held-out --seq-length 4096

    mega eval out/hf --data data/held-out --precision bf16 --json eval.json --per-sample eval.jsonl

    mega eval out/bert --data data/held-out --mask-share 0

    mega eval out/t5 --data data/held-out --seq-length 512

    mega eval out/hf --tasks hellaswag,arc_easy --output results.json --log-samples

    mega eval runs/llama3-8b --tasks tasks/mine.yaml --num-fewshot 5 --limit 100 --offline

    mega eval runs/llama3-8b --tasks mmlu --nproc 8 --tp 2 --precision bf16 --cache eval-cache
"""
GENERATE_EXAMPLES = """Examples:

    mega generate out/hf --prompt "The capital of France is" --max-new-tokens 20

    mega generate out/hf --prompt-file prompts.jsonl --temperature 0.8 --top-p 0.95 --seed 7 --json

    echo "Once upon a time" | mega generate runs/llama3-8b --stop "The end"

    mega generate out/hf --prompt "A person as JSON:" --grammar schema.json --temperature 0.7 --min-p 0.1

    mega generate out/hf --prompt-file code.txt --draft ngrams

    mega generate out/hf --adapter runs/polite --prompt "Where is the station?"

    mega generate out/llava --image cat.png --prompt "USER: <image> What is it? ASSISTANT:"
"""
LONGEST_DEFAULT = 4096  # tokens
DATA_OPTIONS = ("check_tokenizer", "json_file", "mask_share", "per_sample")  # of `mega eval`, with --data only
TASK_OPTIONS = (
    "include_path", "num_fewshot", "limit", "apply_chat_template", "log_samples", "output", "cache", "offline", "nproc",
    "tp", "ep", "pp",
)  # fmt: skip


class EvalPrecision(StrEnum):
    """Precisions of weights and activations in evaluation."""

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


Model = Annotated[
    str,
    typer.Argument(
        help="Model: a mega checkpoint, a run folder (latest checkpoint), a HuggingFace folder or a GGUF file; path or URL."
    ),
]
PrecisionOption = Annotated[EvalPrecision, typer.Option(help="Dtype of weights and activations.")]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer", help="Folder with tokenizer.json, or that file; default: the tokenizer in the model's folder."
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="Speculative decoding (the output stays the same): ngrams drafts from repetitions in the text, mtp uses the "
        "model's MTP layers, a folder is a smaller draft model; none turns it off.",
        show_default="ngrams on a CPU, in fp32 and fp64",
    ),
]

Temperature = Annotated[float | None, typer.Option(min=0, help="Sampling temperature, e.g. 0.7; 0 is greedy decoding.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Sample from the k most likely tokens only, e.g. 50.")]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Nucleus sampling: sample from the smallest set of tokens with this total probability, e.g. 0.95; above 0, up to 1."
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Sample only from tokens with at least this fraction of the highest probability, e.g. 0.1; 0 to 1."
    ),
]


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
        from mega_cli.eval_tasks import TaskEvalOptions, evaluate_tasks, import_harness

        import_harness(offline=offline)
        from mega_eval.harness_tasks import TaskOptions
        from mega_eval.multi_rank_inference import ReplicaLayout

        asked = TaskEvalOptions(model, tokenizer, precision, device, batch_size, seq_length, output)
        options = TaskOptions(include_path, num_fewshot, limit, apply_chat_template, log_samples, cache)
        evaluate_tasks(tasks.split(","), asked, options, ReplicaLayout(tp, ep, pp), nproc)
        return
    assert data is not None
    from mega_common.atomic_files import write_json_atomically
    from mega_eval.dataset_scores import evaluate_perplexity
    from mega_eval.masked_lm_loss import SHARE, evaluate_masked_lm
    from mega_eval.model_loading import PRECISIONS, load_inference_model, select_device
    from mega_eval.span_corruption import evaluate_span_corruption

    loaded = load_inference_model(
        model,
        dtype=PRECISIONS[precision],
        device=select_device(device),
        kinds=("decoder", "encoder", "encoder-decoder", "reward model"),
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
            option = "json" if name == "json_file" else name.replace("_", "-")
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


def generate_command(
    model: Model,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue, e.g. 'Once upon a time'. Repeatable.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="Text file with one prompt, or .jsonl file with the key 'prompt' in each line; - for standard input."
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="Image file for each <image> placeholder of the prompt, in order. Repeatable.", metavar="FILE"
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="LoRA adapter to apply to MODEL: a run that trained one, or a PEFT folder."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate per prompt.")] = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Above 1 makes tokens of the prompt and the generated text less likely, e.g. 1.1."),
    ] = None,
    presence_penalty: Annotated[
        float | None,
        typer.Option(help="Subtracted from the logit of every token that was already generated, e.g. 0.5."),
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option(help="Subtracted from a token's logit for each time it was already generated, e.g. 0.2."),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text. Repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    grammar: Annotated[
        Path | None, typer.Option(help="File with a JSON schema or a Lark grammar that the output must match.")
    ] = None,
    draft: DraftOption = None,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, help="With --json: log-probability of each token, and this many alternatives, e.g. 5."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 8,
    precision: PrecisionOption = EvalPrecision.FP32,
    device: Device = "auto",
    tokenizer: TokenizerOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help='Print a JSON line {"prompt", "text", "tokens", "finish"} per prompt.')
    ] = False,
) -> None:
    """Continue prompts. A single continuation is printed while it is generated; the prompt itself is not printed.

    Sampling settings come from the options, else from the model's generation_config.json. Settings of that file that are
    not supported (beams, stop strings, ...) are listed in a warning.
    """
    prompts, rule = _read_prompts(prompt or [], prompt_file), None if grammar is None else _read_text(grammar)
    if image and len(prompts) > 1:
        raise ConfigError(f"--image requires one prompt, found {len(prompts)}", hint="give one --prompt")
    images = [_read_bytes(path) for path in image or []]
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs requires --json", hint="add --json")
    given = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed,
        "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty,
    }  # fmt: skip
    settings = {name: value for name, value in given.items() if value is not None}
    from mega_eval.language_model import LanguageModel
    from mega_eval.sampling import Sampling

    Sampling.parse(settings, source="command line")  # before a model is read
    if rule is not None and grammar is not None:
        from mega_eval.grammar_compiler import check_grammar_file

        check_grammar_file(rule, grammar)
    loaded = LanguageModel.load(
        model, precision=precision, device=device, tokenizer=tokenizer, draft=draft, adapter=adapter
    )
    own = {name: value for name, value in loaded.settings.items() if name not in settings}
    if own:
        logger.info("%s: from its generation_config.json: %s", model, ", ".join(f"{k} {v}" for k, v in own.items()))
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": tuple(stop or ()), "grammar": rule, **settings}
    from mega_eval.image_prompts import ImagePrompt

    inputs = [ImagePrompt(prompts[0], images)] if images else prompts
    if len(prompts) == 1 and not as_json:
        for text in loaded.stream(inputs[0], **options):
            print(text, end="", flush=True)
        print()
        return
    found = loaded.generate(inputs, batch_size=batch_size, logprobs=logprobs, **options)
    for text, completion in zip(prompts, found, strict=True):
        print(_format_json_line(text, completion) if as_json else f"--- {text}\n{completion.text}")


def _format_json_line(prompt: str, completion: Completion) -> str:
    line = {"prompt": prompt, "text": completion.text, "tokens": completion.tokens, "finish": completion.finish}
    if completion.scored:
        line["logprobs"] = [{"logprob": one.logprob, "top": one.top} for one in completion.scored]
    return json.dumps(line)


def _read_prompts(given: list[str], file: Path | None) -> list[str]:
    """Return the prompts of the command line, then those of the file; without either, standard input if it is not a
    terminal.
    """
    if file is None and not given:
        if sys.stdin.isatty():
            raise DataError(
                "mega generate requires a prompt",
                hint='give --prompt "some text", --prompt-file FILE or standard input',
            )
        file = Path("-")
    if file is None:
        return given
    text = _read_text(file)
    if file.suffix != ".jsonl":
        return [*given, text.removesuffix("\n")]
    if not text.strip():
        raise DataError(f"{file}: the file has no prompts", hint='each line must be {"prompt": "some text"}')
    return given + [_parse_prompt(line, f"{file}: line {number}") for number, line in enumerate(text.splitlines(), 1)]


def _read_bytes(file: Path) -> bytes:
    try:
        return read_file_start(file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({explain_read_error(error)})") from None


def _read_text(file: Path) -> str:
    if file != Path("-"):
        return read_utf8_text(file, DataError)
    try:
        return sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"standard input: cannot be read ({explain_read_error(error)})") from None


def _parse_prompt(line: str, where: str) -> str:
    try:
        raw = parse_json_text(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error})") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("prompt"), str):
        keys = ", ".join(map(repr, raw)) if isinstance(raw, dict) else "no JSON object"
        raise DataError(
            f"{where}: requires a text under the key 'prompt', found {keys}", hint='{"prompt": "Once upon a time"}'
        )
    if not raw["prompt"].isascii() and any("\ud800" <= letter <= "\udfff" for letter in raw["prompt"]):
        raise DataError(f"{where}: the prompt contains an unpaired surrogate, which is not a character")
    return str(raw["prompt"])
