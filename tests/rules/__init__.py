"""Proof 1, the rules: state machines and slow reference models beside the code that decides who may write and what counts.

A model here is written from DESIGN and docs/states.md, never from the code it judges, and it is slow on purpose: it looks at everything
that happened instead of keeping sums. Crashes of whole processes are the simulation's business (`batch_assets/sim/crash.py`); here
everything happens in one thread, in any order. `tests/planted` shows that these tests bite.
"""
