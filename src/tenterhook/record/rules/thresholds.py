"""Every number that a rule compares with, and where it is from. "Seen" is what some trainings gave, "chosen" is a guess
that no healthy training in tests/record/test_loss_rules.py contradicts: neither is a survey.
"""

# Losses
INITIAL_TIMES, INITIAL_PLUS = 1.1, 0.5  # of ln C, and more; seen: 1.03 × ln C on healthy ones, ≥ 1.5 on faulty ones
BLOW_UP_STEPS = 20  # chosen
BLOW_UP_TIMES = 5.0  # of the first loss, or of a guess; chosen
BLOW_UP_LAST = 3  # steps in a row, for a single hard batch is no blow-up; chosen
SPIKE_WINDOW, SPIKE_WARM = 128, 64  # steps
SPIKE_SIGMAS, SPIKE_LOG_SIGMAS, SPIKE_TIMES = 6.0, 4.0, 2.0  # above the mean of the window
SPIKE_FIRST, SPIKE_SHARE = 20, 0.1  # and by that share of the mean of the first losses
FALLING_STEPS, FALLING_FIRST, FALLING_LAST = 200, 20, 50  # when to look, and the steps that are compared
FALLING_SHARE = 0.02  # lower, at least
CHANCE_STEPS = 300  # when to look; chosen
CHANCE_STEPS_OF_WORDS = 1000  # for a language model, which first learns how often words are; chosen
CHANCE_WORDS = 1000  # classes from which on these are words
CHANCE_FROM, CHANCE_SAMPLES = 50, 6  # first step that counts, and samples that are compared with as many before
CHANCE_SHARE = 0.98  # of the entropy of the labels; seen near step 300: 0.985 – 1.005 on random ones, 0.973 on slow SGD
CHANCE_ABOVE = 1.5  # of the same: a loss above that has gone up, which is another fault; chosen
CHANCE_FALL = 0.015  # from one window to the next: what falls faster does learn; chosen
PROBABILITIES_OFF = 0.02  # how far rows of probabilities may be from one: bfloat16 has 8 bits
LOG_PROBABILITIES_OFF = 0.05  # the same for the logarithm
ROWS_SEEN = 4  # samples in which that has to hold, for the first may be by chance; chosen
FLOOR = -1e-3  # a cross entropy is not below zero, but by rounding
SIGN_SEEN = 5  # samples in which the sign of a loss is the wrong one; chosen
UNBOUND_WINDOW, UNBOUND_TIMES = 20, 10.0  # steps, and times the first loss; chosen
UNBOUND_GROWTH = 1.2  # how much faster it falls each time; chosen
RATE_GONE = 1e-4  # of the highest; computed: a cosine is below that in 0.64 % of its steps
RATE_STEPS, RATE_SHARE = 50, 0.05  # for so many steps, and that share of all so far
ONE_CLASS_RATIO = 0.25  # entropy of a batch ÷ that of all labels; seen: 0 – 0.09 when sorted; else chosen
ONE_CLASS_BATCHES, ONE_CLASS_LABELS = 10, 4  # chosen: with fewer, chance alone makes such batches
ONE_CLASS_ENTROPY = 0.3  # of all labels, at least; chosen
BAD_BATCH_STEPS = 5  # from a batch that is far off to the NaN that it leads to; chosen
LEAK_SHARE, LEAK_SEEN = 0.9999, 5  # of a column's variance between classes, and samples in a row; chosen
AT_ONCE_STEPS, AT_ONCE_LABELS = 30, 8  # steps at most, and labels in a batch; chosen, only for a note
AT_ONCE_SHARE = 0.02  # of a guess's loss; chosen, only for a note
MOVING_SHARE, MOVING_CALLS = 0.25, 4  # steps with calls under no_grad; calls for each backward pass; chosen

# Weights
GROWTH_STEPS, GROWTH_TIMES = 20, 6.0  # of the rms of weights; seen: 15 – 247 on faulty ones, ≤ 2.5 else
GROWTH_FLOOR, GROWTH_FEWEST = 1e-3, 1  # weights below that have to grow; how many others there must be; chosen
OLD_GRADIENTS, OLD_GRADIENTS_OF = 5, 8  # steps with the gradients of the one before in them; chosen
REPEATED_STEPS, REPEATED_STEPS_OF = 3, 8  # chosen: every second step is one, where it is by mistake
DROPOUT_HIGH = 0.85  # chosen: who wants to keep 0.9, and says so, drops 0.9; published ones are up to 0.8
CLIP_TIMES, CLIP_SHARE = 100.0, 0.5  # of the limit, and of the values; chosen
CLIP_WARN, CLIP_NOTE = 16, 48  # samples in a row; chosen: norms are above a usual limit for long at first
NORM_BATCH, NORM_VALUES = 2, 4096  # samples in a batch; values of a channel, from which on it is a note; chosen
NORM_OFTEN, NORM_OF = 6, 8  # samples, for the last batch of an epoch may be small; chosen
INPUT_RMS = 30.0  # of a feature; seen: ≤ 10 on standardised data and observations of games, 80 – 110 on bytes
INPUT_OFTEN, INPUT_OF = 3, 8  # samples; chosen
NOTHING_PASSES, NOTHING_SAMPLES = 10, 12  # backward passes without a step; samples of an optimizer; chosen
CUT_SAMPLES = 12  # without a gradient; chosen, as for parameters that are never trained
