"""The limit: the rate of 2048 x 2048 float32 matrix products, on one thread and on a thread for each core."""

import os
import time

import torch

from benchmarks.peers.work import Pipe

SIZE = 2048


def main() -> None:
    pipe = Pipe()
    a, b, c = (torch.randn(SIZE, SIZE) for _ in range(3))
    pipe.ready()
    while True:
        pipe.wait()
        pipe.done(torch.empty(0), one=rate(a, b, c, 1), all=rate(a, b, c, len(os.sched_getaffinity(0))))


def rate(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, threads: int) -> float:
    """Operations a second, the best of five; on one thread a second of its CPU time, which others cannot take."""
    torch.set_num_threads(threads)
    clock, times = time.thread_time if threads == 1 else time.perf_counter, []
    for _ in range(5):
        started = clock()
        torch.mm(a, b, out=c)
        times.append(clock() - started)
    return 2 * SIZE**3 / min(times)


if __name__ == "__main__":
    main()
