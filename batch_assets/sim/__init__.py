"""See the map in `batch_assets/__init__.py`."""
