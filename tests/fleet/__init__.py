"""Supervisor, committer, local fleet, and the outcomes table they write."""
