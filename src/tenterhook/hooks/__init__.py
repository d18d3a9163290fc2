"""Hooks in a model: what is done at a site, by whom, and for how long."""
