/* The statistics of tensors in one pass, for machines that have a C compiler; see native.py. */

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>

#include "columns.h" /* Row, START and BINS: native.py writes it from columns.py */

enum { BLOCK = 8192, LANES = 32, RUNS = 32, RUN = 32 };

/* The numbers that count some of the finite values: those v for which this holds. */
#define COUNTED(X) X(zeros, v == 0)

#define ADD(name, holds) row->name += (holds);
#define DECLARE(name, holds) int32_t name[LANES] = {0};
#define ADD_IN_LANE(name, holds) name[j] = (holds) ? name[j] + 1 : name[j];
#define FOLD(name, holds) name[j] += name[j + half];
#define ADD_FOLDED(name, holds) row->name += name[0];

static void careful(const float *x, int64_t n, Row *row) {
    double sum = 0, square = 0; /* by themselves: small numbers would get lost in the sums of a whole tensor */
    for (int64_t i = 0; i < n; i++) {
        double v = x[i];
        if (isnan(v)) row->nan++;
        else if (v == INFINITY) row->pos_inf++;
        else if (v == -INFINITY) row->neg_inf++;
        else {
            COUNTED(ADD)
            sum += v;
            square += v * v;
            if (v < row->min) row->min = v;
            if (v > row->max) row->max = v;
        }
    }
    row->sum += sum;
    row->sumsq += square;
}

static float total(float *lanes) {
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
    return lanes[0];
}

/* In float32 around a shift, or little would be left of a small deviation from a large mean: around the mean of the
   first values, where that says more than they deviate, and the others turn out to be like them. Every lane adds up by
   itself, so that the compiler can use vectors without changing what is computed; n is a multiple of LANES. */
static void quick(const float *restrict x, int n, Row *row, int shifted) {
    float near[LANES], far[LANES], sum[LANES], square[LANES] = {0}, low[LANES], high[LANES];
    COUNTED(DECLARE)
    for (int j = 0; j < LANES; j++) low[j] = high[j] = x[0], sum[j] = x[j] - x[0];
    float mean = x[0] + total(sum) / LANES; /* so of equal values it is that value */
    for (int j = 0; j < LANES; j++) near[j] = (x[j] - mean) * (x[j] - mean), far[j] = x[j] * x[j], sum[j] = 0;
    float shift = shifted && 2 * total(near) <= total(far) ? mean : 0;
    for (int i = 0; i < n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float v = x[i + j], d = v - shift;
            sum[j] += d;
            square[j] += d * d;
            low[j] = v < low[j] ? v : low[j];
            high[j] = v > high[j] ? v : high[j];
            COUNTED(ADD_IN_LANE)
        }
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) {
            low[j] = low[j + half] < low[j] ? low[j + half] : low[j];
            high[j] = high[j + half] > high[j] ? high[j + half] : high[j];
            COUNTED(FOLD)
        }
    double s = shift, sums = total(sum), squares = total(square), least = low[0], most = high[0];
    if (!(squares < 1e30 && fabs(s) < 1e30) || (squares < 1e-30 && least != most)) {
        careful(x, n, row); /* NaN, infinite, huge or tiny values */
        return;
    }
    if (2 * fabs(sums + n * s) < fabs(n * s)) {
        quick(x, n, row, 0);
        return;
    }
    COUNTED(ADD_FOLDED)
    row->sum += sums + n * s;
    row->sumsq += squares + 2 * s * sums + n * s * s;
    if (least < row->min) row->min = least;
    if (most > row->max) row->max = most;
}

/* What to measure: `data`, less `minus` if there is any; a copy of it goes to `copy`. */
typedef struct {
    const float *data, *minus;
    float *copy;
    int64_t size;
    Row *row;
    int32_t *bins;
} Job;

static void count(const Job *job) {
    int64_t n = job->size, runs = n > RUNS * RUN ? RUNS : 1, run = n > RUNS * RUN ? RUN : n, step = n / runs;
    for (int64_t k = 0; k < runs; k++)
        for (int64_t i = k * step; i < k * step + run; i++) {
            float value = job->minus ? job->data[i] - job->minus[i] : job->data[i];
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            job->bins[bits >> 23]++;
        }
    job->row->sampled = runs * run;
}

static void measure(const Job *job) {
    Row *row = job->row;
    *row = START;
    memset(job->bins, 0, BINS * sizeof *job->bins);
    row->count = job->size;
    float apart[BLOCK];
    for (int64_t i = 0; i < job->size; i += BLOCK) { /* all that is done to a block is done while the cache has it */
        int64_t n = job->size - i < BLOCK ? job->size - i : BLOCK;
        const float *values = job->data + i;
        if (job->minus) {
            for (int64_t j = 0; j < n; j++) apart[j] = values[j] - job->minus[i + j];
            values = apart;
        }
        int64_t even = n - n % LANES;
        if (even) quick(values, even, row, 1);
        if (even < n) careful(values + even, n - even, row);
        if (job->copy) memcpy(job->copy + i, job->data + i, n * sizeof *values);
    }
    if (job->size) count(job);
}

void one(const float *data, int64_t size, Row *row, int32_t *bins) {
    Job job = {data, NULL, NULL, size, row, bins};
    measure(&job);
}

/* Many at once: a thread of ours takes part, where it was started and is asked to. */
static const Job *jobs;
static int64_t many, taken, done;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER, lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER, ready = PTHREAD_COND_INITIALIZER;

static void take_part(void) { /* with the lock held */
    while (taken < many) {
        const Job *job = jobs + taken++;
        pthread_mutex_unlock(&lock);
        measure(job);
        pthread_mutex_lock(&lock);
        if (++done == many) pthread_cond_signal(&ready);
    }
}

static void *help(void *unused) {
    pthread_mutex_lock(&lock);
    for (;;) {
        take_part();
        pthread_cond_wait(&more, &lock);
    }
    return unused;
}

void all(const Job *some, int64_t of_them, int helped) {
    pthread_mutex_lock(&turn); /* of the program's threads, one at a time */
    pthread_mutex_lock(&lock);
    jobs = some, many = of_them, taken = done = 0;
    if (helped) pthread_cond_signal(&more);
    take_part();
    while (done < many) pthread_cond_wait(&ready, &lock);
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&turn);
}

void renew(void) { /* in a process that was forked, which has no such thread, and may have been forked in between */
    pthread_mutex_init(&turn, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&more, NULL);
    pthread_cond_init(&ready, NULL);
    many = taken = done = 0;
}

int start(void) {
    pthread_t thread;
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before); /* signals are for the program's own threads */
    int failed = pthread_create(&thread, NULL, help, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed) pthread_detach(thread);
    return failed;
}

/* Which units have a value above 0, of values in the order [outer, unit, inner]. Those that are known to have one are
   not looked at, and of the others no more than it takes: for a unit that lives, next to nothing. */
void fires(const float *x, int64_t outer, int64_t units, int64_t inner, char *known) {
    for (int64_t i = 0; i < outer; i++) {
        int64_t silent = 0;
        for (int64_t unit = 0; unit < units; unit++) {
            const float *values = x + (i * units + unit) * inner;
            for (int64_t k = 0; k < inner && !known[unit]; k++) known[unit] = values[k] > 0;
            silent += !known[unit];
        }
        if (!silent) return;
    }
}
