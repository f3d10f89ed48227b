/* Vectors of doubles, and e^x of them. Written with the vector extensions of GCC and Clang. */

#include <float.h>
#include <stdint.h>

#if FLT_EVAL_METHOD != 0 || defined(__FAST_MATH__)
#error "sums that are exact to rounding need the arithmetic of the standard"
#endif

/* Doubles per vector, one register: 8 with AVX-512 (the files that end in _512), 4 with AVX2, 2 with NEON. GCC is slow
   with more. */
#ifndef LANES
#ifdef __x86_64__
#define LANES 4
#else
#define LANES 2
#endif
#endif

typedef double vec __attribute__((vector_size(8 * LANES)));
typedef double vec_anywhere __attribute__((vector_size(8 * LANES), aligned(8)));
typedef uint64_t bits __attribute__((vector_size(8 * LANES)));

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* On x86 these functions run only on machines that support what they are compiled for. */
#if LANES == 8
#define FOR_THIS_MACHINE __attribute__((target("avx512f,avx512dq,avx512vl,avx2,fma")))
#define MACHINE_HAS_IT \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#elif LANES == 4
#define FOR_THIS_MACHINE __attribute__((target("avx2,fma")))
#define MACHINE_HAS_IT (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#else
#define FOR_THIS_MACHINE
#define MACHINE_HAS_IT 1
#endif

INLINE vec load(const double *x) { return *(const vec_anywhere *)x; }
INLINE vec all(double x) { return x - (vec){}; }
INLINE vec choose(bits mask, vec yes, vec no) { return (vec)((mask & (bits)yes) | (~mask & (bits)no)); }

#define LOG2_E 0x1.71547652b82fep+0
#define LN2_HIGH 0x1.62e42fefa38p-1 /* its last 11 bits are zero, so that products with an exponent are exact */
#define LN2_LOW 0x1.ef35793c7673p-45
#define ROUNDER 0x1.8p52 /* added to a small number, it leaves the integer part in the last bits */

typedef struct {
    vec up, down; /* e^x and e^-x */
} exponentials;

/* To an ulp or two, for |x| <= 708. The even and odd parts of the series give both signs. */
INLINE exponentials exponential(vec x) {
    vec shifted = x * LOG2_E + ROUNDER, n = shifted - ROUNDER;
    vec r = (x - n * LN2_HIGH) - n * LN2_LOW, r2 = r * r;
    vec even = all(1.0 / 479001600), odd = all(1.0 / 6227020800);
    even = even * r2 + 1.0 / 3628800, odd = odd * r2 + 1.0 / 39916800;
    even = even * r2 + 1.0 / 40320, odd = odd * r2 + 1.0 / 362880;
    even = even * r2 + 1.0 / 720, odd = odd * r2 + 1.0 / 5040;
    even = even * r2 + 1.0 / 24, odd = odd * r2 + 1.0 / 120;
    even = even * r2 + 0.5, odd = odd * r2 + 1.0 / 6;
    even = even * r2 + 1.0, odd = (odd * r2 + 1.0) * r;
    bits power = (bits)shifted << 52;
    return (exponentials){(vec)((bits)(even + odd) + power), (vec)((bits)(even - odd) - power)};
}
