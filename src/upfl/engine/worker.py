"""A worker process: `python -m upfl.engine.worker RANK SIZE RENDEZVOUS RUN PLUGIN...`, started by `group.workers`."""

import sys
from pathlib import Path

import torch.distributed as dist

from upfl.engine.allocator import keep_freed_memory
from upfl.engine.folder import RunFolder
from upfl.engine.group import FOLLOWED, end_with_parent, join
from upfl.engine.rounds import Engine
from upfl.errors import StoppedError, UpflError, WriteError
from upfl.plugins import load


def main(rank: str, size: str, store: str, run: str, *plugins: str) -> None:
    end_with_parent()
    keep_freed_memory()
    load(plugins)
    group = join(int(rank), int(size), Path(store))
    try:
        Engine.local(RunFolder.open(Path(run)), group).run()
    except WriteError as error:  # its own: the first process shows it
        sys.exit(str(error))
    except StoppedError:  # the first process says why
        sys.exit(FOLLOWED)
    except UpflError as error:
        sys.exit(str(error))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
