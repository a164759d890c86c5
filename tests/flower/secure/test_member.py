"""A link that cheats is refused by honest nodes, and what it sees of a node's vector is noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.secure import Federation, advert_of, random_vectors, registered, session
from upfl.flower.secure import Advert, Collector, RefusedError, Session
from upfl.flower.secure.member import pair_mask_key
from upfl.flower.secure.primitives import add_mask, combine, new_key, public_of, sign
from upfl.flower.secure.session import transcript

SIZE, CLIENTS, THRESHOLD = 16, 5, 4
ABOUT = session(THRESHOLD, SIZE)
VECTORS = random_vectors(np.random.default_rng(0), CLIENTS, SIZE)


def upto(step: str, about: Session = ABOUT) -> tuple[Federation, Collector, dict[str, Any]]:
    """A federation that has come so far, honestly."""
    federation, found = Federation(CLIENTS), dict[str, Any]()
    collector = Collector(about, range(CLIENTS))
    found["adverts"] = collector.advertised(federation.ask(c, "advertise", about) for c in range(CLIENTS))
    if step == "share":
        return federation, collector, found
    found["boxes"] = collector.shared({c: federation.ask(c, "share", found["adverts"]) for c in range(CLIENTS)})
    if step == "mask":
        return federation, collector, found
    for client in range(CLIENTS):
        collector.add(client, federation.ask(client, "mask", found["boxes"][client], VECTORS[client]))
    return federation, collector, found


# A link that puts its own key in a node's place


def test_a_substituted_key_is_found_by_everybody_else() -> None:
    federation, _, found = upto("share")
    own = replace(advert_of(found["adverts"], 1), mask_key=new_key()[1])
    shown = [own if advert.client == 1 else advert for advert in found["adverts"]]
    for client in (0, 2, 3, 4):
        with pytest.raises(RefusedError, match="client 1 are not signed by its registered key"):
            federation.ask(client, "share", shown)
    with pytest.raises(RefusedError, match="its own keys are not among"):
        federation.ask(1, "share", shown)


def test_a_key_that_the_link_signed_itself_or_moved_to_another_client_is_found() -> None:
    federation, _, found = upto("share")
    forged = Advert(1, new_key()[1], new_key()[1])
    forged = replace(forged, signature=sign(registered(99), forged.signed(ABOUT)))
    moved = replace(advert_of(found["adverts"], 2), client=1)
    for bad in (forged, moved):
        shown = [bad if advert.client == 1 else advert for advert in found["adverts"]]
        with pytest.raises(RefusedError, match=r"client 1 are not signed|there twice"):
            federation.ask(0, "share", shown)


def test_a_client_that_nobody_registered_is_refused() -> None:
    federation, _, found = upto("share")
    stranger = Advert(50, new_key()[1], new_key()[1])
    stranger = replace(stranger, signature=sign(registered(50), stranger.signed(ABOUT)))
    with pytest.raises(RefusedError, match="no registered key of client 50"):
        federation.ask(0, "share", [*found["adverts"], stranger])


def test_a_key_of_small_order_is_refused() -> None:
    federation, _, found = upto("share")
    weak = replace(advert_of(found["adverts"], 1), cipher_key=bytes(32))
    weak = replace(weak, signature=sign(registered(1), weak.signed(ABOUT)))
    with pytest.raises(RefusedError, match="public key of client 1 cannot be used"):
        federation.ask(0, "share", [weak if advert.client == 1 else advert for advert in found["adverts"]])


# A link that replays a round


def test_keys_of_another_sum_attempt_or_threshold_are_refused() -> None:
    for other in (replace(ABOUT, name="train/1"), replace(ABOUT, attempt=2), replace(ABOUT, threshold=5)):
        federation, _, found = upto("share", other)
        old = found["adverts"]
        now = [federation.ask(client, "advertise", ABOUT) for client in (0, 1)]
        with pytest.raises(RefusedError, match="are not signed by its registered key"):
            federation.ask(0, "share", [*now, *old[2:]])


def test_keys_of_the_same_session_that_a_node_no_longer_has_get_no_sum() -> None:
    """The very same session, begun twice: old keys pass for signed, and then nothing fits them."""
    federation, _, found = upto("share")
    old = advert_of(found["adverts"], 4)
    adverts = [federation.ask(client, "advertise", ABOUT) for client in range(CLIENTS)]
    shown = [*adverts[:4], old]
    sealed = {client: federation.ask(client, "share", shown) for client in range(4)}
    with pytest.raises(RefusedError, match="its own keys are not among"):
        federation.ask(4, "share", shown)
    boxes = Collector(ABOUT, range(CLIENTS))
    boxes.advertised(shown)
    federation.ask(4, "share", adverts)
    with pytest.raises(RefusedError, match="were not sealed for it in this session"):
        federation.ask(4, "mask", {client: sealed[client][4] for client in range(4)}, VECTORS[4])


def test_shares_of_an_earlier_session_are_refused() -> None:
    federation, _, earlier = upto("mask")
    adverts = [federation.ask(client, "advertise", replace(ABOUT, attempt=2)) for client in range(CLIENTS)]
    for client in range(CLIENTS):
        federation.ask(client, "share", adverts)
    with pytest.raises(RefusedError, match="were not sealed for it in this session"):
        federation.ask(0, "mask", earlier["boxes"][0], VECTORS[0])


def test_a_sum_whose_masks_were_taken_off_is_not_given_again() -> None:
    federation = Federation(CLIENTS)
    federation.sum(ABOUT, VECTORS)
    with pytest.raises(RefusedError, match="gives it once"):
        federation.ask(0, "advertise", replace(ABOUT, attempt=2))
    federation.ask(0, "advertise", replace(ABOUT, name="train/1"))


def test_what_was_added_beside_something_else_is_not_given_again_without_it() -> None:
    federation = Federation(CLIENTS)
    federation.sum(replace(ABOUT, name="fit/1/gate/0 and fit/1/likeness/0"), VECTORS)
    for name in ("fit/1/gate/0", "fit/1/likeness/0", "fit/1/likeness/0 and fit/1/gate/1"):
        with pytest.raises(RefusedError, match="gives it once"):
            federation.ask(0, "advertise", replace(ABOUT, name=name, attempt=2))
    federation.ask(0, "advertise", replace(ABOUT, name="fit/1/gate/1 and fit/1/likeness/1"))


def test_a_step_is_answered_once_and_in_order() -> None:
    federation, _, found = upto("mask")
    for step, *what in (("share", found["adverts"]), ("agree", range(CLIENTS)), ("unmask", {})):
        with pytest.raises(RefusedError, match="out of turn"):
            federation.ask(0, step, *what)
    federation.ask(0, "mask", found["boxes"][0], VECTORS[0])
    with pytest.raises(RefusedError, match="out of turn"):
        federation.ask(0, "mask", {peer: found["boxes"][0][peer] for peer in (1, 2, 3)}, VECTORS[0])


# A link that asks for both shares of a node, or shows different sets of those that remain


def test_no_member_reveals_both_shares_of_a_peer() -> None:
    federation, collector, _ = upto("agree")
    everybody, but_four = list(range(CLIENTS)), [0, 1, 2, 3]
    signatures = {client: federation.ask(client, "agree", everybody) for client in range(CLIENTS)}
    with pytest.raises(RefusedError, match="out of turn"):
        federation.ask(0, "agree", but_four)
    revealed = federation.ask(0, "unmask", signatures)
    again = federation.ask(0, "unmask", {client: signatures[client] for client in but_four})
    assert revealed == again, "asked again, it says the same: shares of seeds, of nobody's key"
    assert np.array_equal(
        collector.unmasked({c: federation.ask(c, "unmask", signatures) for c in everybody}),
        sum(VECTORS.values(), np.zeros(SIZE, np.uint64)),
    )


def test_of_a_peer_that_remains_its_seeds_share_is_revealed_and_of_one_that_does_not_its_keys() -> None:
    federation, _, _ = upto("agree")
    live = [0, 1, 2, 3]
    signatures = {client: federation.ask(client, "agree", live) for client in live}
    for client in live:
        held = dict(zip(federation.states[client]["shares.of"], federation.states[client]["shares"], strict=True))
        keys, seeds = ({peer: share[part] for peer, share in held.items()} for part in (slice(32), slice(32, 64)))
        revealed = federation.ask(client, "unmask", signatures)
        assert revealed == {peer: seeds[peer] for peer in live} | {4: keys[4]}
        with pytest.raises(RefusedError, match="out of turn"):
            federation.ask(client, "agree", range(CLIENTS))
        assert federation.ask(client, "unmask", signatures) == revealed


def test_different_sets_of_those_that_remain_get_no_share_from_anybody() -> None:
    federation, _, _ = upto("agree")
    sets = {0: range(5), 1: range(5), 2: range(5), 3: [1, 2, 3, 4], 4: [1, 2, 3, 4]}
    signatures = {client: federation.ask(client, "agree", live) for client, live in sets.items()}
    for client in range(CLIENTS):
        theirs = {peer: signature for peer, signature in signatures.items() if peer in sets[client]}
        with pytest.raises(RefusedError, match="did not sign what this one signed"):
            federation.ask(client, "unmask", theirs)
        same = {peer: signature for peer, signature in signatures.items() if sets[peer] == sets[client]}
        with pytest.raises(RefusedError, match="below the threshold"):
            federation.ask(client, "unmask", same)


def test_a_member_that_was_asked_for_something_else_gets_no_sum_made() -> None:
    federation, collector, found = upto("mask")
    for client in range(CLIENTS):
        about = b"another model" if client == 2 else b"the model"
        collector.add(client, federation.ask(client, "mask", found["boxes"][client], VECTORS[client], about))
    signatures = {client: federation.ask(client, "agree", range(CLIENTS)) for client in range(CLIENTS)}
    for client in range(CLIENTS):
        with pytest.raises(RefusedError, match="asked for something else"):
            federation.ask(client, "unmask", signatures)


def test_sets_only_shrink_and_stay_above_the_threshold() -> None:
    federation, _, found = upto("mask")
    with pytest.raises(RefusedError, match="below the threshold"):
        federation.ask(0, "mask", {1: found["boxes"][0][1], 2: found["boxes"][0][2]}, VECTORS[0])
    with pytest.raises(RefusedError, match="client 9, which advertised no keys"):
        federation.ask(0, "mask", found["boxes"][0] | {9: b"x" * 92}, VECTORS[0])
    federation.ask(0, "mask", {peer: found["boxes"][0][peer] for peer in (1, 2, 3)}, VECTORS[0])
    for live in ([0, 1, 2, 4], [1, 2, 3, 4]):
        with pytest.raises(RefusedError, match="is not a part of those before, or leaves this one out"):
            federation.ask(0, "agree", live)
    with pytest.raises(RefusedError, match="below the threshold"):
        federation.ask(0, "agree", [0, 1, 2])


def test_a_threshold_that_is_no_majority_is_refused() -> None:
    about = replace(ABOUT, threshold=2)
    federation, _, found = upto("share", about)
    with pytest.raises(RefusedError, match="no majority"):
        federation.ask(0, "share", found["adverts"])
    with pytest.raises(RefusedError, match="threshold of at least 2"):
        federation.ask(0, "advertise", replace(ABOUT, threshold=1))


@pytest.mark.parametrize("place", [0, 5, -1])
def test_a_changed_box_is_refused(place: int) -> None:
    federation, _, found = upto("mask")
    box = bytearray(found["boxes"][0][3])
    box[place] ^= 1
    with pytest.raises(RefusedError, match="from client 3 were not sealed"):
        federation.ask(0, "mask", found["boxes"][0] | {3: bytes(box)}, VECTORS[0])


def test_boxes_that_were_swapped_are_refused() -> None:
    federation, _, found = upto("mask")
    boxes = found["boxes"]
    with pytest.raises(RefusedError, match="were not sealed"):
        federation.ask(0, "mask", boxes[0] | {1: boxes[2][1]}, VECTORS[0])


# What the link sees


def chosen(kind: str, size: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Vectors that would show through anything but noise."""
    if kind == "zeros":
        return np.zeros(size, np.uint64)
    if kind == "ones":
        return np.full(size, 2**64 - 1, np.uint64)
    return np.arange(size, dtype=np.uint64) << np.uint64(40)


