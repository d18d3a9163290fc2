"""The birth of a value: which operation, on which line, made the first one that is not finite, and why.

trace     every operation of what runs meanwhile: what it made of what
made      one of them that made such a value, and where its bad inputs came from
lines     which line of whose code ran, in which module
causes    why, as far as the inputs tell
find      `find_nonfinite` and `find_first`
"""
