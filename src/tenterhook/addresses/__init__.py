"""Addresses, and what they mean in a model, a graph or a function."""