@pytest.mark.parametrize("kind", ["zeros", "ones", "ramp"])
def test_what_the_link_sees_of_a_chosen_vector_is_uniform(kind: str) -> None:
    """Bytes and bits over rounds; between rounds and members, differences too. Bounds: six standard deviations."""
    size, rounds = 512, 40
    seen: list[np.ndarray[Any, Any]] = []
    for round in range(rounds):
        link: dict[str, Any] = {}
        vectors = dict.fromkeys(range(3), chosen(kind, size))
        Federation(3).sum(session(2, size, f"train/{round}"), vectors, seen=link)
        seen += [link["masked"][client] for client in range(3)]
    values = np.stack(seen)
    pairs = np.concatenate([values.ravel(), (values[1:] - values[:-1]).ravel()])
    bytes_, bits = pairs.view(np.uint8), np.unpackbits(pairs.view(np.uint8)).reshape(-1, 64)
    expected = len(bytes_) / 256
    chi = float(((np.bincount(bytes_, minlength=256) - expected) ** 2 / expected).sum())
    assert abs(chi - 255) < 6 * np.sqrt(2 * 255)
    assert (abs(bits.mean(0) - 0.5) < 6 * 0.5 / np.sqrt(len(bits))).all()
    assert len(np.unique(pairs)) == len(pairs)
    high = (values.astype(np.float64) / 2**64 - 0.5) * np.sqrt(12)
    between = high @ high.T / size
    assert (abs(between - np.eye(len(values))) < 6 * 1.5 / np.sqrt(size)).all()


