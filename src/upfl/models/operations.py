"""Loops that Numba compiled, as operations of PyTorch's.

PyTorch calls them by its stable C interface, without Python: between the products of a step, Python would take as long
as a loop saves (20 microseconds where its code has left the cache). Tensors come as handles, which are numbers.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple, cast

from numba import types

from upfl.models.compiled import torch_library

_pointer = cast(Any, types).CPointer  # without a type of its own
# The stack holds what is given, and then what is returned.
STACK = types.void(_pointer(types.uint64), types.uint64, types.uint64)


class Interface(NamedTuple):
    """What may be asked of a handle: data(handle, to), size and stride(handle, dimension, to), done(handle)."""

    data: Any
    size: Any
    stride: Any
    done: Any


@cache
def interface() -> Interface:
    library = torch_library()
    assert library is not None
    counts = {"get_data_ptr": 2, "get_size": 3, "get_stride": 3, "delete_tensor_object": 1}
    functions = [library[f"aoti_torch_{name}"] for name in counts]
    for function, count in zip(functions, counts.values(), strict=True):
        function.argtypes, function.restype = [ctypes.c_uint64] * count, ctypes.c_int32
    return Interface(*functions)


def made_once(make: Callable[[], Any]) -> Callable[[], Any]:
    """Compile a loop and make it an operation when it is first needed, whichever threads ask.

    Of two registrations, one would be forgotten with its code, which may be what is called.
    """
    lock, made = threading.Lock(), list[Any]()

    @wraps(make)
    def register() -> Any:
        with lock:
            if not made:
                made.append(make())
            return made[0]

    return register


def operation(name: str, code: Any) -> Any:
    """Make compiled code what `upfl::name` does; what is returned stays as long as the process."""
    library, made = torch_library(), ctypes.c_void_p()
    assert library is not None
    if library.aoti_torch_library_init_impl(b"upfl", b"CPU", __file__.encode(), 0, ctypes.byref(made)) or (
        library.aoti_torch_library_impl(made, name.encode(), ctypes.c_void_p(code.address))
    ):
        raise RuntimeError(f"PyTorch refuses upfl::{name} by its C interface; set UPFL_NUMBA=0 to do without it")
    return code
