/* One decision of a bandit, and one step of its posterior: what arms.py computes, without the cost of many small arrays.

   The log-odds f of an arm are Gaussian, N(t, v). A logistic function is close to a mixture of normal distribution
   functions (mixture_table.py), so that all expectations are sums of Phi and phi. */

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))
#define ROOT_HALF 0.70710678118654752440
#define INVERSE_ROOT_2PI 0.39894228040143267794
/* As in arms.py. */
#define REACH 6.0
#define STEP 0.7
#define NARROWEST 128
#define BEYOND 9.0 /* sds; a normal distribution has 1e-19 there */

typedef struct {
    ptrdiff_t size;
    const double *weight, *variance;
} mixture;

typedef struct {
    double softplus, value, slope, bend; /* E log(1 + e^f), E s(f), and the first two derivatives of the latter in t */
} sigmoid;

static double normal_cdf(double x) { return 0.5 * erfc(-x * ROOT_HALF); }
static double normal_density(double x) { return INVERSE_ROOT_2PI * exp(-0.5 * x * x); }

static sigmoid expected_sigmoid(const mixture *mix, double t, double v) {
    sigmoid sum = {0.0, 0.0, 0.0, 0.0};
    for (ptrdiff_t j = 0; j < mix->size; j++) {
        const double r = sqrt(mix->variance[j] + v), u = t / r, w = mix->weight[j];
        const double cdf = w * normal_cdf(u), density = w * normal_density(u);
        sum.softplus += t * cdf + r * density;
        sum.value += cdf;
        sum.slope += density / r;
        sum.bend -= u * density / (r * r);
    }
    return sum;
}

static double entropy(double p) {
    const double q = 1.0 - p;
    return -(p > 0.0 ? p * log(p) : 0.0) - (q > 0.0 ? q * log(q) : 0.0);
}

/* As ArmPosterior in arms.py: what all arms share, and then, one arm after the other, what is their own. x of an arm's
   log-odds f = w'x has `width` numbers: those of the shared weights are its first, those of its own ones its last. */
typedef struct {
    ptrdiff_t width, shared, own;
    double *mean, *covariance, *own_mean, *slope, *own_covariance;
} posterior;

/* u, with which f = u'(shared weights) + c'(own weights where the shared ones are 0); c is the last part of x. */
static void shared_part(const posterior *q, ptrdiff_t arm, const double *x, const double *c, double *u) {
    const double *slope = q->slope + arm * q->own * q->shared;
    for (ptrdiff_t i = 0; i < q->shared; i++) u[i] = x[i];
    for (ptrdiff_t j = 0; j < q->own; j++)
        for (ptrdiff_t i = 0; i < q->shared; i++) u[i] += c[j] * slope[j * q->shared + i];
}

/* Add mean'x and x' covariance x. */
static void add_moments(ptrdiff_t d, const double *x, const double *mean, const double *covariance, double *t,
                        double *v) {
    for (ptrdiff_t i = 0; i < d; i++) {
        if (x[i] == 0.0) continue;
        double across = 0.0;
        for (ptrdiff_t j = 0; j < d; j++) across += covariance[i * d + j] * x[j];
        *t += mean[i] * x[i];
        *v += across * x[i];
    }
}

/* Mean t[k] and variance v[k] of each arm's log-odds; a stride of 0 means that all arms have the same x. `u` has room
   for the shared part. */
static void moments(ptrdiff_t arms, const ptrdiff_t *arm, const posterior *q, const double *x, ptrdiff_t x_stride,
                    double *t, double *v, double *u) {
    for (ptrdiff_t k = 0; k < arms; k++, x += x_stride) {
        const double *c = x + q->width - q->own;
        t[k] = v[k] = 0.0;
        shared_part(q, arm[k], x, c, u);
        add_moments(q->own, c, q->own_mean + arm[k] * q->own, q->own_covariance + arm[k] * q->own * q->own, t + k, v + k);
        add_moments(q->shared, u, q->mean, q->covariance, t + k, v + k);
        v[k] = fmax(v[k], 0.0);
    }
}

