/* The compiled pass on several threads, without Python, for `make sanitize`: the same sums as on one, and no races. */

#include <assert.h>
#include <stdio.h>

#include "../src/viper/inference/kernels/_rows.c"

#define ROWS 20000
#define COLUMNS 3
#define SUMS (2 + COLUMNS + COLUMNS * COLUMNS)

static double X[ROWS * COLUMNS], out[8][SUMS];
static unsigned char code[ROWS];

static void sum_rows(int threads, double *sums) {
    const double mean[COLUMNS] = {0.3, -1.0, 0.5}, nodes[4] = {0, 1, 0, 0.5};
    memset(sums, 0, sizeof(double) * SUMS);
    const int failed = row_sums_4(X, ROWS, COLUMNS, 1, COLUMNS, COLUMNS, NULL, code, NULL, NULL, NULL, mean, NULL, NULL, nodes,
                                  4, 0, 1, threads, NULL, NULL, sums);
    assert(!failed);
}

static void *call(void *given) {
    sum_rows(3, given);
    return NULL;
}

int main(void) {
    for (int i = 0; i < ROWS * COLUMNS; i++) X[i] = i * 7919 % 1000 / 500.0 - 1.0;
    for (int i = 0; i < ROWS; i++) code[i] = i % 3 == 0;
    if (!MACHINE_HAS_IT) return puts("skipped: the machine is too old"), 0;
    for (int i = 0; i < 6; i++) sum_rows(1 + 2 * i, out[i]);
    pthread_t callers[2]; /* two passes at a time */
    for (int i = 0; i < 2; i++) assert(!pthread_create(&callers[i], NULL, call, out[6 + i]));
    for (int i = 0; i < 2; i++) pthread_join(callers[i], NULL);
    for (int i = 1; i < 8; i++) assert(!memcmp(out[0], out[i], sizeof out[0]));
    return puts("the same sums on 1 to 11 threads"), 0;
}
