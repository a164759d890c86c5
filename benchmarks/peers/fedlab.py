"""FedLab: its FedAvg handler and serial trainer in its standalone pipeline, one process, all threads."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.peers.work import Data, Pair, Pipe, pack


class Absent(ModuleType):
    """In the place of torchvision, which FedLab's data sets import, and its FedAvg does not use.

    The package index's torchvision is built for another build of PyTorch than the one for CPUs, and fails to load
    beside it ("operator torchvision::nms does not exist").
    """

    __path__: list[str] = []  # noqa: RUF012 - what makes a module a package

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def without_torchvision() -> str:
    """Make FedLab's import work; returns what had to be done for it."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("torchvision", "torchvision.datasets", "torchvision.transforms"):
            sys.modules[name] = Absent(name)
        return "with an empty module for torchvision, which does not load here and is not needed for FedAvg"
    return ""


def main(folder: str) -> None:
    note = without_torchvision()
    from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
    from fedlab.core.standalone import StandalonePipeline

    data, pipe = Data(Path(folder)), Pipe()
    (model,) = data.models()

    class Clients:
        def get_dataloader(self, client: int, batch_size: int) -> list[Pair]:
            return list(data.batches(client))

    class Told(StandalonePipeline):  # type: ignore[misc]
        def evaluate(self) -> None:
            pipe.done(pack([self.handler.model]))
            pipe.wait()

    trainer: Any = FedAvgSerialClientTrainer(model, data.work.clients)
    trainer.setup_dataset(Clients())
    trainer.setup_optim(epochs=1, batch_size=data.work.batch, lr=data.work.lr)
    pipeline = Told(FedAvgServerHandler(model, global_round=10**9, sample_ratio=1.0), trainer)
    pipe.ready(note)
    pipe.wait()
    pipeline.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
