"""Dequantization of the weights of HuggingFace folders.

A quantized weight W [O, I] is stored as codes q, and scales s that each apply to a block of codes.

    W[o, i] = (q[o, i] - zero[o // height, i // width]) * s[o // height, i // width]

computed in fp32 and rounded once, to the dtype that config.json declares; blocks at the edges are cut off. The result is
bitwise equal to that of the methods' own libraries. Methods differ in codes, tensor names and block size:

    fp8 (DeepSeek, arXiv:2412.19437)   W.weight e4m3, W.weight_scale_inv; block = weight_block_size, or all of W
    mxfp4 (OCP Microscaling; GPT-OSS)  W_blocks [E, O, I / 32, 16]: two e2m1 a byte, the low one first; W_scales: the
                                       exponent of a power of two, plus 127; the whole stored as [E, I, O]
    compressed-tensors                 W.weight e4m3 or int8, or W.weight_packed: 32 / bits codes in an int32, the lowest
                                       first, each plus 2^(bits - 1); W.weight_scale, W.weight_zero_point, W.weight_g_idx;
                                       or mxfp4: W.weight_packed, two e2m1 in a byte, W.weight_scale, exponent plus 127
    MLX                                W.weight: 32 / bits unsigned codes in a uint32, the lowest first; W.scales, W.biases
                                       (added after scaling)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.formats.disk_source import LazyTensor
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.errors import CheckpointError
from mega_common.object_store import Location

SCHEME_KEYS = ("quantization_config", "compression_config", "quantization")  # older compressed-tensors, MLX
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CODES = (*_FP8, torch.int8)
_DECLARED = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CHUNK = 1 << 18  # elements that are decoded at once
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_ACTIVATION_SCALES = re.compile(
    r".*\.(activation_scale|(input|output)_(scale|zero_point|global_scale)|[qkv]_(proj\.output_)?(scale|zero_point))"
)

_HINT = "load it with transformers and the method's package, call model.dequantize(), and save it with save_pretrained"
_Dequantized = tuple[dict[str, LazyTensor], str]  # the tensors, and a description of the quantization


class _UnsupportedSchemeError(ValueError):
    """A quantization scheme that is not supported; the message names it."""


def dequantize_tensors(
    tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], folder: Location
) -> tuple[Mapping[str, LazyTensor], str | None]:
    """Return the tensors of a HuggingFace folder, dequantized when read, and a description of the quantization or None.

    Tensors are decoded a few rows at a time. Scales of activations are left out: weights do not depend on them.

    Args:
        tensors: tensors of the files.
        config: the folder's config.json.
        folder: the folder, for errors.

    Raises:
        CheckpointError: for an unsupported method, or a part that is missing or has another shape.
    """
    scheme = next((config[key] for key in SCHEME_KEYS if config.get(key)), None)
    if scheme is None:
        return tensors, None
    method = _find_method(scheme) if isinstance(scheme, Mapping) else scheme
    if not isinstance(method, str) or method not in _METHODS:
        raise CheckpointError(
            f"{folder}: weights quantized with {method!r} are not supported (only {', '.join(_METHODS)}, and GGUF)",
            hint=_HINT,
        )
    dtype = _DECLARED.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)
    left = {name: stored for name, stored in tensors.items() if not _ACTIVATION_SCALES.fullmatch(name)}
    try:
        decoded, description = _METHODS[method](left, scheme, dtype)
    except _UnsupportedSchemeError as error:
        raise CheckpointError(f"{folder}: weights quantized with {error} are not supported", hint=_HINT) from None
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise CheckpointError(
            f"{folder}: quantization_config of config.json is damaged or not supported ({error!r})", hint=_HINT
        ) from None
    description += ", scales of activations left out" if len(left) < len(tensors) else ""
    return decoded, f"{description}; read as {str(dtype).removeprefix('torch.')}"


def _find_method(scheme: Mapping[str, Any]) -> Any:
    """Return the method's name; older compressed-tensors and MLX do not state it."""
    return scheme.get("quant_method", "compressed-tensors" if "config_groups" in scheme else "mlx")


