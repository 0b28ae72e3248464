"""An unpickler for state dicts that builds inert records: it imports and runs nothing of torch.

:data:`ALLOWED` has every global that a pickle may name. Each stands for a class or callable of
syncd that only keeps its arguments. The objects that a pickle can reach refuse ``BUILD``
(``__setstate__``), so that a file cannot change how later files are read.

A malicious pickle can still take unlimited memory and time. Therefore other trainers' pickles are
read in a child process (:mod:`~syncd.checkpoint.sandbox.isolated`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, NoReturn, Self

from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import ShardFormatError, SyncdError

#: The state of objects without state: one immutable mapping for all.
_STATELESS: Final[Mapping[Any, Any]] = MappingProxyType({})


class Inert:
    """A stand-in for an instance of a torch class.

    ``args`` are the arguments of the constructor; ``state`` has the pickled attributes by name.
    """

    __slots__ = ("args", "state")

    #: True for a placement of torch before 2.5, which does not record the order of cuts.
    unordered: ClassVar[bool] = False
    args: tuple[object, ...]
    state: Mapping[Any, Any]

    def __new__(cls, *args: object) -> Self:
        """Keep the arguments."""
        self = object.__new__(cls)  # super() would be slower, and this runs five times per tensor
        self.args = args
        self.state = _STATELESS
        return self

    def __setstate__(self, state: object) -> None:
        self.state = attributes(state)


class _Sealed:
    """The base of classes that refuse ``BUILD``."""

    __slots__ = ()

    def __setstate__(self, state: object) -> NoReturn:
        raise pickle.UnpicklingError("it sets attributes on an object that cannot have any")


class DType(NamedTuple):
    """A dtype by torch's name, e.g. ``bfloat16``."""

    name: str


class StorageType(NamedTuple):
    """A storage class, by its elements' dtype; None if it is untyped."""

    dtype: str | None


@dataclass(slots=True)  # frozen would bring a __setstate__ of its own
class StorageRef(_Sealed):
    """A storage: the bytes of the record ``data/<key>``; ``dtype`` is None if it is untyped."""

    key: str
    dtype: str | None
    location: object
    numel: object


@dataclass(slots=True)
class TensorRef(_Sealed):
    """A strided tensor over a storage, not checked yet. The offset is in elements."""

    storage: object
    dtype: str | None
    offset: object
    shape: object
    stride: object
    #: Changes that apply on reading: ``{"neg": True}``, ``{"conj": True}``; most tensors have none.
    bits: object = None


@dataclass(slots=True)
class DTensorRef(_Sealed):
    """A DTensor: its global shape and its state, with ``_local_tensor`` and ``_spec``."""

    shape: object
    state: Mapping[Any, Any]


@dataclass(slots=True)
class ShardedTensorRef(_Sealed):
    """A ShardedTensor; ``state`` begins with the chunks."""

    dtype: object
    shape: object
    state: object


def attributes(state: object) -> dict[Any, Any]:
    """The attributes in a pickled state: a dict, or a pair of dicts or None."""
    if isinstance(state, dict):
        return state
    found: dict[Any, Any] = {}
    if isinstance(state, tuple) and len(state) == 2:
        for part in state:
            if isinstance(part, dict):
                found.update(part)
    return found


class _StateDict(dict[Any, Any]):
    """A stand-in for ``OrderedDict``; it ignores its state, which holds only ``_metadata``."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        """Ignore the state."""


class _Call(_Sealed):
    """A stand-in for a callable; not a plain function, which ``BUILD`` could change."""

    __slots__ = ()
    __call__: Callable[..., object]


def _call(function: Callable[..., object]) -> _Call:
    members = {"__slots__": (), "__call__": staticmethod(function)}
    kind: type[_Call] = type(function.__name__, (_Call,), members)
    return kind()


def _inert(name: str, *, unordered: bool = False) -> type[Inert]:
    return type(name, (Inert,), {"__slots__": (), "unordered": unordered})


class _Fields(Inert):
    """A stand-in for a class whose state is a tuple; ``state`` has the values by their index."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        self.state = dict(enumerate(state)) if isinstance(state, tuple) else attributes(state)


