"""What the protocol asks of a model (`upfl/models/base.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from upfl import models
from upfl.engine.rounds import one_thread
from upfl.errors import ConfigError
from upfl.models import Model
from upfl.randomness import default_generator, generator
from upfl.state import State, trainable
from upfl.testing.parts import CheckError, require, same_bits, snapshot, storable


def check_model(
    model: object, *, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, options: Mapping[str, Any] | None = None
) -> str:
    """Check a model, given by its registered name or as a factory; returns remarks, such as which methods lack what."""
    try:
        made = models.entry(models.named(model)).make(shape, classes, options or {})
    except ConfigError as error:
        raise CheckError(str(error)) from error
    x = torch.randn(6, *shape, generator=generator("check", "model"))
    with one_thread():
        params = _state(made)
        _predicts(made, params, x, classes)
        _learns(made, params, x)
        twice = made.why_not_twice()
        _derivatives(made, params, x, second_order=twice is None)
    remarks = [] if twice is None else [f"FedTTA's trainings cannot take it: {twice}"]
    if made.head is None:
        remarks.append(
            "it has no linear layer with a bias at its end: refit, FedADG, FedSR and ODPFL-HN cannot take it"
        )
    if made.buffers:
        remarks.append("it has running statistics or frozen parameters, which the server averages; not for ODPFL-HN")
    return "; ".join(remarks)


def _state(model: Model) -> State:
    before = torch.get_rng_state()
    params, again, other = (model.init(generator("check", seed)) for seed in (0, 0, 1))
    require(torch.equal(before, torch.get_rng_state()), "init draws from the default generator")
    same_bits(again, params, "init of the same generator")
    forms = {name: tuple(value.shape) for name, value in params.items()}
    require(forms == model.shapes | model.buffers, "init: not the shapes that the model says")
    storable(params, "init")
    differs = any(not torch.equal(value, params[name]) for name, value in trainable(other).items())
    require(differs, "init does not depend on the generator")
    return params


def _predicts(model: Model, params: State, x: Tensor, classes: int) -> None:
    kept, given = snapshot(params), x.clone()
    with torch.no_grad():
        z = model.apply(params, x)
        require(z.shape == (len(x), classes), f"apply: shape {list(z.shape)}")
        require(z.isfinite().all(), "apply: not finite")
        require(torch.equal(model.apply(params, x), z), "apply: other bits the second time")
        alone = torch.cat([model.apply(params, one) for one in x.split(1)])  # type: ignore[no-untyped-call]
        _close(alone, z, 1e-4, "apply: a prediction depends on the samples beside it")
        _close(model.apply(model.layout(params), x), z, 1e-4, "layout: other values")
        _close(model.apply(model.observed(params, x), x), model.batchwise(params, x), 1e-3, "observed: not batchwise")
        if model.head is not None:
            weight, bias = (params[f"{model.head}.{kind}"] for kind in ("weight", "bias"))
            _close(F.linear(model.features(params, x), weight, bias), z, 1e-4, "features: the head makes other logits")
    same_bits(params, kept, "apply changed the parameters")
    require(torch.equal(x, given), "apply changed its input")


def _learns(model: Model, params: State, x: Tensor) -> None:
    """The trace is `learning`, to the same random numbers; parameters stay."""
    ends = []
    calls: list[Callable[[State], Tensor]] = [
        lambda own: model.trace(own, x).output,
        lambda own: model.learning(own, x),
    ]
    for call in calls:
        own = snapshot(params)
        with default_generator("check", "learning"), torch.no_grad():
            ends.append((call(own).detach(), own))
        same_bits(trainable(own), trainable(params), "a forward pass changed the parameters")
    _close(ends[0][0], ends[1][0], 1e-5, "trace: another output than learning")
    for name in model.buffers:
        _close(ends[0][1][name], ends[1][1][name], 1e-5, f"trace: '{name}' is updated otherwise than by learning")


def _derivatives(model: Model, params: State, x: Tensor, second_order: bool) -> None:
    """Against torch.autograd through `learning`."""
    source = generator("check", "directions")
    moving = trainable(params)
    still = {name: value for name, value in params.items() if name not in moving}
    v = {name: torch.randn(value.shape, generator=source) * 0.1 for name, value in moving.items()}
    with default_generator("check", "trace"):
        trace = model.trace(snapshot(params), x)
    u, du = (torch.randn(trace.output.shape, generator=source) for _ in range(2))
    ours = dict(trace.backward(u))
    leaves = {name: value.clone().requires_grad_() for name, value in moving.items()}
    with torch.enable_grad(), default_generator("check", "trace"):
        z = model.learning(leaves | snapshot(still), x)
        back = torch.autograd.grad(z, list(leaves.values()), u, create_graph=second_order, materialize_grads=True)
    _agrees(ours, dict(zip(leaves, back, strict=True)), "backward")
    if not second_order:
        return
    with torch.enable_grad():
        along = torch.stack([(one * v[name]).sum() for name, one in zip(leaves, back, strict=True)]).sum()
        curved = [torch.zeros_like(value) for value in leaves.values()]  # of a model that is linear in its parameters
        if along.requires_grad:
            curved = list(torch.autograd.grad(along, list(leaves.values()), retain_graph=True, materialize_grads=True))
        change = torch.autograd.grad(z, list(leaves.values()), du, materialize_grads=True)
    tangent = trace.tangent(v)
    sides = [float((tangent * du).sum()), sum(float((v[n] * one).sum()) for n, one in zip(leaves, change, strict=True))]
    require(
        abs(sides[0] - sides[1]) <= 1e-3 * (abs(sides[1]) + 1),
        f"tangent: <du, J v> is {sides[0]:.6g}, not {sides[1]:.6g}",
    )
    expected = {name: curved[i] + change[i] for i, name in enumerate(leaves)}
    _agrees(dict(trace.backward_tangent(du)), expected, "backward_tangent")


def _agrees(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], what: str) -> None:
    require(ours.keys() == theirs.keys(), f"{what}: other names")
    both = [torch.cat([state[name].detach().flatten() for name in theirs]).double() for state in (ours, theirs)]
    away = float((both[0] - both[1]).norm() / (both[1].norm() + 1e-12))
    require(away < 1e-3, f"{what}: {away:.1e} away from autograd's")


def _close(ours: Tensor, theirs: Tensor, tolerance: float, message: str) -> None:
    require(torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance), message)
