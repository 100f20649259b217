"""`mega chat`: chat with a model in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mega_cli.model_options import (
    ChatTemplateOption,
    Device,
    DraftOption,
    EvalPrecision,
    ExtensionOption,
    MaxLength,
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
from mega_cli.serve import load_default_sampling, load_served_model
from mega_common.errors import DataError, MegaError

if TYPE_CHECKING:
    from mega_eval.chat_session import ChatSession

EXAMPLES = """Examples:

    mega chat out/hf

    mega chat out/hf --system "Answer in one sentence." --temperature 0.7 --seed 1

    printf 'What is the capital of France?\\nAnd of Italy?\\n' | mega chat out/hf
"""


def chat_command(
    model: Model,
    system: Annotated[str | None, typer.Option(help="System prompt, e.g. 'Answer in one sentence.'")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = 1024,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    sampler: SamplerOption = None,
    sampler_option: SamplerSettings = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 makes tokens of the conversation less likely, e.g. 1.1.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    max_length: MaxLength = None,
    draft: DraftOption = None,
    precision: PrecisionOption = EvalPrecision.FP32,
    device: Device = "auto",
    tokenizer: TokenizerOption = None,
    extension: ExtensionOption = None,
    chat_template: ChatTemplateOption = None,
) -> None:
    """Chat with a model. /reset clears the conversation, /quit or Ctrl-D exits, Ctrl-C stops an answer.

    Piped standard input has one user turn per line; standard output has the answers only. Sampling settings come from
    the options, else from the model's generation_config.json.
    """
    from mega_eval.chat_session import ChatSession, load_chat_template
    from mega_eval.sampling import Sampling

    given: dict[str, Any] = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    settings = {name: value for name, value in given.items() if value is not None}
    settings |= make_sampler_settings(sampler, sampler_option)
    Sampling.parse(settings, source="options of sampling")
    sampling = Sampling.parse(
        {**load_default_sampling(model, extension or []), **settings}, source="command line and generation_config.json"
    )
    template = load_chat_template(model, tokenizer, chat_template, extension or [])
    found = load_served_model(
        model, precision, device, tokenizer, max_length, None, 1, draft=draft, extensions=extension or []
    )
    sampling = sampling.model_copy(update={"min_length_ends": sorted(found.ends)}).bind_token_sampler(found.samplers)
    chat = ChatSession(
        found.engine, found.tokenizer, template, sampling, found.ends, max_new_tokens, found.max_length, system=system
    )
    _run_chat(chat)


def _run_chat(chat: ChatSession) -> None:
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401 - its import makes input() an editable line

        _print_note("/reset clears the conversation, /quit or Ctrl-D exits, Ctrl-C stops an answer")
    for turn in _read_turns(terminal):
        if turn == "/quit":
            return
        if turn == "/reset":
            chat.messages.clear()
            _print_note("conversation cleared")
            continue
        if turn.startswith("/") and terminal and " " not in turn:
            _print_note(f"{turn}: unknown command; the commands are /reset and /quit")
            continue
        _answer(chat, turn)


def _print_note(text: str) -> None:
    print(text, file=sys.stderr)


def _read_turns(terminal: bool) -> Iterator[str]:
    """Yield the non-empty lines of standard input until its end."""
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            if terminal:
                print()
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            _print_note("\n/quit or Ctrl-D exits")
            continue
        if line.strip():
            yield line.strip()


def _answer(chat: ChatSession, turn: str) -> None:
    previous = len(chat.messages)
    try:
        with _catch_interrupt(chat) as stopped:
            for text in chat.stream_answer(turn, stopped):
                print(text, end="", flush=True)
            print()
    except MegaError as error:
        _print_note(f"error: {error}")
        return
    if len(chat.messages) < previous + 2:
        _print_note(f"the conversation exceeds the context of {chat.max_length} tokens: its first turns are dropped")


@contextlib.contextmanager
def _catch_interrupt(chat: ChatSession) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after Ctrl-C; a second Ctrl-C exits the program.

    While the engine has no request, such as during a chat template that does not terminate, Ctrl-C raises an error.
    """
    pressed = False

    def handle_interrupt(_: int, __: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)
        if not chat.engine.num_waiting and not chat.engine.num_running:
            raise DataError("Ctrl-C was pressed before the answer began; the turn is cancelled")

    before = signal.signal(signal.SIGINT, handle_interrupt)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
