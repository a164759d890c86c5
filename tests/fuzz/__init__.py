"""Damaged bundles, run folders, arrays and messages, by a seed: `python -m tests.fuzz --cases 20000`.

Each case changes something that is good - a value of a document, a header, bytes, the kind of a file - with checksums
and digests that fit again wherever they can, and takes it in. It must be accepted or refused by an error of ours: no
other exception, no more than ten seconds, no more than a gigabyte, and no file outside may change.
"""