/* E s(f) of every arm, and the information of its outcome about f. */
static void rewards(ptrdiff_t arms, const double *t, const double *v, const mixture *mix, double *reward,
                    double *information) {
    for (ptrdiff_t k = 0; k < arms; k++) {
        const sigmoid s = expected_sigmoid(mix, t[k], v[k]);
        reward[k] = fmin(fmax(s.value, 0.0), 1.0);
        information[k] = fmax(entropy(reward[k]) - (s.softplus - t[k] * s.value - v[k] * s.slope), 0.0);
    }
}

/* chance[k] = P(arm k has the largest of t + spread * (f - t)), by equal steps over the range of the largest.
   Returns E s(largest). `work` has room for 3 numbers an arm. */
static double chances(ptrdiff_t arms, const double *t, const double *v, double spread, double *chance, double *work) {
    double *sd = work, *cdf = work + arms, *density = work + 2 * arms;
    double from = -INFINITY, to = -INFINITY, least = INFINITY, best = 0.0, total = 0.0;
    for (ptrdiff_t k = 0; k < arms; k++) {
        sd[k] = spread * sqrt(v[k]);
        from = fmax(from, t[k] - REACH * sd[k]);
        to = fmax(to, t[k] + REACH * sd[k]);
    }
    const double narrowest = fmax((to - from) / NARROWEST, 1e-12 * fmax(1.0, fabs(from)));
    for (ptrdiff_t k = 0; k < arms; k++) {
        const int may_be_best = t[k] + REACH * sd[k] >= from;
        chance[k] = 0.0;
        sd[k] = fmax(sd[k], narrowest);
        if (may_be_best) least = fmin(least, sd[k]);
    }
    from -= REACH * least;
    to += REACH * least;
    const double step = STEP * least;
    const ptrdiff_t nodes = (ptrdiff_t)ceil((to - from) / step) + 1;
    for (ptrdiff_t i = 0; i < nodes; i++) {
        const double at = from + step * i;
        double every = 1.0, sum = 0.0;
        for (ptrdiff_t k = 0; k < arms; k++) {
            const double u = (at - t[k]) / sd[k];
            if (u > BEYOND) {
                cdf[k] = 1.0, density[k] = 0.0;
                continue;
            }
            cdf[k] = normal_cdf(u);
            density[k] = normal_density(u) / sd[k];
            every *= cdf[k];
        }
        if (every <= 0.0) continue;
        for (ptrdiff_t k = 0; k < arms; k++) {
            const double mass = density[k] * (every / cdf[k]);
            chance[k] += mass;
            sum += mass;
        }
        best += sum / (1.0 + exp(-at));
        total += sum;
    }
    for (ptrdiff_t k = 0; k < arms; k++) chance[k] /= total;
    return best / total;
}

typedef struct {
    double information, regret;
    ptrdiff_t arm;
} offer;

static int by_information(const void *a, const void *b) {
    const offer *x = a, *y = b;
    if (x->information != y->information) return x->information < y->information ? -1 : 1;
    if (x->regret != y->regret) return x->regret < y->regret ? -1 : 1;
    return (x->arm > y->arm) - (x->arm < y->arm);
}

/* The distribution over arms with the least regret^2 / information: one arm or two, next to each other on the lower
   edge of the convex hull of all. */
static void least_ratio(ptrdiff_t arms, const double *regret, const double *information, double *chance, offer *edge) {
    ptrdiff_t kept = 0;
    for (ptrdiff_t k = 0; k < arms; k++) edge[k] = (offer){information[k], regret[k], k}, chance[k] = 0.0;
    qsort(edge, arms, sizeof(offer), by_information);
    for (ptrdiff_t k = 0; k < arms; k++) {
        const offer c = edge[k];
        if (kept && edge[kept - 1].information == c.information) continue;
        for (; kept > 1; kept--) {
            const offer a = edge[kept - 2], b = edge[kept - 1];
            if ((b.information - a.information) * (c.regret - a.regret) >
                (b.regret - a.regret) * (c.information - a.information))
                break;
        }
        edge[kept++] = c;
    }
    double least = INFINITY, share = 0.0;
    ptrdiff_t first = kept - 1, second = kept - 1;
    for (ptrdiff_t k = 0; k < kept; k++) {
        const offer a = edge[k], b = edge[k + 1 < kept ? k + 1 : k];
        const double gain = b.information - a.information, cost = b.regret - a.regret;
        double q = gain * cost == 0.0 ? 0.0 : (gain * a.regret - 2.0 * cost * a.information) / (cost * gain);
        q = fmin(fmax(q, 0.0), 1.0);
        const double r = a.regret + q * cost, g = a.information + q * gain;
        const double ratio = r <= 0.0 ? 0.0 : r * r / g;
        if (ratio < least) least = ratio, share = q, first = k, second = k + 1 < kept ? k + 1 : k;
    }
    chance[edge[first].arm] += 1.0 - share;
    chance[edge[second].arm] += share;
}

