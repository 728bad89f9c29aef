"""Dagster sensors of one job. Thin and idempotent: each reads the register and asks for a run of a job that a person could start as well.

All are stopped by default; switch them on in the UI when the job may run by itself.
"""

from sensors.job_sensors import build_sensors

__all__ = ["build_sensors"]
