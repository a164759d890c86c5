"""Closed form: against plain double precision and scikit-learn, and whoever holds which samples."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from tests.plugin_methods import upfl
from upfl.api import train
from upfl.bundle import export
from upfl.config import Config, configure
from upfl.data import load
from upfl.data.federation import Clients, Federation, build_federation
from upfl.data.partition import dirichlet, iid, pathological
from upfl.engine.folder import RunFolder
from upfl.engine.rounds import Engine
from upfl.engine.setup import assemble
from upfl.errors import ConfigError
from upfl.methods import make_personalizer, personalizer_class
from upfl.models.filters import EXACT, FEATURE, rounded_filters
from upfl.models.patches import PIXEL, Patches, hashes
from upfl.onnx_export import export as onnx_export
from upfl.randomness import generator
from upfl.state import State
from upfl.training.closed_form import BLOCK, add_products_, full, triangle_size

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = ("filters=6", "iterations=2", "patches=4")


def layer(**changes: Any) -> Patches:
    return replace(Patches("patches", 3, 5, 4, 2, 0.25, 0.0025), **changes)


def filters(of: Patches, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = generator(seed, "filters")
    weight, bias = torch.randn(of.outputs, of.size, generator=source), torch.randn(of.outputs, generator=source)
    return rounded_filters(weight * 0.2, bias * 0.1)


def images(n: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(n, *shape, generator=generator(seed, "images"))


def config_of(*settings: str, **options: Any) -> Config:
    options.setdefault("score", ["none"])
    return configure("closed-form", "digits", settings=[*SETTINGS, *settings], **options)


def ran(config: Config, path: Path, federation: Federation | None = None) -> Engine[Any]:
    engine = Engine.local(RunFolder.create(path, config), setup=assemble(config, federation))
    engine.run()
    return engine


# The features


def plain_features(of: Patches, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """The equations, in double precision, one patch at a time."""
    side = x.shape[2] - of.patch + 1
    z = torch.empty(len(x), of.outputs, side, side, dtype=torch.float64)
    for i in range(side):
        for j in range(side):
            p = x[:, :, i : i + of.patch, j : j + of.patch].double().permute(0, 2, 3, 1).flatten(1)
            centred = p - p.mean(1, keepdim=True)
            p = centred / (centred.square().mean(1, keepdim=True) + of.contrast).sqrt()
            z[:, :, i, j] = p @ weight.double().T + bias
    cuts = [round(side * i / of.grid) for i in range(of.grid + 1)]
    cells = []
    for top, bottom in pairwise(cuts):
        for left, right in pairwise(cuts):
            rows, columns = slice(top, bottom), slice(left, right)
            part = z[:, :, rows, columns]
            cells += [(part - of.threshold).relu().mean((2, 3)), (-part - of.threshold).relu().mean((2, 3))]
    return torch.cat(cells, 1)


@pytest.mark.parametrize(("channels", "side", "patch"), [(3, 9, 4), (1, 8, 3), (3, 12, 6)])
def test_features_are_those_of_the_equations_up_to_their_rounding(channels: int, side: int, patch: int) -> None:
    of = layer(inputs=channels, patch=patch)
    x = images(4, channels, side, side)
    found, expected = of.apply(*filters(of), x), plain_features(of, *filters(of), x)
    assert found.shape == (4, of.features)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.02)
    assert torch.equal(found * FEATURE, (found * FEATURE).round())


@pytest.mark.parametrize(("side", "grid"), [(9, 2), (12, 3)])
def test_with_mirror_features_are_those_of_an_image_and_of_its_mirror_image(side: int, grid: int) -> None:
    of = layer(mirror=True, grid=grid)
    x = images(4, 3, side, side)
    found = of.apply(*filters(of), x)
    expected = sum(plain_features(of, *filters(of), image) for image in (x, x.flip(3))) / 2
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.02)
    assert torch.equal(of.apply(*filters(of), x.flip(3)), found)
    assert not torch.equal(of.apply(*filters(of), x.flip(2)), found)


def test_features_do_not_depend_on_the_batch_nor_on_the_memory_layout() -> None:
    of = layer(outputs=37, mirror=True)
    x, params = images(21, 3, 11, 11), filters(of)
    whole = of.apply(*params, x)
    assert torch.equal(torch.cat([of.apply(*params, x[i : i + 1]) for i in range(len(x))]), whole)
    assert torch.equal(of.apply(*params, x.contiguous(memory_format=torch.channels_last)), whole)
    assert torch.equal(of.apply(*params, x.flip(0)).flip(0), whole)


def test_huge_and_constant_inputs_have_features_that_can_be_counted_with() -> None:
    of = layer()
    x = torch.cat([images(2, 3, 9, 9) * 1e6, torch.zeros(1, 3, 9, 9), torch.full((1, 3, 9, 9), 7.0)])
    h = of.apply(*filters(of), x)
    assert h.isfinite().all()
    assert (h >= 0).all()
    assert (h * FEATURE).square().max() < EXACT
    assert of.pixels(x).square().sum(3).max() * of.patch**2 <= EXACT
    assert torch.equal(h[2], h[3]), "a patch's mean does not count"
    assert of.apply(*filters(of), torch.full((1, 3, 9, 9), torch.nan)).isnan().any(), "what is no number must show"


def test_patches_at_places_are_those_of_the_whole_image() -> None:
    of = layer()
    x = images(3, 3, 9, 9)
    pixels = of.pixels(x)
    assert of.places(pixels) == 36
    found = of.patches_at(pixels, torch.tensor([[0, 35], [7, 7], [1, 6]]))
    p = pixels[1, 1:5, 1:5].double()  # place 7 is row 1, column 1
    expected = (p - p.mean()) / (p.var(unbiased=False) + of.contrast * PIXEL**2).sqrt() * 32
    torch.testing.assert_close(found[1, 0].double(), expected.flatten(), rtol=0, atol=0.51)
    assert torch.equal(found[1, 0], found[1, 1])


def test_an_images_places_are_its_own_and_the_seeds() -> None:
    rows = (images(200, 48) * 64).round()
    first = hashes(rows, 0, 6) % 50
    assert torch.equal(hashes(rows[17:18], 0, 6) % 50, first[17:18])
    assert not torch.equal(hashes(rows, 1, 6) % 50, first)
    counts = torch.bincount(first.flatten(), minlength=50).double()
    assert float((counts - 24).square().sum() / 24) < 86, "chi-squared with 49 degrees of freedom: p > 0.001"
    changed = rows.clone()
    changed[:, 3] += 1
    assert (hashes(changed, 0, 6) % 50 == first).double().mean() < 0.06, "a pixel more, other places"


# The sums


@pytest.mark.parametrize("size", [7, BLOCK, BLOCK + 3, 2 * BLOCK + 1])
def test_second_moments_are_exact_however_they_are_added(size: int) -> None:
    h = torch.randint(
        0, 4096, (23, size), generator=generator(0, "h")
    ).float()  # so large that halves of halves are needed
    total = torch.zeros(triangle_size(size), dtype=torch.int64)
    add_products_(total, h)
    again = torch.zeros_like(total)
    for i in (3, 0, 9, 1):
        add_products_(again, h[i * 2 : i * 2 + 2])
    rest = [i for i in range(23) if i // 2 not in (3, 0, 9, 1)]
    add_products_(again, h[rest])
    assert torch.equal(total, again)
    assert torch.equal(full(total, size), h.double().T @ h.double())


def test_the_sums_of_a_run_are_those_of_all_train_splits(tmp_path: Path) -> None:
    engine = ran(config_of(), tmp_path / "run")
    x, y = trained_on(engine)
    server, training = engine.progress.server, engine.training
    h = training.features(training.start(engine.published(), None, None), x).double()  # type: ignore[arg-type]
    assert torch.equal(server["sum.layer.counts"], torch.bincount(y, minlength=10))
    of_classes = torch.stack([h[y == c].sum(0) for c in range(10)])
    assert torch.equal(server["sum.layer.sums"] / FEATURE, of_classes.float())
    assert torch.equal(full(server["sum.layer.products"], h.shape[1]) / FEATURE**2, h.T @ h)


def trained_on(engine: Engine[Any]) -> tuple[Tensor, Tensor]:
    clients = engine.federation.training
    indices = np.concatenate([clients.train(i) for i in range(len(clients))])
    return engine.setup.inputs.x(indices), engine.setup.inputs.y(indices)


@pytest.mark.parametrize("kind", ["discriminant", "ridge"])
def test_the_last_layer_is_scikit_learns_on_standardized_features(kind: str, tmp_path: Path) -> None:
    engine = ran(config_of(f"layer={kind}", "shrinkage=0.05"), tmp_path / "run")
    x, y = trained_on(engine)
    params = engine.training.start(engine.published(), None, None)  # type: ignore[arg-type]
    h = StandardScaler().fit_transform(engine.training.features(params, x).double().numpy())
    logits = engine.training.logits(params, x).double()
    if kind == "ridge":
        targets = F.one_hot(y, 10).double()
        expected = torch.from_numpy(Ridge(0.05 * len(y)).fit(h, targets.numpy()).predict(h))
    else:
        counts = torch.bincount(y, minlength=10).double()
        model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.05).fit(h, y.numpy())
        expected = torch.from_numpy(model.decision_function(h)) - counts.log() + (counts + 1).log()
    centred = [value - value.mean(1, keepdim=True) for value in (logits, expected)]
    torch.testing.assert_close(*centred, rtol=1e-3, atol=1e-3 * float(centred[1].abs().max()))


@pytest.mark.parametrize("mirror", [False, True])
def test_whitening_and_filters_are_what_the_equations_say(mirror: bool, tmp_path: Path) -> None:
    """From the patches that the clients drew, in double precision: covariance, and one turn of k-means."""
    engine = ran(config_of("iterations=1", f"mirror={str(mirror).lower()}"), tmp_path / "run")
    training: Any = engine.training
    pixels = training.layer.pixels(trained_on(engine)[0])
    places = hashes(pixels.sum(1).flatten(1), engine.config.seed, 4) % training.layer.places(pixels)
    p = training.layer.patches_at(pixels, places).flatten(0, 1).double() / 32
    if mirror:
        p = torch.cat([p, p.view(-1, 3, 3).flip(2).flatten(1)])
    server: State = {name: value.double() for name, value in engine.progress.server.items()}
    covariance = torch.cov(p.T, correction=0)
    torch.testing.assert_close(server["mean"], p.mean(0), rtol=1e-5, atol=1e-6)
    inverse = server["whitening"] @ server["whitening"]
    torch.testing.assert_close(inverse @ (covariance + 0.1 * torch.eye(9)), torch.eye(9).double(), rtol=0, atol=1e-4)
    start = training.init(generator(engine.config.seed, "init"))["filters"].double()
    q = (p - server["mean"]) @ server["whitening"]
    sides = q.view(1 + mirror, -1, 9).transpose(0, 1)  # a patch, and its mirror image
    z = (sides @ start.T).flatten(1)
    chosen = z.abs().argmax(1)
    nearer = sides[torch.arange(len(z)), chosen // 6]
    pulled = torch.zeros_like(start).index_add_(0, chosen % 6, z.gather(1, chosen.unsqueeze(1)) * nearer)
    cosine = (F.normalize(pulled, dim=1) * server["filters"]).sum(1)
    assert cosine.min() > 0.995, "but for patches on the edge between two filters, which rounding moves"
    torch.testing.assert_close(server["filters"].norm(dim=1), torch.ones(6).double())


def test_each_pass_counts_anew_and_a_pass_of_several_rounds_goes_on() -> None:
    training: Any = assemble(config_of("iterations=2", clients_per_round=1)).training
    total = {name: torch.ones_like(value) for name, value in training._no_sums("filters").items()}
    first = 2 * training.rounds_a_pass  # whitening, filters, filters
    for round, kept in ((first, 0), (first + 1, 5)):
        server = training.init(generator(0))
        server |= {name: value + 5 for name, value in server.items() if name.startswith("sum.filters.")}
        after = training.aggregate(server, total, round)
        assert all((after[f"sum.filters.{name}"] == 1 + kept).all() for name in total)


# Who holds what


def dealt(federation: Federation, shares: Any, pool: NDArray[np.int64]) -> Federation:
    """The same train split dealt out otherwise. Each client validates on what the first client validated on."""
    validation = federation.training.validation(0)
    parts = [pool[shares[i]] for i in range(len(shares)) if len(shares[i])]
    rng = np.random.default_rng(0)
    held = [np.concatenate([rng.permutation(part), validation]) for part in parts]
    offsets = np.cumsum([0, *map(len, held)])
    clients = Clients(np.concatenate(held), offsets, np.array([len(part) for part in parts]), np.zeros(len(parts)))
    return replace(federation, training=clients)


def test_the_same_train_split_gives_the_same_bits_however_it_is_dealt_out(tmp_path: Path) -> None:
    config = config_of("mirror=true")
    source = load("digits")
    federation = build_federation(source, config.partition, 0)
    clients = federation.training
    pool = np.sort(np.concatenate([clients.train(i) for i in range(len(clients))]))
    labels, rng = source.labels[pool], np.random.default_rng(1)
    ways = {
        "as it was": federation,
        "pathological": dealt(federation, pathological(labels, 12, 2, False, rng), pool),
        "iid": dealt(federation, iid(len(pool), 7, rng), pool),
        "dirichlet": dealt(federation, dirichlet(labels, 9, 0.1, rng), pool),
        "one machine": dealt(federation, iid(len(pool), 1, rng), pool),
    }
    states = {way: ran(config, tmp_path / way, given).progress.server for way, given in ways.items()}
    for way, state in states.items():
        assert all(torch.equal(value, states["as it was"][name]) for name, value in state.items()), way
    assert all(state["psi.last.weight"].abs().max() > 0 for state in states.values())


@pytest.mark.parametrize("participants", [3, 7, 0.5])
def test_parts_of_the_clients_in_turn_come_to_the_bits_of_all_at_once(participants: float, tmp_path: Path) -> None:
    whole, parts = config_of(), config_of(clients_per_round=participants)
    engine = ran(parts, tmp_path / "parts")
    assert parts.rounds == whole.rounds * engine.training.rounds_a_pass > whole.rounds == 4
    expected = ran(whole, tmp_path / "whole").progress.server
    assert all(torch.equal(value, expected[name]) for name, value in engine.progress.server.items())
    asked = [i for round in range(engine.training.rounds_a_pass) for i in engine.cohort.participants(round)]
    assert asked == list(range(20))


def test_the_size_of_batches_changes_no_bit(tmp_path: Path) -> None:
    one, other = (ran(config_of(f"batch_size={n}"), tmp_path / str(n)).progress.server for n in (512, 3))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_rounds_after_the_last_pass_change_nothing(tmp_path: Path) -> None:
    one, other = (ran(config_of(rounds=n), tmp_path / str(n)).progress.server for n in (4, 6))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


# What it is good for


def test_it_tells_digits_apart_better_than_chance_by_far(tmp_path: Path) -> None:
    engine = ran(config_of("filters=24", score=["none", "label-shift"]), tmp_path / "run")
    rows = {row["row"]: row["test"] for row in engine.folder.result()["rows"]}
    assert rows["closed-form"] > 93
    assert rows["closed-form-label-shift"] > 93


def test_steps_down_a_gradient_are_refused_in_words() -> None:
    training = assemble(config_of()).training
    for name in ("tent", "atp", "one-step", "sampled"):
        with pytest.raises(ConfigError, match="closed-form"):
            make_personalizer(name, training, personalizer_class(name).Hyper())


def test_a_grid_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="smaller patch or grid"):
        assemble(config_of("patch=8"))


def test_a_run_too_short_to_end_is_refused(tmp_path: Path) -> None:
    said = upfl(
        "train", "closed-form", "digits", "--rounds", "20", "--clients-per-round", "9", "--out", tmp_path / "run"
    )
    assert said.code == 2
    assert "takes 36 rounds" in said.err
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="takes 4 rounds"):
        train(config_of(rounds=3), tmp_path / "run")


def test_features_are_made_once_for_all_personalizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    apply = Patches.apply

    def counted(self: Patches, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        made.extend([i.sum().item() for i in x])
        return apply(self, weight, bias, x)

    monkeypatch.setattr(Patches, "apply", counted)
    engine = ran(config_of(score=["none", "label-shift", "em", "calibrated"]), tmp_path / "run")
    source = engine.federation.source.x
    assert len(made) == len(source), "each image once: train splits in the last pass, the others when they are scored"


def test_features_that_are_kept_are_those_of_these_samples_and_filters() -> None:
    training: Any = assemble(config_of()).training
    params = {**dict(zip(("patches.weight", "patches.bias"), filters(training.layer), strict=True))}
    x = images(5, 1, 8, 8)
    first = training.features(params, x)
    assert torch.equal(first, training.layer.apply(*params.values(), x))
    assert torch.equal(training.features(params, x.clone()), first)
    x[2, 0, 3, 3] += 1
    assert not torch.equal(training.features(params, x)[2], first[2]), "changed in place"
    other = {name: value + 0.25 for name, value in params.items()}
    assert torch.equal(training.features(other, x), training.layer.apply(*other.values(), x))
    assert len(training.remembered.kept) == 11, "five, the one that changed, five of other filters"
    x[0] = torch.nan
    assert training.features(params, x)[0].isnan().any(), "what is no number must show"


def test_a_run_is_as_long_as_the_passes_take_whatever_the_profile() -> None:
    for profile in ("paper", "lite", "smoke"):
        config = configure("closed-form-label-shift", "cifar10", profile=profile)
        assert (config.rounds, config.clients_per_round, config.evaluate_every) == (12, None, 12)
    assert configure("closed-form", "cifar10", clients_per_round=20).rounds == 36
    assert configure("closed-form", "cifar10", clients_per_round=0.4, settings=["iterations=3"]).rounds == 15


def test_a_newcomers_model_is_an_onnx_file_like_any_other(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run = train(config_of("mirror=true", "grid=2", score=["label-shift"]), tmp_path / "run", workers=1)
    images = run.federation.source.x[run.federation.new.all(0)]
    mine = export(run, tmp_path / "bundle").personalize(images)
    assert onnx_export(mine, tmp_path / "me.onnx") < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "me.onnx", providers=["CPUExecutionProvider"])
    for count in (1, 20):
        (probabilities,) = session.run(None, {"images": (images[:count] / 16).astype(np.float32)})
        np.testing.assert_allclose(probabilities, mine.predict_proba(images[:count]), atol=1e-5)
