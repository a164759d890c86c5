"""upfl on Flower's deployment engine: the same trainings over a real federation. Needs the extra `flower`.

    terms.py      what a run is: its configuration, what samples look like; what a node says about itself
    messages.py   state to Flower's records and back, without trust in the other side
    client.py     the ClientApp: what a node answers
    training_node.py  what a training node computes for that: rounds, fits, scores, with its memory
    server.py     the ServerApp: the engine's rounds, over a cohort of nodes
    cohort.py     the nodes as the engine's clients
    handout.py    handing a bundle to nodes that are newcomers
    privacy.py    clipping, noise, and the budget that they cost
    secure/       secure sums: the protocol, without Flower
    masked.py     a node's side of it over messages; sums.py: the link's
    node.py       a SuperNode whose process stays warm between messages
    keys.py       certificates and keys for a trial

The Flower app itself, what `flwr run` takes, is the folder `flower/` of the repository: a configuration table and two
names. The code is installed with upfl on every machine, so a run has nothing to install.

- The server is the engine, over a cohort of nodes. A node runs the engine's `train_client` over the engine's
  `LocalClient`, on one thread. Hence the same bits.
- A node keeps nothing in its process: each message brings the run's terms (configuration, task) and the state. A node
  with data of its own sees a federation in which every other client is empty. The server of such nodes sees one in
  which every client holds a blank image, for the form of what clients send.
- Client memory is kept on the node under the round that made it, and the server's checkpoint says which version counts.
  So a reply that is lost, late or refused leaves no trace, and a resumed run finds the right version.
- Replies are folded into the sum as they come. They are not trusted: names, shapes, types, range and norm are checked.
- Flower's own wrappers for differential privacy clip whole models under one strategy class and count by an optional
  package; they do not fit sums of changes. So noise is added here (privacy.py).
"""
