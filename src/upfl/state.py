"""State: a flat dict of named tensors. One safetensors file, one message, one sum."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

State = dict[str, Tensor]


def select(state: State, prefix: str) -> State:
    """The entries below a prefix, without it: select(state, "psi") has `fc1.weight` for `psi.fc1.weight`."""
    prefix = f"{prefix}."
    start = len(prefix)
    return {name[start:]: value for name, value in state.items() if name.startswith(prefix)}


def prefixed(prefix: str, state: Mapping[str, Tensor]) -> State:
    return {f"{prefix}.{name}": value for name, value in state.items()}


def contiguous(state: State) -> State:
    return {name: value.detach().contiguous() for name, value in state.items()}


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


def norm(values: Iterable[Tensor]) -> Tensor:
    """The l2 norm of all values together."""
    values = tuple(values)
    if is_vectorized(values[0]):
        norms = tuple(torch.linalg.vector_norm(value) for value in values)
    else:
        norms = torch._foreach_norm(values)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def byte_size(state: State) -> int:
    return sum(value.numel() * value.element_size() for value in state.values())
