"""Every private name of torch and CPython that we rely on, one file per subject."""
