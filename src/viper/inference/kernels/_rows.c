/* Sums over rows on a CPU, the same as `row_sums` in sums.py, in one pass over X.

   Rows are cut into pieces of PIECE, whatever the number of threads. Each thread repeatedly takes the next free piece;
   when all are done, their sums are added in the order of the rows. So the answer is the same to the last bit for every
   number of threads. Threads end with the call, so there is nothing left that could break a fork or another pool.

   A tile of X is transposed so that vectors run along rows. Its expected softplus is a weighted sum over pairs of nodes
   (quadrature.py). With E = e^-|theta|, P = 2 E cosh(tau z) and u = 1 + P + E^2 = (1 + E e^{tau z})(1 + E e^{-tau z}), a
   pair +-z gives

       log u  to eta,     (P + 2 E^2) / u  to g,     (P (1 + E^2) + 4 E^2) / u^2  to h.

   If the variance is large and a rough answer is enough, the logistic is replaced by a mixture of normals (limit.py).

   If this does not compile, sums.py is used instead. */

#include "../../softplus/_vectors.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define TILE 96 /* rows: a multiple of 12 vectors, so that three or four at a time leave no remainder */
#define AHEAD (2 * TILE) /* rows: how far ahead columns are fetched, each from memory of its own */
#define PIECE 4032 /* rows summed by one thread at a time: a multiple of TILE */
#define THREADS_MOST 256
#define VECTORS (TILE / LANES)
#define LINE 8 /* doubles in a cache line */
#define SIZE_MOST 256 /* most columns of a full factor or curvature, as in compiled.py */
#define BINS_MOST 64
#define SQRT_HALF 0x1.6a09e667f3bcdp-1
#define INVERSE_ROOT_2PI 0x1.9884533d43651p-2

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (bits){__VA_ARGS__})
#endif

INLINE vec magnitude_of(vec x) { return (vec)((bits)x & ((bits){} + INT64_MAX)); }

/* ------------------------------------------------------------------------------------------------------------------ */
/* log to an ulp or two */

typedef struct {
    vec log, inverse; /* log(1+t) and 1/(1+t) */
} logarithm;

/* For t >= 0. With 1+t = 2^k m, log m = 2 artanh((m-1)/(m+1)); then the rounding error of 1+t over 1+t is added. */
INLINE logarithm log_of_1_plus(vec t) {
    vec u = 1.0 + t;
    bits above = (bits)u - 0x3fe6a09e667f3bcdULL; /* sqrt(1/2): m is between it and sqrt(2) */
    bits exponent = above >> 52;
    vec m = (vec)((bits)u - (exponent << 52));
    vec k = (vec)(exponent | 0x4330000000000000ULL) - 0x1p52;
    vec both = 1.0 / (u * (m + 1.0)), inverse = both * (m + 1.0);
    vec s = (m - 1.0) * (u * both), s2 = s * s;
    vec sum = all(1.0 / 21);
    sum = sum * s2 + 1.0 / 19;
    sum = sum * s2 + 1.0 / 17;
    sum = sum * s2 + 1.0 / 15;
    sum = sum * s2 + 1.0 / 13;
    sum = sum * s2 + 1.0 / 11;
    sum = sum * s2 + 1.0 / 9;
    sum = sum * s2 + 1.0 / 7;
    sum = sum * s2 + 1.0 / 5;
    sum = sum * s2 + 1.0 / 3;
    vec small = k * LN2_LOW + (t - (u - 1.0)) * inverse + 2.0 * s * s2 * sum;
    return (logarithm){k * LN2_HIGH + (2.0 * s + small), inverse};
}

INLINE vec square_root(vec x) {
    vec root = x;
    for (int i = 0; i < LANES; i++) root[i] = __builtin_sqrt(x[i]);
    return root;
}

/* ------------------------------------------------------------------------------------------------------------------ */

typedef struct {
    double reach; /* the largest variance for which these nodes suffice; if infinite, this is a mixture */
    int count;
    const double *nodes; /* z and weight of each pair, weights sum to one half; variance and weight of each normal */
} bin;

typedef struct {
    const double *X;
    ptrdiff_t rows, row_stride, column_stride;
    int columns, size, stride; /* with an intercept, size = columns + 1; stride = size + 3 */
    const double *label, *offset, *residual, *weight, *mean, *factor, *variances; /* Sigma by its factor, or diagonal */
    const unsigned char *code; /* labels as bytes, if not as doubles */
    double *seen_theta, *seen_variance; /* of each row, or NULL */
    int first[SIZE_MOST], last[SIZE_MOST]; /* nonzero entries of each column of the factor */
    int bins, quarter, gram;
    bin bin[BINS_MOST];
} problem;

enum { NO_GRAM, FULL_GRAM, GRAM_DIAGONAL }; /* how much of the curvature to compute */

typedef struct {
    vec value, magnitude;
    vec *slope, *curvature; /* `size` vectors, and `size` + 2 rows of `stride` vectors, or one row for the diagonal */
} totals;

typedef vec column[VECTORS + 1]; /* one extra, so that columns start in different cache sets */

typedef struct {
    column *x; /* `size` columns, and three of zeros */
    column weighted[3];
    vec theta[VECTORS], variance[VECTORS], g[VECTORS], h[VECTORS];
} tile;

