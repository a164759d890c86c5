"""FedTTA on `higher`, as code for such methods is written: one process, all threads, a deep copy for each client."""

import copy
import sys
from pathlib import Path

import higher
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.peers.work import Data, Pipe, pack, unpack


def main(folder: str) -> None:
    data, pipe = Data(Path(folder)), Pipe()
    models = data.models()
    pipe.ready()
    while True:
        pipe.wait()
        total = torch.zeros_like(data.start)
        for client in range(data.work.clients):
            local = copy.deepcopy(models)
            meta_train(local, data, client)
            total += pack(local)
        unpack(total / data.work.clients, models)
        pipe.done(pack(models))


def meta_train(models: list[nn.Module], data: Data, client: int) -> None:
    """A client's steps: an inner one along the guide's gradient, an outer one through it on both models."""
    work, (f, g) = data.work, models
    inner = torch.optim.SGD(f.parameters(), lr=work.inner_lr, weight_decay=work.weight_decay)
    outer = torch.optim.SGD(f.parameters(), lr=work.lr, weight_decay=work.weight_decay)
    adapt = torch.optim.SGD(g.parameters(), lr=work.adapt_lr, weight_decay=work.weight_decay, momentum=work.momentum)
    for x, y in data.batches(client):
        outer.zero_grad()
        adapt.zero_grad()
        with higher.innerloop_ctx(f, inner, copy_initial_weights=False) as (personal, step):
            step.step((g(personal(x)).square().sum() + 1e-12).sqrt())
            F.cross_entropy(personal(x), y).backward()  # type: ignore[no-untyped-call]
        for model, optimizer in ((f, outer), (g, adapt)):
            nn.utils.clip_grad_norm_(model.parameters(), work.clip)
            optimizer.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
