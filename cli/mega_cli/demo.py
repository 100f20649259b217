"""`mega demo`: the whole workflow on this machine, without network, with the Python standard library as corpus.

It writes a workflow and a run.yaml as a user would, runs them with `mega run`, and prints the results.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from mega_cli.workflow_runner import rename_to_numbered_backup

EXAMPLES = """Examples:

  mega demo

  mega demo --output /tmp/demo --nproc 2
"""
VOCABULARY, STEPS, SEQUENCE = 8192, 160, 256
HELD_OUT_EVERY = 50  # one file of this many is held out for evaluation
HELD_OUT_BYTES = 150_000
PROMPT = "def read_file(path):\n"

RUN = """\
# A small Llama on the Python standard library. All settings: mega train run.yaml --check
model: {{preset: tiny-10m, vocab_size: {vocabulary}}}
data: {{train: data/train, valid: data/held-out, seq_length: {sequence}, tokenizer: tokenizer}}
batch: {{micro: 4, global: 16}}
train: {{steps: {steps}, eval_every: {half}, eval_steps: 2}}
optimizer: {{lr: 2.0e-3}}
lr_schedule: {{name: cosine, warmup_steps: {warmup}, min_lr: 2.0e-4, decay_steps: {steps}}}
precision: {precision}
checkpoint: {{every: {half}}}
log: {{every: 5}}
output: run
"""
WORKFLOW = """\
# Text -> tokenizer -> tokens -> first half of the training -> second half -> HuggingFace folder -> score.
# mega run workflow.yaml runs the stages that are not done yet; add --status to list them.
stages:
  tokenizer:
    run: data train-tokenizer
    with: {{input: train.jsonl, vocab-size: {vocabulary}, output: tokenizer}}
    outputs: [tokenizer]
  tokens:
    needs: [tokenizer]
    run: data preprocess
    with: {{input: train.jsonl, tokenizer: tokenizer, output: data/train, append-eod: true}}
    outputs: [data/train.bin, data/train.idx, data/train.info]
  held-out:
    needs: [tokenizer]
    run: data preprocess
    with: {{input: held-out.jsonl, tokenizer: tokenizer, output: data/held-out, append-eod: true}}
    outputs: [data/held-out.bin, data/held-out.idx, data/held-out.info]
  train-half:
    needs: [tokens, held-out]
    run: train
    args: [run.yaml]
    with: {{set: train.steps={half}, nproc: {nproc}}}
    outputs: [run/checkpoints/step-{half:08d}]
  train-rest:
    needs: [train-half]
    run: train
    args: [run.yaml]
    with: {{nproc: 1}}
    outputs: [run/checkpoints/step-{steps:08d}]
  export:
    needs: [train-rest]
    run: ckpt convert
    args: [run/checkpoints/step-{steps:08d}, hf]
    with: {{to: hf}}
    outputs: [hf]
  score:
    needs: [export, held-out]
    run: eval
    args: [hf]
    with: {{data: data/held-out, seq-length: {sequence}, json: score.json}}
    outputs: [score.json]
