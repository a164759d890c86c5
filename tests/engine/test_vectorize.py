"""Clients side by side: a vectorized step is the loop's, for every training that claims it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.params import difference, distance
from upfl.config import configure
from upfl.contract import Batch, Task, Training
from upfl.data import Partition, build_federation, load
from upfl.data.federation import Clients
from upfl.data.inputs import Inputs
from upfl.engine.clients import LocalClient
from upfl.engine.local import padded, train_alone, train_together
from upfl.engine.rounds import matrix_precision
from upfl.engine.setup import assemble
from upfl.errors import ConfigError
from upfl.methods import TRAININGS
from upfl.models import convnet, mlp
from upfl.randomness import generator
from upfl.state import State

pytestmark = pytest.mark.usefixtures("one_thread")

CLAIMING = sorted(name for name, training in TRAININGS.items() if training.vectorizes)


class _Double(Inputs):
    """Inputs in double precision, in which rounding cannot hide a difference."""

    def x(self, indices: Any, angle: float = 0.0) -> Tensor:
        return super().x(indices, angle).double()


def clients_of_different_sizes(sizes: tuple[int, ...], dtype: torch.dtype) -> list[LocalClient]:
    federation = build_federation(load("digits"), Partition(kind="iid", clients=20), 0)
    held = np.concatenate([federation.training.train(i)[:size] for i, size in enumerate(sizes)])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    own = Clients(held, offsets, np.array(sizes), np.zeros(len(sizes)))
    inputs = (_Double if dtype == torch.float64 else Inputs)(federation.source)
    return [LocalClient(replace(federation, training=own), inputs, 3, i, 2) for i in range(len(sizes))]


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-5), (torch.float32, 1e-3)])
@pytest.mark.parametrize("model", ["mlp", "convnet"])
@pytest.mark.parametrize("name", CLAIMING)
def test_clients_trained_together_end_where_each_would_alone(
    name: str, model: str, dtype: torch.dtype, within: float
) -> None:
    """In single precision, which is used, a step alone takes other kernels."""
    built = mlp(64, (24, 16), 10) if model == "mlp" else convnet((1, 8, 8), 10, hidden=16, width=0.25)
    kind = TRAININGS[name]
    clients = clients_of_different_sizes((17, 9, 24), dtype)  # batches of 8: some are partial, at different steps
    training: Training[Any] = kind(Task(built, 10, len(clients)), kind.Hyper(iterations=4, batch_size=8))
    server = {key: value.to(dtype) for key, value in training.init(generator(1, "server")).items()}

    def begun() -> list[State]:
        return [training.begin(server, training.memory(client), client) for client in clients]

    with torch.no_grad():
        before = begun()
        alone = [train_alone(training, carry, client, 2) for carry, client in zip(begun(), clients, strict=True)]
        together = train_together(training, begun(), clients, 2)
    for start, (carry, loss), (ours, our_loss) in zip(before, alone, together, strict=True):
        assert distance(ours, carry, scale=difference(carry, start)) < within
        assert float(our_loss) == pytest.approx(float(loss), rel=within / 100)
    assert distance(together[0][0], together[1][0]) > 1e-4  # they are not all the same client


def test_padding_fills_up_to_the_longest_batch_and_does_not_count() -> None:
    short, long = (
        Batch(torch.ones(n, 1, 2, 2), torch.ones(n, dtype=torch.int64), noise={"z": torch.ones(n, 3)}) for n in (2, 5)
    )
    batch = padded([short, long])
    assert batch.x.shape == (2, 5, 1, 2, 2)
    assert batch.noise["z"].shape == (2, 5, 3)
    assert batch.mask is not None
    assert batch.mask.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]


def test_a_training_that_does_not_claim_it_is_refused() -> None:
    name = next(name for name, training in TRAININGS.items() if not training.vectorizes)
    config = configure(name, "digits", vectorize=4)
    with pytest.raises(ConfigError, match="one client at a time"):
        assemble(config)


def test_the_precision_of_matrix_products_is_set_for_a_run_and_put_back() -> None:
    products: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = products.fp32_precision
    for name, setting in (("bf16", "bf16"), ("tf32", "tf32"), ("float32", before)):
        with matrix_precision(name):
            assert products.fp32_precision == setting
        assert products.fp32_precision == before
    with matrix_precision("tf32"), matrix_precision("float32"):
        assert products.fp32_precision == "ieee"
    with matrix_precision("float32"):
        torch._C._get_cudnn_allow_tf32()  # torch.export asks this; it raises where PyTorch's own setting was changed
