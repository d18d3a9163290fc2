/* The statistics of tensors in one pass, for machines that have a C compiler; see _native.py. */

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

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

/* What to measure: `data`, less `minus` if there is any; a copy of it goes to `copy`. */
typedef struct {
    const float *data, *minus;
    float *copy;
    int64_t size;
    double *row;
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
    job->row[SAMPLED] = runs * run;
}

static void measure(const Job *job) {
    double *row = job->row;
    memset(row, 0, COLUMNS * sizeof *row);
    memset(job->bins, 0, BINS * sizeof *job->bins);
    row[COUNT] = job->size;
    row[MIN] = INFINITY;
    row[MAX] = -INFINITY;
    float apart[BLOCK];
    for (int64_t i = 0; i < job->size; i += BLOCK) { /* all that is done to a block is done while the cache has it */
        int64_t n = job->size - i < BLOCK ? job->size - i : BLOCK;
        const float *values = job->data + i;
        if (job->minus) {
            for (int64_t j = 0; j < n; j++) apart[j] = values[j] - job->minus[i + j];
            values = apart;
        }
        if (n == BLOCK) quick(values, row);
        else careful(values, n, row);
        if (job->copy) memcpy(job->copy + i, job->data + i, n * sizeof *values);
    }
    if (job->size) count(job);
}

/* Jobs wait in a ring for a thread of ours, or for whoever calls finish(), which takes part. */
enum { RING = 4096 };
static Job ring[RING];
static char done[RING];
static int64_t added, taken;
int64_t finished; /* so many of the first are */
static int sleeps;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER, fewer = PTHREAD_COND_INITIALIZER;

static void take(void) { /* with the lock held, and a job there */
    int64_t k = taken++;
    Job job = ring[k % RING];
    pthread_mutex_unlock(&lock);
    measure(&job);
    pthread_mutex_lock(&lock);
    done[k % RING] = 1;
    while (finished < taken && done[finished % RING]) finished++;
    pthread_cond_broadcast(&fewer);
}

static void *help(void *unused) { /* to wake it takes the caller longer than a job, so for a while it looks by itself */
    const struct timespec moment = {0, 100000};
    pthread_mutex_lock(&lock);
    for (int looked = 0;; looked++) {
        for (; taken < added; looked = 0) take();
        if (looked < 50) {
            pthread_mutex_unlock(&lock);
            nanosleep(&moment, NULL);
            pthread_mutex_lock(&lock);
        } else {
            sleeps = 1;
            while (taken == added) pthread_cond_wait(&more, &lock);
            sleeps = 0;
        }
    }
    return unused;
}

int start(void) { /* also again in a process that was forked, which has no such thread */
    pthread_t thread;
    sigset_t all, before;
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&more, NULL);
    pthread_cond_init(&fewer, NULL);
    added = taken = finished = 0;
    sleeps = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
    int failed = pthread_create(&thread, NULL, help, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed) pthread_detach(thread);
    return failed;
}

int64_t submit(const float *data, const float *minus, float *copy, int64_t size, double *row, int32_t *bins) {
    Job job = {data, minus, copy, size, row, bins};
    pthread_mutex_lock(&lock);
    while (added - finished == RING) {
        if (taken < added) take();
        else pthread_cond_wait(&fewer, &lock);
    }
    done[added % RING] = 0;
    ring[added++ % RING] = job;
    if (sleeps) pthread_cond_signal(&more);
    int64_t number = added - 1;
    pthread_mutex_unlock(&lock);
    return number;
}

void finish(void) {
    pthread_mutex_lock(&lock);
    while (finished < added) {
        if (taken < added) take();
        else pthread_cond_wait(&fewer, &lock);
    }
    pthread_mutex_unlock(&lock);
}

void now(const float *data, const float *minus, float *copy, int64_t size, double *row, int32_t *bins) {
    Job job = {data, minus, copy, size, row, bins};
    measure(&job);
}
