"""Whether a newcomer's data are like the federation's, told without labels and without anybody's data.

Samples are looked at in two spaces: the normalized inputs, and the features of the published model. Both are brought
to P = 64 numbers by a sketch that everybody knows (each coordinate is added to one of P sums, with a random sign).
Training clients sum over their train splits n_c, the sum of h over class c, and h h^T; from these come class means
mu_c and one covariance S within classes (shrunk), by whose Cholesky factor L samples are judged:

    c(i) = argmin_c |L^-1 (h_i - mu_c)|      the nearest class, so that a mix of classes of its own is no alarm
    t_i  = log |L^-1 (h_i - mu_c(i))| / sqrt(P)           distance: how far a sample is from every class
    w    = mean_i L^-1 (h_i - mu_c(i))                    drift: in which direction all samples are off together

What is usual, training clients tell that play the newcomer on their validation split, each with its own sums taken
out of what it is judged by. With m_c the mean of t over samples that are nearest to class c and u = mean_i (t_i -
m_c(i)),

    u ~ m + N(0, b + s / n)                  s within clients, b between them, by moments
    log (|w - v|^2 / P / (b' + s' / n))      v the mean of w; its mean and deviation over clients

So a newcomer's two numbers in two spaces become four scores in standard deviations of clients. Images have seven more,
one for each way to turn or mirror them (`orientation.py`). Each has Student's p-value for as many clients as played;
the least, times the number of scores, is p. Below 0.002 the data are unlike. Else, with fewer than 20 samples or 7
training clients, too few to tell; else alike. A sample is outlying if its t_i is four deviations of a sample above
m_c(i).

Settled: class means take five samples' weight of the mean of all m_c, S a fiftieth of its mean variance, and the
deviation of the logarithm is taken for 0.5 at least: over clients with few samples it looks smaller than it is. The
level and this bound were set after 7% of FEMNIST's new writers had alarmed at a level of 0.01 without it; labels of
new clients played no part. Where clients have models of their own, the inputs alone are looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from upfl.contract import Client, Fit, Likeness, Need, Published, Total, Training, Unlabelled, all_logits
from upfl.errors import BadClientError
from upfl.personalize import orientation
from upfl.personalize.nothing import Nothing
from upfl.personalize.reference import Reference, class_sums, spread, usual_distance
from upfl.randomness import generator
from upfl.state import State, select

SIZE = 64  # P
LEVEL = 0.002  # of p, below which data are unlike
SAMPLES, CLIENTS = 20, 7  # with fewer, data are never called alike
OUTLYING = 4.0  # deviations of a sample
LEAST_DEVIATION = 0.5
SPACES = ("inputs", "features", "edges")  # edges: of images alone (`orientation.py`)
KINDS = ("distance", "drift")
KEY = "likeness.none"


class LikenessCheck:
    """Who asks for the sums: not a personalizer, but needed with every one of them."""

    name: ClassVar[str] = "likeness"

    def __init__(self, training: Training[Any]) -> None:
        self.training = training

    def needs(self) -> tuple[Need, ...]:
        played = Nothing(self.training, Nothing.Hyper())
        images = [Need.of(orientation.Orientation, played, after=())] if self.training.task.images else []
        return (Need.of(Spread, played), *images)


def spaces_of(training: Training[Any]) -> tuple[str, ...]:
    return SPACES[:1] if training.heterogeneous or not training.serves_newcomers else SPACES[:2]


def sketch(values: Tensor) -> Tensor:
    """P numbers of each sample; fewer are filled up with zeros. Tokens are counted, whatever their order."""
    if not values.is_floating_point():
        tokens = values.detach().reshape(len(values), -1).cpu()
        hashed = tokens * 2654435761 % 2**32  # Knuth's; its upper bits are good
        signs = (1 - 2 * (hashed >> 31)) * (tokens != 0)
        return torch.zeros(len(tokens), SIZE).double().scatter_add_(1, (hashed >> 20) % SIZE, signs.double())
    flat = values.detach().reshape(len(values), -1).cpu().double()
    if flat.shape[1] <= SIZE:
        return torch.nn.functional.pad(flat, (0, SIZE - flat.shape[1]))
    random = generator(0, "likeness", "sketch")
    place = torch.randint(SIZE, (flat.shape[1],), generator=random)
    sign = 2.0 * torch.randint(2, (flat.shape[1],), generator=random) - 1
    return flat.new_zeros(len(flat), SIZE).index_add_(1, place, flat * sign)


def seen_by(training: Training[Any], params: State | None, x: Tensor, space: str) -> Tensor:
    if space == "inputs":
        return sketch(x)
    assert params is not None
    return sketch(all_logits(training.features, params, x))


class Spread(Fit):
    """Four rounds of sums: class means and covariance; usual distances; how clients differ; how drifts spread.

    What goes up has one form in all rounds; the server takes what a round is for.
    """

    key = "likeness"
    split = "train"
    rounds = 4
    # By the size of what is summed: second moments of sketches are large, and need no more digits.
    SUMS: ClassVar = ("sums", "products")
    USUAL: ClassVar = ("seen", "distance")
    MOMENTS: ClassVar = ("mean", "square", "within", "drift", "drift_square", "drift_within", "log", "log_square")

    def __init__(self, personalizer: Any, given: Any) -> None:
        super().__init__(personalizer, given)
        self.spaces = spaces_of(self.training)

    @property
    def scales(self) -> dict[str, int]:  # type: ignore[override]
        return {f"{space}_{name}": 24 for space in self.spaces for name in (*self.SUMS, *self.USUAL, *self.MOMENTS)}

    def init(self, generator: torch.Generator) -> State:
        state = {name: torch.zeros((), dtype=torch.float64) for name in ("clients", "samples", "squared_samples")}
        state["counts"] = torch.zeros(self.classes, dtype=torch.float64)
        for space in self.spaces:
            state |= {f"{space}_{name}": value for name, value in self._empty().items()}
        return state

    def _empty(self) -> State:
        scalars = dict.fromkeys((*self.MOMENTS, "between", "drift_between", "log_deviation"), ())
        shapes: dict[str, tuple[int, ...]] = scalars | {
            "sums": (self.classes, SIZE),
            "products": (SIZE * (SIZE + 1) // 2,),
            "seen": (self.classes,),
            "distance": (self.classes,),
            "drift": (SIZE,),
            "usual": (self.classes,),
            "means": (self.classes, SIZE),
            "factor": (SIZE, SIZE),
        }
        return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}

    def memory(self, client: Client) -> State:
        """The client's own sums over its train split, and sketches of its validation samples."""
        parts: dict[str, list[Tensor]] = {"train": [], "validation": []}
        labels = []
        for split in ("train", "validation"):
            for batch in client.batches(split, 256):
                parts[split].append(batch.x)
                if split == "train":
                    labels.append(batch.y.cpu())
        y = torch.cat(labels)
        found: State = {"counts": torch.bincount(y, minlength=self.classes).double()}
        params = {split: self._params(client, torch.cat(x)) for split, x in parts.items() if x}
        for space in self.spaces:
            sketches = {
                split: torch.cat([seen_by(self.training, params[split], one, space) for one in x]) if x else None
                for split, x in parts.items()
            }
            h = sketches["train"]
            assert h is not None
            found[f"{space}_sums"], found[f"{space}_products"] = class_sums(h, y, self.classes)
            played = sketches["validation"]
            found[f"{space}_validation"] = h.new_zeros(0, SIZE) if played is None else played
        return found

    def _params(self, client: Client, x: Tensor) -> State | None:
        if "features" not in self.spaces:
            return None
        newcomer = Unlabelled(client.id, x, client.seed, client.architecture)
        return self.training.start(self.given.published, newcomer, None)

    def finish(self, server: State, carry: State, client: Client) -> tuple[State, State]:
        n = len(carry[f"{self.spaces[0]}_validation"])
        up: State = {"counts": carry["counts"].long()}
        plays = torch.tensor(n)
        for space in self.spaces:
            own = {name: carry[f"{space}_{name}"] for name in self.SUMS}
            played = self._played(server, carry, space)
            if played is None:
                plays = torch.tensor(0)
                played = {name: torch.zeros_like(server[f"{space}_{name}"]) for name in (*self.USUAL, *self.MOMENTS)}
            up |= {f"{space}_{name}": value for name, value in (own | played).items()}
        return up | {"clients": (plays > 0).long(), "samples": plays, "squared_samples": plays**2}, carry

    def _played(self, server: State, carry: State, space: str) -> State | None:
        """What the client's validation samples come to, judged by what others summed; nothing before that is there."""
        h = carry[f"{space}_validation"]
        # Who came later is no part of these sums: then too much is taken out, and nothing is said where that shows.
        others = [server[name] - carry[name] for name in ("counts", f"{space}_sums", f"{space}_products")]
        reference = Reference.of(*others) if len(h) and server["counts"].any() else None
        if reference is None:
            return None
        t, nearest, off = reference.judge(h)
        seen = torch.bincount(nearest, minlength=self.classes).double()
        distance = t.new_zeros(self.classes).index_add_(0, nearest, t)
        others_seen = (server[f"{space}_seen"] - seen).clamp(min=0)
        u = t - usual_distance(others_seen, server[f"{space}_distance"] - distance)[nearest]
        n, w = len(h), off.mean(0)
        known = _Moments.of(server, space)
        log = known.log_drift(w, n) if server[f"{space}_drift_within"] > 0 else t.new_zeros(())
        return {
            "seen": seen,
            "distance": distance,
            "mean": u.sum(),
            "square": n * u.mean().square(),
            "within": (u - u.mean()).square().sum(),
            "drift": n * w,
            "drift_square": n * w.square().mean(),
            "drift_within": (off - w).square().mean(1).sum(),
            "log": log,
            "log_square": log.square(),
        }

    def checked(self, up: Any) -> Any:
        if (up.get("counts", torch.zeros(1)) < 0).any():
            raise BadClientError("its sums are not those of samples: a count is negative")
        return up

    def aggregate(self, server: State, total: Total, round: int) -> State:
        server = dict(server)
        if round == 0:
            server["counts"] = total["counts"].double()
        else:
            server |= {name: total[name].double() for name in ("clients", "samples", "squared_samples")}
        for space in self.spaces:
            update = (self._references, self._usual, self._moments, self._logs)[round]
            given = {name: total[f"{space}_{name}"] for name in (*self.SUMS, *self.USUAL, *self.MOMENTS)}
            server |= {f"{space}_{name}": value for name, value in update(server, given).items()}
        return server

    def _references(self, server: State, given: State) -> State:
        found = Reference.of(server["counts"], given["sums"], given["products"])
        own = {} if found is None else {"means": found.means, "factor": found.factor}
        return {name: given[name] for name in self.SUMS} | own

    def _usual(self, server: State, given: State) -> State:
        return {name: given[name] for name in self.USUAL} | {"usual": usual_distance(given["seen"], given["distance"])}

    def _moments(self, server: State, given: State) -> State:
        players = server["clients"], server["samples"], server["squared_samples"]
        n, found = server["samples"].clamp(min=1), {}
        for name, mean in (("", given["mean"] / n), ("drift_", given["drift"] / n)):
            found[f"{name}within"], found[f"{name}between"] = spread(
                *players, mean.square().mean(), given[f"{name}square"], given[f"{name}within"]
            )
        return found | {"mean": given["mean"] / n, "drift": given["drift"] / n}

    def _logs(self, server: State, given: State) -> State:
        k = server["clients"].clamp(min=1)
        mean = given["log"] / k
        variance = (given["log_square"] - k * mean.square()) / (k - 1).clamp(min=1)
        return {"log": mean, "log_deviation": variance.clamp(min=0).sqrt()}

    def fitted(self, server: State, fit: int) -> State:
        names = ("means", "factor", "usual", *_Moments.__annotations__)
        return {"clients": server["clients"], "counts": server["counts"]} | {
            f"{space}_{name}": server[f"{space}_{name}"] for space in self.spaces for name in names
        }

    def ranges(self) -> dict[str, tuple[float, float]]:
        names = ("within", "between", "drift_within", "drift_between", "log_deviation")
        positive = 0.0, math.inf
        return {f"{space}_{name}": positive for space in self.spaces for name in names} | {
            "counts": positive,
            "clients": positive,
        }

    def facts(self, server: State) -> dict[str, float]:
        return {
            f"{space}.{name}": server[f"{space}_{name}"].item() ** power
            for space in self.spaces
            for name, power in (("within", 0.5), ("between", 0.5), ("log_deviation", 1))
        }


