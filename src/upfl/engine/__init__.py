"""How rounds are run: batches, workers, sums, fits, scores, checkpoint and resume.

    setup.py      from a configuration to objects: federation, training, personalizers
    rounds.py     the rounds: choose clients, train, sum, aggregate, evaluate, commit
    cohort.py     the clients of a run: who takes part, how they train, fit and are scored
    local.py      a client's round, alone or several side by side
    recorded.py   steps of small models, recorded once and replayed without Python
    fold.py       the exact sum of what clients send
    fitting.py    what personalizers need to have fitted
    evaluate.py   personalize without labels, then count
    group.py      worker processes that train together
    folder.py     the run folder; checkpoint.py, metrics.py and result.py have what its files say
    allocator.py  how freed memory is kept for the next step

Every worker process runs the same `Engine.run`. It holds the whole server state, trains its share of the round's
clients, and takes part in one sum. The sum is the same everywhere, so `aggregate` gives the same state everywhere.
`upfl train --workers N` starts N - 1 processes that meet at a file in a private folder and talk over the loopback
interface; under `torchrun` the processes come from there. A worker that dies closes its connections, and the parent
says which one it was and how it ended. Workers end when their parent does: they hold the reading end of a pipe.

What is sent (`bytes_up`, `bytes_down` in the metrics, over all clients of a round). Up: the tensors that go into the
sum, in the types in which a client has them, for the clients that were counted; not the sum's own integers. Down: the
server's state, for every participant. Two trainings differ and say how: ODPFL-HN (`training/odpfl_hn.py`) and FedMD
(`training/fedmd.py`). Gradient work (`gradients`) is counted by phases: each says what its step costs in forward and
backward passes of the prediction model.

`publish` may hand out training clients' memories (FedPer's personal layers), as a sequence that reads them one by one.
Only the two PFL rows do, and say so wherever they are shown.
"""