/* Transposes a square of LANES vectors: swaps halves, pairs and single numbers, in the fastest order. */
INLINE void transpose(vec *a) {
#if LANES == 8
    vec b[8];
    for (int i = 0; i < 8; i += 2) {
        b[i] = SHUFFLE(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        b[i + 1] = SHUFFLE(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int k = 0; k < 2; k++)
        for (int i = k; i < 8; i += 4) {
            a[i] = SHUFFLE(b[i], b[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            a[i + 2] = SHUFFLE(b[i], b[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int k = 0; k < 4; k++) {
        const vec low = a[k], high = a[k + 4];
        a[k] = SHUFFLE(low, high, 0, 1, 2, 3, 8, 9, 10, 11);
        a[k + 4] = SHUFFLE(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
    }
#elif LANES == 4
    const vec ac = SHUFFLE(a[0], a[2], 0, 1, 4, 5), bd = SHUFFLE(a[1], a[3], 0, 1, 4, 5);
    const vec ca = SHUFFLE(a[0], a[2], 2, 3, 6, 7), db = SHUFFLE(a[1], a[3], 2, 3, 6, 7);
    a[0] = SHUFFLE(ac, bd, 0, 4, 2, 6);
    a[1] = SHUFFLE(ac, bd, 1, 5, 3, 7);
    a[2] = SHUFFLE(ca, db, 0, 4, 2, 6);
    a[3] = SHUFFLE(ca, db, 1, 5, 3, 7);
#else
    const vec first = a[0], second = a[1];
    a[0] = SHUFFLE(first, second, 0, 2);
    a[1] = SHUFFLE(first, second, 1, 3);
#endif
}

/* Turns LANES rows of LANES columns, `stride` doubles apart, into columns. */
INLINE void turn(const double *X, ptrdiff_t stride, column *out, int v) {
    vec a[LANES];
    for (int i = 0; i < LANES; i++) a[i] = load(X + i * stride);
    transpose(a);
    for (int i = 0; i < LANES; i++) out[i][v] = a[i];
}

/* Rows are read one after the other, which suits memory best; the next tile is fetched meanwhile. */
INLINE void read_tile(const problem *p, ptrdiff_t start, int rows, tile *t) {
    const double *X = p->X + start * p->row_stride;
    int turned = 0; /* columns transposed so far */
    if (rows < TILE)
        memset(t->x, 0, sizeof(column) * p->size);
    else if (p->column_stride == 1) {
        turned = p->columns - p->columns % LANES;
        for (int v = 0; v < VECTORS; v++) {
            const double *row = X + v * LANES * p->row_stride;
            for (int i = 0; i < LANES; i++) {
                const double *next = row + (TILE + i) * p->row_stride;
                for (int k = 0; k < p->columns; k += LINE) __builtin_prefetch(next + k, 0, 2);
            }
            for (int k = 0; k < turned; k += LANES) turn(row + k, p->row_stride, t->x + k, v);
            for (int k = turned; k < p->columns; k++)
                for (int i = 0; i < LANES; i++) t->x[k][v][i] = row[i * p->row_stride + k];
        }
        turned = p->columns;
    }
    if (p->row_stride == 1)
        for (; turned < p->columns; turned++) {
            const double *from = X + turned * p->column_stride;
            for (int r = 0; r < TILE; r += LINE) __builtin_prefetch(from + AHEAD + r, 0, 2);
            memcpy(t->x[turned], from, sizeof(double) * rows);
        }
    for (int k = turned; k < p->columns; k++)
        for (int r = 0; r < rows; r++) ((double *)t->x[k])[r] = X[r * p->row_stride + k * p->column_stride];
    if (p->size > p->columns)
        for (int r = 0; r < rows; r++) ((double *)t->x[p->columns])[r] = 1.0;
}

/* The next rows of a column, padded with zeros after the last; `other` if the column is absent. */
INLINE vec read_rows(const double *data, ptrdiff_t at, int left, double other) {
    vec out = all(other);
    if (left >= LANES) {
        if (data) out = load(data + at);
    } else
        for (int i = 0; i < LANES; i++) out[i] = i >= left ? 0.0 : data ? data[at + i] : other;
    return out;
}

INLINE void write_rows(double *out, vec x, int left) {
    for (int i = 0; i < LANES && i < left; i++) out[i] = x[i];
}

INLINE vec read_labels(const problem *p, ptrdiff_t at, int left) {
    if (!p->code) return read_rows(p->label, at, left, 0.0);
    vec out = {};
    for (int i = 0; i < LANES && i < left; i++) out[i] = p->code[at + i];
    return out;
}

/* theta and, for a diagonal Sigma, the variance. */
INLINE void latent_diagonal(const problem *p, tile *t) {
    for (int v = 0; v < VECTORS; v += 4) {
        vec a = {}, b = {}, c = {}, d = {}, e = {}, f = {}, g = {}, h = {};
        for (int k = 0; k < p->size; k++) {
            const vec *x = t->x[k] + v;
            const double mean = p->mean[k], variance = p->variances[k];
            a += x[0] * mean, b += x[1] * mean, c += x[2] * mean, d += x[3] * mean;
            e += x[0] * x[0] * variance, f += x[1] * x[1] * variance;
            g += x[2] * x[2] * variance, h += x[3] * x[3] * variance;
        }
        t->theta[v] = a, t->theta[v + 1] = b, t->theta[v + 2] = c, t->theta[v + 3] = d;
        t->variance[v] = e, t->variance[v + 1] = f, t->variance[v + 2] = g, t->variance[v + 3] = h;
    }
}

INLINE void latent(const problem *p, tile *t) {
    if (p->variances) {
        latent_diagonal(p, t);
        return;
    }
    for (int v = 0; v < VECTORS; v += 4) {
        vec a = {}, b = {}, c = {}, d = {};
        for (int k = 0; k < p->size; k++) {
            const vec *x = t->x[k] + v;
            const double mean = p->mean[k];
            a += x[0] * mean, b += x[1] * mean, c += x[2] * mean, d += x[3] * mean;
        }
        t->theta[v] = a, t->theta[v + 1] = b, t->theta[v + 2] = c, t->theta[v + 3] = d;
    }
    for (int v = 0; v < VECTORS; v++) t->variance[v] = (vec){};
    if (!p->factor) return;
    const int d = p->size;
    for (int j = 0; j < d; j += 4) {
        const int width = d - j < 4 ? d - j : 4;
        int first = d, last = 0;
        for (int i = 0; i < width; i++) {
            first = p->first[j + i] < first ? p->first[j + i] : first;
            last = p->last[j + i] > last ? p->last[j + i] : last;
        }
        const double *F = p->factor + j;
        if (width == 4) {
            for (int v = 0; v < VECTORS; v += 3) {
                vec a0 = {}, a1 = {}, a2 = {}, a3 = {}, b0 = {}, b1 = {}, b2 = {}, b3 = {};
                vec c0 = {}, c1 = {}, c2 = {}, c3 = {};
                for (int k = first; k <= last; k++) {
                    const vec x = t->x[k][v], y = t->x[k][v + 1], z = t->x[k][v + 2];
                    const double *f = F + k * d;
                    a0 += x * f[0], b0 += y * f[0], c0 += z * f[0];
                    a1 += x * f[1], b1 += y * f[1], c1 += z * f[1];
                    a2 += x * f[2], b2 += y * f[2], c2 += z * f[2];
                    a3 += x * f[3], b3 += y * f[3], c3 += z * f[3];
                }
                t->variance[v] += a0 * a0 + a1 * a1 + a2 * a2 + a3 * a3;
                t->variance[v + 1] += b0 * b0 + b1 * b1 + b2 * b2 + b3 * b3;
                t->variance[v + 2] += c0 * c0 + c1 * c1 + c2 * c2 + c3 * c3;
            }
            continue;
        }
        for (int i = 0; i < width; i++)
            for (int v = 0; v < VECTORS; v++) {
                vec a = {};
                for (int k = first; k <= last; k++) a += t->x[k][v] * F[k * d + i];
                t->variance[v] += a * a;
            }
    }
}

typedef struct {
    vec eta, g, h;
} triple;

/* The expected softplus and its derivatives for the mean -size. */
INLINE triple by_nodes(const bin *b, vec size, vec tau) {
    const bits near = (bits)(size < 708.0);
    const vec E = choose(near, exponential(-choose(near, size, (vec){})).up, (vec){}), E2 = E * E;
    triple sum = {};
    for (int j = 0; j < b->count; j++) {
        const double z = b->nodes[2 * j], w = b->nodes[2 * j + 1];
        vec P = 2.0 * E;
        if (z != 0.0) {
            const exponentials e = exponential(tau * z);
            P = E * (e.up + e.down);
        }
        const logarithm l = log_of_1_plus(P + E2);
        sum.eta += w * l.log;
        sum.g += w * (P + 2.0 * E2) * l.inverse;
        sum.h += w * (P * (1.0 + E2) + 4.0 * E2) * (l.inverse * l.inverse);
    }
    return sum;
}

typedef struct {
    vec size, rate, sd; /* |z| = |theta| / sd, 1 / sd and sd of one normal of the mixture, its own variance included */
    vec below, density; /* Phi(-|z|) and the density of z */
} tail;

/* (x + K) erfcx(x) by powers of (x - K)/(x + K), as in normal.py */
#define ERFCX_CENTRE 3.25
static const double ERFCX[] = {
    1.0811797647743422, -0.9129949832951073, 0.6457337773843056, -0.3751649422636419, 0.17200591888557049,
    -0.05667521903649944, 0.009529321785568604, 0.0018073248058833949, -0.0014879109096115522, 0.0001593600878413444,
    0.00014751029817489133, -4.313757329467987e-05, -1.530854020175914e-05, 7.425454641696979e-06,
    2.010530172835351e-06, -1.1996921446083475e-06, -3.5216141385187315e-07, 1.8588683148831436e-07,
    7.097022254739322e-08, -2.457673754694876e-08, -1.2512837394243785e-08, 1.9761057445007267e-09,
    1.269585623316916e-09};
#define ERFCX_COUNT (int)(sizeof(ERFCX) / sizeof(ERFCX[0]))

INLINE tail tail_of(vec size, vec variance) {
    const vec sd = square_root(variance), half = size * SQRT_HALF, sum = half + ERFCX_CENTRE * sd;
    const vec both = 1.0 / (sd * sum), rate = both * sum, inverse = both * sd; /* 1/sd; 1/(x + K) is inverse times sd */
    const vec z = size * rate, t = (half - ERFCX_CENTRE * sd) * inverse, square = 0.5 * z * z;
    vec scaled = all(ERFCX[ERFCX_COUNT - 1]);
    for (int k = ERFCX_COUNT - 2; k >= 0; k--) scaled = scaled * t + ERFCX[k];
    const bits near = (bits)(square < 708.0);
    const vec e = choose(near, exponential(-choose(near, square, (vec){})).up, (vec){});
    return (tail){z, rate, sd, 0.5 * e * scaled * (inverse * sd), INVERSE_ROOT_2PI * e};
}

INLINE triple by_mixture(const bin *b, vec size, vec variance) {
    triple sum = {};
    for (int j = 0; j < b->count; j++) {
        const double w = b->nodes[2 * j + 1];
        const tail t = tail_of(size, variance + b->nodes[2 * j]);
        sum.eta += w * t.sd * (t.density - t.size * t.below);
        sum.g += w * t.below;
        sum.h += w * t.rate * t.density;
    }
    return sum;
}

/* The expected softplus with its derivatives. Returns 0, or 1 if a variance is NaN or beyond the reach of all nodes. */
INLINE int expected(const problem *p, vec theta, vec variance, vec tau, triple *out) {
    int b = 0;
    for (int i = 0; i < LANES; i++) {
        while (b < p->bins && !(variance[i] <= p->bin[b].reach)) b++;
        if (b == p->bins) return 1;
    }
    const vec size = magnitude_of(theta);
    const bin *chosen = p->bin + b;
    const triple sum = chosen->reach == INFINITY ? by_mixture(chosen, size, variance) : by_nodes(chosen, size, tau);
    const bits positive = (bits)(theta > 0.0);
    out->eta = sum.eta + choose(positive, theta, (vec){});
    out->g = choose(positive, 1.0 - sum.g, sum.g);
    out->h = sum.h;
    return 0;
}

INLINE int moments(const problem *p, ptrdiff_t start, int rows, tile *t, totals *sums) {
    for (int v = 0; v < VECTORS; v++) {
        const int left = rows - v * LANES;
        const ptrdiff_t at = start + v * LANES;
        if (left <= 0) {
            t->g[v] = t->h[v] = (vec){};
            continue;
        }
        const vec c = read_rows(p->weight, at, left, 1.0), y = read_labels(p, at, left);
        const vec theta = t->theta[v] + read_rows(p->offset, at, left, 0.0);
        const vec variance = t->variance[v] + read_rows(p->residual, at, left, 0.0), tau = square_root(variance);
        triple found;
        if (expected(p, theta, variance, tau, &found)) return 1;
        if (p->seen_theta) write_rows(p->seen_theta + at, theta, left), write_rows(p->seen_variance + at, variance, left);
        sums->value += c * (y * theta - found.eta);
        sums->magnitude += c * (magnitude_of(theta) + tau + 1.0);
        t->g[v] = c * (y - found.g), t->h[v] = c * (p->quarter ? all(0.25) : found.h);
    }
    return 0;
}

INLINE void gather(const problem *p, tile *t, totals *sums) {
    const int d = p->size;
    for (int k = 0; k < d; k++) {
        const vec *x = t->x[k], *g = t->g;
        vec a = {}, b = {}, c = {}, e = {};
        for (int v = 0; v < VECTORS; v += 4)
            a += x[v] * g[v], b += x[v + 1] * g[v + 1], c += x[v + 2] * g[v + 2], e += x[v + 3] * g[v + 3];
        sums->slope[k] += (a + b) + (c + e);
    }
    if (p->gram == NO_GRAM) return;
    if (p->gram == GRAM_DIAGONAL) {
        for (int k = 0; k < d; k++) {
            const vec *x = t->x[k], *h = t->h;
            vec a = {}, b = {}, c = {}, e = {};
            for (int v = 0; v < VECTORS; v += 4) {
                a += x[v] * x[v] * h[v], b += x[v + 1] * x[v + 1] * h[v + 1];
                c += x[v + 2] * x[v + 2] * h[v + 2], e += x[v + 3] * x[v + 3] * h[v + 3];
            }
            sums->curvature[k] += (a + b) + (c + e);
        }
        return;
    }
    for (int i = 0; i < d; i += 3) { /* three rows and four columns at a time, starting at the diagonal */
        const vec *u0 = t->x[i], *u1 = t->x[i + 1], *u2 = t->x[i + 2];
        vec *w0 = t->weighted[0], *w1 = t->weighted[1], *w2 = t->weighted[2];
        for (int v = 0; v < VECTORS; v++) w0[v] = u0[v] * t->h[v], w1[v] = u1[v] * t->h[v], w2[v] = u2[v] * t->h[v];
        for (int j = i; j < d; j += 4) {
            const vec *x0 = t->x[j], *x1 = t->x[j + 1], *x2 = t->x[j + 2], *x3 = t->x[j + 3];
            vec a0 = {}, a1 = {}, a2 = {}, a3 = {}, b0 = {}, b1 = {}, b2 = {}, b3 = {}, c0 = {}, c1 = {}, c2 = {}, c3 = {};
            for (int v = 0; v < VECTORS; v++) {
                const vec a = w0[v], b = w1[v], c = w2[v];
                a0 += a * x0[v], b0 += b * x0[v], c0 += c * x0[v];
                a1 += a * x1[v], b1 += b * x1[v], c1 += c * x1[v];
                a2 += a * x2[v], b2 += b * x2[v], c2 += c * x2[v];
                a3 += a * x3[v], b3 += b * x3[v], c3 += c * x3[v];
            }
            vec *A = sums->curvature + i * p->stride + j, *B = A + p->stride, *C = B + p->stride;
            A[0] += a0, A[1] += a1, A[2] += a2, A[3] += a3;
            B[0] += b0, B[1] += b1, B[2] += b2, B[3] += b3;
            C[0] += c0, C[1] += c1, C[2] += c2, C[3] += c3;
        }
    }
}

FOR_THIS_MACHINE
static int pass(const problem *p, ptrdiff_t start, ptrdiff_t stop, tile *t, totals *sums) {
    for (; start < stop; start += TILE) {
        const int rows = stop - start < TILE ? (int)(stop - start) : TILE;
        read_tile(p, start, rows, t);
        latent(p, t);
        if (moments(p, start, rows, t, sums)) return 1;
        gather(p, t, sums);
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Wide rows, without d x d matrices: nothing is transposed, and vectors run along columns */

#define WIDE 64 /* columns: with fewer, the ends of rows cost more than a transposition */
#define TOGETHER 4 /* rows that share the loads of each column */
#define GATHERED 8 /* rows that share the stores of each column */
#define WIDE_TILE 32 /* rows that are read twice, the second time from the cache */

INLINE int is_wide(const problem *p) {
    return !p->factor && p->gram != FULL_GRAM && p->column_stride == 1 && p->size >= WIDE;
}

typedef double *flat; /* sums of a tile: the slope, then the diagonal of the curvature */

INLINE double total(vec x) {
    double sum = 0.0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

/* theta and variance of `count` rows. */
INLINE void latent_of_rows(const problem *p, const double *X, int count, double *theta, double *variance) {
    vec a[TOGETHER] = {}, b[TOGETHER] = {};
    const double *last = p->variances ? p->variances : p->mean; /* without variances b is not used: any numbers will do */
    int k = 0;
    for (; k + LANES <= p->columns; k += LANES) {
        const vec mean = load(p->mean + k), v = load(last + k);
        for (int i = 0; i < count; i++) {
            const vec x = load(X + i * p->row_stride + k);
            a[i] += x * mean, b[i] += x * x * v;
        }
    }
    for (int i = 0; i < count; i++) {
        double at = total(a[i]), spread = total(b[i]);
        for (int j = k; j < p->columns; j++) {
            const double x = X[i * p->row_stride + j];
            at += x * p->mean[j], spread += x * x * last[j];
        }
        if (p->size > p->columns) at += p->mean[p->columns], spread += last[p->columns];
        theta[i] = at, variance[i] = p->variances ? spread : 0.0;
    }
}

/* Adds the contribution of `count` rows to the slope and to the diagonal of the curvature. */
INLINE void gather_rows(const problem *p, const double *X, int count, const double *g, const double *h, flat sums) {
    double *slope = sums, *curvature = sums + p->size;
    int k = 0;
    for (; k + LANES <= p->columns; k += LANES) {
        vec s = load(slope + k), c = load(curvature + k);
        for (int i = 0; i < count; i++) {
            const vec x = load(X + i * p->row_stride + k);
            s += x * g[i], c += x * x * h[i];
        }
        *(vec_anywhere *)(slope + k) = s, *(vec_anywhere *)(curvature + k) = c;
    }
    for (; k < p->size; k++)
        for (int i = 0; i < count; i++) {
            const double x = k < p->columns ? X[i * p->row_stride + k] : 1.0;
            slope[k] += x * g[i], curvature[k] += x * x * h[i];
        }
}

INLINE void latent_of_tile(const problem *p, const double *X, int rows, double *theta, double *variance) {
    int r = 0;
    for (; r + TOGETHER <= rows; r += TOGETHER)
        latent_of_rows(p, X + r * p->row_stride, TOGETHER, theta + r, variance + r);
    for (; r < rows; r++) latent_of_rows(p, X + r * p->row_stride, 1, theta + r, variance + r);
}

INLINE void gather_few(const problem *p, const double *X, int rows, const double *g, const double *h, flat sums) {
    int r = 0;
    for (; r + GATHERED <= rows; r += GATHERED) gather_rows(p, X + r * p->row_stride, GATHERED, g + r, h + r, sums);
    for (; r < rows; r++) gather_rows(p, X + r * p->row_stride, 1, g + r, h + r, sums);
}

INLINE void gather_tile(const problem *p, const double *X, int rows, const double *g, const double *h, flat all_tiles,
                        flat of_tile) {
    memset(of_tile, 0, sizeof(double) * 2 * p->size);
    gather_few(p, X, rows, g, h, of_tile);
    for (int k = 0; k < 2 * p->size; k++) all_tiles[k] += of_tile[k];
}

FOR_THIS_MACHINE
static int wide_pass(const problem *p, ptrdiff_t first, ptrdiff_t stop, tile *t, totals *sums, flat of_tile) {
    double *all_tiles = (double *)sums->slope; /* one number per column is enough here */
    double *theta = (double *)t->theta, *variance = (double *)t->variance;
    const double *g = (const double *)t->g, *h = (const double *)t->h;
    if (first + TOGETHER <= stop) { /* if one variance is beyond reach, most are: a cheap test */
        latent_of_rows(p, p->X + first * p->row_stride, TOGETHER, theta, variance);
        for (int i = 0; i < TOGETHER; i++)
            if (!(variance[i] <= p->bin[p->bins - 1].reach)) return 1;
    }
    for (ptrdiff_t start = first; start < stop; start += WIDE_TILE) {
        const int rows = stop - start < WIDE_TILE ? (int)(stop - start) : WIDE_TILE;
        const double *X = p->X + start * p->row_stride;
        if (rows < WIDE_TILE) memset(theta, 0, sizeof t->theta), memset(variance, 0, sizeof t->variance);
        latent_of_tile(p, X, rows, theta, variance);
        if (moments(p, start, rows, t, sums)) return 1;
        gather_tile(p, X, rows, g, h, all_tiles, of_tile);
    }
    return 0;
}

/* The two halves of a wide pass whose moments are computed elsewhere. */
FOR_THIS_MACHINE
static void wide_latent(const problem *p, double *theta, double *variance) {
    latent_of_tile(p, p->X, (int)p->rows, theta, variance);
}

FOR_THIS_MACHINE
static void wide_gather(const problem *p, const double *g, const double *h, flat all_tiles, flat of_tile) {
    for (ptrdiff_t start = 0; start < p->rows; start += WIDE_TILE) {
        const int rows = p->rows - start < WIDE_TILE ? (int)(p->rows - start) : WIDE_TILE;
        gather_tile(p, p->X + start * p->row_stride, rows, g + start, h + start, all_tiles, of_tile);
    }
}

/* The Hessian of a row, which maps a = A u and b = A^2 v to two other numbers. */
typedef struct {
    const double *by_mean, *by_both, *by_variance;
} row_hessian;

INLINE void bend(const row_hessian *w, ptrdiff_t i, double *a, double *b) {
    const double first = *a, second = *b;
    *a = w->by_mean[i] * first + w->by_both[i] * second;
    *b = w->by_both[i] * first + w->by_variance[i] * second;
}

/* Both halves for a few rows at a time, which are read from the cache the second time. */
FOR_THIS_MACHINE
static void wide_bend(const problem *p, const row_hessian *w, flat out) {
    double a[GATHERED], b[GATHERED];
    for (ptrdiff_t start = 0; start < p->rows; start += GATHERED) {
        const int rows = p->rows - start < GATHERED ? (int)(p->rows - start) : GATHERED;
        const double *X = p->X + start * p->row_stride;
        latent_of_tile(p, X, rows, a, b);
        for (int r = 0; r < rows; r++) bend(w, start + r, a + r, b + r);
        gather_few(p, X, rows, a, b, out);
    }
}

/* The same in single precision: half the bytes, and twice as many numbers in a vector. */
typedef float half_vec __attribute__((vector_size(8 * LANES)));
typedef float half_anywhere __attribute__((vector_size(8 * LANES), aligned(4)));
#define FLOATS (2 * LANES)

INLINE half_vec load_floats(const float *x) { return *(const half_anywhere *)x; }

INLINE float total_of_floats(half_vec x) {
    float sum = 0.0f;
    for (int i = 0; i < FLOATS; i++) sum += x[i];
    return sum;
}

INLINE void latent_of_floats(const float *X, ptrdiff_t row_stride, int count, int columns, const float *u, const float *v,
                             double *a, double *b) {
    half_vec s[TOGETHER] = {}, t[TOGETHER] = {};
    int k = 0;
    for (; k + FLOATS <= columns; k += FLOATS) {
        const half_vec mean = load_floats(u + k), spread = load_floats(v + k);
        for (int i = 0; i < count; i++) {
            const half_vec x = load_floats(X + i * row_stride + k);
            s[i] += x * mean, t[i] += x * x * spread;
        }
    }
    for (int i = 0; i < count; i++) {
        a[i] = total_of_floats(s[i]), b[i] = total_of_floats(t[i]);
        for (int j = k; j < columns; j++) {
            const float x = X[i * row_stride + j];
            a[i] += x * u[j], b[i] += x * x * v[j];
        }
    }
}

INLINE void gather_floats(const float *X, ptrdiff_t row_stride, int count, int columns, const double *a, const double *b,
                          float *first, float *second) {
    int k = 0;
    for (; k + FLOATS <= columns; k += FLOATS) {
        half_vec s = load_floats(first + k), t = load_floats(second + k);
        for (int i = 0; i < count; i++) {
            const half_vec x = load_floats(X + i * row_stride + k);
            s += x * (float)a[i], t += x * x * (float)b[i];
        }
        *(half_anywhere *)(first + k) = s, *(half_anywhere *)(second + k) = t;
    }
    for (; k < columns; k++)
        for (int i = 0; i < count; i++) {
            const float x = X[i * row_stride + k];
            first[k] += x * (float)a[i], second[k] += x * x * (float)b[i];
        }
}

FOR_THIS_MACHINE
static void bend_floats(const float *X, ptrdiff_t rows, ptrdiff_t row_stride, int columns, int size, const float *u,
                        const float *v, const row_hessian *w, float *first, float *second) {
    double a[GATHERED], b[GATHERED];
    for (ptrdiff_t start = 0; start < rows; start += GATHERED) {
        const int count = rows - start < GATHERED ? (int)(rows - start) : GATHERED;
        const float *here = X + start * row_stride;
        if (count == GATHERED)
            for (int r = 0; r < GATHERED; r += TOGETHER)
                latent_of_floats(here + r * row_stride, row_stride, TOGETHER, columns, u, v, a + r, b + r);
        else
            for (int r = 0; r < count; r++)
                latent_of_floats(here + r * row_stride, row_stride, 1, columns, u, v, a + r, b + r);
        for (int r = 0; r < count; r++) {
            if (size > columns) a[r] += u[columns], b[r] += v[columns];
            bend(w, start + r, a + r, b + r);
            if (size > columns) first[columns] += (float)a[r], second[columns] += (float)b[r];
        }
        if (count == GATHERED)
            gather_floats(here, row_stride, GATHERED, columns, a, b, first, second);
        else
            for (int r = 0; r < count; r++)
                gather_floats(here + r * row_stride, row_stride, 1, columns, a + r, b + r, first, second);
    }
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* The entry point called from Python */

/* Value, magnitude, gradient and curvature, one after the other. */
static void write_out(const problem *p, const totals *sums, double *out) {
    const int d = p->size;
    out[0] = total(sums->value), out[1] = total(sums->magnitude);
    if (is_wide(p)) {
        memcpy(out + 2, sums->slope, sizeof(double) * d * (p->gram == GRAM_DIAGONAL ? 2 : 1));
        return;
    }
    for (int i = 0; i < d; i++) {
        out[2 + i] = total(sums->slope[i]);
        if (p->gram == GRAM_DIAGONAL) out[2 + d + i] = total(sums->curvature[i]);
        for (int j = i; p->gram == FULL_GRAM && j < d; j++)
            out[2 + d + i * d + j] = out[2 + d + j * d + i] = total(sums->curvature[i * p->stride + j]);
    }
}

static void see_factor(problem *p) {
    for (int j = 0; j < p->size; j++) {
        int first = 0, last = p->size - 1;
        while (first < last && p->factor[first * p->size + j] == 0.0) first++;
        while (last > first && p->factor[last * p->size + j] == 0.0) last--;
        p->first[j] = first, p->last[j] = last;
    }
}

/* Nodes are passed bin by bin: reach, count, then z and weight of each pair. */
static void see_bins(problem *p, const double *nodes, ptrdiff_t length) {
    for (ptrdiff_t at = 0; at < length && p->bins < BINS_MOST; at += 2 + 2 * p->bin[p->bins++].count)
        p->bin[p->bins] = (bin){nodes[at], (int)nodes[at + 1], nodes + at + 2};
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Pieces and threads */

typedef struct {
    const problem *problem;
    const struct products *products;
    ptrdiff_t pieces, next; /* how many there are; the next free one */
    size_t length; /* of a piece's sums */
    double *sums;
    int failed;
} job;

static void *work(void *given) {
    job *j = given;
    const problem *p = j->problem;
    const size_t d = p->size, sums_size = d + (p->gram == FULL_GRAM ? (d + 2) * p->stride : d);
    const size_t tile_size = is_wide(p) ? d : (d + 3) * (VECTORS + 1);
    char *memory = calloc(sums_size + tile_size + 1, sizeof(vec)); /* columns beyond the last stay zero */
    if (!memory) {
        __atomic_store_n(&j->failed, 1, __ATOMIC_RELAXED);
        return NULL;
    }
    vec *space = (vec *)(memory + (sizeof(vec) - (uintptr_t)memory % sizeof(vec)) % sizeof(vec));
    tile t;
    t.x = (column *)(space + sums_size);
    while (!__atomic_load_n(&j->failed, __ATOMIC_RELAXED)) {
        const ptrdiff_t piece = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
        if (piece >= j->pieces) break;
        const ptrdiff_t start = piece * PIECE, stop = p->rows - start < PIECE ? p->rows : start + PIECE;
        memset(space, 0, sizeof(vec) * sums_size);
        totals sums = {(vec){}, (vec){}, space, space + d};
        double *out = j->sums + piece * j->length;
        if (is_wide(p) ? wide_pass(p, start, stop, &t, &sums, (flat)(space + sums_size)) : pass(p, start, stop, &t, &sums))
            __atomic_store_n(&j->failed, 1, __ATOMIC_RELAXED);
        else
            write_out(p, &sums, out);
    }
    free(memory);
    return NULL;
}

/* Signals are for Python's main thread, so the others block them. If a thread cannot be created, fewer are used. */
static void work_on_threads(job *j, void *(*work)(void *), int threads) {
    pthread_t others[THREADS_MOST];
    int started = 0;
    if (threads > 1) {
        sigset_t every, before;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);
        while (started < threads - 1 && !pthread_create(&others[started], NULL, work, j)) started++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    work(j);
    while (started) pthread_join(others[--started], NULL);
}

/* Adds the sums of all pieces to `out`, in the order of the rows. Returns 0, or 1 if a piece has failed. */
static int sum_of_pieces(job *j, void *(*work)(void *), int threads, double *out) {
    if (!j->pieces) return 0;
    j->sums = calloc(j->length * j->pieces, sizeof(double));
    if (!j->sums) return 1;
    threads = threads < THREADS_MOST ? threads : THREADS_MOST;
    work_on_threads(j, work, threads < j->pieces ? threads : (int)j->pieces);
    for (ptrdiff_t piece = 0; !j->failed && piece < j->pieces; piece++)
        for (size_t i = 0; i < j->length; i++) out[i] += j->sums[piece * j->length + i];
    free(j->sums);
    return j->failed;
}

/* Adds the sums to `out`. Returns 0, or 1 without sums: a variance is beyond the reach of the nodes, memory ran out, or
   the machine is too old. Labels are doubles or, in `code`, bytes. Strides are counted in doubles. theta and the
   variance of each row are stored unless `seen_theta` is NULL. */
EXPORT int row_sums_4(const double *X, ptrdiff_t rows, ptrdiff_t row_stride, ptrdiff_t column_stride, int columns,
                      int size, const double *label, const unsigned char *code, const double *offset,
                      const double *residual, const double *weight, const double *mean, const double *factor,
                      const double *variances, const double *nodes, ptrdiff_t length, int quarter, int gram, int threads,
                      double *seen_theta, double *seen_variance, double *out) {
    problem p = {.X = X, .rows = rows, .row_stride = row_stride, .column_stride = column_stride, .columns = columns,
                 .size = size, .stride = size + 3, .label = label, .code = code, .offset = offset,
                 .residual = residual, .weight = weight, .mean = mean, .factor = factor, .variances = variances,
                 .quarter = quarter, .gram = gram, .seen_theta = seen_theta, .seen_variance = seen_variance};
    if (!MACHINE_HAS_IT || ((factor || gram == FULL_GRAM) && size > SIZE_MOST)) return 1;
    if (factor) see_factor(&p);
    see_bins(&p, nodes, length);
    const size_t per_column = gram == FULL_GRAM ? (size_t)size + 1 : gram == GRAM_DIAGONAL ? 2 : 1;
    job j = {.problem = &p, .pieces = (rows + PIECE - 1) / PIECE, .length = 2 + size * per_column};
    return sum_of_pieces(&j, work, threads, out);
}

/* theta and variance of rows whose columns are adjacent, for a diagonal Sigma: half of a pass. Returns 0, or 1 if the
   machine is too old. */
EXPORT int wide_latent_1(const double *X, ptrdiff_t rows, ptrdiff_t row_stride, int columns, int size,
                         const double *mean, const double *variances, double *theta, double *variance) {
    const problem p = {.X = X, .rows = rows, .row_stride = row_stride, .columns = columns, .size = size, .mean = mean,
                       .variances = variances};
    if (!MACHINE_HAS_IT) return 1;
    wide_latent(&p, theta, variance);
    return 0;
}

/* The other half of a pass: the sum of g x over rows, followed by that of h x^2. */
EXPORT int wide_gather_1(const double *X, ptrdiff_t rows, ptrdiff_t row_stride, int columns, int size, const double *g,
                         const double *h, double *out) {
    const problem p = {.X = X, .rows = rows, .row_stride = row_stride, .columns = columns, .size = size};
    double *of_tile = MACHINE_HAS_IT ? malloc(sizeof(double) * 2 * size) : NULL;
    if (!of_tile) return 1;
    memset(out, 0, sizeof(double) * 2 * size);
    wide_gather(&p, g, h, out, of_tile);
    free(of_tile);
    return 0;
}

/* A u and A2 v of every row, transformed by `bend`, times A^T and A2^T; X, u and v are in one of two precisions. */
typedef struct products {
    const problem *p; /* its u is the mean, its v the variances */
    const float *X, *u, *v;
    row_hessian weights;
} products;

/* The sums of a piece, initially zero. */
static int products_of_piece(const products *given, ptrdiff_t start, ptrdiff_t rows, double *out) {
    const problem *p = given->p;
    const row_hessian all_rows = given->weights;
    const row_hessian w = {all_rows.by_mean + start, all_rows.by_both + start, all_rows.by_variance + start};
    if (!given->X) {
        problem part = *p;
        part.X += start * p->row_stride, part.rows = rows;
        wide_bend(&part, &w, out);
        return 0;
    }
    float *sums = calloc(2 * p->size, sizeof(float));
    if (!sums) return 1;
    const float *X = given->X + start * p->row_stride;
    bend_floats(X, rows, p->row_stride, p->columns, p->size, given->u, given->v, &w, sums, sums + p->size);
    for (int k = 0; k < 2 * p->size; k++) out[k] = sums[k];
    free(sums);
    return 0;
}

static void *work_on_products(void *given) {
    job *j = given;
    const ptrdiff_t all_rows = j->products->p->rows;
    while (!__atomic_load_n(&j->failed, __ATOMIC_RELAXED)) {
        const ptrdiff_t piece = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED), start = piece * PIECE;
        if (piece >= j->pieces) break;
        const ptrdiff_t rows = all_rows - start < PIECE ? all_rows - start : PIECE;
        if (products_of_piece(j->products, start, rows, j->sums + piece * j->length))
            __atomic_store_n(&j->failed, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

/* (A^T s, A2^T t), where A2 holds the squares of A, and `bend` computes s and t from A u and A2 v. X, u and v are
   floats if `single`. Returns 0, or 1 if memory ran out or the machine is too old. */
EXPORT int wide_bend_2(const void *X, int single, ptrdiff_t rows, ptrdiff_t row_stride, int columns, int size,
                       const void *u, const void *v, const double *by_mean, const double *by_both,
                       const double *by_variance, int threads, double *out) {
    problem p = {.rows = rows, .row_stride = row_stride, .columns = columns, .size = size};
    products given = {.p = &p, .weights = {by_mean, by_both, by_variance}};
    if (single)
        given.X = X, given.u = u, given.v = v;
    else
        p.X = X, p.mean = u, p.variances = v;
    job j = {.products = &given, .pieces = (rows + PIECE - 1) / PIECE, .length = 2 * (size_t)size};
    return !MACHINE_HAS_IT || sum_of_pieces(&j, work_on_products, threads, out);
}

FOR_THIS_MACHINE
static int moments_of_rows(const problem *p, const double *theta, const double *variance, double *eta, double *g,
                           double *h) {
    for (ptrdiff_t at = 0; at < p->rows; at += LANES) {
        const int left = p->rows - at < LANES ? (int)(p->rows - at) : LANES;
        const vec spread = read_rows(variance, at, left, 0.0);
        triple found;
        if (expected(p, read_rows(theta, at, left, 0.0), spread, square_root(spread), &found)) return 1;
        write_rows(eta + at, found.eta, left), write_rows(g + at, found.g, left), write_rows(h + at, found.h, left);
    }
    return 0;
}

/* The expected softplus of every row and its derivatives. Returns 0, or 1 as `row_sums` does. */
EXPORT int row_moments_1(const double *theta, const double *variance, ptrdiff_t rows, const double *nodes,
                         ptrdiff_t length, double *eta, double *g, double *h) {
    problem p = {.rows = rows};
    if (!MACHINE_HAS_IT) return 1;
    see_bins(&p, nodes, length);
    return moments_of_rows(&p, theta, variance, eta, g, h);
}

FOR_THIS_MACHINE
static void bends_of_rows(const bin *mixture, const double *theta, const double *variance, ptrdiff_t rows, double *first,
                          double *third, double *fourth) {
    for (ptrdiff_t at = 0; at < rows; at += LANES) {
        const int left = rows - at < LANES ? (int)(rows - at) : LANES;
        const vec mean = read_rows(theta, at, left, 0.0), spread = read_rows(variance, at, left, 0.0);
        vec a = {}, b = {}, c = {};
        for (int j = 0; j < mixture->count; j++) {
            const tail t = tail_of(magnitude_of(mean), spread + mixture->nodes[2 * j]);
            const vec density = mixture->nodes[2 * j + 1] * t.rate * t.density, inverse = t.rate * t.rate;
            a += density;
            b -= density * inverse;
            c += density * inverse * (t.size * t.size - 1.0);
        }
        b *= mean, c *= 0.5;
        write_rows(first + at, a, left), write_rows(third + at, b, left), write_rows(fourth + at, c, left);
    }
}

/* The second, third and half the fourth derivative of the expected softplus in theta, by a mixture of normals. These
   are the derivatives of g and h in theta, and of h in the variance. Returns 0, or 1 if the machine is too old. */
EXPORT int row_bends_1(const double *theta, const double *variance, ptrdiff_t rows, const double *mixture, int count,
                       double *first, double *third, double *fourth) {
    const bin normals = {INFINITY, count, mixture};
    if (!MACHINE_HAS_IT) return 1;
    bends_of_rows(&normals, theta, variance, rows, first, third, fourth);
    return 0;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Several classes, each with its own mean and factor, from one transposition of each tile */

#define TOGETHER_BYTES (512 << 10) /* most bytes of curvatures of classes summed together: half of a typical cache */

FOR_THIS_MACHINE
static void latent_of_classes(problem *p, int classes, int factors, const double *means, const double *all_factors,
                              tile *t, double *theta, double *variance) {
    for (ptrdiff_t start = 0; start < p->rows; start += TILE) {
        const int rows = p->rows - start < TILE ? (int)(p->rows - start) : TILE;
        read_tile(p, start, rows, t);
        for (int k = 0; k < classes; k++) {
            p->mean = means + k * p->size;
            p->factor = k < factors ? all_factors + (ptrdiff_t)k * p->size * p->size : NULL;
            latent(p, t);
            for (int r = 0; r < rows; r++) theta[(start + r) * classes + k] = ((double *)t->theta)[r];
            for (int r = 0; r < rows && p->factor; r++) variance[(start + r) * factors + k] = ((double *)t->variance)[r];
        }
    }
}

/* Loads the columns of rows, `stride` doubles apart, with zeros after the last. */
INLINE void read_column(vec *out, const double *data, ptrdiff_t stride, int rows) {
    double *x = (double *)out;
    for (int r = 0; r < rows; r++) x[r] = data[r * stride];
    for (int r = rows; r < TILE; r++) x[r] = 0.0;
}

FOR_THIS_MACHINE
static void gather_classes(problem *p, int classes, int grams, int first, int last, const double *g, const double *h,
                           tile *t, vec *slope, vec *curvature) {
    const size_t matrix = (size_t)(p->size + 2) * p->stride;
    for (ptrdiff_t start = 0; start < p->rows; start += TILE) {
        const int rows = p->rows - start < TILE ? (int)(p->rows - start) : TILE;
        read_tile(p, start, rows, t);
        for (int k = first; k < last; k++) {
            p->gram = k < grams ? FULL_GRAM : NO_GRAM;
            read_column(t->g, g + start * classes + k, classes, rows);
            if (p->gram) read_column(t->h, h + start * grams + k, grams, rows);
            totals sums = {(vec){}, (vec){}, slope + (k - first) * p->size, curvature + (k - first) * matrix};
            gather(p, t, &sums);
        }
    }
}

/* A^T s (diag p - p p^T) A v for a vector v of every class; `inner` holds A v of a tile, then the factor of A^T. */
FOR_THIS_MACHINE
static void hessian_of_classes(problem *p, int classes, const double *vectors, const double *probability,
                               const double *scale, tile *t, vec *inner, vec *slope) {
    p->gram = NO_GRAM, p->factor = NULL;
    for (ptrdiff_t start = 0; start < p->rows; start += TILE) {
        const int rows = p->rows - start < TILE ? (int)(p->rows - start) : TILE;
        read_tile(p, start, rows, t);
        memset(t->h, 0, sizeof(t->h));
        for (int k = 0; k < classes; k++) {
            p->mean = vectors + k * p->size;
            latent(p, t);
            read_column(t->g, probability + start * classes + k, classes, rows);
            for (int v = 0; v < VECTORS; v++) inner[k * VECTORS + v] = t->theta[v], t->h[v] += t->g[v] * t->theta[v];
        }
        vec s[VECTORS];
        read_column(s, scale + start, 1, rows);
        for (int k = 0; k < classes; k++) {
            read_column(t->g, probability + start * classes + k, classes, rows);
            for (int v = 0; v < VECTORS; v++) t->g[v] *= s[v] * (inner[k * VECTORS + v] - t->h[v]);
            totals sums = {.slope = slope + k * p->size};
            gather(p, t, &sums);
        }
    }
}

INLINE vec *aligned(char *memory) { return (vec *)(memory + (sizeof(vec) - (uintptr_t)memory % sizeof(vec)) % sizeof(vec)); }

/* theta (rows x classes) and variance (rows x factors) for `factors` full factors: none, one, or one per class. Returns
   0, or 1 if memory ran out or the machine is too old. */
EXPORT int class_latent_1(const double *X, ptrdiff_t rows, ptrdiff_t row_stride, ptrdiff_t column_stride, int columns,
                          int size, int classes, int factors, const double *means, const double *all_factors,
                          double *theta, double *variance) {
    problem p = {.X = X, .rows = rows, .row_stride = row_stride, .column_stride = column_stride, .columns = columns,
                 .size = size, .stride = size + 3};
    char *memory = MACHINE_HAS_IT && size <= SIZE_MOST ? calloc((size + 3) * (VECTORS + 1) + 1, sizeof(vec)) : NULL;
    if (!memory) return 1;
    for (int k = 0; k < factors; k++) { /* the entries that are not zero in any factor */
        problem one = {.size = size, .factor = all_factors + (ptrdiff_t)k * size * size};
        see_factor(&one);
        for (int j = 0; j < size; j++) {
            p.first[j] = k && p.first[j] < one.first[j] ? p.first[j] : one.first[j];
            p.last[j] = k && p.last[j] > one.last[j] ? p.last[j] : one.last[j];
        }
    }
    tile t;
    t.x = (column *)aligned(memory);
    latent_of_classes(&p, classes, factors, means, all_factors, &t, theta, variance);
    free(memory);
    return 0;
}

/* The sums of g_k x (classes x size) and of h_k x x^T (grams x size x size), for g (rows x classes) and h (rows x
   grams): none, one, or one per class. */
EXPORT int class_gather_1(const double *X, ptrdiff_t rows, ptrdiff_t row_stride, ptrdiff_t column_stride, int columns,
                          int size, int classes, int grams, const double *g, const double *h, double *slope,
                          double *curvature) {
    problem p = {.X = X, .rows = rows, .row_stride = row_stride, .column_stride = column_stride, .columns = columns,
                 .size = size, .stride = size + 3};
    const size_t matrix = grams ? (size_t)(size + 2) * p.stride : 0, tile_size = (size_t)(size + 3) * (VECTORS + 1);
    int together = grams ? (int)(TOGETHER_BYTES / (matrix * sizeof(vec))) : classes;
    together = together < 1 ? 1 : together > classes ? classes : together;
    char *memory = MACHINE_HAS_IT && size <= SIZE_MOST
                       ? calloc(tile_size + together * (size + matrix) + 1, sizeof(vec)) : NULL;
    if (!memory) return 1;
    vec *space = aligned(memory), *slopes = space + tile_size, *curvatures = slopes + together * size;
    tile t;
    t.x = (column *)space;
    for (int first = 0; first < classes; first += together) {
        const int last = first + together < classes ? first + together : classes;
        memset(slopes, 0, sizeof(vec) * together * (size + matrix));
        gather_classes(&p, classes, grams, first, last, g, h, &t, slopes, curvatures);
        for (int k = first; k < last; k++)
            for (int i = 0; i < size; i++) {
                slope[k * size + i] = total(slopes[(k - first) * size + i]);
                double *out = curvature + (ptrdiff_t)k * size * size;
                for (int j = i; k < grams && j < size; j++)
                    out[i * size + j] = out[j * size + i] = total(curvatures[(k - first) * matrix + i * p.stride + j]);
            }
    }
    free(memory);
    return 0;
}

/* The product of vectors (classes x size) with the sum over rows of the Hessians s (diag p - p p^T). */
EXPORT int class_hessian_1(const double *X, ptrdiff_t rows, ptrdiff_t row_stride, ptrdiff_t column_stride, int columns,
                           int size, int classes, const double *vectors, const double *probability,
                           const double *scale, double *out) {
    problem p = {.X = X, .rows = rows, .row_stride = row_stride, .column_stride = column_stride, .columns = columns,
                 .size = size, .stride = size + 3};
    const size_t tile_size = (size_t)(size + 3) * (VECTORS + 1), inner = (size_t)classes * VECTORS;
    char *memory = MACHINE_HAS_IT && size <= SIZE_MOST
                       ? calloc(tile_size + inner + (size_t)classes * size + 1, sizeof(vec)) : NULL;
    if (!memory) return 1;
    vec *space = aligned(memory), *slopes = space + tile_size + inner;
    tile t;
    t.x = (column *)space;
    hessian_of_classes(&p, classes, vectors, probability, scale, &t, space + tile_size, slopes);
    for (int i = 0; i < classes * size; i++) out[i] = total(slopes[i]);
    free(memory);
    return 0;
}

/* The same for sparse rows (CSR), each in one reading of the entries. Row i starts at `first[i]`. Each column has a
   pair: its mean and variance, or its two sums. `theta` and `variance` start with the contribution of the intercept. */
INLINE void sparse_dot(const double *data, const int32_t *column, int32_t from, int32_t to, const double *pairs,
                       double *theta, double *variance) {
    double t = *theta, v = *variance;
    for (int32_t k = from; k < to; k++) {
        const double x = data[k], *pair = pairs + 2 * (ptrdiff_t)column[k];
        t += x * pair[0], v += x * x * pair[1];
    }
    *theta = t, *variance = v;
}

INLINE void sparse_add(const double *data, const int32_t *column, int32_t from, int32_t to, double g, double h,
                       double *pairs) {
    for (int32_t k = from; k < to; k++) {
        const double x = data[k];
        double *pair = pairs + 2 * (ptrdiff_t)column[k];
        pair[0] += x * g, pair[1] += x * x * h;
    }
}

EXPORT int sparse_latent_2(const double *data, const int32_t *column, const int32_t *first, ptrdiff_t rows,
                           const double *given, double *theta, double *variance) {
    for (ptrdiff_t i = 0; i < rows; i++)
        sparse_dot(data, column, first[i], first[i + 1], given, theta + i, variance + i);
    return 0;
}

EXPORT int sparse_gather_1(const double *data, const int32_t *column, const int32_t *first, ptrdiff_t rows,
                           const double *g, const double *h, double *out) {
    for (ptrdiff_t i = 0; i < rows; i++) sparse_add(data, column, first[i], first[i + 1], g[i], h[i], out);
    return 0;
}

/* With an intercept, its pairs follow those of the last column. */
EXPORT int sparse_bend_1(const double *data, const int32_t *column, const int32_t *first, ptrdiff_t rows, int columns,
                         int intercept, const double *given, const double *by_mean, const double *by_both,
                         const double *by_variance, double *out) {
    const row_hessian w = {by_mean, by_both, by_variance};
    const ptrdiff_t last = 2 * (ptrdiff_t)columns;
    for (ptrdiff_t i = 0; i < rows; i++) {
        double a = intercept ? given[last] : 0.0, b = intercept ? given[last + 1] : 0.0;
        sparse_dot(data, column, first[i], first[i + 1], given, &a, &b);
        bend(&w, i, &a, &b);
        sparse_add(data, column, first[i], first[i + 1], a, b, out);
        if (intercept) out[last] += a, out[last + 1] += b;
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Rows from columns in separate memory, as decoded from files */

/* Returns whether all entries are finite: x - x is 0 only for finite x. */
FOR_THIS_MACHINE
static int join_columns(const double *const *columns, ptrdiff_t rows, int width, double *out) {
    bits odd = {};
    int finite = 1;
    const ptrdiff_t turned = rows - rows % LANES;
    const int squares = width - width % LANES;
    for (ptrdiff_t r = 0; r < turned; r += LANES) {
        for (int k = 0; k < squares; k += LANES) {
            vec a[LANES];
            for (int i = 0; i < LANES; i++) a[i] = load(columns[k + i] + r), odd |= (bits)(a[i] - a[i] != 0.0);
            transpose(a);
            for (int i = 0; i < LANES; i++) *(vec_anywhere *)(out + (r + i) * width + k) = a[i];
        }
        for (int k = squares; k < width; k++) {
            const vec x = load(columns[k] + r);
            odd |= (bits)(x - x != 0.0);
            for (int i = 0; i < LANES; i++) out[(r + i) * width + k] = x[i];
        }
    }
    for (ptrdiff_t r = turned; r < rows; r++)
        for (int k = 0; k < width; k++) {
            const double x = out[r * width + k] = columns[k][r];
            finite &= x - x == 0.0;
        }
    for (int i = 0; i < LANES; i++) finite &= !odd[i];
    return finite;
}

/* Copies columns into a matrix stored by rows. Returns 0, 1 if an entry is not finite, or -1 if the machine is too old. */
EXPORT int join_columns_1(const double *const *columns, ptrdiff_t rows, int width, double *out) {
    return MACHINE_HAS_IT ? !join_columns(columns, rows, width, out) : -1;
}
