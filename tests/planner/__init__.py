"""The planner: snapshots, buckets, frozen input, shards."""
