"""The command `upfl`, and `python -m upfl`, for torchrun."""

import sys


def main() -> None:
    try:
        from upfl.cli import main as command_line  # PyTorch comes with it: seconds, in which Ctrl-C must be quiet, too
    except KeyboardInterrupt:
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()
