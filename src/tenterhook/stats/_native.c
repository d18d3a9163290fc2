/* The statistics of tensors in one pass, for machines that have a C compiler; see _native.py. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { COUNT, NAN_, POS_INF, NEG_INF, ZEROS, SUM, SUMSQ, MIN, MAX, SAMPLED, COLUMNS };
enum { BLOCK = 1024, LANES = 32, RUNS = 32, RUN = 32, BINS = 512 };

static void careful(const float *x, int64_t n, double *row) {
    for (int64_t i = 0; i < n; i++) {
        double v = x[i];
        if (isnan(v)) row[NAN_]++;
        else if (isinf(v)) row[v > 0 ? POS_INF : NEG_INF]++;
        else {
            row[ZEROS] += v == 0;
            row[SUM] += v;
            row[SUMSQ] += v * v;
            if (v < row[MIN]) row[MIN] = v;
            if (v > row[MAX]) row[MAX] = v;
        }
    }
}

/* In float32 around a shift, or little would be left of a small deviation from a large mean. Every lane adds up by
   itself, so that the compiler can use vectors without changing what is computed. */
static void quick(const float *restrict x, double *row) {
    float shift = x[0], sum[LANES] = {0}, square[LANES] = {0}, low[LANES], high[LANES];
    int32_t zeros[LANES] = {0};
    for (int j = 0; j < LANES; j++) low[j] = high[j] = shift;
    for (int i = 0; i < BLOCK; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float v = x[i + j], d = v - shift;
            sum[j] += d;
            square[j] += d * d;
            low[j] = v < low[j] ? v : low[j];
            high[j] = v > high[j] ? v : high[j];
            zeros[j] += v == 0;
        }
    double s = shift, total = 0, squares = 0, least = s, most = s, none = 0;
    for (int j = 0; j < LANES; j++) {
        total += sum[j];
        squares += square[j];
        none += zeros[j];
        if (low[j] < least) least = low[j];
        if (high[j] > most) most = high[j];
    }
    if (!(squares < 1e30 && fabs(s) < 1e30) || (squares < 1e-30 && least != most)) {
        careful(x, BLOCK, row); /* NaN, infinite, huge or tiny values */
        return;
    }
    row[ZEROS] += none;
    row[SUM] += total + BLOCK * s;
    row[SUMSQ] += squares + 2 * s * total + BLOCK * s * s;
    if (least < row[MIN]) row[MIN] = least;
    if (most > row[MAX]) row[MAX] = most;
}

static void count(const float *x, int64_t n, double *row, int32_t *bins) {
    int64_t runs = n > RUNS * RUN ? RUNS : 1, run = n > RUNS * RUN ? RUN : n, step = n / runs;
    for (int64_t k = 0; k < runs; k++)
        for (int64_t i = 0; i < run; i++) {
            uint32_t bits;
            memcpy(&bits, x + k * step + i, sizeof bits);
            bins[bits >> 23]++;
        }
    row[SAMPLED] = runs * run;
}

void measure(int64_t many, const float *const *data, const int64_t *sizes, double *rows, int32_t *bins) {
    for (int64_t t = 0; t < many; t++) {
        double *row = rows + t * COLUMNS;
        memset(row, 0, COLUMNS * sizeof *row);
        memset(bins + t * BINS, 0, BINS * sizeof *bins);
        row[COUNT] = sizes[t];
        row[MIN] = INFINITY;
        row[MAX] = -INFINITY;
        int64_t whole = sizes[t] / BLOCK * BLOCK;
        for (int64_t i = 0; i < whole; i += BLOCK) quick(data[t] + i, row);
        careful(data[t] + whole, sizes[t] - whole, row);
        if (sizes[t]) count(data[t], sizes[t], row, bins + t * BINS);
    }
}
