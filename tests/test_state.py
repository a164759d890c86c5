"""Norms and updates of named tensors against the same written out; where tensors lie in memory."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.shifted import shifted
from upfl import state
from upfl.randomness import generator
from upfl.safe import tensors
from upfl.safe.folder import Folder
from upfl.state import ALIGNMENT, SMALL, aligned, move_, norm

SHAPES = {"matrix": (7, 5), "vector": (33,), "scalar": (), "kernel": (4, 3, 5, 5)}


def values(seed: int, layout: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Tensors of several shapes: kernels channels last, and all of them with gaps, if asked for."""
    drawn = [torch.randn(shape, generator=generator(seed, name)).to(dtype) for name, shape in SHAPES.items()]
    if layout == "channels last":
        return [one.contiguous(memory_format=torch.channels_last) if one.dim() == 4 else one for one in drawn]
    return [torch.stack([one, one], -1)[..., 0] for one in drawn] if layout == "gaps" else drawn


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("layout", "along_layout", "buffer_layout", "fused"),
    [
        ("plain", "plain", "plain", True),
        ("channels last", "channels last", "channels last", True),
        ("plain", "channels last", "plain", False),
        ("plain", "plain", "channels last", False),
        ("gaps", "plain", "plain", False),
        ("gaps", "gaps", "gaps", False),
    ],
)
def test_an_update_is_what_it_says_whatever_the_layout(
    layout: str, along_layout: str, buffer_layout: str, fused: bool, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fusable, said = state._fusable, list[bool]()

    def watched(*same: Tensor) -> bool:
        said.append(fusable(*same))
        return said[-1]

    monkeypatch.setattr(state, "_fusable", watched)
    own, along = values(0, layout), values(1, along_layout)
    buffers = values(2, buffer_layout) if momentum else []
    expected, left = [one.clone() for one in own], [one.clone() for one in buffers]
    divisor, rate, decay = torch.tensor(1.7), 0.3, 0.01
    for i, value in enumerate(expected):
        step = along[i] / divisor + decay * value
        if momentum:
            left[i] = step = momentum * left[i] + step
        expected[i] = value - rate * step
    move_(own, along, rate, decay, divisor, (momentum, buffers) if momentum else None)
    assert all(said) == (fused or (not momentum and layout == along_layout == "plain"))
    for ours, theirs in zip([*own, *buffers], [*expected, *left], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


def test_an_update_in_double_precision_is_one() -> None:
    """The fused kernel divides by a number in single precision."""
    (own,), (along,) = values(0, "plain", torch.float64)[:1], values(1, "plain", torch.float64)[:1]
    expected = own - 0.1 * (along / 1.7 + 0.01 * own)
    move_([own], [along], 0.1, 0.01, torch.tensor(1.7, dtype=torch.float64))
    torch.testing.assert_close(own, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("size", [1, SMALL - 8, SMALL - 7, 3 * SMALL])  # and seven values more
def test_a_norm_is_that_of_all_values_together(size: int) -> None:
    first, second = torch.randn(size, generator=generator(0)), torch.randn(3, 2, generator=generator(1)).t()
    parts = [first, second, torch.tensor(2.0)]
    expected = sum(float(part.double().square().sum()) for part in parts) ** 0.5
    assert float(norm(parts)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("layout", ["plain", "channels last"])
def test_what_lies_between_boundaries_is_copied_in_its_layout_and_all_else_left_alone(layout: str) -> None:
    for value in values(0, layout):
        assert aligned(value) is value
        ours = aligned(shifted(value))
        assert ours.data_ptr() % ALIGNMENT == 0
        assert ours.stride() == value.stride()
        assert torch.equal(ours, value)
    integers = torch.arange(9)[1:]
    assert aligned(integers) is integers


def test_a_state_from_a_file_is_aligned(tmp_path: Path) -> None:
    sizes = {f"part{i}": torch.ones(size) for i, size in enumerate((1, 3, 10, 33, 1000))}
    tensors.save(Folder(tmp_path), "state.safetensors", sizes, {})
    stored = tensors.read_file(tmp_path / "state.safetensors")
    assert all(value.data_ptr() % ALIGNMENT == 0 for value in stored.values())
