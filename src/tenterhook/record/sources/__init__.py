"""What listens to torch while a training is recorded, one file per subject; each tells of what it sees by events."""
