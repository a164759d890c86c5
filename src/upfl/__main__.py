"""The command `upfl`, and `python -m upfl`, for torchrun."""

import sys


def main() -> None:
    try:
        from upfl.cli import main as command_line  # Ctrl-C is quiet from the start
    except KeyboardInterrupt:
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()
