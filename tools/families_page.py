"""Write docs/families.md: the supported model families, and the models of transformers that are not supported.

`python tools/families_page.py` rewrites the page; a test compares it with the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from mega_ckpt.families import FAMILIES, SEEING

PAGE = Path(__file__).parent.parent / "docs" / "families.md"

KINDS = {
    "dense": "Dense decoders",
    "moe": "Mixture-of-experts decoders",
    "recurrent": "Hybrid and recurrent decoders",
    "encoder": "Encoders",
    "encoder-decoder": "Encoder-decoder models",
    "vision": "Vision-language models",
}
MODELS = {
    "Decoders": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "Encoders": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "Encoder-decoder models": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "Vision-language models": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
HEAD = """# Model families

`python tools/families_page.py` writes this page from the declarations in `mega_ckpt.families`; a test compares the two. Do not edit.

Every family converts in both directions: `mega ckpt convert FOLDER out --to mega` and back with `--to hf`. The round trip
gives byte-identical weight files, and logits agree with transformers {version} to 1e-5 in fp32
(`tests/ckpt/test_hf.py`, `tests/interop/test_hf_logits.py`). The family of a folder is the `model_type` of its config.json.
"""
SETTINGS = """
## Differences from transformers

- Nemotron-H and Nemotron-3: `mega` bounds the time step by `time_step_limit` of config.json; transformers 5.23 uses `time_step_min`.
- A layer's experts are one tensor in a `mega` checkpoint, and one tensor per expert in most HuggingFace folders. Conversion needs memory for one
  expert at a time.

## Settings that are not supported

A config.json may have a supported `model_type` and still use a setting that `mega` cannot express, for example an unknown
`rope_type`. `mega` then refuses the folder and names every such key. It never drops a setting that changes the result. Keys that
transformers does not read for this family are kept and listed once in a warning.

AWQ, GPTQ, bitsandbytes, sparse and rotated weights are refused by name. [Checkpoints](checkpoints.md#quantized-weights-pytorch_modelbin-gguf)
lists the quantized formats that are read, and [Megatron checkpoints](megatron-checkpoints.md) the settings of Megatron that convert.
"""


def kind_of(model_type: str) -> str:
    """Return the kind of a supported family, by its configuration class in transformers."""
    if model_type in MODELS["Encoder-decoder models"]:
        return "encoder-decoder"
    if model_type in MODELS["Encoders"]:
        return "encoder"
    keys = " ".join(CONFIG_MAPPING[model_type]().to_dict())
    if any(part in keys for part in ("mamba", "ssm_", "state_size", "linear_")):
        return "recurrent"
    return "moe" if "expert" in keys else "dense"


def supported() -> dict[str, list[tuple[str, str, str]]]:
    """Return (model_type, class in transformers, model_type of the enclosing model) of every family, by kind."""
    rows: dict[str, list[tuple[str, str, str]]] = {kind: [] for kind in KINDS}
    for family in FAMILIES:
        rows[kind_of(family.name)].append((family.name, family.architecture, family.outer_model_type))
    rows["vision"] = [(family.name, family.architecture, "") for family in SEEING]
    return rows


def table(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    """Yield the lines of one kind's table."""
    yield from ("| `model_type` | class in transformers |", "|---|---|")
    for name, architecture, outer in sorted(rows):
        note = f"; also the text model of `{outer}`" if outer else ""
        yield f"| `{name}` | `{architecture}`{note} |"


def families_page() -> str:
    """Return the text of docs/families.md."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    lines = [HEAD.format(version=transformers.__version__)]
    rows = supported()
    for kind, title in KINDS.items():
        lines += [f"## {title}", "", *table(rows[kind]), ""]
    known = {name for kind in rows.values() for family in kind for name in (family[0], family[2])}
    lines += ["## Models that are not supported", ""]
    lines += [
        f"These `model_type`s of transformers {transformers.__version__} are refused with the nearest supported name."
    ]
    for title, names in MODELS.items():
        missing = ", ".join(f"`{name}`" for name in sorted(set(names) - known))
        lines += ["", f"**{title}:** {missing}."]
    return "\n".join([*lines, SETTINGS])


if __name__ == "__main__":
    PAGE.write_text(families_page(), encoding="utf-8")
