/* Differences sorted by the exponents of their base (see delta.py, which says the same in numpy, 6 times slower).

   A counting sort: one pass counts the exponents, another one writes each difference to its place, or takes it from there. Vectors, and
   several parts of the words in turns, made the second pass slower. */

#include "_kernel.h"

#define WORD(BITS)                                                                                                                         \
    INLINE unsigned exponent##BITS(uint##BITS##_t word)                                                                                    \
    {                                                                                                                                      \
        return (unsigned)((uint##BITS##_t)(word << 1) >> (BITS - 8));                                                                      \
    }                                                                                                                                      \
                                                                                                                                           \
    /* Floats as integers in their order, in two's complement; its own inverse. */                                                         \
    INLINE uint##BITS##_t ordered##BITS(uint##BITS##_t word)                                                                               \
    {                                                                                                                                      \
        uint##BITS##_t sign = (uint##BITS##_t)(0 - (word >> (BITS - 1)));                                                                  \
        return word ^ (uint##BITS##_t)(sign >> 1);                                                                                         \
    }                                                                                                                                      \
                                                                                                                                           \
    INLINE uint##BITS##_t zigzag##BITS(uint##BITS##_t word, uint##BITS##_t base)                                                           \
    {                                                                                                                                      \
        uint##BITS##_t difference = (uint##BITS##_t)(ordered##BITS(word) - ordered##BITS(base));                                           \
        return (uint##BITS##_t)(difference << 1) ^ (uint##BITS##_t)(0 - (difference >> (BITS - 1)));                                       \
    }                                                                                                                                      \
                                                                                                                                           \
    INLINE uint##BITS##_t plus##BITS(uint##BITS##_t base, uint##BITS##_t zigzag)                                                           \
    {                                                                                                                                      \
        uint##BITS##_t difference = (uint##BITS##_t)((zigzag >> 1) ^ (uint##BITS##_t)(0 - (zigzag & 1)));                                  \
        return ordered##BITS((uint##BITS##_t)(ordered##BITS(base) + difference));                                                          \
    }                                                                                                                                      \
                                                                                                                                           \
    static void starts##BITS(const char *base, size_t count, uint32_t starts[256])                                                         \
    {                                                                                                                                      \
        uint32_t counts[4][256]; /* several, as neighbours are often alike, and a count waits for the one before */                        \
        memset(counts, 0, sizeof counts);                                                                                                  \
        for (size_t i = 0; i < count; i++)                                                                                                 \
            counts[i & 3][exponent##BITS(load##BITS(base, i))]++;                                                                          \
        for (uint32_t e = 0, start = 0; e < 256; e++) {                                                                                    \
            starts[e] = start;                                                                                                             \
            start += counts[0][e] + counts[1][e] + counts[2][e] + counts[3][e];                                                            \
        }                                                                                                                                  \
    }                                                                                                                                      \
                                                                                                                                           \
    static void take##BITS(const char *words, const char *base, char *into, size_t count)                                                  \
    {                                                                                                                                      \
        uint32_t at[256];                                                                                                                  \
        starts##BITS(base, count, at);                                                                                                     \
        for (size_t i = 0; i < count; i++) {                                                                                               \
            uint##BITS##_t other = load##BITS(base, i);                                                                                    \
            store##BITS(into, at[exponent##BITS(other)]++, zigzag##BITS(load##BITS(words, i), other));                                     \
        }                                                                                                                                  \
    }                                                                                                                                      \
                                                                                                                                           \
    static void add##BITS(const char *sorted, const char *base, char *into, size_t count)                                                  \
    {                                                                                                                                      \
        uint32_t at[256];                                                                                                                  \
        size_t i = 0;                                                                                                                      \
        starts##BITS(base, count, at);                                                                                                     \
        for (; i + 2 <= count; i += 2) { /* two at a time: a place is read after the one before was written */                             \
            uint##BITS##_t one = load##BITS(base, i), other = load##BITS(base, i + 1);                                                     \
            unsigned first = exponent##BITS(one), second = exponent##BITS(other);                                                          \
            uint32_t place = at[first], next = at[second] + (first == second);                                                             \
            at[first] = place + 1;                                                                                                         \
            at[second] = next + 1;                                                                                                         \
            one = plus##BITS(one, load##BITS(sorted, place));                                                                              \
            other = plus##BITS(other, load##BITS(sorted, next));                                                                           \
            store##BITS(into, i, one);                                                                                                     \
            store##BITS(into, i + 1, other);                                                                                               \
        }                                                                                                                                  \
        if (i < count) {                                                                                                                   \
            uint##BITS##_t other = load##BITS(base, i);                                                                                    \
            store##BITS(into, i, plus##BITS(other, load##BITS(sorted, at[exponent##BITS(other)])));                                        \
        }                                                                                                                                  \
    }

WORD(8)
WORD(16)
WORD(32)
WORD(64)

const DifferenceLoop take_loops[4] = {take8, take16, take32, take64};
const DifferenceLoop add_loops[4] = {add8, add16, add32, add64};
