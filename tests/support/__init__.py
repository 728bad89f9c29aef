"""Builders that several test modules share: job folders, models, installations."""
