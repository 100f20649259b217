"""Make the pictures of README and docs (report.png, plan.png, top.png, doctor.png) from a small run of four ranks, from a plan
and from an examination of this machine.

`python tools/docs_pictures.py FOLDER` works in the new folder FOLDER, takes about six minutes, and needs chromium;
`python tools/docs_pictures.py FOLDER doctor` makes only doctor.png. `python tools/docs_pictures.py FOLDER rewards` makes only
rewards.svg, from the report of a finished run of examples/arithmetic in the existing FOLDER, and needs no chromium.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

from rich.console import Console, RenderableType

from mega_cli.doctor import build_doctor_table
from mega_trainer.doctor.check_result import CheckResult
from mega_trainer.pages.run_log import RunLog
from mega_trainer.pages.terminal_view import TAIL, render_run_view

ROOT = Path(__file__).parent.parent
RUN = Path("runs/small-moe")
STEPS, TOP_AT = 160, 106
RUN_YAML = f"""
model:
  {{preset: tiny-10m, vocab_size: 1024, num_attention_heads: 4, num_kv_heads: 2, head_dim: 64,
   moe: {{num_experts: 8, top_k: 2, ffn_hidden_size: 256}}}}
data: {{train: data/train, valid: data/held-out, seq_length: 256, tokenizer: tok}}
parallel: {{tp: 2, sp: true, pp: 2}}
batch: {{micro: 2, global: 8}}
train: {{steps: {STEPS}, eval_every: 20, eval_steps: 2}}
optimizer: {{lr: 1.0e-3}}
lr_schedule: {{name: cosine, warmup_steps: 20, min_lr: 1.0e-4}}
precision: fp32
checkpoint: {{every: 40}}
output: {RUN}
"""


def main(folder: str, only: str = "") -> None:
    """Train the run in `folder`, and write the pictures to docs/."""
    if only == "rewards":
        draw_rewards(Path(folder))
        return
    Path(folder).mkdir(parents=True)
    os.chdir(folder)
    picture_doctor()
    if only == "doctor":
        return
    prepare_data()
    Path("run.yaml").write_text(RUN_YAML)
    training = subprocess.Popen(["mega", "train", "run.yaml", "--nproc", "4"])
    while training.poll() is None and steps_done() < TOP_AT:
        time.sleep(1)
    picture_terminal()
    if status := training.wait():
        sys.exit(status)
    mega("report", str(RUN), "--out", "report.html")
    screenshot(Path("report.html"), "report.png", 1400, 900)
    recipe = Path("llama3-70b.yaml")
    recipe.write_text((ROOT / "recipes" / "llama3-70b-64.yaml").read_text())
    mega("plan", str(recipe), "--machine", "h100", "--ranks", "64", "--html", "plan.html")
    screenshot(Path("plan.html"), "plan.png", 1400, 880)


def draw_rewards(folder: Path) -> None:
    """Write rewards.svg: the figure of the mean reward in the report of the run runs/grpo."""
    page = folder / "report.html"
    mega("report", str(folder / "runs" / "grpo"), "--out", str(page))
    figure = page.read_text().partition("<figcaption>Mean reward</figcaption>")[2].partition("</svg>")[0] + "</svg>"
    style = (
        "<style>svg{background:#f7f8fa;font:13px sans-serif}text{fill:#667085}.grid{stroke:#d9dde3;fill:none}"
        ".line{fill:none;stroke:#0072b2;stroke-width:1.6}.line.faint{stroke-width:1;opacity:.35}</style>"
    )
    head, _, rest = figure.partition(">")
    picture = f'{head} xmlns="http://www.w3.org/2000/svg">{style}{rest}\n'
    (ROOT / "docs" / "rewards.svg").write_text(picture)


def prepare_data() -> None:
    """Write token files of Python's help texts."""
    names = sorted(topics)
    for name, chosen in (("train", names[::2]), ("held-out", names[1::2])):
        lines = [json.dumps({"text": topics[topic]}) + "\n" for topic in chosen]
        Path(f"{name}.jsonl").write_text("".join(lines))
    mega("data", "train-tokenizer", "--input", "train.jsonl", "--vocab-size", "1024", "--output", "tok")
    for name in ("train", "held-out"):
        words = ["--input", f"{name}.jsonl", "--tokenizer", "tok", "--output", f"data/{name}", "--append-eod"]
        mega("data", "preprocess", *words)


def mega(*words: str) -> None:
    """Run a mega command."""
    subprocess.run(["mega", *words], check=True)


def steps_done() -> int:
    """Return the number of lines of the run's metrics."""
    metrics = RUN / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def picture_terminal() -> None:
    """Write top.png: the view of `mega top` at this moment."""
    view = render_run_view(RunLog.read_folder(RUN, tail=TAIL), time.time())
    screenshot(draw_terminal(view, f"mega top {RUN}", 112), "top.png", 1400, 668)


def picture_doctor() -> None:
    """Write doctor.png: the table of `mega doctor` on four ranks of this machine."""
    mega("doctor", "--nproc", "4", "--json", "doctor.json")
    checks = json.loads(Path("doctor.json").read_text())["checks"]
    table = build_doctor_table([CheckResult.from_json(check) for check in checks])
    page = draw_terminal(table, "mega doctor --nproc 4", 124)
    columns, rows = map(float, re.findall(r'viewBox="0 0 (\S+) (\S+)"', page.read_text())[0])
    screenshot(page, "doctor.png", 1400, math.ceil(1400 * rows / columns))


def draw_terminal(view: RenderableType, title: str, width: int) -> Path:
    """Return a page that shows `view` as a terminal of `width` columns does."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True)
        console.print(view)
    page = Path(f"{title.split()[1]}.html")
    page.write_text(f"<style>body{{margin:0}} svg{{width:1400px}}</style>{console.export_svg(title=title)}")
    return page


def screenshot(page: Path, picture: str, width: int, height: int) -> None:
    """Write docs/`picture` with chromium."""
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=3000"]
    target = [f"--window-size={width},{height}", f"--screenshot={ROOT / 'docs' / picture}", page.resolve().as_uri()]
    subprocess.run(["chromium", *options, *target], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main(*sys.argv[1:])
