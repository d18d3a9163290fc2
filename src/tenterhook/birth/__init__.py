"""The birth of a value: which operation, on which line, made the first one that is not finite, and why.

trace      every operation of what runs meanwhile: what it made of what
made       one of them that made such a value, and where its bad inputs came from
lines      which line of whose code ran, in which module
causes     why, as far as the inputs tell
birth      all of it, as a person reads it
find       `find_nonfinite` and `find_first`: in code of the user's own
replay     a bad step of a training, run again under a trace
loss_code  for that, the user's lines from the call of the model to `backward()`
state      what it must not change
alone      what it cannot run in one of several processes
capsule    such a step in a file
"""
