"""Structured values: what is in them, and the same with other things in it."""
