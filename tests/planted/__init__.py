"""Proof that the proofs bite: bugs as patches, each planted alone in a copy of the tree, where a proof must fail.

A patch is `NN_name.patch`: a few lines of `Word: text`, then a unified diff against the repository's folder. `Breaks:` says what no longer
holds, `Proof:` which suite is expected to catch it (a path that pytest takes, or `sim`, or both with a comma; the first is tried first).
`python -m tests.planted.run` plants them.
"""
