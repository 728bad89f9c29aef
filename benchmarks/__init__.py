"""Benchmarks of the whole: throughput, bookkeeping, memory, planner, release. `python -m benchmarks --help`; README.md says how to read them.

They drive the real parts (planner, register, worker processes, supervisor, committer, release) over folders of their own and write what they
measured to results/. Nothing of the product may import from here.
"""
