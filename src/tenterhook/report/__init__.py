"""A recorded run, told to a person."""