/* Equal shares for the arms whose score is the largest. */
static void largest(ptrdiff_t arms, const double *score, double *chance) {
    double most = -INFINITY;
    ptrdiff_t ties = 0;
    for (ptrdiff_t k = 0; k < arms; k++) most = fmax(most, score[k]);
    for (ptrdiff_t k = 0; k < arms; k++) ties += score[k] == most;
    for (ptrdiff_t k = 0; k < arms; k++) chance[k] = score[k] == most ? 1.0 / ties : 0.0;
}

/* In the order of POLICIES in weights.py. */
enum { DIRECTED, UPPER, THOMPSON }; /* the others take the largest reward */

/* One decision: `out` receives t, v, reward, information and the chance of being chosen of every arm. Returns 0, or 1 if
   there is no memory. */
EXPORT int arm_decision_2(int policy, double spread, double epsilon, ptrdiff_t arms, const ptrdiff_t *arm,
                          const double *x, ptrdiff_t x_stride, ptrdiff_t width, ptrdiff_t shared, ptrdiff_t own,
                          double *mean, double *covariance, double *own_mean, double *slope, double *own_covariance,
                          ptrdiff_t size, const double *weight, const double *variance, double *out) {
    const mixture mix = {size, weight, variance};
    const posterior q = {width, shared, own, mean, covariance, own_mean, slope, own_covariance};
    double *t = out, *v = out + arms, *reward = out + 2 * arms, *information = out + 3 * arms, *chance = out + 4 * arms;
    double *work = malloc(arms * (3 * sizeof(double) + sizeof(offer)) + shared * sizeof(double));
    if (!work) return 1;
    offer *offers = (offer *)(work + 3 * arms);
    moments(arms, arm, &q, x, x_stride, t, v, (double *)(offers + arms));
    rewards(arms, t, v, &mix, reward, information);
    if (policy == THOMPSON)
        chances(arms, t, v, spread, chance, work);
    else if (policy == DIRECTED) {
        const double best = chances(arms, t, v, spread, chance, work);
        for (ptrdiff_t k = 0; k < arms; k++) work[k] = fmax(best - reward[k], 0.0);
        least_ratio(arms, work, information, chance, offers);
    } else if (policy == UPPER) {
        for (ptrdiff_t k = 0; k < arms; k++) work[k] = t[k] + spread * sqrt(v[k]);
        largest(arms, work, chance);
    } else
        largest(arms, reward, chance);
    for (ptrdiff_t k = 0; k < arms; k++) chance[k] = epsilon / arms + (1.0 - epsilon) * chance[k];
    free(work);
    return 0;
}

/* One kept outcome, as the columns of Outcomes in outcomes.py, and exp(weight (shift f - precision f^2 / 2)) for it. */
typedef struct {
    double time, arm, propensity, reward, weight, precision, shift;
} outcome;

static double product(ptrdiff_t d, const double *x, const double *y) {
    double sum = 0.0;
    for (ptrdiff_t i = 0; i < d; i++) sum += x[i] * y[i];
    return sum;
}

/* mean += step * across, and covariance -= loss * across across'. */
static void move(ptrdiff_t d, const double *across, double step, double loss, double *mean, double *covariance) {
    for (ptrdiff_t i = 0; i < d; i++) {
        mean[i] += step * across[i];
        for (ptrdiff_t j = 0; j < d; j++) covariance[i * d + j] -= loss * (across[i] * across[j]);
    }
}

