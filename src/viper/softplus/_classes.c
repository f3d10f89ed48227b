/* Rows of the expected log-sum-exp on a CPU: what `class_moments` in logsumexp.py computes, for rows that need one piece.

   A class turns its mean and sd into weights w_l of a table's rows (gumbel.py); a sum over l gives Q = 1 - L and D = L' at
   all nodes at once. Their ratio is kept, P = prod L and R = sum L'/L are collected, and a second pass over the classes
   adds up P L'/L and P (L'/L)(R - L'/L).

   Written with the vector extensions of GCC and Clang; if this does not compile, logsumexp.py does all rows. */

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#if FLT_EVAL_METHOD != 0 || defined(__FAST_MATH__)
#error "weights that are exact to rounding need the arithmetic of the standard"
#endif

/* Doubles per vector: one register of AVX2 on x86 or NEON on ARM. */
#ifdef __x86_64__
#define LANES 4
#define FOR_THIS_MACHINE __attribute__((target("avx2,fma")))
#define MACHINE_HAS_IT (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#else
#define LANES 2
#define FOR_THIS_MACHINE
#define MACHINE_HAS_IT 1
#endif
#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#define CHUNK 16 /* nodes whose sums stay in registers; tables have this many more columns on both sides */
#define VECTORS (CHUNK / LANES)
#define HALF_MOST 128 /* rows of a table on each side of the middle one, as in compiled_classes.py */
#define STENCIL 8
#define LEAST 1e-30 /* of L, as in logsumexp.py */

typedef double vec __attribute__((vector_size(8 * LANES)));
typedef double vec_anywhere __attribute__((vector_size(8 * LANES), aligned(8)));
typedef int64_t bits __attribute__((vector_size(8 * LANES)));

