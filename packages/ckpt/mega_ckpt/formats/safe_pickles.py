"""Reader of untrusted pickles that runs none of their code.

A pickle names functions to call and classes to create. Here every name is looked up in an allowlist and gives a builtin
container or an `PickledObjectPlaceholder`, a placeholder that stores its arguments and runs no code. Any other name is an error. The
placeholder classes are created per pickle, so that pickles cannot affect each other.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import IO, Any, ClassVar

from mega_common.errors import CheckpointError

MAX_PICKLE_BYTES = 1 << 30


class PickledObjectPlaceholder:
    """Placeholder for a pickled object, whose class is not imported.
    `name` is the class, `args` and `state` are its pickled data.
    """

    name = ""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(f"{self.name} has no {name}")


# Harmless containers.
_BUILTINS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": OrderedDict,
    "builtins.dict": dict,
    "builtins.list": list,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "torch.Size": tuple,
    "_codecs.encode": lambda text, encoding="latin1": text.encode("latin1"),
}

# Classes replaced by placeholders; Megatron's settings and states have such objects, whose values are not used.
_PLACEHOLDERS = frozenset([
    "argparse.Namespace", "types.SimpleNamespace", "collections.Counter", "collections.defaultdict",
    "collections.deque", "pathlib.PosixPath", "pathlib._local.PosixPath", "pathlib.PurePosixPath", "_io.BytesIO",
    "io.BytesIO", "signal.Signals", "datetime.timedelta", "datetime.datetime", "numpy.ndarray", "numpy.dtype",
    "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar", "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar", "numpy._core.numeric._frombuffer", "torch.device", "torch.Tensor",
    "torch.nn.parameter.Parameter", "torch._utils._rebuild_parameter", "torch._utils._rebuild_tensor_v2",
    "torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_tensor_v3", "torch.serialization._get_layout",
    "torch.storage.UntypedStorage", "torch.storage._load_from_bytes",
])  # fmt: skip
_PLACEHOLDER_MODULES = (
    "megatron.", "apex.", "transformer_engine", "deepspeed.", "lightning.", "pytorch_lightning.", "lightning_fabric.",
    "torch.distributed.checkpoint.", "torch.distributed._shard.",
)  # fmt: skip
_TORCH_TYPES = frozenset([
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint64", "uint32", "uint16", "uint8", "bool", "strided", "contiguous_format", "DoubleStorage", "FloatStorage",
    "HalfStorage", "BFloat16Storage", "LongStorage", "IntStorage", "ShortStorage", "CharStorage", "ByteStorage",
    "BoolStorage",
])  # fmt: skip


def _load_bytearray8(unpickler: Any) -> None:
    """Read a bytearray; the base class allocates the stated length before it checks the file."""
    (length,) = struct.unpack("<Q", unpickler.read(8))
    data = unpickler.read(min(length, MAX_PICKLE_BYTES))
    if len(data) != length:
        raise pickle.UnpicklingError(f"a bytearray must have {length:,} bytes, but only {len(data):,} are left")
    unpickler.append(bytearray(data))


class _SafeUnpickler(pickle._Unpickler):
    """Pickle interpreter in Python: its memory grows with the file, while the one in C trusts the indices it reads."""

    def __init__(
        self, stream: IO[bytes], source: str, replace: dict[str, Callable[..., Any]], stored: Callable[[Any], Any]
    ) -> None:
        super().__init__(stream, encoding="latin1")
        self._source, self._replace, self._stored = source, replace, stored
        self._classes: dict[str, Any] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        full = f"{module}.{name}".replace("__builtin__.", "builtins.")
        if full in self._replace:
            return self._replace[full]
        if full in _BUILTINS:
            return _BUILTINS[full]
        if not _is_placeholder_class(module, name, full):
            raise CheckpointError(
                f"{self._source}: the pickle requires {full!r}, which is not allowed in a checkpoint",
                hint="pickles can run programs: use the file only if you trust its source, and save it as safetensors",
            )
        if full not in self._classes:
            self._classes[full] = type("Inert", (PickledObjectPlaceholder,), {"name": full})
        return self._classes[full]

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BYTEARRAY8[0]: _load_bytearray8}

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError("extension codes are not used by checkpoints")

    def persistent_load(self, pid: Any) -> Any:
        return self._stored(pid)


def _is_placeholder_class(module: str, name: str, full: str) -> bool:
    return (
        full in _PLACEHOLDERS
        or (module == "torch" and name in _TORCH_TYPES)
        or (module + ".").startswith(_PLACEHOLDER_MODULES)
    )


def _reject_persistent_id(pid: Any) -> Any:
    raise pickle.UnpicklingError("external references are not supported")


def load_untrusted_pickle(
    data: bytes | IO[bytes],
    source: str,
    *,
    replace: dict[str, Callable[..., Any]] | None = None,
    stored: Callable[[Any], Any] = _reject_persistent_id,
) -> Any:
    """Load a pickle without running code in it; CheckpointError for a name that is not allowed, or damage.

    The result has builtin containers and `PickledObjectPlaceholder` placeholders.

    Args:
        data: the pickle, or a stream positioned at its start; the stream is left at its end.
        source: name of the pickle in errors.
        replace: functions that replace some names, {name: function}.
        stored: resolves persistent ids.
    """
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    try:
        return _SafeUnpickler(stream, source, replace or {}, stored).load()
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle fails in any way
        raise CheckpointError(
            f"{source}: damaged, or not a pickle of this kind ({error or type(error).__name__})"
        ) from None
