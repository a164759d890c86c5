"""Models made of other models: what methods need that put a layer of their own into the model they are given.

Each gives None where a model cannot be taken apart so; the training then says why it does not fit (`why_not`).
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from upfl.models.base import Model
from upfl.models.filters import Filters
from upfl.models.layered import Layered, mlp
from upfl.models.layers import Conv, Flatten, Linear, Relu
from upfl.models.module import Headed, Module


def with_head(model: Model, layers: tuple[Linear, ...]) -> Model | None:
    """The model with other layers in the place of its head, on the same features."""
    if model.head is None:
        return None
    if isinstance(model, Layered):
        return Layered((*model.layers[:-1], *layers))
    return Headed(model, layers) if isinstance(model, Module) else None


def embedding(model: Model, size: int) -> Model | None:
    """An encoder to so many numbers: the convolutions and a linear layer; of an MLP the first hidden layer and one;
    of a module what its head reads and a linear layer."""
    if model.head is None:
        return None
    if not isinstance(model, Layered):
        return with_head(model, (Linear("embedding", model.shapes[f"{model.head}.weight"][1], size),))
    layers = model.layers
    linear = [layer for layer in layers if isinstance(layer, Linear)]
    if not any(isinstance(layer, Conv) for layer in layers):
        return mlp(linear[0].inputs, (linear[0].outputs,), size)
    flat = next(i for i, layer in enumerate(layers) if isinstance(layer, Flatten))
    return Layered((*layers[: flat + 1], Linear("embedding", linear[0].inputs, size)))


def halves(model: Model) -> tuple[Model, Model, Layered] | None:
    """A model cut in two after a doubled layer: all of its layers, an encoder of twice as many numbers, and the
    classifier of one half.

    The doubled layer is the last convolution, or the last linear one but the head. Rectifiers between it and the
    classifier are left out. A module gets a linear layer for it, on what its head reads; the head is the classifier.
    """
    if model.head is None:
        return None
    if not isinstance(model, Layered):
        classes, size = model.shapes[f"{model.head}.weight"]
        doubled, last = Linear("representation", size, 2 * size), Linear(model.head, size, classes)
        whole, encoder = with_head(model, (doubled, last)), with_head(model, (doubled,))
        return (whole, encoder, Layered((last,))) if whole and encoder else None
    layers = list(model.layers)
    convolutions = [i for i, layer in enumerate(layers) if isinstance(layer, Conv)]
    linear = [i for i, layer in enumerate(layers) if isinstance(layer, Linear)]
    if len(linear) < 2:
        return None
    cut = convolutions[-1] if convolutions else linear[-2]
    single = layers[cut]
    assert isinstance(single, Conv | Linear)
    wide = type(single)(single.name, single.inputs, 2 * single.outputs)
    rest = [i for i in range(cut + 1, len(layers)) if not isinstance(layers[i], Relu)]
    head = next(i for i in rest if isinstance(layers[i], Linear))
    between = tuple(layers[i] for i in rest if i < head)
    below, above = (*layers[:cut], wide, *between), tuple(layers[head:])
    return Layered((*below, *above)), Layered(below), Layered(above)


def cut_below(model: Model, names: AbstractSet[str]) -> tuple[Layered, Layered] | None:
    """A chain of layers cut in two below the first that has one of these parameters."""
    if not isinstance(model, Layered):
        return None
    first = next(i for i, layer in enumerate(model.layers) if not names.isdisjoint(layer.shapes()))
    return model[:first], model[first:]


def filters_below(model: Model) -> Filters | None:
    """The layer of filters of a model that is one with a linear layer on it."""
    layers = model.layers if isinstance(model, Layered) else ()
    if len(layers) == 2 and isinstance(layers[0], Filters) and isinstance(layers[1], Linear):
        return layers[0]
    return None
