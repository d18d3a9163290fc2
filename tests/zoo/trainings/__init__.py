"""The trainings. Nothing in them knows of tenterhook."""