/* Moves an outcome's factor to where the posterior has the moments of the other factors times the likelihood. Returns
   how far f moves, in its sds. `work` has room for 2 numbers a shared weight and one an own weight.
   Given the shared weights w, f is N(u'w + a, tau). Its factor of precision p and shift b is one of u'w with precision
   p / (1 + p tau) and shift (b - p a) / (1 + p tau) when the arm's own weights are integrated out.
   Where f is far on the wrong side, s(f) = e^f s(-f) turns the expectation into one of a shifted Gaussian. */
static double visit(const posterior *q, const double *x, outcome *one, const mixture *mix, double *work) {
    const ptrdiff_t arm = (ptrdiff_t)one->arm, n = q->shared, d = q->own;
    double *own_mean = q->own_mean + arm * d, *slope = q->slope + arm * d * n, *own_cov = q->own_covariance + arm * d * d;
    double *u = work, *across = work + n, *own_across = work + 2 * n;
    const double *c = x + q->width - d;
    shared_part(q, arm, x, c, u);
    for (ptrdiff_t i = 0; i < d; i++) own_across[i] = product(d, own_cov + i * d, c);
    for (ptrdiff_t i = 0; i < n; i++) across[i] = product(n, q->covariance + i * n, u);
    const double a = product(d, own_mean, c), b = product(n, q->mean, u), t = a + b;
    const double tau = product(d, own_across, c), s = product(n, across, u), v = tau + s;
    const double left = 1.0 / v - one->weight * one->precision;
    if (!(v > 0.0 && left > 0.0)) return 0.0;
    const double sign = one->reward > 0.5 ? 1.0 : -1.0, others = 1.0 / left;
    const double centre = (t / v - one->weight * one->shift) * others, toward = sign * centre;
    const int far = toward + others < 0.0;
    const sigmoid sum = expected_sigmoid(mix, far ? -(toward + others) : toward, others);
    const double rise = sum.slope / sum.value, curvature = rise * rise - sum.bend / sum.value;
    const double step = sign * (far ? 1.0 - rise : rise), stays = 1.0 - others * curvature;
    if (!(curvature >= 0.0 && stays > 0.0)) return 0.0;
    const double precision = curvature / stays, shift = (step + centre * curvature) / stays;
    const double more = one->weight * (precision - one->precision), push = one->weight * (shift - one->shift);
    const double more_of_u = more / (1.0 + more * tau), push_of_u = (push - more * a) / (1.0 + more * tau);
    one->precision = precision;
    one->shift = shift;
    for (ptrdiff_t j = 0; j < d; j++)
        for (ptrdiff_t i = 0; i < n; i++) slope[j * n + i] -= more_of_u * own_across[j] * u[i];
    move(d, own_across, push_of_u, more_of_u, own_mean, own_cov);
    const double within = 1.0 + more_of_u * s;
    move(n, across, (push_of_u - more_of_u * b) / within, more_of_u / within, q->mean, q->covariance);
    return fmax(fabs(push - more * t) * sqrt(v), fabs(more) * v) / (1.0 + more * v);
}

/* Visits the newest outcome and then, in turn from `first`, others until `least` one after the other have moved f by
   less than `calm`, or `most` are visited. Returns their number. `work` is as in visit. */
EXPORT int arm_visits_2(ptrdiff_t outcomes, ptrdiff_t first, ptrdiff_t least, ptrdiff_t most, double calm,
                        const double *vectors, double *kept, ptrdiff_t width, ptrdiff_t shared, ptrdiff_t own,
                        double *mean, double *covariance, double *own_mean, double *slope, double *own_covariance,
                        ptrdiff_t size, const double *weight, const double *variance, double *work) {
    const mixture mix = {size, weight, variance};
    const posterior q = {width, shared, own, mean, covariance, own_mean, slope, own_covariance};
    outcome *all = (outcome *)kept;
    for (ptrdiff_t visited = 0, quiet = 0, i = outcomes - 1;; i = (first + visited++) % outcomes) {
        quiet = visit(&q, vectors + i * width, all + i, &mix, work) < calm ? quiet + 1 : 0;
        if (quiet >= least || visited >= most) return (int)visited;
    }
}