def test_without_the_seed_even_all_pairwise_masks_do_not_show_a_vector() -> None:
    """A late vector of a member that was taken for gone: the link restores its key, and still sees noise."""
    left = []
    for round in range(30):
        about = session(2, 64, f"train/{round}")
        federation, collector = Federation(3), Collector(about, range(3))
        adverts = collector.advertised(federation.ask(c, "advertise", about) for c in range(3))
        boxes = collector.shared({c: federation.ask(c, "share", adverts) for c in range(3)})
        masked = {c: federation.ask(c, "mask", boxes[c], np.zeros(64, np.uint64)) for c in range(3)}
        signatures = {c: federation.ask(c, "agree", [0, 1]) for c in (0, 1)}
        revealed = {c: federation.ask(c, "unmask", signatures) for c in (0, 1)}
        secret, context = combine([(c + 1, revealed[c][2]) for c in (0, 1)]), transcript(about, adverts)
        assert public_of(secret) == adverts[2].mask_key
        for peer in (0, 1):
            add_mask(masked[2], pair_mask_key(secret, adverts[peer].mask_key, context, 2, peer), 1)
        left.append(masked[2])
    bits = np.unpackbits(np.stack(left).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 6 * 0.5 / np.sqrt(len(bits))
    assert len(np.unique(np.stack(left))) == 30 * 64
