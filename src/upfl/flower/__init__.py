"""upfl on Flower's deployment engine: the same trainings over a real federation. Needs the extra `flower`.

    terms.py      what a run is: its configuration, what samples look like; what a node says about itself
    messages.py   state to Flower's records and back, without trust in the other side
    client.py     the ClientApp: a node trains, validates, personalizes
    server.py     the ServerApp: the engine's rounds, over a cohort of nodes
    cohort.py     the nodes as the engine's clients
    handout.py    handing a bundle to nodes that are newcomers
    privacy.py    clipping, noise, and the budget that they cost
    keys.py       certificates and keys for a trial

The Flower app itself, what `flwr run` takes, is the folder `flower/` of the repository.
"""
