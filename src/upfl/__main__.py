"""`python -m upfl`, for torchrun."""

from upfl.cli import main

if __name__ == "__main__":
    main()
