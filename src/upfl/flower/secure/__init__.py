"""Secure sums: whoever adds up learns the sum, and of each part only that it is in it.

The protocol is Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017), in
its form against a server that cheats (figure 4 with the underlined parts). Members u hold vectors x_u of integers
modulo 2^64; the collector is the server. Of n members that advertise, t must stay to the end; 2 t > n.

    advertise   u makes two key pairs, c for shares and s for masks, and signs both public keys      U1: who did
    share       u checks all signatures, draws a seed b, splits b and its secret key s among U1      U2: who did
                (t shares restore them), and seals each member's two shares for it
    mask        y_u = x_u + PRG(b_u) + sum_{v in U2, v > u} PRG(s_uv) - sum_{v in U2, v < u} PRG(s_uv)     U3: who did
    agree       u signs U3, and what it was asked for, once                                          U4: who did
    unmask      u checks that t members signed the same, and reveals    of each v its share of b_v   U5: who did
                if v is in U3, and of the key s_v if v is in U2 but not in U3

The collector restores b_v of those in U3 and the keys of those that dropped out, and takes their masks off the sum of
y. The fourth step is the paper's consistency check, without which members could be shown different sets. Here it also
covers a digest of what x_u was computed from: a server that gave one member another model than the others, in order to
have that one's part stand out in the sum (Pasquini et al., CCS 2022), gets no sum.

    session.py      what a sum is, what is signed and hashed
    primitives.py   X25519, HKDF-SHA256, AES-256-CTR, AES-256-GCM, ECDSA from `cryptography`; Shamir from `pycryptodome`
    member.py       a node's side: it refuses whatever an honest server would not send
    collector.py    the server's side

- Every key serves one session. What is derived or sealed is bound to the transcript: a hash of the session's terms and
  of all public keys in it. So nothing of another session fits, and members that were shown different keys fail at once.
- A member answers each step once, and takes part in the unmasking of a sum once: a sum of the same name is refused
  afterwards, because two sums over different members would tell one part by their difference.
- A member does not reveal both shares of a peer: it decides by the one set that it signed.
- Nothing here knows Flower. Messages are values; what a member must remember goes through `Member.state`.
"""

from upfl.flower.secure.collector import Collector, TooFewError
from upfl.flower.secure.member import Member, RefusedError
from upfl.flower.secure.session import Advert, Session

__all__ = ["Advert", "Collector", "Member", "RefusedError", "Session", "TooFewError"]