@dataclass(frozen=True)
class _Moments:
    """How clients differ in a space."""

    mean: Tensor
    within: Tensor
    between: Tensor
    drift: Tensor
    drift_within: Tensor
    drift_between: Tensor
    log: Tensor
    log_deviation: Tensor

    @classmethod
    def of(cls, known: State, space: str) -> _Moments:
        return cls(**{name: known[f"{space}_{name}"] for name in cls.__annotations__})

    def log_drift(self, w: Tensor, n: int) -> Tensor:
        usual = self.drift_between + self.drift_within / n
        return ((w - self.drift).square().mean() / usual).clamp(min=1e-12).log()


def known_of(published: Published) -> State:
    """What the federation published for the check; nothing where it did not."""
    turned = select(published.fitted, orientation.KEY)
    return select(published.fitted, KEY) | {f"edges_{name}": value for name, value in turned.items()}


def check(training: Training[Any], known: State, params: State | None, x: Tensor) -> tuple[Likeness, Tensor]:
    """Whether samples are like the federation's, and which of them are outlying."""
    scores: dict[str, float] = {}
    n, clients = len(x), int(known["clients"])
    outlying = torch.zeros(n, dtype=torch.bool)
    for space in (space for space in SPACES[:2] if f"{space}_means" in known):
        moments = _Moments.of(known, space)
        reference = Reference(known[f"{space}_means"], known[f"{space}_factor"], known["counts"] > 0)
        t, nearest, off = reference.judge(seen_by(training, params, x, space))
        u = t - known[f"{space}_usual"][nearest] - moments.mean
        mean = moments.between / max(clients, 1)  # the mean of so many clients is not known better
        deviation = (moments.between + mean + moments.within / n).sqrt()
        scores[f"{space} {KINDS[0]}"] = float(u.mean() / deviation)
        log = moments.log_drift(off.mean(0), n) - moments.log
        scores[f"{space} {KINDS[1]}"] = float(log / moments.log_deviation.clamp(min=LEAST_DEVIATION))
        outlying |= u > OUTLYING * (moments.between + moments.within).sqrt()
    tests = len(scores)
    if "edges_means" in known:
        turned = {name.removeprefix("edges_"): value for name, value in known.items() if name.startswith("edges_")}
        best, score = orientation.best_view(turned, x)
        scores[f"orientation ({best})"] = score
        tests += len(orientation.VIEWS)
    p = min(1.0, tests * min(_upper_tail(score, clients - 1) for score in scores.values()))
    if not p >= LEVEL:
        return Likeness("unlike", p, scores), outlying
    return Likeness("alike" if n >= SAMPLES and clients >= CLIENTS else "too few", p, scores), outlying


def stored(known: State, spaces: tuple[str, ...]) -> State:
    """What a newcomer's own model needs to look at later data in these spaces."""
    return {name: value for name, value in known.items() if name.partition("_")[0] in ("clients", "counts", *spaces)}


def expected(classes: int, spaces: tuple[str, ...]) -> State:
    """The tensors of `stored`, without values."""
    if not spaces:
        return {}
    shapes: dict[str, tuple[int, ...]] = {"means": (classes, SIZE), "factor": (SIZE, SIZE), "usual": (classes,)}
    shapes |= dict.fromkeys(_Moments.__annotations__, ()) | {"drift": (SIZE,)}
    names = {"clients": (), "counts": (classes,)} | {
        f"{space}_{name}": shape for space in spaces if space in SPACES[:2] for name, shape in shapes.items()
    }
    if SPACES[2] in spaces:
        names |= {f"{SPACES[2]}_{name}": shape for name, shape in orientation.published(classes).items()}
    return {name: torch.empty(shape, dtype=torch.float64, device="meta") for name, shape in names.items()}


def _upper_tail(score: float, freedom: int) -> float:
    from scipy.special import stdtr  # here, because it takes a while to import

    return float(stdtr(max(freedom, 1), -score)) if math.isfinite(score) else 0.0