def _dequantize_fp8(tensors: dict[str, LazyTensor], scheme: Mapping[str, Any], dtype: torch.dtype) -> _Dequantized:
    block = scheme.get("weight_block_size")
    out = dict(tensors)
    for name, codes in tensors.items():
        if codes.dtype in _FP8:
            kind = next((kind for kind in ("_scale_inv", "_scale") if name + kind in out), "_scale_inv")
            scale = _take_part(out, name + kind, name, codes)
            height, width = block or codes.shape
            out[name] = _ScaleGrid(name, codes.shape, (height, width), scale).dequantize(codes, dtype)
    return out, "fp8, " + (f"a scale for {' x '.join(map(str, block))} weights" if block else "a scale for each tensor")


def _dequantize_mxfp4(tensors: dict[str, LazyTensor], scheme: Mapping[str, Any], dtype: torch.dtype) -> _Dequantized:
    out = dict(tensors)
    for name, blocks in tensors.items():
        if name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            experts, height, count, _ = out.pop(name).shape
            _check_part(name, blocks, (experts, height, count, 16), torch.uint8)
            scales = _take_part(out, f"{base}_scales", base, blocks)
            _check_part(f"{base}_scales", scales, (experts, height, count), torch.uint8)
            shape = (experts, 32 * count, height)
            read = partial(_read_mxfp4_experts, base, blocks, scales, dtype)
            out[base] = LazyTensor(blocks.path, dtype, shape, read, costly=True)
    return out, "mxfp4, a power of two for 32 weights"


def _read_mxfp4_experts(name: str, blocks: LazyTensor, scales: LazyTensor, dtype: torch.dtype) -> Tensor:
    """Return [E, I, O] from blocks [E, O, I / 32, 16] and scales [E, O, I / 32], one expert at a time."""
    experts, height, count, _ = blocks.shape
    out = torch.empty(experts, height, 32 * count, dtype=dtype)
    for codes, powers, rows in zip(blocks.read(), _finite_scales(name, scales).unsqueeze(-1), out, strict=True):
        rows.copy_((_unpack_e2m1(codes) * powers).flatten(1))
    return out.transpose(1, 2)


def _unpack_e2m1(codes: Tensor) -> Tensor:
    """Return e2m1 numbers [..., 2 N] in fp32 from bytes [..., N]."""
    return _E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()]


def _dequantize_compressed(
    tensors: dict[str, LazyTensor], scheme: Mapping[str, Any], dtype: torch.dtype
) -> _Dequantized:
    _check_scheme(scheme)
    out, kinds = dict(tensors), set()
    for name in tensors:
        module, _, kind = name.rpartition(".")
        packed = kind == "weight_packed"
        if packed or (kind == "weight" and tensors[name].dtype in _CODES):
            group = _config_group_of(scheme["config_groups"], module)
            out[f"{module}.weight"] = _dequantize_module(
                out, module, out.pop(name), group["weights"], dtype, packed=packed
            )
            kinds.add(f"{group['weights']['type']}{group['weights']['num_bits']} by {group['weights']['strategy']}")
    return out, f"compressed-tensors, {' and '.join(sorted(kinds)) or 'no tensor'}"


def _dequantize_module(
    out: dict[str, LazyTensor],
    module: str,
    codes: LazyTensor,
    weights: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    packed: bool,
) -> LazyTensor:
    """Return the weight of one module, and remove its parts from `out`."""
    name, bits, shape = f"{module}.weight", weights["num_bits"], codes.shape
    decode: Callable[[Tensor], Tensor] = Tensor.float
    scale = _take_part(out, f"{name}_scale", name, codes)
    zero, index = (out.pop(f"{name}_{part}", None) for part in ("zero_point", "g_idx"))
    if packed and weights["type"] == "float":
        shape, decode = (codes.shape[0], 2 * codes.shape[1]), _unpack_e2m1
        _check_part(f"{name}_packed", codes, codes.shape, torch.uint8)
    elif packed:
        height, width = shape = tuple(_take_part(out, f"{name}_shape", name, codes).read().tolist())
        _check_part(f"{name}_packed", codes, (height, math.ceil(width * bits / 32)), torch.int32)
        decode = partial(_unpack_integers, bits=bits, count=width)
        if zero and zero.dtype == torch.int32:
            read = partial(_unpack_columns, zero, bits, height)
            zero = replace(zero, shape=(height, *zero.shape[1:]), read=read)
    block = {
        "tensor": shape, "channel": (1, shape[-1]), "group": (1, weights.get("group_size")),
        "block": tuple(weights.get("block_structure") or ()),
    }[weights["strategy"]]  # fmt: skip
    return _ScaleGrid(name, shape, block, scale, zero, index).dequantize(codes, dtype, decode)


