"""Watching a training: what is recorded, when, and what the rules say about it."""
