"""A worker process: `python -m upfl.engine.worker RANK SIZE RENDEZVOUS RUN PLUGIN...`, started by `group.workers`."""

import sys
from pathlib import Path

import torch.distributed as dist

from upfl.engine.folder import RunFolder
from upfl.engine.group import end_with_parent, join
from upfl.engine.rounds import Engine
from upfl.methods import load_plugins


def main(rank: str, size: str, store: str, run: str, *plugins: str) -> None:
    end_with_parent()
    load_plugins(plugins)
    group = join(int(rank), int(size), Path(store))
    Engine(RunFolder.open(Path(run)), group).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
