"""The numbers that are kept of a tensor: counts, sums, extrema and a histogram, which all add up exactly.

They come as two tensors, a row for each tensor that was measured: `numbers` (float64, the columns of NUMBERS) and
`histogram` (int32, BINS columns). Sums and extrema are over the finite values; where there are none, min is +inf and
max is -inf. The histogram counts values by sign and power of two, of a fixed sample of the tensor where that is large;
`sampled` says how many that were. A value's bin is the upper nine bits of its float32 form:

    bin = sign * 256 + biased exponent      0 < exponent < 255: 2**(exponent - 127) <= |value| < 2**(exponent - 126)
                                            exponent 0: zero, or smaller than all that; 255: infinite or NaN
"""

NUMBERS = ("count", "nan", "pos_inf", "neg_inf", "zeros", "sum", "sumsq", "min", "max", "sampled")
BINS = 512
