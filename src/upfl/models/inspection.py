"""What a torch.nn.Module is made of, and what about it would not work here, in words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin

from upfl.errors import ConfigError
from upfl.models.base import Kind
from upfl.randomness import generator

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def checked(name: str, net: nn.Module, x: Tensor, classes: int) -> None:
    """Refuse a module that cannot be trained here, and say what is wrong and what to do about it."""
    problem = _structure(net) or _behaviour(net, x, classes)
    if problem:
        raise ConfigError(f"model '{name}': {problem}")


def kinds(net: nn.Module) -> dict[str, Kind]:
    """What each layer with parameters of its own is."""
    found: dict[str, Kind] = {}
    for name, layer in net.named_modules():
        if any(True for _ in layer.parameters(recurse=False)):
            linear, convolution = isinstance(layer, nn.Linear), isinstance(layer, _ConvNd)
            norm = isinstance(layer, _NORMS)
            found[name] = "linear" if linear else "convolution" if convolution else "norm" if norm else "other"
    return found


def batch_norms(net: nn.Module) -> dict[str, _BatchNorm]:
    """The layers that normalise by statistics of the batch while they train, and by running ones afterwards."""
    return {name: layer for name, layer in net.named_modules() if isinstance(layer, _BatchNorm)}


def head(net: nn.Module, x: Tensor) -> str | None:
    """The linear layer whose output is the module's, where it has a bias and reads a row for each sample."""
    calls: list[tuple[str, Tensor, Tensor]] = []
    hooks = [
        layer.register_forward_hook(lambda _, x, y, name=name: calls.append((name, x[0], y)))
        for name, layer in net.named_modules()
        if type(layer) is nn.Linear and layer.bias is not None and name
    ]
    try:
        with torch.no_grad():
            z = net(x)
    finally:
        for hook in hooks:
            hook.remove()
    names = [name for name, rows, y in calls if y is z and rows.dim() == 2]
    last = net.get_submodule(names[0]) if names else None
    whole = last is not None and all(value.requires_grad for value in last.parameters())
    return names[0] if whole and sum(name == names[0] for name, *_ in calls) == 1 else None


def _structure(net: nn.Module) -> str | None:
    if not isinstance(net, nn.Module):
        return f"the factory gave {type(net).__name__}, not a torch.nn.Module"
    for name, layer in net.named_modules():
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():  # type: ignore[misc]
            return f"'{name}' is lazy: give its input's size, or let the factory call the module on an example once"
    parameters = list(net.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, value in parameters:
        if id(value) in first:
            return (
                f"'{first[id(value)]}' and '{name}' are the same tensor (tied weights): what is averaged, kept or "
                "refitted here goes by one name; give each its own"
            )
        first[id(value)] = name
    tensors: dict[str, Tensor] = dict([*parameters, *net.named_buffers()])
    for name, tensor in tensors.items():
        if tensor.is_complex():
            return f"'{name}' is complex: sums over clients are of real numbers; keep real and imaginary parts apart"
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            return f"'{name}' is of type {tensor.dtype}: training is in float32; let the factory call .float()"
    if not any(value.requires_grad for _, value in parameters):
        return "it has no parameter that can be trained"
    for name, layer in batch_norms(net).items():
        if layer.running_mean is None:
            return (
                f"'{name}' keeps no running statistics: a prediction would depend on which samples are asked for "
                "together; leave track_running_stats at True"
            )
        if layer.momentum is None:
            return f"'{name}' has momentum=None, which counts batches over the whole run; give it a number, such as 0.1"
    return None


def _behaviour(net: nn.Module, x: Tensor, classes: int) -> str | None:
    """What shows only when it runs, on two samples of noise."""
    given = x.clone()
    for training in (False, True):
        net.train(training)
        drawn, kept = torch.random.get_rng_state(), {name: value.clone() for name, value in net.named_buffers()}
        try:
            z = net(x)
        except Exception as error:  # whatever a stranger's code raises
            return f"it does not take a batch of shape {list(x.shape)}: {type(error).__name__}: {_first_line(error)}"
        if not isinstance(z, Tensor):
            return f"it gives {type(z).__name__}, and should give a tensor of logits, [samples, classes]"
        if z.shape != (2, classes):
            return f"it gives {list(z.shape)} for 2 samples, and {classes} classes need [2, {classes}]"
        if not torch.equal(x, given):
            return "it changes its input in place: use operations without a trailing underscore or inplace=True there"
        if not training and not torch.equal(drawn, torch.random.get_rng_state()):
            return "it draws random numbers in evaluation mode; a prediction must be a function of the input"
        moved = [name for name, one in net.named_buffers() if name not in kept or not torch.equal(one, kept[name])]
        if moved and not training:
            return (
                f"it changes its buffer '{moved[0]}' in evaluation mode; a prediction must be a function of the input"
            )
        if not z.requires_grad:
            return "its output does not depend on any parameter that can be trained"
    return None


def draws(net: nn.Module, x: Tensor) -> bool:
    """Whether it draws random numbers while it trains."""
    before = torch.random.get_rng_state()
    net.train()
    with torch.no_grad():
        net(x)
    return not torch.equal(before, torch.random.get_rng_state())


def why_not_twice(net: nn.Module, x: Tensor) -> str | None:
    """Why its derivatives cannot be differentiated again, as FedTTA must; None where they can.

    Code of its own may cut autograd's graph without a word. Then <u, J v>, J v found from J^T u, is not <J^T u, v>, or
    the derivatives of J^T u along v and w are not symmetric.
    """
    net.train()
    params, source = [value for value in net.parameters() if value.requires_grad], generator("module", "twice")
    v, w = ([torch.randn(value.shape, generator=source) for value in params] for _ in range(2))
    try:
        with torch.enable_grad():
            z = net(x)
            u, other = (torch.randn(z.shape, generator=source, requires_grad=True) for _ in range(2))
            h = _back([z], params, [u], create_graph=True)
            along = [i for i, one in enumerate(h) if one.requires_grad]  # not parameters that nothing depends on
            kept, of_v, of_w = ([one[i] for i in along] for one in (h, v, w))
            (jv,) = _back(kept, [u], of_v, retain_graph=True)
            curved_v, curved_w = (_back(kept, params, one, retain_graph=True) for one in (of_v, of_w))
            back = _back([z], params, [other])
    except (RuntimeError, NotImplementedError) as error:
        return f"the model's gradient cannot be differentiated again: {_first_line(error)}"
    if not (_agree([other], [jv], back, v) and _agree(w, curved_v, curved_w, v)):
        return "the model's gradient cannot be differentiated again: some operation's second derivative is missing"
    return None


def _back(of: Sequence[Tensor], to: Sequence[Tensor], along: Sequence[Tensor], **options: bool) -> tuple[Tensor, ...]:
    return torch.autograd.grad(of, to, along, materialize_grads=True, **options)


def _agree(a: Sequence[Tensor], b: Sequence[Tensor], c: Sequence[Tensor], d: Sequence[Tensor]) -> bool:
    """Whether <a, b> = <c, d>, but for rounding: in random directions, a missing part would show."""
    flat = [torch.cat([one.detach().flatten() for one in many]).double() for many in (a, b, c, d)]
    size = sum(float(one.norm() * other.norm()) / len(one) ** 0.5 for one, other in (flat[:2], flat[2:]))
    difference = float(flat[0] @ flat[1] - flat[2] @ flat[3])
    return bool(abs(difference) <= 0.01 * size + 1e-12)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
