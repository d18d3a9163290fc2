"""Values inside a forward: the variables and operations of a function."""
