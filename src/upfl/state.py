"""State: a flat dict of named tensors. One safetensors file, one message, one sum."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]

ALIGNMENT = 64  # bytes: a cache line, the widest vector register, and where PyTorch's own tensors begin
BUFFERS = "buffers."  # what a model's state has below this is not trained
is_recording: Callable[[], bool] = getattr(torch._C, "_is_tracing", lambda: False)  # PyTorch may drop its recorder
SMALL = 2**14  # values that are sooner copied together than passed over one tensor at a time


def select(state: State, prefix: str) -> State:
    """The entries below a prefix, without it: select(state, "psi") has `fc1.weight` for `psi.fc1.weight`."""
    prefix = f"{prefix}."
    start = len(prefix)
    return {name[start:]: value for name, value in state.items() if name.startswith(prefix)}


def prefixed(prefix: str, state: Mapping[str, Tensor]) -> State:
    return {f"{prefix}.{name}": value for name, value in state.items()}


def is_buffer(name: str) -> bool:
    """Whether a name is that of a value that belongs to a model but is not trained, such as a running statistic."""
    return name.startswith(BUFFERS) or f".{BUFFERS}" in name


def has_shapes(state: State, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a state has these names, and its tensors these shapes."""
    return {name: tuple(value.shape) for name, value in state.items()} == shapes


def trainable(state: Mapping[str, Tensor]) -> State:
    return {name: value for name, value in state.items() if not is_buffer(name)}


def contiguous(state: State) -> State:
    return {name: value.detach().contiguous() for name, value in state.items()}


def aligned(value: Tensor) -> Tensor:
    """The same values where matrix products always give the same bits.

    A library's thin products (MKL's without AVX-512) sum in an order that depends on where their operands begin. What
    PyTorch allocates begins at a multiple of 64 bytes. What comes from a file, a message or a slice may not: it is
    copied, in the same layout. Sums of integers are exact wherever they lie.
    """
    if torch._C._functorch.is_batchedtensor(value) or value.data_ptr() % ALIGNMENT == 0:
        return value
    return value.clone() if value.is_floating_point() else value


def all_aligned(state: Mapping[str, Tensor]) -> State:
    return {name: aligned(value) for name, value in state.items()}


class AlignedStates(Sequence[State]):
    """States that are read or made when they are asked for, aligned then."""

    def __init__(self, states: Sequence[State]) -> None:
        self._states: Sequence[State] = states._states if isinstance(states, AlignedStates) else states

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: Any) -> Any:
        return all_aligned(self._states[index])


class Factored(Mapping[str, Tensor]):
    """A state some of whose matrices are outer products of a column and a row, formed each time they are asked for."""

    def __init__(self, whole: State, factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self.whole, self.factors = whole, factors

    def __getitem__(self, name: str) -> Tensor:
        return torch.outer(*self.factors[name]) if name in self.factors else self.whole[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.whole
        yield from self.factors

    def __len__(self) -> int:
        return len(self.whole) + len(self.factors)


def factors(state: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor] | None:
    """The column and the row that an entry is the product of, where a state has it so."""
    return state.factors.get(name) if isinstance(state, Factored) else None


def set_first(frozen: Any, **fields: Any) -> None:
    """Give fields of a frozen object other values than it was made with; for `__post_init__` alone."""
    for name, value in fields.items():
        object.__setattr__(frozen, name, value)


def to_device(state: State, device: torch.device) -> State:
    return {name: value.to(device) for name, value in state.items()}


def is_vectorized(value: Tensor) -> bool:
    """Whether a tensor stands for many under torch.func.vmap, for which kernels with `out=` are not made."""
    return bool(torch._C._functorch.is_batchedtensor(value))


def add_product_(total: Tensor, a: Tensor, b: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """total <- beta * total + alpha * a b"""
    if is_vectorized(total):
        return total.copy_(torch.addmm(total, a, b, beta=beta, alpha=alpha))
    return total.addmm_(a, b, beta=beta, alpha=alpha)


def combined(first: list[Tensor], a: float, second: list[Tensor], b: float) -> list[Tensor]:
    """a * first + b * second, tensor by tensor."""
    return [torch.mul(one, a).add_(other, alpha=b) for one, other in zip(first, second, strict=True)]


def move_(
    values: list[Tensor],
    along: list[Tensor],
    rate: float,
    weight_decay: float,
    divisor: Tensor,
    momentum: tuple[float, list[Tensor]] | None = None,
) -> None:
    """values <- values - rate * step in place, step = along / divisor + weight_decay * values; `along` is used up.

    With momentum (m, buffers) the buffers step instead: buffers <- m * buffers + step.
    """
    factor, buffers = momentum or (0.0, [])
    if all(_fusable(*same) for same in zip(values, along, buffers or along, strict=True)):
        if is_recording():
            lr = rate if isinstance(rate, Tensor) else torch.tensor(rate, dtype=torch.float64)
            _recordable().move_(values, along, buffers, weight_decay, factor, lr, divisor)
            return
        torch._fused_sgd_(
            values,
            along,
            buffers,
            weight_decay=weight_decay,
            momentum=factor,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=divisor,
        )
        return
    for i, (value, step) in enumerate(zip(values, along, strict=True)):
        step.div_(divisor).add_(value, alpha=weight_decay)
        value.sub_(buffers[i].mul_(factor).add_(step) if buffers else step, alpha=rate)


def _fusable(value: Tensor, along: Tensor, buffer: Tensor) -> bool:
    """Whether PyTorch's fused kernel takes them: values in the same order and without gaps in memory."""
    if is_vectorized(value) or is_vectorized(along) or is_vectorized(buffer):
        return False
    whole = value.is_contiguous() or (value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last))
    return whole and all(
        one.dtype == torch.float32 and one.device.type == "cpu" and one.stride() == value.stride()
        for one in (value, along, buffer)
    )


@cache
def _recordable() -> Any:
    """The fused update in TorchScript: while steps are recorded, operations that return nothing are passed over."""
    return torch.jit.CompilationUnit("""
def move_(values: List[Tensor], along: List[Tensor], buffers: List[Tensor], weight_decay: float, momentum: float,
          rate: Tensor, divisor: Tensor) -> Tensor:
    torch._fused_sgd_(values, along, buffers, weight_decay=weight_decay, momentum=momentum, lr=rate, dampening=0.0,
                      nesterov=False, maximize=False, is_first_step=False, grad_scale=divisor, found_inf=None)
    return divisor
""")


def norm(values: Iterable[Tensor]) -> Tensor:
    """The l2 norm of all values together."""
    values = tuple(values)
    if is_vectorized(values[0]):
        parts = torch.stack([torch.linalg.vector_norm(value) for value in values])
    elif sum(value.numel() for value in values) < SMALL:
        parts = torch.cat([value.flatten() for value in values])
    else:
        parts = torch.stack(torch._foreach_norm(values))
    total: Tensor = torch.linalg.vector_norm(parts)
    return total


def byte_size(state: State) -> int:
    return sum(value.numel() * value.element_size() for value in state.values())
