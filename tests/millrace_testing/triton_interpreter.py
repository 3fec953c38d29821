"""Triton's interpreter, faster, with float conversions that round as a GPU does, and for the numpy of today.

Its own conversions drop the carry out of the mantissa: 31.7 becomes 16 in E4M3. Torch's are right. Values beyond E4M3
become NaN here, though a GPU saturates them, so that a kernel which relies on that is noticed.
"""

import functools
from typing import Any

import numpy as np
import torch

_DTYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
LARGEST = 464.0  # what still rounds to 448, the largest value of E4M3
_BITS = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32), 8: (np.int64, torch.int64)}


def convert(values: np.ndarray[Any, Any], source: Any, target: Any, rounding_mode: object) -> np.ndarray[Any, Any]:
    """Arrays hold the bits of dtypes that numpy lacks. `rounding_mode` is to nearest everywhere in our kernels."""
    before, after = _DTYPES[source.scalar.name], _DTYPES[target.scalar.name]
    bits = np.ascontiguousarray(values).reshape(-1).view(_BITS[before.itemsize][0])
    floats = torch.from_numpy(bits.copy()).view(before).float()
    if after == torch.float8_e4m3fn:
        floats = floats.where(floats.abs() <= LARGEST, torch.nan)
    unsigned = getattr(np, f"uint{8 * after.itemsize}")
    result: np.ndarray[Any, Any] = floats.to(after).view(_BITS[after.itemsize][1]).numpy().view(unsigned)
    return result.reshape(values.shape)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: object, max_num_imprecise_acc: object) -> Any:
    """Its own takes the bits of BF16 for integers."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def floats(operand: Any) -> Any:
        return convert(operand.data, operand.dtype, tl.float32, None).view(np.float32)

    if a.dtype.scalar == tl.int8:  # float64 holds the sums exactly, and numpy multiplies it fast
        return TensorHandle((a.data.astype(np.float64) @ b.data).astype(np.int32) + d.data, d.dtype.scalar)
    return TensorHandle(np.matmul(floats(a), floats(b)) + d.data, d.dtype.scalar)


class _Memory:
    """Memory from an address on, as numpy reads it."""

    def __init__(self, address: int, count: int, dtype: np.dtype[Any]) -> None:
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (count,), "typestr": dtype.str}


def _elements(addresses: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> tuple[np.ndarray[Any, Any], Any]:
    """An array that begins at the lowest address [N > 0], and where in it the elements lie."""
    low = int(addresses.min())
    places = ((addresses - np.uint64(low)) // np.uint64(dtype.itemsize)).astype(np.intp)
    return np.asarray(_Memory(low, int(places.max()) + 1, dtype)), places


def _load(self: Any, pointers: Any, mask: Any, other: Any, *_: object, **__: object) -> Any:
    """An element is read once, as by a GPU. A memcpy of two bytes reads the low one twice, so a value that another
    process writes meanwhile may come without it.
    """
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    dtype = pointers.get_element_ty()
    values = np.zeros(pointers.data.shape, _get_np_dtype(dtype))
    if other is not None:
        values[...] = other.data
    inside = np.asarray(mask.data).astype(bool)
    if inside.any():
        memory, places = _elements(pointers.data[inside], values.dtype)
        values[inside] = memory[places]
    return TensorHandle(values, dtype)


def _store(self: Any, pointers: Any, value: Any, mask: Any, *_: object, **__: object) -> None:
    """An element is written once: the kernels of several processes take data for its own flag."""
    inside = np.asarray(mask.data).astype(bool)
    if inside.any():
        memory, places = _elements(pointers.data[inside], value.data.dtype)
        memory[places] = value.data[inside]


def _patch_tensor(original: Any) -> Any:
    """Scalars are arrays of one element, which numpy no longer takes for an int: loop bounds."""

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


def _patch_once(original: Any, nothing: Any) -> Any:
    """Its own patches the language again for every call of a helper, which is half of a kernel's time. The patches of
    a function stay; `nothing` is what its caller then restores.
    """

    def patch(function: Any) -> Any:
        original(function)
        return nothing

    return functools.cache(patch)


def _lazy_tuple(core: Any) -> None:
    """Every shape is a tuple, whose type its own makes at once and nobody asks for."""

    def init(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def get(self: Any, name: str) -> Any:
        if name == "type":
            self.type = core._type_for_tuple_values(self.values)
            return self.type
        return self.values[self.type.fields.index(name)]

    core.tuple.__init__, core.tuple.__getattr__ = init, get


def _cached_dtype(original: Any) -> Any:
    """By name: its own makes a table of all types at each call."""
    found: dict[str, np.dtype[Any]] = {}

    def get(dtype: Any) -> np.dtype[Any]:
        name = str(dtype)
        if name not in found:
            found[name] = original(dtype)
        return found[name]

    return get


def install() -> None:
    from triton.language import core, semantic
    from triton.runtime import interpreter

    if interpreter._convert_float is not convert:
        interpreter._convert_float = convert
        interpreter._patch_lang = _patch_once(interpreter._patch_lang, interpreter._LangPatchScope())
        interpreter.InterpreterBuilder.create_dot = _dot
        interpreter.InterpreterBuilder.create_masked_load = _load
        interpreter.InterpreterBuilder.create_masked_store = _store
        interpreter._patch_lang_tensor = _patch_tensor(interpreter._patch_lang_tensor)
        interpreter._get_np_dtype = _cached_dtype(interpreter._get_np_dtype)
        # Sums again in int64, for an assertion that the interpreter leaves out.
        semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
        _lazy_tuple(core)
