"""A worker process: `python -m upfl.engine.worker RANK SIZE RENDEZVOUS RUN`, started by `group.workers`."""

import sys
from pathlib import Path

import torch.distributed as dist

from upfl.engine.folder import RunFolder
from upfl.engine.group import end_with_parent, join
from upfl.engine.rounds import Engine


def main(rank: str, size: str, store: str, run: str) -> None:
    end_with_parent()
    group = join(int(rank), int(size), Path(store))
    Engine(RunFolder.open(Path(run)), group).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
