"""A trial's process: `python -m upfl.experiments.trial RUN PLUGIN...`, started by `search`."""

import sys

from upfl import api
from upfl.engine.allocator import keep_freed_memory
from upfl.engine.group import end_with_parent
from upfl.errors import UpflError
from upfl.plugins import load


def main(run: str, *plugins: str) -> None:
    end_with_parent()
    keep_freed_memory()
    load(plugins)
    try:
        api.resume(run, workers=1)
    except UpflError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
