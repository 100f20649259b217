"""`mega generate`: generate text from prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mega_cli.model_options import (
    Device,
    DraftOption,
    EvalPrecision,
    ExtensionOption,
    MinP,
    Model,
    PrecisionOption,
    SamplerOption,
    SamplerSettings,
    Temperature,
    TokenizerOption,
    TopK,
    TopP,
    make_sampler_settings,
)
from mega_common.bounded_parsing import explain_read_error, parse_json_text, read_file_start, read_utf8_text
from mega_common.errors import ConfigError, DataError
from mega_common.progress_logging import logger

PROMPT_HINT = 'give --prompt "some text", --prompt-file FILE or standard input'

if TYPE_CHECKING:
    from mega_eval.generate import Completion

EXAMPLES = """Examples:

    mega generate out/hf --prompt "The capital of France is" --max-new-tokens 20

    mega generate out/hf --prompt-file prompts.jsonl --temperature 0.8 --top-p 0.95 --seed 7 --json

    echo "Once upon a time" | mega generate runs/llama3-8b --stop "The end"

    mega generate out/hf --prompt "A person as JSON:" --grammar schema.json --temperature 0.7 --min-p 0.1

    mega generate out/hf --prompt-file code.txt --draft ngrams

    mega generate out/hf --adapter runs/polite --prompt "Where is the station?"

    mega generate runs/mine --prompt "Once" --extension ./my_sampler.py --sampler my_sampler --sampler-option n=1.5

    mega generate out/llava --image cat.png --prompt "USER: <image> What is it? ASSISTANT:"
"""


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
    sampler: SamplerOption = None,
    sampler_option: SamplerSettings = None,
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
    extension: ExtensionOption = None,
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
    given: dict[str, Any] = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed,
        "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty,
    }  # fmt: skip
    settings = {name: value for name, value in given.items() if value is not None}
    settings |= make_sampler_settings(sampler, sampler_option)
    from mega_eval.language_model import LanguageModel
    from mega_eval.sampling import Sampling

    Sampling.parse(settings, source="options of sampling")  # before a model is read
    if rule is not None and grammar is not None:
        from mega_eval.grammar_compiler import check_grammar_file

        check_grammar_file(rule, grammar)
    loaded = LanguageModel.load(
        model,
        precision=precision,
        device=device,
        tokenizer=tokenizer,
        draft=draft,
        adapter=adapter,
        extensions=extension or [],
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
        line["logprobs"] = [{"logprob": token.logprob, "top": token.top} for token in completion.scored]
    return json.dumps(line)


def _read_prompts(given: list[str], file: Path | None) -> list[str]:
    """Return the prompts of the command line and of the file; without both, standard input if it is not a terminal."""
    if file is None and not given:
        if sys.stdin.isatty():
            raise DataError("mega generate requires a prompt", hint=PROMPT_HINT)
        file = Path("-")
    if file is None:
        return given
    text = _read_text(file)
    if file == Path("-") and not text and not given:
        raise DataError("mega generate requires a prompt, and standard input is empty", hint=PROMPT_HINT)
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
        raise DataError(
            f"{where}: is not JSON ({explain_read_error(error)})", hint='{"prompt": "Once upon a time"}'
        ) from None
    if not isinstance(raw, dict) or not isinstance(raw.get("prompt"), str):
        keys = ", ".join(map(repr, raw)) if isinstance(raw, dict) else "no JSON object"
        if isinstance(raw, dict) and "prompt" in raw:
            keys = f"the value {raw['prompt']!r:.60}"
        raise DataError(
            f"{where}: requires a text under the key 'prompt', found {keys}", hint='{"prompt": "Once upon a time"}'
        )
    if not raw["prompt"].isascii() and any("\ud800" <= letter <= "\udfff" for letter in raw["prompt"]):
        raise DataError(f"{where}: the prompt contains an unpaired surrogate, which is not a character")
    return str(raw["prompt"])