#: Stand-ins for types, which are only compared.
DTensor, ShardedTensor = map(_inert, ("DTensor", "ShardedTensor"))


def _tensor_v2(
    storage: object, offset: object, shape: object, stride: object,
    _grad: object = None, _hooks: object = None, bits: object = None,
) -> TensorRef:  # fmt: skip
    dtype = storage.dtype if isinstance(storage, StorageRef) else None
    return TensorRef(storage, dtype, offset, shape, stride, bits)


def _tensor_v3(
    storage: object, offset: object, shape: object, stride: object, _grad: object, _hooks: object,
    dtype: object, bits: object = None,
) -> TensorRef:  # fmt: skip
    name = dtype.name if isinstance(dtype, DType) else None
    return TensorRef(storage, name, offset, shape, stride, bits)


def _from_type(
    function: object, kind: object, args: tuple[object, ...], state: object
) -> DTensorRef | ShardedTensorRef | object:
    if kind is DTensor:
        return DTensorRef(args[2], attributes(state))
    if kind is ShardedTensor:
        return ShardedTensorRef(args[1], args[2], state)
    if isinstance(function, _Call):  # a tensor with attributes, or a parameter
        return function(*args)
    raise pickle.UnpicklingError("it rebuilds a tensor of an unknown type")


def _size(items: object = ()) -> tuple[object, ...]:
    if not isinstance(items, tuple | list):
        raise pickle.UnpicklingError("it has a torch.Size that is not a sequence")
    return tuple(items)


_DTYPES: Final = (  # noqa: SIM905 - 27 quoted names would hide which they are
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "complex32 complex64 complex128 quint8 qint8 qint32 quint4x2 quint2x4"
).split()
_STORAGES: Final = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QUInt8Storage": "quint8",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": None,
    "TypedStorage": None,
}
_PLACEMENTS: Final = ("Shard", "Replicate", "Partial", "_Partial", "_StridedShard", "_MaskPartial")
_OPAQUE: Final = {
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed._mesh_layout": "_MeshLayout _FlatLayout",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta ShardOrderEntry",
    "torch.distributed._tensor._dtensor_spec": "DTensorSpec TensorMeta",
    "torch.distributed._tensor.placement_types": "DTensorSpec TensorMeta",
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed._shard.sharded_tensor.metadata": (
        "MEM_FORMAT_ENCODING ShardedTensorMetadata"
    ),
    "torch.distributed._shard.sharded_tensor.shard": "Shard",
    "torch.distributed._shard.sharding_spec.api": "EnumerableShardingSpec",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
    "torch.distributed.remote_device": "_remote_device",
    "torch": "device Tensor",
    "torch._tensor": "Tensor",
    "torch.nn.parameter": "Parameter Buffer",
    "__builtin__": "set complex",  # in an _extra_state
    "_io": "BytesIO",  # in an _extra_state of TransformerEngine, which is left out
    "torch.distributed.checkpoint.metadata": (
        "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
        "StorageMeta _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    # The path in the metadata of torch.distributed.checkpoint; the second module is Python 3.13's.
    "pathlib": "PosixPath WindowsPath",
    "pathlib._local": "PosixPath WindowsPath",
}
_TUPLES: Final = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed._shard.sharded_tensor.metadata",
)


