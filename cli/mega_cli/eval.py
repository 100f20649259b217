"""`mega eval` and `mega generate`: scores of a model, and text from it."""

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
OF_DATA = (
    "check_tokenizer",
    "json_file",
    "mask_share",
    "per_sample",
)  # options of `mega eval` that go with --data, and with --tasks
OF_TASKS = (
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
        help="A mega checkpoint, a run folder (its newest checkpoint), a HuggingFace folder or a GGUF file; or its URL."
    ),
]
PrecisionOption = Annotated[EvalPrecision, typer.Option(help="What weights and activations are computed in.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
TokenizerOption = Annotated[
    Path | None, typer.Option("--tokenizer", help="The model's tokenizer; default: the one beside its weights.")
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="Guess tokens, which changes no text: ngrams repeats the text, mtp asks the model's own layers for further tokens, "
        "none does not; or a smaller model's folder.",
        show_default="ngrams on a CPU, in fp32 and fp64",
    ),
]

Temperature = Annotated[float | None, typer.Option(min=0, help="0 takes the likeliest token each time.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Draw from so many likeliest tokens only.")]
TopP = Annotated[
    float | None, typer.Option(help="Draw from the fewest tokens with this probability together; above 0, up to 1.")
]
MinP = Annotated[
    float | None, typer.Option(help="Draw from tokens with this share of the likeliest's probability; from 0 to 1.")
]


def eval_command(
    ctx: typer.Context,
    model: Model,
    data: Annotated[
        Path | None, typer.Option(help="The held-out data set: PREFIX of PREFIX.bin and PREFIX.idx.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Tasks of lm-evaluation-harness instead: names, groups, patterns as 'mmlu_*', or YAML files.",
        ),
    ] = None,
    seq_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens the model sees at once; default: all it can, with --data up to 4096."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences computed together on a GPU; prompts continued together anywhere.")
    ] = 8,
    precision: PrecisionOption = EvalPrecision.FP32,
    device: Device = "auto",
    tokenizer: TokenizerOption = None,
    check_tokenizer: Annotated[
        bool, typer.Option(help="Insist that the data set was made with the model's tokenizer.")
    ] = True,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="--data: write the result to this file as JSON; - for standard output."),
    ] = None,
    per_sample: Annotated[
        Path | None, typer.Option(help="--data: write each sequence's loss to this file, JSON lines.")
    ] = None,
    mask_share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.5,
            help="--data, of an encoder: tokens of a sequence that are hidden together, each token once; 0: one "
            "at a time, for pseudo-perplexity. Of an encoder-decoder: tokens that are hidden, in spans.",
            show_default="0.15",
        ),
    ] = None,
    include_path: Annotated[Path | None, typer.Option(help="--tasks: a folder with tasks of your own.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="--tasks: solved examples before each question; default: the task's own.")
    ] = None,
    limit: Annotated[
        float | None, typer.Option(help="--tasks: so many samples of each; below 1, such a share of them.")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="--tasks: ask each question as a message of a chat.")
    ] = False,
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="--tasks: keep each sample in the results, for `mega compare`.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="--tasks: write the results to this file, in the harness's own JSON.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="--tasks: a folder that keeps answers; the same command goes on where it was ended."),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="--tasks: ask the hub for nothing; data are in its cache or in files.")
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="--tasks: ranks to start here; what --tp, --ep and --pp leave shares the samples."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="--tasks: ranks that share each weight.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="--tasks: ranks that share the experts.")] = 1,
    pp: Annotated[
        int, typer.Option(min=1, help="--tasks: ranks that share the layers, for a model that one device cannot hold.")
    ] = 1,
) -> None:
    """Score a model on held-out tokens (--data: loss, perplexity, bits per byte) or on downstream tasks (--tasks).

    With --data every token but the first is predicted once, in sequences that follow one another; an encoder guesses each
    token once, hidden with others (--mask-share), and an encoder-decoder tells hidden spans, as in its pre-training. With --per-sample, two
    models or two forms of one can be compared sequence by sequence; with --log-samples `mega compare` does that for tasks.
    Of a reward model --data with preference pairs tells how often the chosen answer has the larger score.
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
    hides = loaded.config.encoder is not None or not loaded.config.causal
    if not hides and mask_share is not None:
        raise ConfigError("--mask-share is of encoders, and the model is a decoder", hint="leave it out")
    result: DatasetScore | PreferenceAccuracy
    if loaded.config.score:
        from mega_eval.dataset_scores import evaluate_preferences

        result = evaluate_preferences(loaded, data)
    elif not hides:
        theirs = _find_model_tokenizer(model, tokenizer) if check_tokenizer else None
        result = evaluate_perplexity(
            loaded, data, length, batch_size=batch_size, tokenizer=theirs, per_sample=per_sample
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
    """Refuse options of --data with --tasks, and the reverse."""
    if (data is None) == (tasks is None):
        raise ConfigError(
            "neither --data nor --tasks is given"
            if data is None
            else "--data and --tasks are given, and one is run at a time",
            hint="--data PREFIX scores tokens, --tasks NAME,... runs tasks; see mega eval --help",
        )
    mine, theirs = ("--data", OF_TASKS) if tasks is None else ("--tasks", OF_DATA)
    for name in theirs:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "json" if name == "json_file" else name.replace("_", "-")
            other = "--tasks" if mine == "--data" else "--data"
            raise ConfigError(f"--{option} is for {other}, and {mine} is given")


def _load_model_tokenizer(model: str, named: Path | None) -> Tokenizer:
    """Return the model's tokenizer."""
    from mega_data.tokenizer import Tokenizer
    from mega_eval.model_loading import load_tokenizer

    return load_tokenizer(model) if named is None else Tokenizer(named)


