"""Dagster resources of the code location. Thin: an adapter from Dagster's configuration to our settings; no logic of ours."""

from resources.gristmill import GristmillResource

__all__ = ["GristmillResource"]