def _allowed() -> dict[tuple[str, str], object]:
    table: dict[tuple[str, str], object] = {
        ("collections", "OrderedDict"): _StateDict,
        ("torch", "Size"): _call(_size),
        ("torch.serialization", "_get_layout"): _call(lambda name: name),
        ("_codecs", "encode"): _call(lambda *_: None),  # bytes, in an _extra_state
        ("torch._tensor", "_rebuild_from_type_v2"): _call(_from_type),
        ("torch._utils", "_rebuild_wrapper_subclass"): _call(lambda *_: None),
        ("torch._utils", "_rebuild_tensor_v2"): _call(_tensor_v2),
        ("torch._utils", "_rebuild_tensor_v3"): _call(_tensor_v3),
        ("torch._utils", "_rebuild_parameter"): _call(lambda data, *_: data),
        ("torch._utils", "_rebuild_parameter_with_state"): _call(lambda data, *_: data),
        ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"): ShardedTensor,
    }
    nested = _inert("nested")  # FSDP1 names ShardedTensor.ProcessGroupState this way
    for module in ("__builtin__", "builtins"):
        table[module, "getattr"] = _call(lambda *_: nested)
    for module in ("torch.distributed.tensor", "torch.distributed.tensor._api",
                   "torch.distributed._tensor", "torch.distributed._tensor.api"):  # fmt: skip
        table[module, "DTensor"] = DTensor
    for module in ("torch.distributed.tensor.placement_types",
                   "torch.distributed._tensor.placement_types"):  # fmt: skip
        old = module.startswith("torch.distributed._tensor")
        table.update({(module, name): _inert(name, unordered=old) for name in _PLACEMENTS})
    for module, names in _OPAQUE.items():
        table.update({(module, name): _inert(name) for name in names.split()})
    for module in _TUPLES:
        table[module, "TensorProperties"] = type("TensorProperties", (_Fields,), {"__slots__": ()})
    for name in _DTYPES:
        table["torch", name] = DType(name)
    for name, dtype in _STORAGES.items():
        table["torch", name] = table["torch.storage", name] = StorageType(dtype)
    return table


#: The stand-ins, by the module and the name of the global.
ALLOWED: Final = _allowed()


class _Loading:
    where: str

    def find_class(self, module: str, name: str) -> object:
        found = ALLOWED.get((module, name))
        if found is None:
            raise ShardFormatError(
                f"{self.where} asks for {shown(module)}.{shown(name)}, which is refused. No code "
                "was run. Save a plain state dict of tensors"
            )
        return found

    def persistent_load(self, pid: object) -> StorageRef:
        match pid:
            case ("storage", kind, key, location, numel):
                # Checked here, because the pattern would take twice as long.
                if isinstance(kind, StorageType) and isinstance(key, str):
                    return StorageRef(key, kind.dtype, location, numel)
        raise pickle.UnpicklingError("it names a storage in an unknown format")


class _Fast(_Loading, pickle.Unpickler):
    """The unpickler in C. Its memo is an array, which a damaged index can make gigabytes long."""


class _Frugal(_Loading, pickle._Unpickler):  # noqa: SLF001 - the only one without that array
    """The unpickler in Python: ten times slower, but its memo is a dict, which stays small."""


class _Peekable(io.BytesIO):
    """Bytes with a method ``peek``, which makes an unpickler twice as fast.

    ``BufferedReader`` would take all the memory that a length in a damaged pickle asks for.
    """

    def peek(self, count: int) -> bytes:
        """Up to ``count`` of the next bytes, without moving past them."""
        at = self.tell()
        return self.getvalue()[at : at + count]


def load_inert(data: bytes, where: str, *, intact: bool) -> object:
    """The content of a pickle, with inert records for all objects but plain Python values.

    ``intact`` chooses the fast unpickler, in which a damaged pickle can take gigabytes. Therefore
    it must be True only if a CRC-32 proves the bytes, or if something else limits the memory.

    Raises:
        ShardFormatError: the pickle is broken, needs too much memory, or would run code.
    """
    try:
        unpickler = (_Fast if intact else _Frugal)(_Peekable(data))
        unpickler.where = where
        return unpickler.load()
    except SyncdError:
        raise
    except Exception as error:
        # Any error comes from the bytes: nothing else takes part, not even a disk.
        raise ShardFormatError(
            f"{where} has a pickle that cannot be read ({type(error).__name__}: "
            f"{shown(str(error))}). Save the file again"
        ) from error


def load_state_dict(data: bytes, where: str, *, intact: bool) -> dict[Any, Any]:
    """The state dict that a ``data.pkl`` holds, with inert records for tensors.

    Raises:
        ShardFormatError: :func:`load_inert` fails, or the content is not a dict.
    """
    found = load_inert(data, where, intact=intact)
    if not isinstance(found, dict):
        raise ShardFormatError(
            f"{where} holds an object of type {type(found).__name__}, not a state dict. Save "
            "model.state_dict()"
        )
    return found
