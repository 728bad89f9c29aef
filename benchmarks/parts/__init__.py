"""Parts of the pipeline, each run in a process of its own by `benchmarks.part`: a module with `work(order)`, which returns its facts.

What a module imports at its top is the part's baseline of memory.
"""
