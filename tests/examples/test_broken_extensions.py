"""A comparison of layouts finds mistakes in an extension: a forgotten sum, a head that is counted twice, a lost state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from extension_cases import EXAMPLES, ExtendedCase, extended_cases, find_differences

RETENTION: dict[str, Any] = {
    "retention": {"heads": 8, "key_size": 3, "value_size": 5, "chunk_size": 4, "conv_kernel": 2}
}
# Example, mixers, layout in which it shows, and the mistake.
MISTAKES: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("differential_attention", {"differential": {}}, {"tp": 2}, "std=0.1, partial_grad=True", "std=0.1"),
    (
        "retention", RETENTION, {"tp": 2}, "range(tp.rank * heads // tp.size, (tp.rank + 1) * heads // tp.size)",
        "range(heads // tp.size)",
    ),
    (
        "retention", RETENTION, {"cp": 2}, "self.kernels.selective_scan(inputs, chunks, states)",
        "self.kernels.selective_scan(inputs, chunks, lambda maps, added: pass_recurrent_states(maps, added, None, ALONE)[0])",
    ),
]  # fmt: skip


def broken_case(folder: Path, number: int) -> ExtendedCase:
    example, mixers, parallel, right, wrong = MISTAKES[number]
    text = (EXAMPLES / f"{example}.py").read_text()
    assert right in text
    text = text.replace(right, wrong)
    imports = "from mega_trainer.extend import (\n"
    assert imports in text
    alone = "from mega_trainer.parallel.parallel_linear import ALONE\n"
    text = text.replace(imports, f"{alone}{imports}    pass_recurrent_states,\n")
    file = folder / f"broken_{number}.py"
    file.write_text(text)
    run = {"model": {"mixers": mixers, "layers": [f"{next(iter(mixers))}+mlp"], "position": "none"}}
    return extended_cases(str(file), run, [(parallel, "none")], steps=1)[0]


def test_mistakes_are_found(tmp_path: Path) -> None:
    cases = [broken_case(tmp_path, number) for number in range(len(MISTAKES))]
    assert len(find_differences(cases)) == len(cases)
