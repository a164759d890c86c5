"""upfl's rounds beside other systems': run with `python -m benchmarks.peers` (or `make bench-peers`).

Every contender is a process of its own, in an environment of its own, that does a round when it is told to
(`work.Pipe`); all have the same clients, batches and initial weights (`work.Work`). One file for each contender.
"""
