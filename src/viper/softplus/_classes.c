/* Rows of the expected log-sum-exp on a CPU: what `class_moments` in logsumexp.py computes, for rows that need one piece.

   A class turns its mean and sd into weights w_l of shifts of a table (gumbel.py); a sum over l gives Q = 1 - L and D = L'
   at all nodes at once. Tables hold Q and D at all fractions of a step that shifts have, a row for each fraction, so that
   different l read the same numbers. The ratio L'/L is kept, P = prod L and R = sum L'/L are collected, and a second pass over the classes
   adds up P L'/L and P (L'/L)(R - L'/L).

   If this does not compile, logsumexp.py does all rows. */

#include "_vectors.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#define VECTORS 6 /* whose sums stay in registers */
#define CHUNK (VECTORS * LANES) /* nodes; tables have as many more columns on both sides, or more */
#define HALF_MOST 128 /* shifts on each side of the middle one, as in compiled_classes.py */
#define BEYOND 8 /* shifts added to them on the right, so that weights fill vectors */
#define STENCIL 8
#define LEAST 1e-30 /* of L, as in logsumexp.py */

INLINE void store(double *x, vec y) { *(vec_anywhere *)x = y; }
INLINE vec at_least(vec x, double y) { return choose((bits)(x > y), x, all(y)); }
INLINE double sum_of(vec x) {
    double total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

/* The sum of e^x of numbers <= 0, padded to whole vectors; those below -40 are left out. */
INLINE double sum_of_exponentials(const double *x, ptrdiff_t count, double largest) {
    vec total = {};
    for (ptrdiff_t k = 0; k < count; k += LANES) {
        vec y = load(x + k) - largest;
        bits keep = (bits)(y > -40.0);
        total += choose(keep, exponential(choose(keep, y, (vec){})).up, (vec){});
    }
    return sum_of(total);
}

/* ------------------------------------------------------------------------------------------------------------------ */

typedef struct {
    double base, gap;         /* b and g */
    ptrdiff_t half;           /* l runs from -half to half */
    ptrdiff_t first, count;   /* column 0 is the node `first`; beyond `count` columns Q is 0, and before the first it is 1 */
    const double *Q, *D;      /* rows of CHUNK more columns on both sides and more for the shifts */
    const double *tails;      /* for each entry of these, h times the sums of Q and D beyond it */
    const int64_t *places;    /* where the row of shift l has its column 0 */
} level;

typedef struct {
    double tolerance, step, start, widest, nodes_most, powers, levels;
} settings;

typedef struct {
    double *x, *sd, *above, *up, *down, *ratio, *P, *R; /* scratch */
    double weights[2 * HALF_MOST + 1 + BEYOND];
} scratch;

/* A normal density at (from + i) g - shift, i = 0, ..., over its largest value, by the recurrence of the ratios of numbers
   LANES apart; returns the sum. `count` is rounded up to an even number. */
INLINE double normal_weights(double *w, ptrdiff_t from, ptrdiff_t *count, double shift, double gap, double variance) {
    vec lane = {};
    for (int i = 0; i < LANES; i++) lane[i] = i;
    vec x = lane * gap + (from * gap - shift), rate = 0.5 / variance - (vec){}, total = {};
    const double apart = LANES * gap;
    vec now = exponential(-rate * x * x).up, ratio = exponential(-rate * apart * (2.0 * x + apart)).up;
    vec decay = exponential(-rate * (2.0 * apart * apart)).up; /* of the ratio, from one vector to the next */
    *count += *count % 2;
    for (ptrdiff_t i = 0; i < *count; i += LANES) {
        store(w + i, now), total += choose((bits)(lane < (double)(*count - i)), now, (vec){});
        now *= ratio, ratio *= decay;
    }
    return sum_of(total);
}

/* The means of the Lagrange polynomials of 0, ..., 7 under N(3.5 + u, v), from the moments of N(u, v):
   m_{j+1} = u m_j + j v m_{j-1}. Row j has the coefficients of u^j, times a number. */
INLINE void lagrange_weights(double *w, double u, double v) {
    static const double coefficients[STENCIL][STENCIL] = {
        {-5, 49, -245, 1225, 1225, -245, 49, -5},
        {75, -1029, 8575, -128625, 128625, -8575, 1029, -75},
        {259, -2495, 11691, -9455, -9455, 11691, -2495, 259},
        {-37, 499, -3897, 9455, -9455, 3897, -499, 37},
        {-7, 59, -135, 83, 83, -135, 59, -7},
        {5, -59, 225, -415, 415, -225, 59, -5},
        {1, -5, 9, -5, -5, 9, -5, 1},
        {-1, 7, -21, 35, -35, 21, -7, 1}};
    static const double divisors[STENCIL] = {2048, 107520, 23040, 11520, 1152, 2880, 1440, 5040};
    vec sums[STENCIL / LANES] = {};
    double moment = 1.0, before = 0.0;
    for (int j = 0; j < STENCIL; j++) {
        double share = moment * (1.0 / divisors[j]);
        for (int i = 0; i < STENCIL / LANES; i++) sums[i] += share * load(coefficients[j] + i * LANES);
        double next = u * moment + j * v * before;
        before = moment, moment = next;
    }
    for (int i = 0; i < STENCIL / LANES; i++) store(w + i * LANES, sums[i]);
}

/* Q and D at some vectors of nodes: the products P, sums R and ratios there. */
INLINE void some_nodes(int vectors, const double *weights, const int64_t *places, ptrdiff_t count, double scale,
                       const double *Q, const double *D, double *P, double *R, double *ratio) {
    vec q[VECTORS] = {}, d[VECTORS] = {};
    for (ptrdiff_t l = 0; l < count; l++) {
        vec w = weights[l] - (vec){};
        const double *one = Q + places[l], *other = D + places[l];
        for (int j = 0; j < vectors; j++) q[j] += w * load(one + j * LANES), d[j] += w * load(other + j * LANES);
    }
    for (int j = 0; j < vectors; j++) {
        vec L = at_least(1.0 - scale * q[j], LEAST), r = scale * d[j] / L;
        store(P + j * LANES, load(P + j * LANES) * L);
        store(R + j * LANES, load(R + j * LANES) + r);
        store(ratio + j * LANES, r);
    }
}

typedef double pair __attribute__((vector_size(16), aligned(8)));

/* Beyond the node `end`, Q is negligible. */
INLINE void class_at_nodes(scratch *s, const level *t, int interpolates, double x, double sd, double reach, double first,
                           ptrdiff_t nodes, ptrdiff_t end, double step, double *ratio, double *tail_Q, double *tail_D) {
    double centre = nearbyint(x / step), shift = x - centre * step, scale = 1.0;
    ptrdiff_t from, count = STENCIL;
    if (interpolates) {
        double share = shift / t->gap, whole = floor(share), narrow = sd / t->gap;
        from = (ptrdiff_t)whole - (STENCIL / 2 - 1);
        lagrange_weights(s->weights, share - whole - 0.5, narrow * narrow);
    } else {
        double rest = sd * sd - t->base * t->base, half_width = reach * sqrt(rest);
        from = (ptrdiff_t)ceil((shift - half_width) / t->gap);
        ptrdiff_t to = (ptrdiff_t)floor((shift + half_width) / t->gap);
        if (from < -t->half) from = -t->half;
        if (to > t->half) to = t->half;
        count = to - from + 1;
        scale = 1.0 / normal_weights(s->weights, from, &count, shift, t->gap, rest);
    }
    const int64_t *places = t->places + from + t->half;
    ptrdiff_t place = (ptrdiff_t)(first - centre) - t->first; /* the column of the first node */
    for (ptrdiff_t i = 0, vectors; i < nodes; i += vectors * LANES) {
        ptrdiff_t column = place + i, left = (nodes - i) / LANES, parts = (left + VECTORS - 1) / VECTORS;
        vectors = (left + parts - 1) / parts; /* parts of similar sizes, as one vector would wait for itself */
        if (i > end || column > t->count) {
            for (; i < nodes; i += LANES) store(ratio + i, (vec){});
            break;
        }
        if (column < -CHUNK) column = -CHUNK;
        const double *Q = t->Q + column, *D = t->D + column;
        double *P = s->P + i, *R = s->R + i;
#define SOME_NODES(n) \
    case n: some_nodes(n, s->weights, places, count, scale, Q, D, P, R, ratio + i); break;
        switch (vectors) {
            SOME_NODES(1) SOME_NODES(2) SOME_NODES(3) SOME_NODES(4) SOME_NODES(5) SOME_NODES(6)
        }
    }
    ptrdiff_t last = place + nodes - 1;
    *tail_Q = *tail_D = 0.0;
    if (last >= 0 && last < t->count) {
        const double *tails = t->tails + 2 * last;
        pair even = {}, odd = {};
        for (ptrdiff_t l = 0; l < count; l += 2) { /* an even number */
            even += s->weights[l] * *(const pair *)(tails + 2 * places[l]);
            odd += s->weights[l + 1] * *(const pair *)(tails + 2 * places[l + 1]);
        }
        even += odd;
        *tail_Q = scale * even[0], *tail_D = scale * even[1];
    }
}

/* The index of the narrow band of sds, four to a doubling: ceil(4 log2(sd/t)), from the exponent of (sd/t)^4. */
INLINE int band_of(double variance, double smallest) {
    double share = variance / (smallest * smallest), fourth = share * share;
    if (!(fourth > 1.0)) return 0; /* 0 interpolates */
    union {
        double number;
        uint64_t bits;
    } x = {fourth};
    int exponent = (int)(x.bits >> 52) - 1023;
    return exponent + ((x.bits << 12) != 0);
}

typedef struct {
    double low, high, reach;
    int power;
} plan;

/* `limits` and `plan_pieces` in logsumexp.py; 0 if one piece of at most `nodes_most` nodes does not suffice. */
INLINE int plan_of(scratch *s, const settings *o, const double *thresholds, ptrdiff_t K, double largest, plan *out) {
    if (largest > o->widest) return 0;
    double spread = largest > 1.0 ? largest : 1.0, reach = sqrt(2.0 * log(4.0 * K * spread / o->tolerance));
    double share = sqrt(o->tolerance / (1.0 + spread)), brief = sqrt(2.0 * log(K / share));
    double right = log(50.0 * K / o->tolerance); /* beyond it, Q of all classes is a fiftieth of the tolerance */
    double most = -INFINITY, top = -INFINITY;
    for (ptrdiff_t k = 0; k < K; k++) {
        double half = 0.5 * s->sd[k] * s->sd[k], far = reach * s->sd[k], near = brief * s->sd[k];
        double up = s->x[k] + (half < near ? half : near), down = s->x[k] - far;
        s->above[k] = s->x[k] + (half < far ? half : far) + right;
        s->up[k] = up, s->down[k] = down;
        most = up > most ? up : most, top = down > top ? down : top;
    }
    for (ptrdiff_t k = K; k % LANES; k++) s->up[k] = s->down[k] = -INFINITY;
    out->low = top + log(sum_of_exponentials(s->down, K, top)) + o->start, out->reach = reach;
    out->high = most + log(sum_of_exponentials(s->up, K, most)) - log(share);
    double common = 0.0;
    for (ptrdiff_t k = 0; k < K; k++)
        if (s->above[k] > out->low) common += 1.0 / (s->sd[k] * s->sd[k]);
    double variance = 0.97 / common;
    for (out->power = 0; out->power < (int)o->powers && variance >= thresholds[out->power]; out->power++) {}
    return out->power < (int)o->powers;
}

/* Fills in the rows that are marked 0 in `done` and marks them 1. Where a table is missing, its entry in `needed` is set.
   Returns 1 if this machine cannot run it. */
FOR_THIS_MACHINE static int all_rows(ptrdiff_t rows, ptrdiff_t K, const double *mean, const double *variance,
                                     const settings *o, const double *interpolated, const double *thresholds,
                                     const level *levels, double *value, double *slope, double *curvature, char *done,
                                     char *needed) {
    scratch s;
    ptrdiff_t most = (ptrdiff_t)o->nodes_most + 2 * CHUNK, padded = K + LANES;
    double *memory = malloc(sizeof(double) * (5 * padded + 2 * most + K * most));
    if (!memory) return 1;
    s.x = memory, s.sd = s.x + padded, s.above = s.sd + padded, s.up = s.above + padded, s.down = s.up + padded;
    s.P = s.down + padded, s.R = s.P + most, s.ratio = s.R + most;
    int count = (int)o->levels;
    for (ptrdiff_t row = 0; row < rows; row++) {
        if (done[row]) continue;
        const double *m = mean + row * K, *v = variance + row * K;
        double reference = m[0], largest = 0.0;
        for (ptrdiff_t k = 1; k < K; k++) reference = m[k] > reference ? m[k] : reference;
        for (ptrdiff_t k = 0; k < K; k++) {
            s.x[k] = m[k] - reference, s.sd[k] = sqrt(v[k]);
            if (s.sd[k] > largest) largest = s.sd[k];
        }
        plan p;
        if (!plan_of(&s, o, thresholds, K, largest, &p)) continue;
        double step = o->step * (1 << p.power), first = floor(p.low / step), exact = ceil(p.high / step) - first + 2;
        if (!(exact <= o->nodes_most)) continue;
        ptrdiff_t nodes = ((ptrdiff_t)exact + LANES - 1) / LANES * LANES;
        const level *table = levels + p.power * count;
        int missing = 0;
        for (ptrdiff_t i = 0; i < nodes; i++) s.P[i] = 1.0, s.R[i] = 0.0;
        double tails = 0.0, total = 0.0;
        for (ptrdiff_t k = 0; k < K; k++) {
            double tail_Q = 0.0, tail_D = 0.0, *ratio = s.ratio + k * nodes;
            slope[row * K + k] = 0.0;
            if (s.above[k] <= p.low) continue;
            int index = band_of(v[k], interpolated[p.power]);
            if (index >= count || !table[index].Q) {
                missing = 1;
                if (index < count) needed[p.power * count + index] = 1;
                continue;
            }
            if (missing) continue;
            double end = floor(s.above[k] / step) - first;
            class_at_nodes(&s, table + index, index == 0, s.x[k], s.sd[k], p.reach, first, nodes,
                           end < nodes ? (ptrdiff_t)end : nodes, step, ratio, &tail_Q, &tail_D);
            tails += tail_Q, slope[row * K + k] = tail_D;
        }
        if (missing) continue;
        vec below = {};
        for (ptrdiff_t i = 0; i < nodes; i += LANES) below += 1.0 - load(s.P + i);
        value[row] = reference + (first - 0.5) * step - 0.57721566490153286061 + step * sum_of(below) + tails;
        for (ptrdiff_t k = 0; k < K; k++) {
            if (s.above[k] <= p.low) {
                curvature[row * K + k] = 0.0;
                continue;
            }
            vec once = {}, twice = {};
            const double *ratio = s.ratio + k * nodes;
            for (ptrdiff_t i = 0; i < nodes; i += LANES) {
                vec r = load(ratio + i), share = load(s.P + i) * r;
                once += share, twice += share * (load(s.R + i) - r);
            }
            slope[row * K + k] += step * sum_of(once), curvature[row * K + k] = step * sum_of(twice);
            total += slope[row * K + k];
        }
        for (ptrdiff_t k = 0; k < K; k++) slope[row * K + k] /= total;
        done[row] = 1;
    }
    free(memory);
    return 0;
}

EXPORT int class_rows_3(ptrdiff_t rows, ptrdiff_t K, const double *mean, const double *variance, const double *options,
                        const double *interpolated, const double *thresholds, const level *levels, double *value,
                        double *slope, double *curvature, char *done, char *needed) {
    if (!MACHINE_HAS_IT) return 1;
    return all_rows(rows, K, mean, variance, (const settings *)options, interpolated, thresholds, levels, value, slope,
                    curvature, done, needed);
}
