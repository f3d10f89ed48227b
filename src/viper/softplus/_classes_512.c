/* _classes.c with vectors of eight doubles, for machines with AVX-512. */

#define LANES 8
#include "_classes.c"
