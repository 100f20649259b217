"""Our calls into libraries that need a GPU, against the arguments that their published source takes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from trainer.kernels.published import ARCHIVES, Library, LibraryCall, NotPublishedError, library_calls

import mega_trainer

OURS = Path(mega_trainer.__file__).parent
OPERATORS = "torch.ops.flash_attn_3"
EXPERTS = "transformer_engine.pytorch.ep"
VERSIONS = {
    "causal_conv1d": ["causal_conv1d-*.tar.gz"],
    "fla": ["fla_core-*.whl"],
    "mamba_ssm": ["mamba_ssm-*.tar.gz"],
    EXPERTS: ["transformer_engine-2.20.*.whl"],
    "flash_attn": ["flash_attn-*.tar.gz"],
    OPERATORS: ["flash_attn-*.tar.gz"],
    "transformer_engine": ["transformer_engine-2.10.*.whl", "transformer_engine-2.20.*.whl"],
}


@cache
def library(pattern: str) -> Library:
    found = sorted(ARCHIVES.glob(pattern))
    assert len(found) == 1, f"{ARCHIVES}/{pattern}: `make setup` downloads it"
    return Library(found[0])


def check(call: LibraryCall) -> None:
    name = next(name for name in VERSIONS if call.name.startswith(f"{name}."))
    for pattern in VERSIONS[name]:
        source = library(pattern)
        operator = call.name.removeprefix("torch.ops.").replace(".", "::")
        call.check(source.operator(operator) if name == OPERATORS else source.signature(call.name))


CALLS = list(library_calls(OURS, tuple(VERSIONS)))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.place} {call.name}")
def test_a_librarys_function_takes_what_we_give(call: LibraryCall) -> None:
    check(call)


def test_every_library_is_called() -> None:
    for name in VERSIONS:
        assert any(call.name.startswith(f"{name}.") for call in CALLS), name


@pytest.mark.parametrize(
    "wrong",
    [
        ("softmax_scale=", "scale="),  # no such argument
        (", alibi_slopes=None", ""),  # one that is required is missing
        ("q, k, v, dropout_p", "q, k, v, v, dropout_p"),  # one by its place and by its name
        ("self.library._flash_attn_forward", "self.library.flash_attn_forward"),  # no such function
        ("self.library.fwd(\n            q, k, v,", "self.library.fwd(\n            q, k,"),
        ("is_causal=call.is_causal", "causal=call.is_causal"),
    ],
    ids=" -> ".join,
)
def test_a_wrong_call_is_seen(tmp_path: Path, wrong: tuple[str, str]) -> None:
    right = (OURS / "kernels/flash_attention.py").read_text()
    assert wrong[0] in right
    (tmp_path / "flash_attention.py").write_text(right.replace(*wrong))
    calls = list(library_calls(tmp_path, tuple(VERSIONS)))
    with pytest.raises((TypeError, NotPublishedError)):
        list(map(check, calls))


def test_a_name_taken_from_another_module_is_followed() -> None:
    source = library("transformer_engine-2.20.*.whl")
    signature = source.signature("transformer_engine.pytorch.cpp_extensions.general_gemm")
    assert list(signature.parameters)[:3] == ["A", "B", "out_dtype"]
    assert "kv_channels" in source.signature("transformer_engine.pytorch.DotProductAttention").parameters