INLINE vec load(const double *x) { return *(const vec_anywhere *)x; }
INLINE void store(double *x, vec y) { *(vec_anywhere *)x = y; }
INLINE vec at_least(vec x, double y) {
    bits keep = x > y;
    return (vec)((keep & (bits)x) | (~keep & (bits)(y - (vec){})));
}
INLINE double sum_of(vec x) {
    double total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

typedef struct {
    double base, gap;         /* b and g */
    ptrdiff_t half;           /* l runs from -half to half */
    ptrdiff_t first, count;   /* the table's columns are the nodes first, first + 1, ... */
    const double *Q, *D;      /* rows of count + 2 CHUNK columns */
    const double *tails;      /* for each column and l, h times the sums of Q and D beyond it */
} level;

typedef struct {
    double tolerance, step, start, right, widest, interpolated, nodes_most, powers, levels;
} settings;

typedef struct {
    double *x, *sd, *above, *ratio, *P, *R; /* scratch */
    double weights[2 * HALF_MOST + 1];
} scratch;

/* A normal density at l g, l = from, ..., to, over its largest value, by the recurrence of its ratios; returns 1/sum. */
INLINE double normal_weights(double *w, ptrdiff_t from, ptrdiff_t to, double shift, double gap, double variance) {
    ptrdiff_t middle = (ptrdiff_t)nearbyint(shift / gap);
    if (middle < from) middle = from;
    if (middle > to) middle = to;
    double rate = gap / variance, tilt = exp(-rate * (middle * gap - shift)), edge = exp(-0.5 * rate * gap);
    double up = edge * tilt, down = edge / tilt, decay = edge * edge, right = 1.0, left = 1.0, total = 1.0;
    ptrdiff_t above = to - middle, below = middle - from, both = above < below ? above : below;
    w += middle - from;
    w[0] = 1.0;
    for (ptrdiff_t i = 1; i <= both; i++) {
        right *= up, up *= decay, w[i] = right;
        left *= down, down *= decay, w[-i] = left;
        total += right + left;
    }
    for (ptrdiff_t i = both + 1; i <= above; i++) right *= up, up *= decay, w[i] = right, total += right;
    for (ptrdiff_t i = both + 1; i <= below; i++) left *= down, down *= decay, w[-i] = left, total += left;
    return 1.0 / total;
}

typedef double four __attribute__((vector_size(32)));

/* The means of the Lagrange polynomials of 0, ..., 7 under N(x, sd^2), by Gauss-Hermite with 4 nodes. */
INLINE void lagrange_weights(double *w, double x, double sd) {
    const four node = {-2.3344142183389773, -0.74196378430272586, 0.74196378430272586, 2.3344142183389773};
    const four share = {0.045875854768068492, 0.45412414523193151, 0.45412414523193151, 0.045875854768068492};
    static const double scale[STENCIL] = {-1.0 / 5040, 1.0 / 720, -1.0 / 240, 1.0 / 144,
                                          -1.0 / 144,  1.0 / 240, -1.0 / 720, 1.0 / 5040};
    four y = x + sd * node, before[STENCIL], after = share;
    before[0] = 1.0 - (four){};
    for (int a = 1; a < STENCIL; a++) before[a] = before[a - 1] * (y - (double)(a - 1));
    for (int a = STENCIL - 1; a >= 0; a--) {
        four part = before[a] * after;
        w[a] = ((part[0] + part[1]) + (part[2] + part[3])) * scale[a];
        after *= y - (double)a;
    }
}

/* Q and D at 4 or 2 vectors of nodes: the products P, sums R and ratios there. */
INLINE void some_nodes(int vectors, const double *weights, ptrdiff_t count, double scale, const double *Q, const double *D,
                       ptrdiff_t width, double *P, double *R, double *ratio) {
    vec q[VECTORS] = {}, d[VECTORS] = {};
    for (ptrdiff_t l = 0; l < count; l++, Q += width, D += width) {
        vec w = weights[l] - (vec){};
        for (int j = 0; j < vectors; j++) q[j] += w * load(Q + j * LANES), d[j] += w * load(D + j * LANES);
    }
    for (int j = 0; j < vectors; j++) {
        vec L = at_least(1.0 - scale * q[j], LEAST), r = scale * d[j] / L;
        store(P + j * LANES, load(P + j * LANES) * L);
        store(R + j * LANES, load(R + j * LANES) + r);
        store(ratio + j * LANES, r);
    }
}

INLINE void class_at_nodes(scratch *s, const level *t, int interpolates, double x, double sd, double reach, double first,
                           ptrdiff_t nodes, double step, double *ratio, double *tail_Q, double *tail_D) {
    double centre = nearbyint(x / step), shift = x - centre * step, scale = 1.0;
    ptrdiff_t from, to;
    if (interpolates) {
        from = (ptrdiff_t)floor(shift / t->gap) - (STENCIL / 2 - 1), to = from + STENCIL - 1;
        lagrange_weights(s->weights, shift / t->gap - from, sd / t->gap);
    } else {
        double rest = sd * sd - t->base * t->base, half_width = reach * sqrt(rest);
        from = (ptrdiff_t)ceil((shift - half_width) / t->gap), to = (ptrdiff_t)floor((shift + half_width) / t->gap);
        if (from < -t->half) from = -t->half;
        if (to > t->half) to = t->half;
        scale = normal_weights(s->weights, from, to, shift, t->gap, rest);
    }
    ptrdiff_t count = to - from + 1, width = t->count + 2 * CHUNK, row = (from + t->half) * width + CHUNK;
    ptrdiff_t place = (ptrdiff_t)(first - centre) - t->first; /* the column of the first node */
    for (ptrdiff_t i = 0; i < nodes; i += CHUNK) {
        ptrdiff_t column = place + i;
        if (column < -CHUNK) column = -CHUNK;
        if (column > t->count) column = t->count;
        const double *Q = t->Q + row + column, *D = t->D + row + column;
        double *P = s->P + i, *R = s->R + i;
        if (nodes - i >= CHUNK)
            some_nodes(VECTORS, s->weights, count, scale, Q, D, width, P, R, ratio + i);
        else
            some_nodes(VECTORS / 2, s->weights, count, scale, Q, D, width, P, R, ratio + i);
    }
    ptrdiff_t last = place + nodes - 1;
    *tail_Q = *tail_D = 0.0;
    if (last >= 0 && last < t->count) {
        const double *tail = t->tails + (last * (2 * t->half + 1) + from + t->half) * 2;
        double Q = 0.0, D = 0.0;
        for (ptrdiff_t l = 0; l < count; l++) Q += s->weights[l] * tail[2 * l], D += s->weights[l] * tail[2 * l + 1];
        *tail_Q = scale * Q, *tail_D = scale * D;
    }
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
    double low = 0.0, high = 0.0, most = -INFINITY;
    for (ptrdiff_t k = 0; k < K; k++) {
        double half = 0.5 * s->sd[k] * s->sd[k], far = reach * s->sd[k], near = brief * s->sd[k];
        double up = s->x[k] + (half < near ? half : near);
        s->above[k] = s->x[k] + (half < far ? half : far) + o->right;
        s->R[k] = up;
        if (up > most) most = up;
    }
    double top = -INFINITY;
    for (ptrdiff_t k = 0; k < K; k++) {
        double down = s->x[k] - reach * s->sd[k];
        if (down > top) top = down;
    }
    for (ptrdiff_t k = 0; k < K; k++) {
        double down = s->x[k] - reach * s->sd[k] - top, up = s->R[k] - most;
        if (down > -40.0) low += exp(down);
        if (up > -40.0) high += exp(up);
    }
    out->low = top + log(low) + o->start, out->high = most + log(high) - log(share), out->reach = reach;
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
                                     const settings *o, const double *thresholds, const level *levels, double *value,
                                     double *slope, double *curvature, char *done, char *needed) {
    scratch s;
    ptrdiff_t most = (ptrdiff_t)o->nodes_most + 2 * CHUNK, rest = most > K ? most : K;
    double *memory = malloc(sizeof(double) * (3 * K + most + rest + K * most));
    if (!memory) return 1;
    s.x = memory, s.sd = s.x + K, s.above = s.sd + K, s.P = s.above + K, s.R = s.P + most, s.ratio = s.R + rest;
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
        if (exact > o->nodes_most) continue;
        ptrdiff_t nodes = ((ptrdiff_t)exact + CHUNK / 2 - 1) / (CHUNK / 2) * (CHUNK / 2);
        const level *table = levels + p.power * count;
        int missing = 0;
        for (ptrdiff_t i = 0; i < nodes; i++) s.P[i] = 1.0, s.R[i] = 0.0;
        double tails = 0.0, total = 0.0;
        for (ptrdiff_t k = 0; k < K; k++) {
            double tail_Q = 0.0, tail_D = 0.0, *ratio = s.ratio + k * nodes;
            slope[row * K + k] = 0.0;
            if (s.above[k] <= p.low) continue;
            double place = s.sd[k] > 0.0 ? ceil(2.0 * log2(s.sd[k] / (o->interpolated * step))) : 0.0;
            int index = place > 0.0 ? (int)place : 0; /* 0 interpolates */
            if (index >= count || !table[index].Q) {
                missing = 1;
                if (index < count) needed[p.power * count + index] = 1;
                continue;
            }
            if (missing) continue;
            class_at_nodes(&s, table + index, index == 0, s.x[k], s.sd[k], p.reach, first, nodes, step, ratio,
                           &tail_Q, &tail_D);
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

EXPORT int class_rows_1(ptrdiff_t rows, ptrdiff_t K, const double *mean, const double *variance, const double *options,
                        const double *thresholds, const level *levels, double *value, double *slope, double *curvature,
                        char *done, char *needed) {
    if (!MACHINE_HAS_IT) return 1;
    return all_rows(rows, K, mean, variance, (const settings *)options, thresholds, levels, value, slope, curvature, done,
                    needed);
}