"""


def demo_command(
    output: Annotated[Path, typer.Option(help="Folder for all files.")] = Path("demo"),
    nproc: Annotated[
        int, typer.Option(min=1, help="Ranks for the first half of the training; the second half resumes with one.")
    ] = 1,
    steps: Annotated[int, typer.Option(min=4, help="Training steps; fewer for a quick test.")] = STEPS,
) -> None:
    """Run the whole workflow in a few minutes without network: tokenize, train, convert to HuggingFace, evaluate.

    All files are kept. Re-running the command skips finished stages, and resumes after an interruption.
    """
    begun = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    _write_corpus(output)
    _write_workflow(output, nproc, steps)
    print(
        f"The corpus, run.yaml and workflow.yaml are in {output}/; this is `mega run {output}/workflow.yaml`:",
        flush=True,
    )
    _run_mega("run", str(output / "workflow.yaml"))
    print(f"\n{PROMPT}", end="", flush=True)
    _run_mega("generate", str(output / "hf"), "--prompt", PROMPT, "--max-new-tokens", "60", "--temperature", "0.7")
    _print_results(output, nproc, steps, time.monotonic() - begun)


def _write_corpus(output: Path) -> None:
    """Write the Python standard library as JSON lines; hold out one file in fifty."""
    if (output / "held-out.jsonl").exists():
        return
    held_out_bytes = 0
    with open(output / "train.jsonl", "w") as train, open(output / "held-out.jsonl.tmp", "w") as held_out:
        for number, text in enumerate(_read_standard_library()):
            is_held_out = number % HELD_OUT_EVERY == 0 and held_out_bytes < HELD_OUT_BYTES
            held_out_bytes += is_held_out * len(text)
            (held_out if is_held_out else train).write(json.dumps({"text": text}) + "\n")
    (output / "held-out.jsonl.tmp").rename(output / "held-out.jsonl")


def _read_standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "__pycache__"} & set(path.relative_to(root).parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if text.strip():
                yield text


def _write_workflow(output: Path, nproc: int, steps: int) -> None:
    """Write the workflow and its run.yaml. Another number of steps changes the learning rates, so the run starts over."""
    numbers = {
        "vocabulary": VOCABULARY,
        "sequence": SEQUENCE,
        "steps": steps,
        "half": steps // 2,
        "warmup": steps // 12,
        "nproc": nproc,
    }
    for name, template in (("run.yaml", RUN), ("workflow.yaml", WORKFLOW)):
        text = template.format(**numbers, precision=_choose_precision())
        path = output / name
        if path.exists() and path.read_text() == text:
            continue
        if name == "run.yaml":
            rename_to_numbered_backup(output / "run")
        path.write_text(text)


def _choose_precision() -> str:
    """Return bf16 on processors with bf16 matrix units, where it is twice as fast, else fp32."""
    information = Path("/proc/cpuinfo")
    flags = information.read_text() if information.exists() else ""
    return "bf16" if "amx_bf16" in flags else "fp32"


def _run_mega(*arguments: str) -> None:
    """Run one mega command as typed, and exit with its status if it fails."""
    status = subprocess.call([sys.executable, "-m", "mega_cli.main", *arguments])
    if status:
        raise typer.Exit(status)


def _print_results(output: Path, nproc: int, steps: int, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from mega_common.progress_logging import format_with_decimal_unit

    score = json.loads((output / "score.json").read_text())
    baseline = _unigram_perplexity(output)
    table = Table(title=f"mega demo: {seconds / 60:.1f} minutes", title_justify="left")
    for column in ("result", "path", "value"):
        table.add_column(column)
    corpus = sum((output / name).stat().st_size for name in ("train.jsonl", "held-out.jsonl"))
    table.add_row("text", f"{output}/train.jsonl", f"{format_with_decimal_unit(corpus)}B of Python source")
    table.add_row(
        "tokens",
        f"{output}/data/train.bin, .idx",
        f"{format_with_decimal_unit((output / 'data/train.bin').stat().st_size / 2)}",
    )
    length = f"{steps} steps, resumed once after {steps // 2}"
    table.add_row("training run", f"{output}/run/", length + (f" ({nproc} ranks, then 1)" if nproc > 1 else ""))
    table.add_row("HuggingFace folder", f"{output}/hf/", "loads in transformers")
    table.add_row(
        "held-out perplexity", f"{output}/score.json", f"{score['perplexity']:.1f} (unigram baseline {baseline:.0f})"
    )
    console = Console()
    console.print(table)
    console.print("Next:")
    for command in (
        f"mega generate {output}/hf --prompt 'import ' --max-new-tokens 40",
        f"mega train {output}/run.yaml --set train.steps={2 * steps}",
        f"mega data preprocess --input YOUR.jsonl --tokenizer {output}/tokenizer --output data/mine --append-eod",
    ):
        console.print(f"  {command}", soft_wrap=True, highlight=False)


def _unigram_perplexity(output: Path) -> float:
    """Return the perplexity on the held-out tokens of a unigram model with add-one smoothing."""
    import numpy as np

    from mega_data.token_files.indexed_reader import IndexedReader

    train, held_out = (
        np.bincount(IndexedReader(output / "data" / name).tokens, minlength=VOCABULARY)
        for name in ("train", "held-out")
    )
    probability = (train + 1) / (train + 1).sum()
    return float(np.exp(-(held_out * np.log(probability)).sum() / held_out.sum()))