def _check_scheme(scheme: Mapping[str, Any]) -> None:
    """Reject schemes that codes and scales do not fully describe."""
    sparse = (scheme.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise _UnsupportedSchemeError(f"sparsity_config.format = {sparse!r}")
    if scheme.get("transform_config"):
        raise _UnsupportedSchemeError("transform_config: rotations")
    formats = (
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "mxfp4-pack-quantized",
        "naive-quantized",
        "mixed-precision",
        "dense",
        None,
    )
    for group in (scheme, *scheme["config_groups"].values()):
        if group.get("format") not in formats:
            raise _UnsupportedSchemeError(f"the format {group['format']!r} of compressed-tensors")
    for group in scheme["config_groups"].values():
        weights = group.get("weights")
        if not weights:
            raise _UnsupportedSchemeError("a scheme of compressed-tensors for activations only")
        if weights["type"] == "int" and 32 % weights["num_bits"]:
            raise _UnsupportedSchemeError(f"{weights['num_bits']} bits per weight")


def _config_group_of(groups: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """Return the config group that quantizes a module: one that names it, the one for its class, or the only one."""
    for group in groups.values():
        for target in group["targets"]:
            if target == module or (target.startswith("re:") and re.match(target[3:], module)):
                return group  # type: ignore[no-any-return]
    found = [group for group in groups.values() if "Linear" in group["targets"] or len(groups) == 1]
    if not found:
        raise _UnsupportedSchemeError(f"config_groups without a group for {module}")
    return found[0]  # type: ignore[no-any-return]


def _dequantize_mlx(tensors: dict[str, LazyTensor], scheme: Mapping[str, Any], dtype: torch.dtype) -> _Dequantized:
    out, mode = dict(tensors), scheme.get("mode", "affine")
    if mode != "affine" or any(isinstance(value, Mapping) for value in scheme.values()):
        raise _UnsupportedSchemeError("MLX in another mode than affine" if mode != "affine" else "several MLX schemes")
    bits, group = scheme["bits"], scheme["group_size"]
    if bits not in (2, 4, 8):
        raise _UnsupportedSchemeError(f"{bits} bits per weight by MLX")
    for scales in [name for name in tensors if name.endswith(".scales")]:
        module = scales.removesuffix(".scales")
        name, codes = f"{module}.weight", _take_part(out, f"{module}.weight", module, tensors[scales])
        _check_part(name, codes, codes.shape, torch.uint32)
        shape = (codes.shape[0], codes.shape[1] * 32 // bits)
        decode = partial(_unpack_unsigned, bits=bits)
        bias = _take_part(out, f"{module}.biases", name, codes)
        grid = _ScaleGrid(name, shape, (1, group), _take_part(out, scales, name, codes), bias=bias)
        out[name] = grid.dequantize(codes, dtype, decode)
    return out, f"MLX, {bits} bits by groups of {group}"


_METHODS: Mapping[str, Callable[[dict[str, LazyTensor], Mapping[str, Any], torch.dtype], _Dequantized]] = {
    "fp8": _dequantize_fp8, "mxfp4": _dequantize_mxfp4, "compressed-tensors": _dequantize_compressed,
    "mlx": _dequantize_mlx,
}  # fmt: skip


@dataclass(frozen=True)
class _ScaleGrid:
    """Scales of a weight of `shape`, each of which applies to a block [height, width].

    Attributes:
        name: name of the weight.
        zero: zero points, one per scale.
        index: column of scales for each column of the weight, if the order is not the default one.
        bias: offsets that are added after scaling, one per scale.
    """

    name: str
    shape: TensorShape
    block: TensorShape
    scale: LazyTensor
    zero: LazyTensor | None = None
    index: LazyTensor | None = None
    bias: LazyTensor | None = None

    def dequantize(
        self, codes: LazyTensor, dtype: torch.dtype, decode: Callable[[Tensor], Tensor] = Tensor.float
    ) -> LazyTensor:
        """Return the weight that quantization codes stand for; `decode` converts rows of codes to fp32.

        Raises:
            CheckpointError: when the number of scales differs from that of blocks.
        """
        if len(self.shape) != 2 or len(self.block) != 2:
            raise CheckpointError(f"{codes.path}: quantized {self.name} must be a matrix, not {list(self.shape)}")
        (height, width), grid = self.block, self._blocks
        for part in filter(None, (self.scale, self.zero, self.bias)):
            if [n for n in part.shape if n > 1] != [n for n in grid if n > 1]:
                raise CheckpointError(
                    f"{part.path}: the scales of {self.name} {list(self.shape)} have shape {list(part.shape)}, but blocks of "
                    f"{height} x {width} require {list(grid)}"
                )
        return LazyTensor(codes.path, dtype, self.shape, partial(self._apply, codes, dtype, decode), costly=True)

    @property
    def _blocks(self) -> TensorShape:
        return tuple(math.ceil(n / b) for n, b in zip(self.shape, self.block, strict=True))

    def _apply(self, codes: LazyTensor, dtype: torch.dtype, decode: Callable[[Tensor], Tensor]) -> Tensor:
        """Dequantize a few rows at a time, to limit memory beyond the result."""
        scale, stored = _finite_scales(self.name, self.scale).view(self._blocks), codes.read()
        zero = self.zero.read().float().view(self._blocks) if self.zero else None
        bias = self.bias.read().float().view(self._blocks) if self.bias else None
        columns = self._scale_columns()
        out = torch.empty(self.shape, dtype=dtype)
        step = max(1, _CHUNK // max(self.shape[1], 1))
        for begin in range(0, self.shape[0], step):
            numbers = decode(stored[begin : begin + step])
            blocks = torch.arange(begin, begin + len(numbers)) // self.block[0]
            if zero is not None:
                numbers = numbers - zero[blocks][:, columns]
            scaled = numbers * scale[blocks][:, columns]
            out[begin : begin + step] = scaled if bias is None else scaled + bias[blocks][:, columns]
        return out

    def _scale_columns(self) -> Tensor:
        """Return the column of scales for each column of the weight [I]. An index of -1 means the default order."""
        default = torch.arange(self.shape[1]) // self.block[1]
        index = self.index.read().long() if self.index else default
        if index.shape != default.shape or int(index.max()) >= self._blocks[1]:
            raise CheckpointError(f"{self.scale.path}: {self.name}_g_idx conflicts with the shape of the scales")
        return default if int(index.min()) < 0 else index


def _finite_scales(name: str, scales: LazyTensor) -> Tensor:
    """Return scales in fp32; integers are exponents plus 127, with 255 invalid."""
    stored = scales.read()
    found = (stored.float() - 127).exp2() if stored.dtype == torch.uint8 else stored.float()
    if not found.isfinite().all():
        raise CheckpointError(f"{scales.path}: a scale of {name} is not finite", hint="download or copy the file again")
    return found


def _unpack_integers(words: Tensor, bits: int, count: int) -> Tensor:
    """Return numbers [N, count] in fp32 from int32 [N, count * bits / 32]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & (1 << bits) - 1
    return (codes.flatten(1)[:, :count] - (1 << bits - 1)).float()


def _unpack_unsigned(words: Tensor, bits: int) -> Tensor:
    """Return numbers [N, I] in fp32 from uint32 [N, I * bits / 32]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.view(torch.int32).unsqueeze(-1) >> shifts) & (1 << bits) - 1).flatten(1).float()


def _unpack_columns(words: LazyTensor, bits: int, count: int) -> Tensor:
    """Return numbers [count, N] in fp32 from int32 [count * bits / 32, N]."""
    return _unpack_integers(words.read().t(), bits, count).t()


def _take_part(tensors: dict[str, LazyTensor], part: str, name: str, codes: LazyTensor) -> LazyTensor:
    if part not in tensors:
        raise CheckpointError(
            f"{codes.path}: quantized {name} requires the tensor {part}, which is missing",
            hint="download the folder again",
        )
    return tensors.pop(part)


def _check_part(name: str, part: LazyTensor, shape: TensorShape, dtype: torch.dtype) -> None:
    if part.shape != shape or part.dtype != dtype:
        raise CheckpointError(
            f"{part.path}: {name} must have shape {list(shape)} and dtype {dtype}, not {list(part.shape)} and {part.dtype}"
        )
