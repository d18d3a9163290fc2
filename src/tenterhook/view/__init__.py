"""A run as a page: live from a local server, or as one file. The page itself is in web/, and is built by `make web`."""
