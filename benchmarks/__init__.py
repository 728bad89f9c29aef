"""Benchmarks of the whole: `python -m benchmarks --help`; README.md says what each measures and how to read it.

They drive the real parts (planner, register, workers, supervisor, committer, release) over folders of their own and write what they
measured to results/. Nothing of the product may import from here.
"""
