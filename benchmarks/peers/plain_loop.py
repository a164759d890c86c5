"""The loop that most papers' code has: one process, all threads, default layout, a deep copy for each client."""

import copy
import sys
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.peers.work import Data, Pipe, pack, train


def main(folder: str) -> None:
    data, pipe = Data(Path(folder)), Pipe()
    (model,) = data.models()
    pipe.ready()
    while True:
        pipe.wait()
        received, states = copy.deepcopy(model.state_dict()), list[dict[str, Tensor]]()
        for client in range(data.work.clients):
            model.load_state_dict(received)
            train(model, data.batches(client), data.work.lr)
            states.append(copy.deepcopy(model.state_dict()))
        model.load_state_dict({name: torch.stack([state[name] for state in states]).mean(0) for name in received})
        pipe.done(pack([model]))


if __name__ == "__main__":
    main(*sys.argv[1:])
