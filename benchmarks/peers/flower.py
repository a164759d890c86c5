"""Flower's simulation: its FedAvg strategy over Ray, one actor a core, each on one thread (Ray's own setting)."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.work import Data, Pipe, opened, pack, train

ROUNDS = 1_000_000  # until the pipe closes


class Told(FedAvg):
    """FedAvg that begins a round when it is told to."""

    def __init__(self, folder: Path, pipe: Pipe) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
        self.pipe, self.models = pipe, Data(folder).models()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if server_round > 1:
            self.models[0].load_state_dict(arrays.to_torch_state_dict())
            self.pipe.done(pack(self.models))
        self.pipe.wait()
        return super().configure_train(server_round, arrays, config, grid)


def client_app(folder: Path) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train_client(message: Message, context: Context) -> Message:
        data = opened(folder)
        (model,) = data.models()
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        train(model, data.batches(int(context.node_config["partition-id"])), data.work.lr)
        metrics = MetricRecord({"num-examples": data.work.samples})
        reply = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(reply, reply_to=message)

    return app


def main(folder: str) -> None:
    path, pipe, server = Path(folder), Pipe(), ServerApp()
    cores = len(os.sched_getaffinity(0))

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        strategy = Told(path, pipe)
        pipe.ready()
        strategy.start(grid, ArrayRecord(strategy.models[0].state_dict()), num_rounds=ROUNDS)

    run_simulation(
        server,
        client_app(path),
        num_supernodes=Data(path).work.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": cores, "include_dashboard": False, "_node_ip_address": "127.0.0.1"},
        },
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
