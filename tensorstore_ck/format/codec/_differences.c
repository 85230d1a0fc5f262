/* Differences sorted by the exponents of their base (see delta.py, which says the same in numpy, 6 times slower).

   A counting sort: one pass counts the exponents, another one writes each difference to its place, or takes it from there. The second pass
   waits for memory: vectors, and several parts of the words in turns, made it slower. */

#include "_kernel.h"

#define WORD(BITS)                                                                                                                         \
    static unsigned exponent##BITS(uint##BITS##_t word)                                                                                    \
    {                                                                                                                                      \
        return (unsigned)((uint##BITS##_t)(word << 1) >> (BITS - 8));                                                                      \
    }                                                                                                                                      \
                                                                                                                                           \
    /* Floats as integers in their order, in two's complement; its own inverse. */                                                        \
    static uint##BITS##_t ordered##BITS(uint##BITS##_t word)                                                                               \
    {                                                                                                                                      \
        uint##BITS##_t sign = (uint##BITS##_t)(0 - (word >> (BITS - 1)));                                                                  \
        return word ^ (uint##BITS##_t)(sign >> 1);                                                                                         \
    }                                                                                                                                      \
                                                                                                                                           \
    static void starts##BITS(const char *base, size_t count, size_t starts[256])                                                           \
    {                                                                                                                                      \
        size_t counts[4][256]; /* several, as neighbours are often alike, and a count waits for the one before */                         \
        memset(counts, 0, sizeof counts);                                                                                                  \
        for (size_t i = 0; i < count; i++)                                                                                                 \
            counts[i & 3][exponent##BITS(load##BITS(base, i))]++;                                                                          \
        for (size_t e = 0, start = 0; e < 256; e++) {                                                                                      \
            starts[e] = start;                                                                                                             \
            start += counts[0][e] + counts[1][e] + counts[2][e] + counts[3][e];                                                            \
        }                                                                                                                                  \
    }                                                                                                                                      \
                                                                                                                                           \
    static void take##BITS(const char *words, const char *base, char *into, size_t count)                                                 \
    {                                                                                                                                      \
        size_t at[256];                                                                                                                    \
        starts##BITS(base, count, at);                                                                                                     \
        for (size_t i = 0; i < count; i++) {                                                                                               \
            uint##BITS##_t other = load##BITS(base, i);                                                                                    \
            uint##BITS##_t difference = (uint##BITS##_t)(ordered##BITS(load##BITS(words, i)) - ordered##BITS(other));                      \
            uint##BITS##_t sign = (uint##BITS##_t)(0 - (difference >> (BITS - 1)));                                                        \
            store##BITS(into, at[exponent##BITS(other)]++, (uint##BITS##_t)(difference << 1) ^ sign);                                      \
        }                                                                                                                                  \
    }                                                                                                                                      \
                                                                                                                                           \
    static void add##BITS(const char *sorted, const char *base, char *into, size_t count)                                                 \
    {                                                                                                                                      \
        size_t at[256];                                                                                                                    \
        starts##BITS(base, count, at);                                                                                                     \
        for (size_t i = 0; i < count; i++) {                                                                                               \
            uint##BITS##_t other = load##BITS(base, i), zigzag = load##BITS(sorted, at[exponent##BITS(other)]++);                          \
            uint##BITS##_t difference = (uint##BITS##_t)((zigzag >> 1) ^ (uint##BITS##_t)(0 - (zigzag & 1)));                              \
            store##BITS(into, i, ordered##BITS((uint##BITS##_t)(ordered##BITS(other) + difference)));                                      \
        }                                                                                                                                  \
    }

WORD(8)
WORD(16)
WORD(32)
WORD(64)

const DifferenceLoop take_loops[4] = {take8, take16, take32, take64};
const DifferenceLoop add_loops[4] = {add8, add16, add32, add64};
