"""Gristmill: batch LLM inference whose results can be trusted. This page is the map; it imports nothing.

definitions   composition root for Dagster: build_definitions, build_job_definitions
assets        the graph of one job, in flow order      checks   one asset check per check of the verdict
cli           gristmill …
sim           crash histories: python -m batch_assets.sim.crash; needs the dev extra
flows         planner, release, judge, publish: what an asset, op or command calls; no dagster
fleet         supervisor, committer, local worker processes
worker        python -m batch_assets.worker: claim, feed the engine, put answers in the shard's log; never imports dagster
reading       read_alias, read_record, query: the public reading door
engines       vllm_offline, scripted                    stores   SQL register, shard logs, Delta tables, models, specs
settings      read once, from the environment           core     pure rules and values
"""
