"""The loop that most papers' code has: one process, all threads, default layout, a deep copy for each client.

python -m benchmarks.peers.plain_loop FOLDER [N]: with N, so many processes of one thread share the clients.
"""

import copy
import sys
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.peers.work import Pipe, opened, pack, train, unpack


def main(folder: str, processes: str = "1") -> None:
    count, path = int(processes), Path(folder)
    with ExitStack() as stack:
        if count > 1:  # before this process computes anything: its threads would not be there in a copy of it
            pool = stack.enter_context(get_context("fork").Pool(count, torch.set_num_threads, (1,)))
        data, pipe = opened(path), Pipe()
        models = data.models()
        shares = [range(first, data.work.clients, count) for first in range(count)]
        pipe.ready()
        while True:
            pipe.wait()
            work = [(path, pack(models), share) for share in shares]
            totals = pool.starmap(trained, work) if count > 1 else [trained(*one) for one in work]
            unpack(torch.stack(totals).sum(0) / data.work.clients, models)
            pipe.done(pack(models))


def trained(folder: Path, received: Tensor, clients: range) -> Tensor:
    """The sum of the models of some clients."""
    data, total = opened(folder), torch.zeros_like(received)
    (model,) = data.models()
    unpack(received, [model])
    for client in clients:
        local = copy.deepcopy(model)
        train(local, data.batches(client), data.work.lr)
        total += pack([local])
    return total


if __name__ == "__main__":
    main(*sys.argv[1:])
