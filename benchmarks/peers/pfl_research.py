"""pfl-research (`pfl`): its FederatedAveraging on its simulated backend.

    python -m benchmarks.peers.pfl_research FOLDER PROCESSES

With one process PyTorch takes all threads. With several, each has one, and they meet as under torchrun, whose variables
are set here.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.work import Data, Pipe, pack


class Told:
    """The contender's part in the training loop: begins a round when it is told to. Followers keep step by the sums."""

    def __init__(self, pipe: Pipe | None, module: nn.Module) -> None:
        self.pipe, self.module = pipe, module

    def begin(self) -> None:
        if self.pipe:
            self.pipe.ready()
        self._wait()

    def end(self) -> None:
        if self.pipe:
            self.pipe.done(pack([self.module]))
        self._wait()

    def _wait(self) -> None:
        if self.pipe:
            self.pipe.wait()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(torch.zeros(1))


def with_loss(module: nn.Module) -> nn.Module:
    """A module as pfl wants it."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module(x), y)

    def metrics(x: Tensor, y: Tensor) -> dict[str, Any]:
        return {}

    module.loss, module.metrics = loss, metrics  # type: ignore[assignment]
    return module


def run(data: Data, pipe: Pipe | None) -> None:
    # pfl looks for its place among several processes when it is imported.
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    (module,) = data.models()
    told = Told(pipe, module)

    class Callback(TrainingProcessCallback):  # type: ignore[misc]
        def on_train_begin(self, *, model: Any) -> Any:
            told.begin()
            return Metrics()

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            told.end()
            return False, Metrics()

    def dataset(client: int) -> Any:
        return PyTorchTensorDataset(data.round(client), user_id=str(client))

    work, users = data.work, list(range(data.work.clients))
    federated = FederatedDataset(dataset, get_user_sampler("minimize_reuse", users))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**9, evaluation_frequency=10**9, train_cohort_size=work.clients, val_cohort_size=0
        ),
        SimulatedBackend(federated, federated),
        PyTorchModel(with_loss(module), torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch),
        callbacks=[Callback()],
        send_metrics_to_platform=False,
    )


def main(folder: str, processes: str = "1") -> None:
    data = Data(Path(folder))
    if processes == "1":
        run(data, Pipe())
        return
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        run(data, None)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": processes, "TORCHELASTIC_RUN_ID": "benchmark"}
    others = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.pfl_research", folder, processes],
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
        for rank in range(1, int(processes))
    ]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    try:
        run(data, Pipe())
    finally:
        for other in others:
            other.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