def _find_model_tokenizer(model: str, named: Path | None) -> Tokenizer | None:
    """Return the model's tokenizer to compare the data with, or None for weights without one."""
    try:
        return _load_model_tokenizer(model, named)
    except CheckpointError as error:
        logger.warning("%s; only the vocabulary's size is checked", error.message)
        return None


def generate_command(
    model: Model,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue. Repeatable.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="A file with one prompt, or .jsonl with a key 'prompt' in each line; - for standard input."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="An image for each placeholder of the prompt, in order. Repeatable.", metavar="FILE"),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="An adapter of low rank beside MODEL: a run's, or a folder of PEFT's."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add to each prompt.")] = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens of the prompt or the text become less likely.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Taken from the score of a token that was generated before.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same for each time that it was generated before.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws; the same seed gives the same text.")] = 0,
    grammar: Annotated[
        Path | None, typer.Option(help="A file with a JSON schema, or a Lark grammar, that the text has to obey.")
    ] = None,
    draft: DraftOption = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="With --json: each token's log-probability, and so many alternatives.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts continued together.")] = 8,
    precision: PrecisionOption = EvalPrecision.FP32,
    device: Device = "auto",
    tokenizer: TokenizerOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help='A JSON line {"prompt", "text", "tokens", "finish"} for each prompt.')
    ] = False,
) -> None:
    """Continue prompts. A single one is printed while it is generated; standard output has the continuation only.

    How tokens are drawn is what the model's generation_config.json says, as far as no option says otherwise.
    A setting of that file which is not supported (beams, stop strings, ...) is named in a warning.
    """
    prompts, rule = _read_prompts(prompt or [], prompt_file), None if grammar is None else _text_of(grammar)
    if image and len(prompts) > 1:
        raise ConfigError(f"--image: is for one prompt, and there are {len(prompts)}", hint="one --prompt")
    pictures = [_content_of(path) for path in image or []]
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs: only JSON tells them", hint="add --json")
    given = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed,
        "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty,
    }  # fmt: skip
    settings = {name: value for name, value in given.items() if value is not None}
    from mega_eval.language_model import LanguageModel
    from mega_eval.sampling import Sampling

    Sampling.parse(settings, source="options")  # before a model is read
    if rule is not None and grammar is not None:
        from mega_eval.grammar_compiler import check_grammar_file

        check_grammar_file(rule, grammar)
    loaded = LanguageModel.load(
        model, precision=precision, device=device, tokenizer=tokenizer, draft=draft, adapter=adapter
    )
    own = {name: value for name, value in loaded.settings.items() if name not in settings}
    if own:
        told = ", ".join(f"{name} {value}" for name, value in own.items())
        logger.info("%s: from its generation_config.json: %s", model, told)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": tuple(stop or ()), "grammar": rule, **settings}
    from mega_eval.image_prompts import ImagePrompt

    asking = [ImagePrompt(prompts[0], pictures)] if pictures else prompts
    if len(prompts) == 1 and not as_json:
        for text in loaded.stream(asking[0], **options):
            print(text, end="", flush=True)
        print()
        return
    found = loaded.generate(asking, batch_size=batch_size, logprobs=logprobs, **options)
    for asked, completion in zip(prompts, found, strict=True):
        print(_line(asked, completion) if as_json else f"--- {asked}\n{completion.text}")


def _line(prompt: str, completion: Completion) -> str:
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
                "there is no prompt", hint='give --prompt "some text", --prompt-file FILE or standard input'
            )
        file = Path("-")
    if file is None:
        return given
    text = _text_of(file)
    if file.suffix != ".jsonl":
        return [*given, text.removesuffix("\n")]
    if not text.strip():
        raise DataError(f"{file}: holds no prompts", hint='each line is {"prompt": "some text"}')
    return given + [_prompt_of(line, f"{file}: line {number}") for number, line in enumerate(text.splitlines(), 1)]


def _content_of(file: Path) -> bytes:
    try:
        return read_file_start(file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({explain_read_error(error)})") from None


def _text_of(file: Path) -> str:
    if file != Path("-"):
        return read_utf8_text(file, DataError)
    try:
        return sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"standard input: cannot be read ({explain_read_error(error)})") from None


def _prompt_of(line: str, where: str) -> str:
    try:
        raw = parse_json_text(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error})") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("prompt"), str):
        raise DataError(f"{where}: no text under the key 'prompt'")
    if not raw["prompt"].isascii() and any("\ud800" <= letter <= "\udfff" for letter in raw["prompt"]):
        raise DataError(f"{where}: the prompt holds half of a pair of surrogates, which is not a character")
    return str(raw["prompt"])
